"""Finds NaN and infinity in trained state: peers may agree on numbers that are useless (paper, section 8).

A job that diverges writes NaN into the weights of all replicas alike, so that every comparison agrees. Such
state must not be certified: a restart would go back to it. ``state.table`` says which state counts, and
signatures look for NaN and infinity on the way (``c3.signature``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchscout.c3.signature import LastPlan
from torchscout.decision.types import EvidenceRecord, Manifestation, Surface
from torchscout.replay.recipe import Recipe
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.state.table import Row
from torchscout.utils.text import listed

__all__ = ["FINITE", "FiniteState", "not_finite"]

FINITE = "state/finite"
_MOST_NAMED = 3
_NOT_LOOKED_AT = (
    "torchscout could not look for NaN and infinity: such state is not certified. "
    'session.status()["failures"] says why it could not'
)
_IF_BY_DESIGN = (
    "If a parameter holds it by design, make it a buffer or set requires_grad=False; "
    "if a slot of an optimizer does, let it hold a large finite number instead"
)


class FiniteState:
    """What is not finite of the state that these recipes compare or watch."""

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        self._recipes = [
            each for each in recipes if isinstance(each, ReplicatedStateRecipe | OwnedStateRecipe)
        ]
        self._plan = LastPlan()

    def wrong(self) -> list[Surface]:
        """Return the names of what is not finite now. What the check in progress has signed is not read
        again: signatures of watched state are older than the last update. Waits for the devices."""
        rows, seen, wrong = dict[Surface, Row](), set[Surface](), set[Surface]()
        for each in self._recipes:
            rows |= each.state()
            if isinstance(each, ReplicatedStateRecipe) and each.signed is not None:
                names, signed = each.signed
                seen.update(names)
                wrong.update(names[place] for place in signed.not_finite)
        rest = {name: row for name, row in rows.items() if name not in seen and row.must_be_finite}
        signed = self._plan.of(row.local for row in rest.values()).start(finite=True)
        signed.read()
        wrong.update(name for place, name in enumerate(rest) if place in signed.not_finite)
        return [name for name, row in rows.items() if name in wrong and row.must_be_finite]


def not_finite(wrong: Sequence[Surface] | None, step: int, rank: int) -> list[EvidenceRecord]:
    """Return a record of what is ``wrong`` with the state of a rank, if anything is. None stands for state
    that could not be looked at, which is not certified either."""
    if wrong is None:
        problem = _NOT_LOOKED_AT
    elif wrong:
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        named = f"{listed(wrong[:_MOST_NAMED])}{more}"
        problem = f"NaN or infinity in {named}: such state is not certified. {_IF_BY_DESIGN}"
    else:
        return []
    record = EvidenceRecord(
        step=step, surface=FINITE, manifestation=Manifestation.SDC, peers=(rank,), reason=problem
    )
    return [record]
