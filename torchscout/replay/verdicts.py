"""Compares what one check has seen with the peers in one exchange, and turns it into evidence records (paper,
section 5.1).

Of many values that mostly agree, such as all state, one digest is exchanged first, and the values
themselves only where digests differ. A comparison is a verdict only among ranks that had something to
compare. What could not be compared is ``not_checked`` with its reason, which is neither a disagreement nor
clean evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torchscout.decision import c3, consensus
from torchscout.decision.channel import PeerChannel
from torchscout.decision.ownership import BY_DESIGN, by_design
from torchscout.decision.record import EvidenceRecord, Manifestation, Scope, Surface
from torchscout.decision.repeatability import NONDETERMINISTIC
from torchscout.decision.sdc import FAILED
from torchscout.decision.signature import digest
from torchscout.replay.recipe import ABSENT, POISON, UNREPEATABLE, Comparison, Observation, Replay
from torchscout.utils.text import named

__all__ = [
    "Context",
    "Run",
    "broken_depth",
    "gather",
    "has_failed",
    "is_left_out",
    "is_sound",
    "judge",
    "judged",
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


@dataclass(slots=True)
class Run:
    """A replay that every rank is ready for, and what came of it."""

    kind: str
    """Of the recipe."""
    replay: Replay
    context: Context
    variants: Sequence[float]
    comparisons: Sequence[Comparison] = ()
    seen: dict[float, Observation] = field(default_factory=dict)
    """By variant."""
    problems: dict[float, str | None] = field(default_factory=dict)
    """Why this rank failed, by variant."""
    gathered: dict[float, dict[Surface, Sequence[int]]] = field(default_factory=dict)
    """What every peer has, by variant and surface; without what agrees as a whole."""
    agreeing: dict[float, list[tuple[Comparison, int]]] = field(default_factory=dict)
    """By variant: what agrees as a whole, as the first of its comparisons and the digest of all."""
    records: list[EvidenceRecord] = field(default_factory=list)

    def start(self) -> None:
        """Forget what was seen."""
        self.seen = {variant: Observation() for variant in self.variants}
        self.problems = dict.fromkeys(self.variants)

    @property
    def has_failed(self) -> bool:
        return any(problem is not None for problem in self.problems.values())

    def again(self) -> Run:
        """The same, with nothing seen yet."""
        run = Run(self.kind, self.replay, self.context, self.variants, self.comparisons)
        run.start()
        return run

    def values_of(self, record: EvidenceRecord) -> tuple[list[int], list[int]]:
        """The peers that did not fail, and what they had of what a record is about."""
        of_variant = next(each for each in self.variants if _is_of(record, each))
        values = zip(self.context.peers, self.gathered[of_variant][record.surface], strict=True)
        having = [(rank, value) for rank, value in values if value != POISON]
        return [rank for rank, _ in having], [value for _, value in having]


def gather(channel: PeerChannel, runs: Sequence[Run], *, in_full: bool = False) -> None:
    """Fill in what peers have seen in these runs, which all of them have, in the same order.

    ``in_full`` without digests first: where it is known that something differs.
    """
    if not runs:
        return
    parts = {(id(run), variant): _parts(run, variant) for run in runs for variant in run.variants}
    every = [part for some in parts.values() for part in some]
    if in_full:
        detail = {key: value for part in every for key, value in part.detail().items()}
        values, sound = _gathered(channel, detail), set[Surface]()
    else:
        values = _gathered(channel, {part.key: part.whole for part in every})
        sound = {part.key for part in every if part.is_summary and is_sound(values[part.key])}
        # All peers have gathered the same, and so all of them need the same details.
        if unsound := [part for part in every if part.is_summary and part.key not in sound]:
            detail = {key: value for part in unsound for key, value in part.detail().items()}
            values |= _gathered(channel, detail)
    for run in runs:
        for variant in run.variants:
            some = parts[id(run), variant]
            whole = [part for part in some if part.key in sound]
            apart = [part for part in some if part.key not in sound]
            run.agreeing[variant] = [(part.comparisons[0], values[part.key][0]) for part in whole]
            run.gathered[variant] = {
                each.surface: values[f"{part.prefix} {each.surface}"]
                for part in apart
                for each in part.comparisons
            }


def judged(run: Run) -> list[EvidenceRecord]:
    """The records of all variants, once what peers have seen is gathered."""
    records: list[EvidenceRecord] = []
    for variant, seen in run.seen.items():
        problem, gathered = run.problems[variant], run.gathered[variant]
        here = replace(run.context, variant=variant, problem=problem, unrepeatable=seen.unrepeatable)
        records += [summed(here, first, whole) for first, whole in run.agreeing[variant]]
        records += judge(here, [each for each in run.comparisons if each.surface in gathered], gathered)
    return records


def _gathered(channel: PeerChannel, evidence: Mapping[Surface, int]) -> dict[Surface, Sequence[int]]:
    verdicts = c3.compare(channel, evidence)
    return {surface: cast("Sequence[int]", each.evidence) for surface, each in verdicts.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """One value of the exchange: of one comparison, or of all that have one summary."""

    prefix: str
    comparisons: Sequence[Comparison]
    values: Sequence[int]

    @property
    def is_summary(self) -> bool:
        return self.comparisons[0].summary is not None

    @property
    def key(self) -> Surface:
        first = self.comparisons[0]
        return f"{self.prefix} {first.surface if first.summary is None else f'all of {first.summary}'}"

    @property
    def whole(self) -> int:
        if not self.is_summary:
            return self.values[0]
        return POISON if {ABSENT, POISON} & {*self.values} else digest(self.values)

    def detail(self) -> dict[Surface, int]:
        keys = (f"{self.prefix} {each.surface}" for each in self.comparisons)
        return dict(zip(keys, self.values, strict=True))


def _parts(run: Run, variant: float) -> list[_Part]:
    prefix, seen = f"{run.kind} x{variant!r}", run.seen[variant]
    groups: dict[tuple[Surface, bool], list[Comparison]] = {}
    for each in run.comparisons:
        groups.setdefault((each.summary or each.surface, each.summary is not None), []).append(each)
    return [_Part(prefix, every, [_value(seen, each) for each in every]) for every in groups.values()]


def _value(seen: Observation, comparison: Comparison) -> int:
    if comparison.surface in seen.unrepeatable:
        return UNREPEATABLE
    return seen.signatures.get(comparison.surface, POISON)


def _is_of(record: EvidenceRecord, variant: float) -> bool:
    """Whether a record is about this variant of the input, as ``Context.mode`` spells it."""
    return (record.mode or "").partition(" ")[2] == ("" if variant == 1 else f"x{variant:g}")
