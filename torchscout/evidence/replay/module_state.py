"""A module as it was: what a replayed call changes in it is taken back (paper, section 6.1).

Buffers are exchanged for copies, so that the user's own tensors are never written. Counters, caches and
lists that a module keeps as plain attributes are put back. Parameters are not copied: a forward pass
that writes to them cannot be replayed, and is refused where that can be known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

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
def preserved(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Call the module in this block as often as you like, with copies of ``buffers`` as its own."""
    with ExitStack() as undo:
        for name, buffer in buffers.items():
            path, _, leaf = name.rpartition(".")
            _exchange(module.get_submodule(path), leaf, buffer.clone(), undo)
        for each in module.modules():
            undo.callback(_restore_attributes, each, _attributes(each))
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                undo.callback(each.set_extra_state, each.get_extra_state())
        yield


def _exchange(owner: nn.Module, name: str, copy: torch.Tensor, undo: ExitStack) -> None:
    own = owner._buffers[name]
    owner._buffers[name] = copy
    undo.callback(owner._buffers.__setitem__, name, own)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each plain attribute: the object, and what was in it."""
    plain = {name: value for name, value in vars(module).items() if name not in _OWN}
    return {name: (value, _contents(value)) for name, value in plain.items()}


def _contents(value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) is torch.Tensor and not value.is_meta:
        return value._version, value.detach().clone()
    return None


def _restore_attributes(module: nn.Module, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    for name in [name for name in vars(module) if name not in _OWN and name not in attributes]:
        del module.__dict__[name]
    for name, (value, contents) in attributes.items():
        module.__dict__[name] = value
        _refill(value, contents)


def _refill(value: Any, contents: Any) -> None:
    """Only what was changed: nothing of the user's is written to without need."""
    if contents is None:
        return
    if isinstance(value, torch.Generator):
        value.set_state(contents)
    elif isinstance(value, torch.Tensor):
        version, copy = contents
        if value._version != version:
            with torch.no_grad():
                value.copy_(copy)
    elif not _same(value, contents):
        value.clear()
        value.update(contents) if isinstance(value, dict | set) else value.extend(contents)


def _same(value: Any, contents: Any) -> bool:
    """Whether a container still holds the very same objects."""
    if isinstance(value, dict):
        return _same(list(value), list(contents)) and _same([*value.values()], [*contents.values()])
    return len(value) == len(contents) and all(map(is_, value, contents))
