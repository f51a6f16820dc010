"""Which state replicas hold copies of, and which each rank keeps for itself (paper, section 5.2).

A job may shard its optimizer state by hand, keep an average of the weights on one rank, or leave parameters
local. None of that is corrupt, and nothing but the numbers themselves shows it. So it is learned: state that
was equal once is replicated, and from then on a difference counts; state that differs when it is compared for
the first time, and not as one faulty rank would make it differ, belongs to each rank alone.

[Note: one faulty rank or a design] A fault changes the state of one rank, and seldom much of it. A slot of an
optimizer is taken for owned if no majority agrees on it, if several ranks are outliers in slots of its name
(``exp_avg``), or if one rank is the outlier in all of them. Two ranks have no majority in any case: there, at
least half of the slots of that name must differ. A parameter is equal on all replicas before the first
update; it is owned if it differed then and still does.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchscout.decision import consensus
from torchscout.decision.record import Surface

__all__ = ["BY_DESIGN", "Ownership", "by_design"]

BY_DESIGN = "differs by design"
"""How the reason begins why state is not compared that each rank keeps for itself."""


def by_design(
    differing: Mapping[Surface, Sequence[Hashable]], agreeing: Iterable[Surface]
) -> frozenset[Surface]:
    """Of the slots that differ when they are compared for the first time, those that are owned.

    Given are all values by peer, and the surfaces compared for the first time that agree.
    See [Note: one faulty rank or a design].
    """
    slots: dict[str, list[Surface]] = {}
    for surface in differing:
        if slot := _slot(surface):
            slots.setdefault(slot, []).append(surface)
    equal: dict[str, int] = {}
    for surface in agreeing:
        equal[_slot(surface)] = equal.get(_slot(surface), 0) + 1
    owned: set[Surface] = set()
    for slot, surfaces in slots.items():
        verdicts = {each: consensus.exact(differing[each]) for each in surfaces}
        outliers = {rank for verdict in verdicts.values() for rank in verdict.outliers}
        if any(len(differing[each]) == 2 for each in surfaces):
            if len(surfaces) > 1 and len(surfaces) >= equal.get(slot, 0):
                owned.update(surfaces)
        elif len(outliers) > 1 or (len(surfaces) > 1 and not equal.get(slot)):
            owned.update(surfaces)
        else:
            owned.update(each for each, verdict in verdicts.items() if not verdict.outliers)
    return frozenset(owned)


def _slot(surface: Surface) -> str:
    """What an optimizer calls it: ``exp_avg`` of ``layers.0/weight.exp_avg``; empty of a parameter."""
    return surface.rpartition("/")[2].partition(".")[2]


@dataclass(slots=True)
class Ownership:
    """What was learned about the state of this rank and its peers; the same on all of them."""

    replicated: set[Surface] = field(default_factory=set)
    """What was equal on all peers once, or was taken for it."""
    owned: dict[Surface, str] = field(default_factory=dict)
    """What this rank keeps for itself, with the reason."""
    differed: set[Surface] = field(default_factory=set)
    """Parameters that were not equal before the first update."""
    is_before_training: bool = False
    """Whether the first update is still to come: differences found now are remembered, not reported."""

    def is_new(self, surface: Surface) -> bool:
        return surface not in self.replicated

    def is_local(self, surface: Surface) -> bool:
        """Whether a difference is by design, however many ranks differ."""
        return self.is_before_training or (surface in self.differed and surface not in self.replicated)

    def is_owned(self, surface: Surface) -> bool:
        """Whether peers hold different ones, as far as is known."""
        return surface in self.owned or self.is_local(surface)

    def learn(self, compared: Collection[Surface], owned: Mapping[Surface, str]) -> None:
        """What a comparison of these surfaces has shown."""
        if self.is_before_training:
            self.differed = set(owned)
            return
        self.owned |= owned
        self.replicated.update(each for each in compared if each not in owned)

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": sorted(self.replicated), "owned": dict(self.owned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replicated, self.owned = set(state["replicated"]), dict(state["owned"])
