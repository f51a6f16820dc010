"""Layers whose results do not repeat: kernels that obey no switch, and operators that strict mode refuses."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tests.support.replayed_job import Block, Net

__all__ = ["KINDS", "net_of"]


def _drawn() -> float:
    """Draw from 0 to 1 with a source that no seed controls."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


class _Noise(torch.autograd.Function):
    """Change the last bits of the gradient now and then, as a sum in uncontrolled order does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.rate = rate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient * (1 + 1e-5 * _drawn()) if _drawn() < ctx.rate else gradient), None


class _Put(torch.autograd.Function):
    """Use ``put_``, which has no deterministic version on any device; its result here repeats anyway."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: str) -> torch.Tensor:
        ctx.passed = passed
        return _put(x) if passed == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (_put(gradient) if ctx.passed == "backward" else gradient), None


def _put(x: torch.Tensor) -> torch.Tensor:
    attempts.append(torch.is_deterministic_algorithms_warn_only_enabled())
    return torch.zeros_like(x).put_(torch.arange(x.numel(), device=x.device), x)


attempts: list[bool] = []
"""Every call of ``put_`` in this process, and whether it may only have warned."""


class RestlessBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(KINDS[self.kind](x))


KINDS = {
    "always": lambda x: _Noise.apply(x, 1.0),
    "often": lambda x: _Noise.apply(x, 0.3),
    "rarely": lambda x: _Noise.apply(x, 0.03),
    "put_forward": lambda x: _Put.apply(x, "forward"),
    "put_backward": lambda x: _Put.apply(x, "backward"),
}


def net_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    net.stack = nn.ModuleList([RestlessBlock(kind), RestlessBlock(kind)])
    return net
