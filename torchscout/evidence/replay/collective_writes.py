"""Which tensors a collective of training has written into, known by their memory.

PyTorch counts the writes of its operators in version counters, but not what a backend writes into a buffer
that a parameter is a view of, as a gathered parameter is. Every collective passes ``evidence.collectives``
with its output tensors, so that their addresses tell.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch

from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Handle, Pending, listen
from torchscout.decision.record import Surface

__all__ = ["CollectiveWrites"]


class CollectiveWrites:
    """Listens to collectives from the first ``watch`` until ``close``."""

    def __init__(self) -> None:
        self._handle: Handle | None = None
        self._memory = _Memory({})
        self._written: set[Surface] = set()
        self.failure: str | None = None
        """Why writes are no longer known."""

    def watch(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """From now on, note writes into these; what was noted before is forgotten."""
        self._written = set()
        self._memory = _Memory(tensors)
        self._listen(tensors)

    def watch_also(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """Into these, too, from now on."""
        self._memory = _Memory(tensors, self._memory)
        self._listen(tensors)

    def _listen(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        if tensors and self._handle is None and self.failure is None:
            self._handle = listen(self, on_error=self._failed)

    @property
    def written(self) -> frozenset[Surface]:
        """Those that a collective has written into, or will."""
        return frozenset(self._written)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._memory = _Memory({})

    def before(self, call: Call) -> None:
        memory, written = self._memory, self._written  # those of one window
        if not memory.begins:
            return
        found = {name for tensor in call.outputs for name in memory.touched_by(tensor)}
        if found and call.operation == "all_gather":
            # What a rank gives lies in the output already, and stays as it is.
            found -= {name for tensor in call.inputs for name in memory.within(tensor)}
        written |= found

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """It was noted before."""

    def _failed(self, error: Exception) -> None:
        self._handle, self.failure = None, f"{type(error).__name__}: {error}"


class _Memory:
    """Where tensors lie; they may overlap."""

    def __init__(self, tensors: Mapping[Surface, torch.Tensor], others: _Memory | None = None) -> None:
        own = [(*_range(each), name) for name, each in tensors.items() if each.numel()]
        self.ranges: list[tuple[int, int, Surface]] = sorted([*own, *(others.ranges if others else ())])
        self.begins = [begin for begin, _, _ in self.ranges]
        self.longest = max((end - begin for begin, end, _ in self.ranges), default=0)

    def touched_by(self, tensor: torch.Tensor) -> list[Surface]:
        """What lies at least partly in the memory of this one."""
        begin, end = _range(tensor)
        first, last = bisect_left(self.begins, begin - self.longest), bisect_left(self.begins, end)
        return [name for _, stop, name in self.ranges[first:last] if begin < stop]

    def within(self, tensor: torch.Tensor) -> list[Surface]:
        """What lies wholly in it."""
        begin, end = _range(tensor)
        first, last = bisect_left(self.begins, begin), bisect_left(self.begins, end)
        return [name for _, stop, name in self.ranges[first:last] if stop <= end]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The memory that a tensor may touch; of a view with gaps, the gaps too."""
    begin = tensor.data_ptr()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (extent * tensor.element_size() if tensor.numel() else 0)
