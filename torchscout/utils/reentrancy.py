"""Tells hooks whether a call comes from training, from activation recomputation, or from SCOUT itself (paper,
section 6).

Replay calls a layer with all its hooks, because tensor parallelism and FSDP are implemented as hooks. SCOUT's
own hooks use this module to do nothing meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch

from torchscout.utils._torch import current_graph_task_id

__all__ = ["in_backward", "in_own_work", "is_nested_step", "is_stepping", "own_work"]

# Not per thread: the hooks of a backward pass run on autograd's threads.
_blocks: list[None] = []


def in_own_work() -> bool:
    """Whether SCOUT itself is running the user's modules."""
    return bool(_blocks)


@contextmanager
def own_work() -> Iterator[None]:
    """Disable SCOUT's own hooks in this block."""
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()


# The wrapper of ``step`` that PyTorch installs in every optimizer class, and that calls the hooks.
_HOOKED_STEP: CodeType | None = next(
    (
        each
        for each in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
        if isinstance(each, CodeType) and each.co_name == "wrapper"
    ),
    None,
)


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step hook runs for a step inside a step of the same optimizer.

    If a subclass calls ``step`` of its base class, PyTorch calls the hooks for both.
    """
    return _steps_under_way(optimizer, sys._getframe(1)) > 1


def is_stepping(optimizer: torch.optim.Optimizer, thread: int) -> bool:
    """Whether the thread with this identifier is inside a step of the optimizer."""
    return _steps_under_way(optimizer, sys._current_frames().get(thread)) > 0


def _steps_under_way(optimizer: torch.optim.Optimizer, frame: FrameType | None) -> int:
    steps = 0
    while frame is not None:
        steps += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps


def in_backward() -> bool:
    """Whether this thread is in a backward pass, where activation checkpointing runs layers again."""
    return bool(current_graph_task_id() != -1)
