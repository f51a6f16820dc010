"""Parameters that each update writes anew, from what optimizers update in their place (paper, section 6.1.1).

In mixed precision and with sharded optimizers, a model computes with such working copies. A change in one is
gone after the next update; but one rank has computed gradients with it, and all ranks have added them up. No
comparison finds that later. So working copies are watched at rest, as state with one owner is.

[Note: copies that training writes] Some frameworks write them between updates, too: with
``overlap_param_gather`` Megatron-Core gathers parameters in the next forward pass. Where an adapter knows
that, they are watched from the end of that pass on. Else, a change that a collective may have made is no
fault, nor is one that several ranks show. What training has written to in two windows is left out from then
on. Coverage has what was not watched, with the reason; it does not keep a check from certifying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from torchscout.decision.record import Surface
from torchscout.evidence.replay.collective_writes import CollectiveWrites
from torchscout.evidence.replay.rest_window import Window

__all__ = ["CopyWatch", "WorkingCopies"]

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
