"""Attention as in training's own call, where PyTorch's ``context_parallel`` has exchanged it (paper, 6.1.1).

In a ``context_parallel`` block ``scaled_dot_product_attention`` is another function, which passes keys and
values around; a replay comes after the block, and would attend to this rank's tokens alone. So what was in
place is captured with a call, and put in place again around its replay. Nothing of it travels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchscout.errors import ReplayError

__all__ = ["Attention"]

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
# What is used of it; the interface is experimental.
_NAMES = ("_cp_options", "_disable_cp_dtensor_dispatcher", "_enable_cp_dtensor_dispatcher", "custom_ops")
_PLAIN = torch._C._nn.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Attention:
    """What computes attention, at one moment on one rank."""

    function: Callable[..., Any]
    """What ``torch.nn.functional.scaled_dot_product_attention`` is."""
    is_ring: bool = False
    """Whether attention between DTensors goes around the ranks of a context-parallel group."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How it goes around."""

    @classmethod
    def now(cls) -> Attention:
        function = functional.scaled_dot_product_attention
        module = sys.modules.get(_MODULE)
        missing = [name for name in _NAMES if not hasattr(module, name)]
        if module is None or (missing and function is _PLAIN):
            return cls(function)
        if missing:
            raise ReplayError(f"this PyTorch's context_parallel is not known: it has no {missing[0]}")
        is_ring = any(op in DTensor._op_dispatcher._custom_op_handlers for op in module.custom_ops)
        return cls(function, is_ring, dict(vars(module._cp_options)))

    def describe(self) -> dict[str, Any]:
        """What must be alike on all peers."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        options = {key: str(value) for key, value in self.options.items()} if self.is_ring else {}
        return {"function": name, "ring": self.is_ring, **options}

    def require(self, told: Mapping[str, Any]) -> None:
        """A ``ReplayError`` where the source's attention was another."""
        if (own := self.describe()) != told:
            raise ReplayError(f"attention is {own} here and {dict(told)} on the source")

    @contextmanager
    def again(self) -> Iterator[None]:
        """In this block attention is computed so, whatever computes it around the block."""
        around = Attention.now()
        self._take_place_of(around)
        try:
            yield
        finally:
            around._take_place_of(self)

    def _take_place_of(self, other: Attention) -> None:
        if self.function is not other.function:
            functional.scaled_dot_product_attention = self.function
        if self.options != other.options:
            vars(_module()._cp_options).update(self.options)
        if self.is_ring != other.is_ring:
            switch = "_enable_cp_dtensor_dispatcher" if self.is_ring else "_disable_cp_dtensor_dispatcher"
            getattr(_module(), switch)()


def _module() -> ModuleType:
    return sys.modules[_MODULE]
