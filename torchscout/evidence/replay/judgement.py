"""From what peers gathered to evidence records: premises, missing tensors, failed ranks (paper, section 5.1).

Pure. A comparison is a verdict only among ranks that had something to compare; what could not be compared
is ``not_checked`` with its reason, neither a disagreement nor clean evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchscout.decision import consensus
from torchscout.decision.ownership import BY_DESIGN, by_design
from torchscout.decision.record import EvidenceRecord, Manifestation, Scope, Surface
from torchscout.decision.repeatability import NONDETERMINISTIC
from torchscout.decision.replay_diagnosis import FAILED
from torchscout.evidence.replay.digest import digest
from torchscout.evidence.replay.recipe import ABSENT, POISON, UNREPEATABLE, Comparison
from torchscout.utils.text import named

__all__ = [
    "Context",
    "broken_depth",
    "has_failed",
    "is_left_out",
    "is_sound",
    "judge",
    "named_for_results",
    "not_checked",
    "summed",
    "withhold",
]

_OWNED = f"{BY_DESIGN}: peers did not hold it equal when it was compared for the first time"


@dataclass(frozen=True, slots=True)
class Context:
    """What all records of one replay have in common."""

    step: int
    peers: tuple[int, ...]
    target: str
    """What was replayed; empty for state in general."""
    variant: float = 1.0
    problem: str | None = None
    """What went wrong on this rank, if it is one that failed."""
    left_out: Mapping[Surface, str] = field(default_factory=dict)
    """Surfaces that are known not to repeat, with the reasons: they are not compared."""
    unrepeatable: Mapping[Surface, str] = field(default_factory=dict)
    """What this rank has computed without a deterministic operator, with the reasons."""

    def mode(self, mode: str) -> str:
        return mode if self.variant == 1 else f"{mode} x{self.variant:g}"

    def record(self, comparison: Comparison) -> EvidenceRecord:
        """Of a comparison that has not been made."""
        return EvidenceRecord(
            step=self.step,
            surface=comparison.surface,
            manifestation=Manifestation.SDC,
            peers=self.peers,
            reason="not compared",
            layer=self.target or None,
            mode=self.mode(comparison.mode),
        )


def not_checked(context: Context, surface: Surface, reason: str) -> EvidenceRecord:
    """Of work that could not be replayed at all."""
    return replace(context.record(Comparison(surface, "replay")), reason=reason)


def judge(
    context: Context, comparisons: Sequence[Comparison], gathered: Mapping[Surface, Sequence[int]]
) -> list[EvidenceRecord]:
    """The records of one replay: each surface's own, and one for all that agree under one summary."""
    records: dict[Surface, EvidenceRecord] = {}
    differing: set[Surface] = set()
    left_out = dict(context.left_out)
    failures: list[EvidenceRecord] = []
    sums: dict[Surface, list[Comparison]] = {}
    owned = _owned(comparisons, gathered)
    for comparison in comparisons:
        values = gathered[comparison.surface]
        if comparison.surface in owned:
            records[comparison.surface] = replace(context.record(comparison), reason=_OWNED)
            continue
        if comparison.summary is not None and is_sound(values):  # state, which needs no kernel
            sums.setdefault(comparison.summary, []).append(comparison)
            continue
        record = _judge(context, comparison, values, differing, left_out)
        if record.scope is not None:
            differing.add(comparison.surface)
        if is_left_out(record):
            left_out[comparison.surface] = str(record.reason)
        records[comparison.surface] = _without_tie(comparison, record)
        if failed := [rank for rank, value in zip(context.peers, values, strict=True) if value == POISON]:
            failures.append(_failure(context, comparison, failed))
    agreeing = [summed(context, each[0], _whole(each, gathered)) for each in sums.values()]
    return [*agreeing, *records.values(), *failures]


def _owned(
    comparisons: Sequence[Comparison], gathered: Mapping[Surface, Sequence[int]]
) -> frozenset[Surface]:
    """What each peer keeps for itself, of the state that is compared for the first time."""
    new = [each for each in comparisons if each.is_new]
    differing, agreeing = dict[Surface, Sequence[int]](), list[Surface]()
    for each in new:
        values = gathered[each.surface]
        if POISON in values or is_sound(values):
            agreeing.append(each.surface)
        else:
            differing[each.surface] = values
    local = {each.surface for each in new if each.is_local and each.surface in differing}
    return by_design(differing, agreeing) | local


def has_failed(records: Sequence[EvidenceRecord]) -> bool:
    """Whether a peer could not compute what was to be compared."""
    return any(each.reason is not None and each.reason.startswith(FAILED) for each in records)


def depths(comparisons: Sequence[Comparison]) -> dict[Surface, int]:
    """How many comparisons each one builds upon, one on top of the other."""
    found: dict[Surface, int] = {}
    for each in comparisons:  # premises come first
        found[each.surface] = 1 + max((found[premise] for premise in each.premises), default=-1)
    return found


