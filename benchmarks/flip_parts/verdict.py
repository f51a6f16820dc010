"""What a job said about its flip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flip_parts.flip import Flip, Flipped
from flip_parts.job import Found, Seen


@dataclass(frozen=True, slots=True)
class Result:
    """One job with a flip."""

    layout: str
    flip: Flip
    flipped: Flipped
    outcome: str
    """``rank``: it was named. ``group``: two replicas or more that cannot tell. ``missed``, ``wrong``."""
    has_effect: bool
    """Whether any rank's state is another one in the end than without the flip."""
    is_certified: bool
    """Whether state that the flip has changed, or may have, was certified."""
    certified: int | None
    incidents: Sequence[Seen]
    failures: Sequence[str]


def judged(layout: str, flip: Flip, found: Sequence[Found], clean: Sequence[Found]) -> Result:
    """``clean`` is what the same job has found without a flip."""
    (flipped,) = [each.flipped for each in found if each.flipped is not None]
    incidents = sorted({seen for each in found for seen in each.incidents}, key=lambda each: each.step)
    numbers = [each for each in incidents if each.manifestation == "sdc"]
    if any(flip.rank not in each.ranks for each in numbers):
        outcome = "wrong"
    elif not numbers:
        outcome = "missed"
    else:
        outcome = "rank" if all(each.ranks == (flip.rank,) for each in numbers) else "group"
    certified = max((c for e in found for c in (e.certified, e.verified) if c is not None), default=None)
    before = flip.step - 1  # the last step whose update was over
    reached = -1 if certified is None else certified
    is_certified = reached > before or (outcome in ("missed", "wrong") and reached >= before)
    failures = sorted({failure for each in found for failure in each.failures})
    has_effect = [each.digest for each in found] != [each.digest for each in clean]
    return Result(layout, flip, flipped, outcome, has_effect, is_certified, certified, incidents, failures)


def counted(results: Sequence[Result]) -> dict[str, int]:
    outcomes = Counter(each.outcome for each in results)
    return {
        "flips": len(results),
        "rank": outcomes["rank"],
        "group": outcomes["group"],
        "wrong": outcomes["wrong"],
        "missed": outcomes["missed"],
        "certified": sum(each.is_certified for each in results),
        "with_effect": sum(each.is_certified and each.has_effect for each in results),
    }
