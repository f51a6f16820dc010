"""Watches parameters that each update overwrites with what the optimizer has updated (paper, section 6.1.1).

In mixed precision and with sharded optimizers, a model computes with such working copies. A corrupted one is
overwritten by the next update, but by then one rank has computed gradients with it, and all ranks have added
them up. No later comparison finds that. So working copies are watched between updates, as owned state is.

PyTorch counts the writes of its operators in version counters, but not what a backend writes to a buffer that
a parameter is a view of. ``collectives.interceptor`` sees the output tensors of every collective, and their
addresses show what it writes to.

[Note: copies that training writes] Some frameworks also write them between updates: with
``overlap_param_gather`` Megatron-Core gathers parameters in the next forward pass. If the adapter knows that,
they are watched from the end of that pass on. Otherwise, a change that a collective may have made is not a
fault, nor is one on several ranks. What training has written to in two windows is not watched from then on.
Coverage lists what was not watched, with the reason; that does not prevent certification.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import listen
from torchscout.decision.types import Surface
from torchscout.replay.guard import CallListener
from torchscout.replay.recipes.rest_window import Window

__all__ = ["CollectiveWrites", "CopyWatch", "WorkingCopies"]


class CollectiveWrites(CallListener):
    """Records which tensors collectives write to, from the first ``watch`` until ``close``."""

    def __init__(self) -> None:
        self._memory = _Memory({})
        self._written: set[Surface] = set()
        self.failure: str | None = None
        """Why writes are no longer recorded."""

    def watch(self, tensors: Mapping[Surface, torch.Tensor], *, more: bool = False) -> None:
        """Record writes to these tensors from now on; with ``more``, in addition to those before."""
        if not more:
            self._written = set()
        self._memory = _Memory(tensors, self._memory if more else None)
        if tensors and self._handle is None and self.failure is None:
            self._handle = listen(self, on_error=self._failed)

    @property
    def written(self) -> frozenset[Surface]:
        """Tensors that a collective has written to, or will."""
        return frozenset(self._written)

    def close(self) -> None:
        self.stop()
        self._memory = _Memory({})

    def before(self, call: Call) -> None:
        memory, written = self._memory, self._written  # of one window, even if another thread opens the next
        if not memory.begins:
            return
        found = {name for tensor in call.outputs for name in memory.touched_by(tensor)}
        if found and call.operation == "all_gather":
            # A rank's own contribution may already be in the output, and does not change.
            found -= {name for tensor in call.inputs for name in memory.within(tensor)}
        written |= found

    def _failed(self, error: Exception) -> None:
        self._handle, self.failure = None, f"{type(error).__name__}: {error}"


class _Memory:
    """The addresses of tensors, which may overlap."""

    def __init__(self, tensors: Mapping[Surface, torch.Tensor], extended: _Memory | None = None) -> None:
        new = [(*_range(each), name) for name, each in tensors.items() if each.numel()]
        self.ranges: list[tuple[int, int, Surface]] = sorted([*new, *(extended.ranges if extended else ())])
        self.begins = [begin for begin, _, _ in self.ranges]
        self.longest = max((end - begin for begin, end, _ in self.ranges), default=0)

    def touched_by(self, tensor: torch.Tensor) -> list[Surface]:
        """Return what overlaps with this tensor."""
        begin, end = _range(tensor)
        first, last = bisect_left(self.begins, begin - self.longest), bisect_left(self.begins, end)
        return [name for _, stop, name in self.ranges[first:last] if begin < stop]

    def within(self, tensor: torch.Tensor) -> list[Surface]:
        """Return what lies entirely in this tensor."""
        begin, end = _range(tensor)
        first, last = bisect_left(self.begins, begin), bisect_left(self.begins, end)
        return [name for _, stop, name in self.ranges[first:last] if stop <= end]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range of a tensor, including the gaps of a view."""
    begin = tensor.data_ptr()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (extent * tensor.element_size() if tensor.numel() else 0)


_COLLECTIVE = "a collective writes to it between updates"
_PROGRAM = "training writes to it between updates"
_MOST = 2
"""After writes in so many windows, a copy is not watched any more."""


@dataclass(frozen=True, slots=True)
class WorkingCopies:
    """The working copies of one rank at this moment."""

    resting: Mapping[Surface, torch.Tensor] = field(default_factory=dict)
    """Copies that training does not write to until the next update, as far as the adapter knows."""
    unwatched: Mapping[Surface, str] = field(default_factory=dict)
    """Copies that cannot be watched now, with the reason; some can after the next forward pass."""


class CopyWatch:
    """Decides which working copies are watched, and records why others are not."""

    def __init__(
        self,
        copies: Callable[[], WorkingCopies] = WorkingCopies,
        passes: Sequence[torch.nn.Module] = (),
    ) -> None:
        """``copies`` returns what the next update overwrites; ``passes`` are the modules that a forward pass
        calls."""
        self._copies, self._writes, self.passes = copies, CollectiveWrites(), passes
        self._begun: frozenset[Surface] = frozenset()
        """Everything watched since the last update."""
        self._windows: Counter[Surface] = Counter()
        """The number of windows in which training has written to a copy."""
        self._left_out: dict[Surface, str] = {}
        """Copies that are not watched any more, with the reasons."""
        self._missed: dict[Surface, str] = {}
        """Copies not watched since the last check, with the reasons."""
        self._missed_before: dict[Surface, str] = {}
        """The same for the time before the last check."""

    def resting(self) -> dict[Surface, torch.Tensor]:
        """Return what to watch now."""
        found = self._copies()
        self._missed |= found.unwatched
        if self._writes.failure is not None:  # a write by a collective would look like a fault
            return {}
        return {name: each for name, each in found.resting.items() if name not in self._left_out}

    def unwatched(self) -> dict[Surface, str]:
        """Return what is not watched, or was not since the check before the last one, with the reasons."""
        found = self._copies()
        failure = self._writes.failure
        lost = (
            {}
            if failure is None
            else dict.fromkeys(found.resting, f"collectives are no longer recorded: {failure}")
        )
        return {**self._missed_before, **self._left_out, **lost, **found.unwatched}

    def begin(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """Record which of these collectives write to, until the next call."""
        self._writes.watch(tensors)
        self._begun = frozenset(tensors)

    def begin_late(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """Also record writes to these."""
        self._writes.watch(tensors, more=True)
        self._begun |= tensors.keys()

    @property
    def are_late(self) -> bool:
        """Whether some copies cannot be watched yet."""
        return bool(self._copies().unwatched)

    @property
    def received(self) -> frozenset[Surface]:
        """What a collective may have written to."""
        return self._writes.written if self._writes.failure is None else self._begun

    def excuse(self, window: Window, names: Collection[Surface]) -> None:
        """Treat changes of these in this window as writes of training."""
        window.written |= frozenset(names)
        for name in names if window.are_copies else ():
            reason = _COLLECTIVE if name in window.received else _PROGRAM
            self._windows[name] += 1
            (self._missed if self._windows[name] < _MOST else self._left_out)[name] = reason

    def not_read(self, names: Collection[Surface], reason: str) -> None:
        """Record that these could not be watched in one window; without names, all copies."""
        self._missed |= dict.fromkeys(names or ("working copies",), reason)

    def checked(self) -> None:
        """Called when a check is over."""
        self._missed_before, self._missed = self._missed, {}

    def close(self) -> None:
        self._writes.close()
