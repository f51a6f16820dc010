"""What a rank holds that is training's state, and what each part of it is called (paper, section 9).

Names come from the model, so that they are the same after a restart. Nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchscout.errors import CheckpointError

__all__ = ["Holdings", "Stateful", "title_of"]


class Stateful(Protocol):
    """Anything a user registers: a scheduler, a gradient scaler, a loader that knows its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Holdings:
    """A model, its optimizers and what else the user registered, each part by its name."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        registered: Mapping[str, Stateful],
        owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """``owned`` is kept in place of the parameters of the same names, and besides them: a framework may
        show the model whole parameters, or none, where a rank holds a part."""
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.reshard()  # the sharded parameters are the ones to keep, and the ones to fill
        self.model = model
        self.optimizers = list(_with_inner(optimizers))
        self.registered = registered
        self.parameters: dict[str, torch.Tensor] = {
            name: owned.get(name, each) for name, each in model.named_parameters()
        }
        self.restless = _restless(model)
        """Names of parameters that a forward pass changes."""
        self.buffers, self.caches = _buffers(model)
        """Persistent ones, and those that a module could make again."""
        self.extra = {name: each for name, each in model.named_modules() if _has_extra_state(each)}
        """Modules that keep more than tensors."""
        self.names = {id(tensor): name for name, tensor in self.parameters.items()}
        self.masters = {name: each for name, each in owned.items() if name not in self.parameters}
        self.names |= {id(tensor): name for name, tensor in self.masters.items()}
        self.masters |= self._masters()
        """What optimizers update that is no parameter of the model, such as copies in higher precision."""
        self.names |= {id(tensor): name for name, tensor in self.masters.items()}

    @property
    def updated(self) -> dict[str, torch.Tensor]:
        """All that an optimizer may have slots for."""
        return self.parameters | self.masters

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.updated.values(), *self.buffers.values(), *self.caches.values()]

    def slots(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[Any, Any]]:
        """What it keeps for each parameter, by its name, and what it keeps besides."""
        own: dict[str, Any] = {}
        others: dict[Any, Any] = {}
        state: dict[Any, Any] = optimizer.state  # some keep things by other keys than tensors
        for key, value in state.items():
            if not isinstance(key, torch.Tensor):
                others[key] = value
            elif id(key) in self.names:
                own[self.names[id(key)]] = value
            else:
                raise CheckpointError(
                    f"{title_of(optimizer)} keeps state for a tensor of shape {tuple(key.shape)} "
                    "that is neither a parameter of the model nor in its parameter groups"
                )
        return own, others

    def _masters(self) -> dict[str, torch.Tensor]:
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for index, tensor in enumerate(group["params"]):
                    if id(tensor) not in self.names:
                        name = f"optimizer {number} group {place} parameter {index}"
                        found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())


def title_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _with_inner(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    """ZeroRedundancyOptimizer keeps its settings itself, and its slots in another one."""
    for optimizer in optimizers:
        yield optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            yield optimizer.optim


def _buffers(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    every = dict(model.named_buffers())
    return (
        {name: each for name, each in every.items() if name not in passing},
        {name: each for name, each in every.items() if name in passing},
    )


def _restless(model: nn.Module) -> set[str]:
    """Embeddings with ``max_norm`` scale their weights down whenever they are looked up."""
    weights = {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
