"""A listener that records every collective."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from torchscout.collectives.call import Call, Group, Splits
from torchscout.collectives.interceptor import Pending


@dataclass(frozen=True)
class RecordedCall:
    operation: str
    variant: str
    group: Group
    dtype: torch.dtype | None
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    reduction: str | None
    root: int | None
    peer: int | None
    tag: int | None
    splits: Splits | None
    is_async: bool | None
    thread: str


class CallRecorder:
    """Records ``calls`` before each operation, and the same as ``tokens`` once it was issued."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.tokens: list[RecordedCall] = []

    def before(self, call: Call) -> Any:
        recorded = RecordedCall(
            call.operation,
            call.variant,
            call.group,
            call.dtype,
            call.input_shapes,
            call.output_shapes,
            call.reduction,
            call.root,
            call.peer,
            call.tag,
            call.splits,
            call.is_async,
            threading.current_thread().name,
        )
        self.calls.append(recorded)
        return recorded

    def issued(self, _call: Call, token: Any, _pending: Pending | None) -> None:
        self.tokens.append(token)

    @property
    def operations(self) -> list[str]:
        return [call.operation for call in self.calls]
