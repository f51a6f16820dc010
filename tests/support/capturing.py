"""A module with a capture armed on it, for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layer_job import Calling
from tests.support.replay_by_hand import CPU
from torchscout.errors import ReplayError
from torchscout.replay.capture.hooks import CallCapture


@contextmanager
def armed(module: nn.Module, *, keep: bool = True) -> Iterator[CallCapture]:
    capture = CallCapture(module, CPU, keep=keep)
    try:
        yield capture
    finally:
        capture.disarm()


def reason(capture: CallCapture) -> str:
    with pytest.raises(ReplayError) as caught:
        capture.invocation()
    return str(caught.value)


def calling(forward: Callable[..., Any]) -> nn.Module:
    return Calling(forward, width=2)


def doubling() -> nn.Module:
    return calling(lambda self, x: x * self.weight)


def x(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)
