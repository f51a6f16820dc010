"""Learns which state is replicated and which belongs to one rank (paper, section 5.2).

A job may shard its optimizer state by hand, keep an average of the weights on one rank, or leave parameters
local. None of that is corrupt, and only the numbers show it. So it is learned: state that was equal once is
replicated, and from then on a difference counts. State that differs when it is first compared, and not in the
way that one faulty rank would make it differ, is owned by each rank.

[Note: one faulty rank or a design] A fault changes the state of one rank, and seldom much of it. A slot of an
optimizer counts as owned if no majority agrees on it, if several ranks are outliers in slots of its name
(``exp_avg``), or if one rank is the outlier in all of them. Two ranks have no majority: at least half of the
slots of that name must differ. A parameter is equal on all replicas before the first update; it is owned if
it differed then and still does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchscout.decision import consensus
from torchscout.decision.types import Surface

__all__ = ["BY_DESIGN", "Ownership", "by_design"]

BY_DESIGN = "differs by design"
"""The beginning of the reason why owned state is not compared."""


def by_design(
    differing: Mapping[Surface, Sequence[Hashable]], agreeing: Iterable[Surface]
) -> frozenset[Surface]:
    """Return the owned slots among those that differ when they are first compared.

    ``differing`` has the values of all peers, and ``agreeing`` the surfaces first compared that agree. See
    [Note: one faulty rank or a design].
    """
    slots: dict[str, list[Surface]] = {}
    for surface in differing:
        if slot := _slot(surface):
            slots.setdefault(slot, []).append(surface)
    equal = Counter(map(_slot, agreeing))
    owned: set[Surface] = set()
    for slot, surfaces in slots.items():
        verdicts = {each: consensus.exact(differing[each]) for each in surfaces}
        outliers = {rank for verdict in verdicts.values() for rank in verdict.outliers}
        if any(len(differing[each]) == 2 for each in surfaces):
            if len(surfaces) > 1 and len(surfaces) >= equal[slot]:
                owned.update(surfaces)
        elif len(outliers) > 1 or (len(surfaces) > 1 and not equal[slot]):
            owned.update(surfaces)
        else:
            owned.update(each for each, verdict in verdicts.items() if not verdict.outliers)
    return frozenset(owned)


def _slot(surface: Surface) -> str:
    """The optimizer's name of a slot: ``exp_avg`` of ``layers.0/weight.exp_avg``; empty for a parameter."""
    return surface.rpartition("/")[2].partition(".")[2]


@dataclass(slots=True)
class Ownership:
    """What was learned about the state of a peer group; the same on all peers."""

    replicated: set[Surface] = field(default_factory=set)
    """State that was equal on all peers once, or counts as replicated."""
    owned: dict[Surface, str] = field(default_factory=dict)
    """State that belongs to this rank, with the reason."""
    differed: set[Surface] = field(default_factory=set)
    """Parameters that differed before the first update."""
    is_before_training: bool = False
    """Before the first update differences are only remembered."""

    def is_new(self, surface: Surface) -> bool:
        return surface not in self.replicated

    def is_local(self, surface: Surface) -> bool:
        """Whether a difference of any number of ranks is by design."""
        return self.is_before_training or (surface in self.differed and surface not in self.replicated)

    def is_owned(self, surface: Surface) -> bool:
        """Whether peers are known to hold different values."""
        return surface in self.owned or self.is_local(surface)

    def learn(self, compared: Collection[Surface], owned: Mapping[Surface, str]) -> None:
        """Add the result of comparing these surfaces."""
        if self.is_before_training:
            self.differed = set(owned)
            return
        self.owned |= owned
        self.replicated.update(each for each in compared if each not in owned)

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": sorted(self.replicated), "owned": dict(self.owned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replicated, self.owned = set(state["replicated"]), dict(state["owned"])
