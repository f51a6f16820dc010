"""State that Megatron-Core keeps outside of modules: random streams, losses, gradients (paper, section 9).

Replay restores it after every call, and checkpoints contain what a step depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)

from torchscout.adapters.megatron.fsdp import room_for
from torchscout.replay.sharded_parameters import GradientLookup

__all__ = ["Losses", "Streams", "lent"]

_FUSED = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""The flags of Megatron's and Transformer Engine's layers whose backward accumulates gradients itself."""


@contextmanager
def lent(module: torch.nn.Module) -> Iterator[GradientLookup]:
    """Restore what a replayed call writes outside of the module.

    A backward that accumulates gradients itself writes them to ``main_grad``, and returns uninitialized
    memory. Parts that are recomputed do not support ``autograd.grad``, so recomputation is turned off.
    """
    weights: list[Any] = [each for each in module.parameters() if hasattr(each, "main_grad")]
    is_fused = any(getattr(each, flag, False) for each in module.modules() for flag in _FUSED)
    scale = "main_loss_backward_scale"
    with ExitStack() as undo:
        # Before the first step, backward would create one with another shape than training does.
        undo.callback(setattr, MoEAuxLossAutoScaler, scale, getattr(MoEAuxLossAutoScaler, scale))
        undo.callback(Losses().load_state_dict, Losses().state_dict())
        for part, flag in [*_recomputed(module)]:
            undo.callback(setattr, part, flag, True)
            setattr(part, flag, False)
        for each in weights if is_fused else ():
            given: dict[str, Any] = {"main_grad": _room_for(each), "grad_added_to_main_grad": False}
            if hasattr(each, "get_main_grad"):
                given["get_main_grad"] = partial(getattr, each, "main_grad")
            for name, value in given.items():
                undo.callback(setattr, each, name, getattr(each, name))
                setattr(each, name, value)
        yield _accumulated


def _recomputed(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """The flags with which Megatron's modules recompute a part of themselves in backward."""
    for part in module.modules():
        for name, value in vars(part).items():
            if value is True and (name == "checkpoint_core_attention" or "recompute" in name):
                yield part, name


def _room_for(parameter: Any) -> torch.Tensor:
    return torch.zeros_like(room_for(parameter) if parameter.main_grad is None else parameter.main_grad)


def _accumulated(parameter: Any) -> torch.Tensor | None:
    return parameter.main_grad if getattr(parameter, "grad_added_to_main_grad", False) else None


class Streams:
    """Megatron's random streams for tensor-parallel and expert-parallel ranks."""

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: _bytes_of(each) for name, each in get_cuda_rng_tracker().get_states().items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        tracker = get_cuda_rng_tracker()
        own = tracker.get_states()
        for name, state in states.items():
            if isinstance(generator := own.get(name), torch.Generator):
                generator.set_state(state)  # CUDA graphs refer to this object
            else:
                own[name] = state.clone()
        tracker.set_states(own)

    state_dict = get_states
    load_state_dict = set_states


def _bytes_of(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


class Losses:
    """The sums of auxiliary losses that routers keep for logging."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        tracker = get_moe_layer_wise_logging_tracker()
        return {name: each["values"].clone() for name, each in tracker.items() if "values" in each}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], /) -> None:
        tracker = get_moe_layer_wise_logging_tracker()
        for name in tracker.keys() - state.keys():
            del tracker[name]
        for name, values in state.items():
            if name in tracker:
                tracker[name]["values"].copy_(values)
            else:
                tracker[name] = {"values": values.to(_device()).clone()}


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())
