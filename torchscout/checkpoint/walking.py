"""Goes through nested state and exchanges its tensors. What may be in a state is for ``tree`` to say."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Exchange", "walk"]

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
