"""Parameters that each update overwrites, from what optimizers update in their place (paper, section 6.1.1).

In mixed precision and with sharded optimizers, a model computes with such working copies. A change in one
is gone after the next update, but one rank has computed gradients with it, and all ranks have added them
up. No comparison finds that later. So working copies are watched at rest, as state with one owner is.

PyTorch counts the writes of its operators in version counters, but not what a backend writes into a buffer
that a parameter is a view of. Every collective passes ``collectives.interceptor`` with its output tensors,
so their addresses show what it has written.

[Note: copies that training writes] Some frameworks write them between updates, too: with
``overlap_param_gather`` Megatron-Core gathers parameters in the next forward pass. Where an adapter knows
that, they are watched from the end of that pass on. Else, a change that a collective may have made is no
fault, nor is one that several ranks show. What training has written to in two windows is left out from then
on. Coverage has what was not watched, with the reason; it does not keep a check from certifying.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Handle, Pending, listen
from torchscout.decision.record import Surface
from torchscout.replay.recipes.rest_window import Window

__all__ = ["CollectiveWrites", "CopyWatch", "WorkingCopies"]


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


_COLLECTIVE = "a collective writes it between updates"
_PROGRAM = "training writes to it between updates"
_MOST = 2
"""Windows in which training may write to a copy before it is left out."""


@dataclass(frozen=True, slots=True)
class WorkingCopies:
    """Those of one rank, as they are now."""

    resting: Mapping[Surface, torch.Tensor] = field(default_factory=dict)
    """Those that training does not write to until the next update, as far as the adapter knows."""
    unwatched: Mapping[Surface, str] = field(default_factory=dict)
    """Those that cannot be watched now, with the reason; some may be after the next forward pass."""


class CopyWatch:
    """Which working copies are watched, and why others are not."""

    def __init__(self, copies: Callable[[], WorkingCopies] = WorkingCopies) -> None:
        self._copies, self._writes = copies, CollectiveWrites()
        self._begun: frozenset[Surface] = frozenset()
        """All that is watched between these two updates."""
        self._windows: Counter[Surface] = Counter()
        """In how many windows training has written to a copy."""
        self._left_out: dict[Surface, str] = {}
        """For good, with the reasons."""
        self._lately: dict[Surface, str] = {}
        """Not watched since the last check."""
        self._before: dict[Surface, str] = {}
        """The same, as the last check found it."""

    def resting(self) -> dict[Surface, torch.Tensor]:
        """What to watch now."""
        found = self._copies()
        self._lately |= found.unwatched
        if self._writes.failure is not None:  # a write by a collective would look like a fault
            return {}
        return {name: each for name, each in found.resting.items() if name not in self._left_out}

    def unwatched(self) -> dict[Surface, str]:
        """What is not watched, or was not since the check before the last one, with the reasons."""
        found = self._copies()
        failure = self._writes.failure
        lost = {} if failure is None else dict.fromkeys(found.resting, f"collectives are not seen: {failure}")
        return {**self._before, **self._left_out, **lost, **found.unwatched}

    def begin(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """The time between two updates begins: note which of these collectives write to."""
        self._writes.watch(tensors)
        self._begun = frozenset(tensors)

    def begin_late(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """Note it of these, too."""
        self._writes.watch_also(tensors)
        self._begun |= tensors.keys()

    @property
    def are_late(self) -> bool:
        """Whether some are not ready to be watched."""
        return bool(self._copies().unwatched)

    @property
    def received(self) -> frozenset[Surface]:
        """What a collective may have written to while it was watched."""
        return self._writes.written if self._writes.failure is None else self._begun

    def excuse(self, window: Window, names: Collection[Surface]) -> None:
        """Training has written to these in this window."""
        window.written |= frozenset(names)
        for name in names if window.are_copies else ():
            reason = _COLLECTIVE if name in window.received else _PROGRAM
            self._windows[name] += 1
            (self._lately if self._windows[name] < _MOST else self._left_out)[name] = reason

    def not_read(self, names: Collection[Surface], reason: str) -> None:
        """They could not be watched in one window; without names, none of them."""
        self._lately |= dict.fromkeys(names or ("working copies",), reason)

    def checked(self) -> None:
        """A check is over."""
        self._before, self._lately = self._lately, {}

    def close(self) -> None:
        self._writes.close()
