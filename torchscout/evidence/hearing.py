"""Whose calls a hook hears: training's own, a recomputation's, or SCOUT's (paper, section 6).

Replay calls a layer with all its hooks in place, because tensor parallelism and FSDP live in them.
SCOUT's own hooks ask here and do nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["in_backward", "inert", "is_inert"]

# Not per thread: the hooks of a backward pass run on autograd's threads.
_blocks: list[None] = []


def is_inert() -> bool:
    """Whether it is SCOUT itself that computes on the user's modules."""
    return bool(_blocks)


@contextmanager
def inert() -> Iterator[None]:
    """SCOUT's own hooks do nothing in this block."""
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()


def in_backward() -> bool:
    """Whether this thread is at a backward pass: activation checkpointing runs layers again in it."""
    return bool(torch._C._current_graph_task_id() != -1)
