"""What leaves torchscout, under the names that PyTorch's own checkpoints use (paper, section 9).

``model`` has parameters and persistent buffers by the names of ``model.state_dict()``, ``optim`` the state
and settings of the optimizers by the names of ``torch.distributed.checkpoint.state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchscout.checkpoint.reshard.parts import whole_part
from torchscout.checkpoint.reshard.reader import ReadPart, assembled
from torchscout.checkpoint.reshard.whole_state import Key, WholeState, WholeTensor
from torchscout.state.collect import walk

__all__ = ["Path", "full", "model_of", "optimizer_of"]

Path = tuple[str | int, ...]
"""Where a value lies in nested dicts and lists."""


def model_of(state: WholeState, *, tied: bool) -> dict[str, WholeTensor]:
    """Parameters and buffers by name; with ``tied``, tied parameters under all of their names."""
    found = {**state.named("parameters"), **state.named("buffers")}
    more = {name: found[saved] for name, saved in state.tied.items() if saved in found} if tied else {}
    return {**found, **more}


def optimizer_of(state: WholeState, read: ReadPart) -> dict[Path, Any]:
    """The optimizers' tensors, as ``WholeTensor``, and all their other values, by path."""
    found: dict[Path, Any] = {}
    for key in state.keys("slots"):
        found.update(_leaves(("state", key[2]), state, key, read))
    for number, key in enumerate(state.keys("settings")):
        found["param_groups", number, "params"] = state.groups[key[1], key[2]]
        found.update(_leaves(("param_groups", number), state, key, read))
    for name, whole in state.named("masters").items():
        found["masters", name] = whole
    return found


def full(whole: WholeTensor, read: ReadPart) -> torch.Tensor:
    """The whole tensor, verified."""
    return assembled(whole, whole_part(whole.shape), whole.shape, read)


def _leaves(start: Path, state: WholeState, key: Key, read: ReadPart) -> Iterator[tuple[Path, Any]]:
    """The leaves of a tree, split where DCP splits: at dicts, and at lists with tensors or dicts in them."""
    tensors = state.tensors[key]

    def leaves(path: Path, value: Any, place: str) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, torch.Tensor):
            yield path, tensors[place]
        elif isinstance(value, dict):
            for name, each in value.items():
                yield from leaves((*path, str(name)), each, f"{place}/{name!r}")
        elif isinstance(value, list) and any(isinstance(each, torch.Tensor | dict) for each in value):
            for index, each in enumerate(value):
                yield from leaves((*path, index), each, f"{place}/{index}")
        else:
            yield path, walk(value, place, lambda _, __, inner: full(tensors[inner], read))

    return leaves(start, state.trees[key], "")
