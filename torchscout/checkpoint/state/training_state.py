"""What a checkpoint holds of a rank (paper, sections 8 and 9).

Parameters, frozen ones too, and buffers, persistent or not; all that optimizers keep, and their settings;
random streams of PyTorch, the devices, NumPy and Python; what the user registered. Of distributed tensors,
this rank's part. Names come from the model, so that they are the same after a restart. Gradients are not
state: a checkpoint is taken between an update and the next backward pass. Random streams that modules or
loaders keep for themselves are saved by whoever registers them. Copying is for ``snapshot``.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchscout.checkpoint.state import random_state
from torchscout.checkpoint.state.tensor_layout import CPU, layout_of, local_of
from torchscout.checkpoint.storage import encoding
from torchscout.errors import CheckpointError

__all__ = [
    "SCOUT_PREFIX",
    "Exchange",
    "Note",
    "State",
    "StateParts",
    "Stateful",
    "collect",
    "expected_bytes",
    "note",
    "parameter_of",
    "refuse_what_cannot_be_kept",
    "title_of",
    "walk",
]

Exchange = Callable[[torch.Tensor, Any, str], Any]
"""Of a tensor, what is in its place in the other tree, and where that is."""


def walk(value: Any, path: str, exchange: Exchange, beside: Any = None) -> Any:
    """The same tree with other tensors; ``beside`` is another tree, of whatever shape, looked at in step."""
    if isinstance(value, torch.Tensor):
        return exchange(value, beside, path)
    if type(value) in (dict, OrderedDict, defaultdict):
        others = beside if isinstance(beside, dict) else {}
        walked = copy.copy(value)  # with its order, and its factory
        walked.update(
            (key, walk(each, f"{path}/{key!r}", exchange, others.get(key))) for key, each in value.items()
        )
        return walked
    if type(value) is deque:
        own = list(beside) if isinstance(beside, deque) else None
        return deque(walk(list(value), path, exchange, own), value.maxlen)
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if type(value) in (list, tuple) or is_named:
        same = isinstance(beside, list | tuple) and len(beside) == len(value)
        pairs = zip(value, beside if same else [None] * len(value), strict=True)
        items = [walk(each, f"{path}/{index}", exchange, own) for index, (each, own) in enumerate(pairs)]
        return type(value)(*items) if is_named else type(value)(items)
    return value


class Stateful(Protocol):
    """Anything a user registers: a scheduler, a gradient scaler, a loader that knows its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class StateParts:
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


SCOUT_PREFIX = "torchscout/"
"""What SCOUT itself registers is named so; its tensors never change."""
_LIVE = ("parameters/", "masters/", "slots/", f"registered/{SCOUT_PREFIX}")
_USUAL_SLOTS = 2


def parameter_of(name: str) -> tuple[str, str] | None:
    """The parameter that a tensor of this name is, or is kept for, and in the second case the slot's name.

    None of a tensor that replicas hold no copies of.
    """
    part, _, rest = name.partition("/")
    if part == "parameters":
        return rest, ""
    if part != "slots":
        return None
    _, _, parameter, *slot = [*rest.split("/"), "", ""]
    return parameter, "/".join(filter(None, slot))


