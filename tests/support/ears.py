"""A listener that writes down all it hears."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from torchscout.collectives.call import Call, Group, Splits
from torchscout.collectives.interceptor import Pending

__all__ = ["Ears", "Heard"]


@dataclass(frozen=True)
class Heard:
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


class Ears:
    """``heard`` before each operation; ``tokens``, the same again, once it was issued."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.tokens: list[Heard] = []

    def before(self, call: Call) -> Any:
        heard = Heard(
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
        self.heard.append(heard)
        return heard

    def issued(self, _call: Call, token: Any, _pending: Pending | None) -> None:
        self.tokens.append(token)

    @property
    def operations(self) -> list[str]:
        return [heard.operation for heard in self.heard]