def broken_depth(comparisons: Sequence[Comparison], records: Sequence[EvidenceRecord]) -> int | None:
    """The lowest depth at which peers differ in what others build upon; None if they do nowhere."""
    ties = {comparison.tie for comparison in comparisons} - {None}
    differing = [each.surface for each in records if each.scope is not None or each.reason in ties]
    differing += [each.surface for each in records if is_left_out(each)]
    if not differing:  # nearly always, and a census has thousands of comparisons
        return None
    found = depths(comparisons)
    premises = {premise for comparison in comparisons for premise in comparison.premises}
    return min((found[surface] for surface in differing if surface in premises), default=None)


def is_left_out(record: EvidenceRecord) -> bool:
    """Whether a surface was not compared because it does not repeat."""
    return record.reason is not None and record.reason.startswith(NONDETERMINISTIC)


def named_for_results(comparisons: Sequence[Comparison], records: Sequence[EvidenceRecord]) -> list[int]:
    """The ranks whose results differ, though they started from the same."""
    following = {comparison.surface for comparison in comparisons if comparison.premises}
    return sorted({rank for record in records if record.surface in following for rank in record.ranks})


def withhold(
    comparisons: Sequence[Comparison], records: Sequence[EvidenceRecord], depth: int
) -> list[EvidenceRecord]:
    """The records, without blame for what builds upon something that is broken at ``depth`` on any rank.

    A tensor-parallel rank computes with what its partners compute; a partner's wrong weight is not its fault.
    """
    found = depths(comparisons)
    reason = "what it builds upon differs, or failed, on a rank that may compute together with this one"
    return [
        replace(record, verdict=None, reason=reason)
        if record.scope is not None and found[record.surface] > depth
        else record
        for record in records
    ]


def _judge(
    context: Context,
    comparison: Comparison,
    values: Sequence[int],
    differing: Collection[Surface],
    left_out: Mapping[Surface, str],
) -> EvidenceRecord:
    record = context.record(comparison)
    for premise in comparison.premises:
        if premise in differing:
            return replace(record, reason=f"{premise} differs among peers already")
    for premise in comparison.premises:
        if premise in left_out:
            reason = f"{NONDETERMINISTIC}: it is computed from {premise}, which does not repeat"
            return replace(record, reason=reason)
    if (unfit := left_out.get(comparison.surface) or _unrepeatable(context, comparison, values)) is not None:
        return replace(record, reason=unfit)
    having = [(rank, value) for rank, value in zip(context.peers, values, strict=True) if value != POISON]
    if having and all(value == ABSENT for _, value in having):
        return replace(record, reason=comparison.absent)
    right = comparison.right
    if len(having) < (2 if right is None else 1):
        return replace(record, reason="fewer than two peers had anything to compare")
    ranks, compared = zip(*having, strict=True)
    verdict = consensus.exact(compared) if right is None else consensus.known(compared, right)
    return replace(record, peers=ranks, verdict=verdict, reason=None)


def _unrepeatable(context: Context, comparison: Comparison, values: Sequence[int]) -> str | None:
    """Why values cannot be compared, if a rank had to compute them without a deterministic operator."""
    if UNREPEATABLE not in values:
        return None
    marked = [rank for rank, value in zip(context.peers, values, strict=True) if value == UNREPEATABLE]
    elsewhere = f"an operator on {named(marked)} has no deterministic version"
    return f"{NONDETERMINISTIC}: {context.unrepeatable.get(comparison.surface, elsewhere)}"


def _without_tie(comparison: Comparison, record: EvidenceRecord) -> EvidenceRecord:
    if comparison.tie is None or record.scope is not Scope.PEER_GROUP:
        return record
    return replace(record, verdict=None, reason=comparison.tie)


def _failure(context: Context, comparison: Comparison, failed: Sequence[int]) -> EvidenceRecord:
    reason = f"{FAILED} on {named(failed)}"
    if context.problem is not None:
        reason += f": {context.problem}"
    return replace(context.record(comparison), peers=tuple(failed), reason=reason)


def is_sound(values: Sequence[int]) -> bool:
    """Whether several peers have something to compare, and all have the same."""
    first = values[0]
    return len(values) > 1 and first not in (ABSENT, POISON) and all(value == first for value in values)


def summed(context: Context, first: Comparison, whole: int) -> EvidenceRecord:
    """One record for many that agree, the first of which is given; ``whole`` is the digest of them all."""
    record = context.record(replace(first, surface=first.summary or ""))
    return replace(record, verdict=consensus.exact([whole] * len(context.peers)), reason=None)


def _whole(found: Sequence[Comparison], gathered: Mapping[Surface, Sequence[int]]) -> int:
    return digest([gathered[comparison.surface][0] for comparison in found])