@dataclass(frozen=True, slots=True)
class State:
    """A rank's state at one instant: all that is no tensor is copied, the tensors are training's own."""

    document: Any
    """What ``storage.encoding.decode`` needs, with the tensors, to give the tree that ``restore`` takes."""
    live: Mapping[str, torch.Tensor]
    """Changed by the next optimizer update at the earliest; until then they may be copied."""
    prompt: Mapping[str, torch.Tensor]
    """May change as soon as training goes on, and are to be copied before."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.prompt, **self.live}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


# [Note: where a step ends]
#
# A checkpoint lies between two steps, and a step does not end with the optimizer's update: schedulers and
# scalers are told of it after that. But a loader may have gone on to the next batch before anything of the
# next step is seen. So what a loader draws from, its position and the random streams, is noted right after
# the update, and everything else when the next step begins. Whatever can be iterated over counts as a loader.


@dataclass(frozen=True, slots=True)
class Note:
    """What is taken right after an update: see [Note: where a step ends]."""

    rng: Any
    positions: Mapping[str, Any]
    """What loaders said, by the name they are registered under."""


def note(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    registered: Mapping[str, Stateful],
    owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Note:
    held = StateParts(model, optimizers, registered, owned)
    loaders = {name: each for name, each in registered.items() if _is_loader(each)}
    return Note(
        random_state.now(held.tensors),
        {name: copy.deepcopy(each.state_dict()) for name, each in loaders.items()},
    )


def _is_loader(stateful: Stateful) -> bool:
    return hasattr(stateful, "__iter__")


def refuse_what_cannot_be_kept(name: str, stateful: Stateful) -> None:
    """Try to encode its state now; a ``ValueError`` names the place in it that a checkpoint cannot keep.

    Loaders are not asked: some of them begin to iterate when they are.
    """
    if _is_loader(stateful):
        return
    try:
        encoding.encode({name: _Taken().tree(stateful.state_dict(), name)})
    except CheckpointError as error:
        raise ValueError(f"the state registered as {name!r} cannot be kept: {error}") from error


def collect(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    registered: Mapping[str, Stateful],
    noted: Note | None = None,
    owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> State:
    """The state as it is now, but for what was noted; a ``CheckpointError`` names what cannot be kept."""
    held, taken = StateParts(model, optimizers, registered, owned), _Taken()
    noted = noted or note(model, optimizers, registered, owned)
    found = {
        "schema": 1,
        "rng": noted.rng,
        "registered": {
            name: taken.tree(
                noted.positions[name] if name in noted.positions else each.state_dict(),
                f"registered/{name!r}",
            )
            for name, each in registered.items()
        },
        "extra": {name: each.get_extra_state() for name, each in held.extra.items()},
        "buffers": taken.each("buffers", held.buffers),
        "caches": {name: taken.tree(each, f"caches/{name!r}") for name, each in held.caches.items()},
        "restless": taken.each("parameters", {name: held.parameters[name] for name in held.restless}),
        "optimizers": [_settings(each, held, taken, place) for place, each in enumerate(held.optimizers)],
        # From here on live ones; a tensor that is in both halves belongs to the first.
        "parameters": taken.each(
            "parameters", {name: each for name, each in held.parameters.items() if name not in held.restless}
        ),
        "masters": taken.each("masters", held.masters),
        "slots": [_slots(each, held, taken, place) for place, each in enumerate(held.optimizers)],
        "layouts": taken.layouts,
    }
    document, tensors = encoding.encode(found)
    live = {name: each for name, each in tensors.items() if name.startswith(_LIVE)}
    return State(document, live, {name: each for name, each in tensors.items() if name not in live})


def expected_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> int:
    """About what a checkpoint will take, also before the first update: Adam's two slots are assumed then."""
    held = StateParts(model, optimizers, {}, owned)
    total = sum(local_of(each).nbytes for each in held.tensors)
    for optimizer in held.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slots = optimizer.state.get(parameter)
                total += _slot_bytes(slots) if slots else _USUAL_SLOTS * local_of(parameter).nbytes
    return total


def _slot_bytes(slots: Any) -> int:
    return sum(each.nbytes for each in encoding.encode(_Taken().tree(slots, "")).tensors.values())


class _Taken:
    """Trees with local tensors in them, and how those lie."""

    def __init__(self) -> None:
        self.layouts: dict[str, Any] = {}

    def each(self, part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors for which there will be a place; each is at home where it is."""
        return {name: self._tensor(each, f"{part}/{name!r}", each.device) for name, each in tensors.items()}

    def tree(self, value: Any, path: str, parameter: torch.Tensor | None = None) -> Any:
        """``parameter`` is the one that all of it is kept for."""
        home = CPU if parameter is None else parameter.device
        return walk(value, path, lambda each, _, place: self._tensor(each, place, home, parameter))

    def _tensor(
        self,
        tensor: torch.Tensor,
        path: str,
        home: torch.device,
        parameter: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (layout := layout_of(tensor, home, parameter)) is not None:
            self.layouts[path] = layout
        return local_of(tensor)


def _settings(
    optimizer: torch.optim.Optimizer, held: StateParts, taken: _Taken, place: int
) -> dict[str, Any]:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        first = next(iter(group["params"]), None)
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            {
                "params": [held.names[id(parameter)] for parameter in group["params"]],
                "settings": taken.tree(values, f"optimizers/{place}/{number}", first),
            }
        )
    return {"class": title_of(optimizer), "groups": groups}


def _slots(optimizer: torch.optim.Optimizer, held: StateParts, taken: _Taken, place: int) -> dict[str, Any]:
    own, others = held.slots(optimizer)
    updated = held.updated
    return {
        "own": {
            name: taken.tree(value, f"slots/{place}/{name!r}", updated[name]) for name, value in own.items()
        },
        "others": taken.tree(others, f"slots/{place}"),
    }
