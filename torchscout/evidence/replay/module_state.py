"""A module as it was: what a replayed call changes in it is taken back (paper, section 6.1).

Buffers are exchanged for copies, so that the user's own tensors are never written. Counters, caches and
lists that a module keeps as plain attributes are put back, with what is in them; objects of other classes
are not looked into. Parameters are not copied: a forward pass that writes to them cannot be replayed, and
is refused where that can be known.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from torchscout.evidence.replay.randomness import lend

__all__ = ["buffers_of", "preserved", "refusal"]

_OWN = frozenset(nn.Module().__dict__) - {"training"}  # what nn.Module itself keeps; buffers among it
_CONTAINERS = (list, dict, set, deque)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer by its dotted name, each once."""
    return dict(module.named_buffers())


def refusal(module: nn.Module) -> str | None:
    """Why a call of this module would change training, if it would."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            return f"{name or 'it'} renormalizes its weights in place (max_norm) whenever it is called"
    return None


@contextmanager
def preserved(module: nn.Module, buffers: Mapping[str, torch.Tensor], seed: int) -> Iterator[None]:
    """Call the module in this block as often as you like, with copies of ``buffers`` as its own.

    Random streams that the module keeps for itself draw from ``seed``, which peers share.
    """
    with ExitStack() as undo:
        _exchange_buffers(module, buffers, undo)
        _Memory(seed, undo).of_attributes(module)
        # Taken back first, while what it may write to is still the copies.
        for each in module.modules():
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                undo.callback(each.set_extra_state, copy.deepcopy(each.get_extra_state()))
        yield


def _exchange_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor], undo: ExitStack) -> None:
    """Under every name a buffer has, and those that the call adds are gone afterwards."""
    copies = {own: buffers[name].clone() for name, own in buffers_of(module).items()}
    for each in module.modules():
        undo.callback(_refill, each._buffers, each._buffers.copy())
        undo.callback(_refill, each._non_persistent_buffers_set, each._non_persistent_buffers_set.copy())
        exchanged = {name: copies.get(own, own) for name, own in each._buffers.items() if own is not None}
        each._buffers.update(exchanged)


class _Memory:
    """What is to be put back, values within values included; each once."""

    def __init__(self, seed: int, undo: ExitStack) -> None:
        self._seed, self._undo = seed, undo
        self._known: set[int] = set()

    def of_attributes(self, module: nn.Module) -> None:
        for each in module.modules():
            plain = {name: value for name, value in vars(each).items() if name not in _OWN}
            self._undo.callback(_restore_attributes, each, plain)
            for value in plain.values():
                self._of(value)

    def _of(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, _CONTAINERS):
            self._undo.callback(_refill, value, value.copy())
        elif type(value) is torch.Tensor and not value.is_meta and not value.is_inference():
            self._undo.callback(_rewrite, value, value._version, value.detach().clone())
        elif (give_back := lend(value, self._seed)) is not None:
            self._undo.callback(give_back)
        if isinstance(value, (*_CONTAINERS, tuple)):
            for each in value.values() if isinstance(value, dict) else value:
                self._of(each)


def _restore_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    for name in [name for name in vars(module) if name not in _OWN and name not in attributes]:
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _rewrite(tensor: torch.Tensor, version: int, contents: torch.Tensor) -> None:
    """Only if it was changed: nothing of the user's is written to without need."""
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(contents)


def _refill(value: Any, contents: Any) -> None:
    if not _same(value, contents):
        value.clear()
        value.update(contents) if isinstance(value, dict | set) else value.extend(contents)


def _same(value: Any, contents: Any) -> bool:
    """Whether a container still holds the very same objects."""
    if isinstance(value, dict):
        return _same(list(value), list(contents)) and _same([*value.values()], [*contents.values()])
    return len(value) == len(contents) and all(map(is_, value, contents))
