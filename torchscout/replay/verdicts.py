"""Compares the results of one check among peers, and returns evidence records (paper, section 5.1).

Of many values that usually agree, such as all state, peers first exchange one digest, and the values only if
the digests differ. Only ranks that have a value vote. What could not be compared is ``not_checked`` with its
reason, which is neither a disagreement nor clean evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from torchscout.c3 import compare as c3
from torchscout.c3.channel import PeerChannel
from torchscout.c3.signature import digest
from torchscout.decision import consensus
from torchscout.decision.ownership import BY_DESIGN, by_design
from torchscout.decision.repeatability import NONDETERMINISTIC, Repeated
from torchscout.decision.sdc import FAILED
from torchscout.decision.types import EvidenceRecord, Manifestation, Scope, Surface
from torchscout.replay.recipe import ABSENT, POISON, UNREPEATABLE, Comparison, Measured, Observation, Replay
from torchscout.utils.text import named

__all__ = [
    "Ballot",
    "Context",
    "Findings",
    "Run",
    "ballot_of",
    "broken_depth",
    "gather",
    "has_failed",
    "is_left_out",
    "judge",
    "judged",
    "named_for_results",
    "not_checked",
    "withhold",
]

_REFUSED, _FAILED = 1, 2
_HEIGHT = 8
"""More than the longest chain of premises."""
_OWNED = f"{BY_DESIGN}: it was not equal on all peers when it was first compared"


@dataclass(slots=True)
class Findings:
    """The results of one check, identical on every peer."""

    records: list[EvidenceRecord] = field(default_factory=list)
    """For the log: what does not repeat has no verdict."""
    repeats: list[Repeated] = field(default_factory=list)
    """Results of the repetitions after disagreements."""
    elsewhere: set[int] = field(default_factory=set)
    """Ranks of other peer groups whose results were wrong in the same check."""
    targets: list[str] = field(default_factory=list)
    """Required targets that were due on this rank, whether or not they could be replayed."""
    measured: list[Measured] = field(default_factory=list)
    """This rank's times, without those of first runs."""
    on_shapes: float = 0.0
    """Seconds that this rank took to replay expert shapes once."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all records of one replay share."""

    step: int
    peers: tuple[int, ...]
    target: str
    """What was replayed; empty for all state."""
    variant: float = 1.0
    shape: tuple[int, ...] | None = None
    """The size of the work, such as the shape of a layer's input; None for all state."""
    problem: str | None = None
    """Why this rank failed, if it did."""
    left_out: Mapping[Surface, str] = field(default_factory=dict)
    """Surfaces that are not compared because they are known not to repeat, with the reasons."""
    unrepeatable: Mapping[Surface, str] = field(default_factory=dict)
    """Surfaces that this rank computed without a deterministic operator, with the reasons."""

    def mode(self, mode: str) -> str:
        return mode if self.variant == 1 else f"{mode} x{self.variant:g}"

    def record(self, comparison: Comparison) -> EvidenceRecord:
        """Return the record of a comparison before it is made."""
        return EvidenceRecord(
            step=self.step,
            surface=comparison.surface,
            manifestation=Manifestation.SDC,
            peers=self.peers,
            reason="not compared",
            layer=self.target or None,
            mode=self.mode(comparison.mode),
            shape=self.shape,
        )


def not_checked(context: Context, surface: Surface, reason: str) -> EvidenceRecord:
    """Return the record of work that could not be replayed."""
    return replace(context.record(Comparison(surface, "replay")), reason=reason)


def judge(
    context: Context, comparisons: Sequence[Comparison], gathered: Mapping[Surface, Sequence[int]]
) -> list[EvidenceRecord]:
    """Return one record for each surface, and one for all that agree under the same summary."""
    records: dict[Surface, EvidenceRecord] = {}
    differing: set[Surface] = set()
    left_out = dict(context.left_out)
    failures: list[EvidenceRecord] = []
    summaries: dict[Surface, list[Comparison]] = {}
    owned = _owned(comparisons, gathered)
    for comparison in comparisons:
        values = gathered[comparison.surface]
        if comparison.surface in owned:
            records[comparison.surface] = replace(context.record(comparison), reason=_OWNED)
            continue
        if comparison.summary is not None and is_unanimous(values):  # state, which no kernel computes
            summaries.setdefault(comparison.summary, []).append(comparison)
            continue
        record = _judge(context, comparison, values, differing, left_out)
        if record.scope is not None:
            differing.add(comparison.surface)
        if is_left_out(record):
            left_out[comparison.surface] = str(record.reason)
        if comparison.tie is not None and record.scope is Scope.PEER_GROUP:
            record = replace(record, verdict=None, reason=comparison.tie)
        records[comparison.surface] = record
        if failed := _ranks_with(POISON, context.peers, values):
            problem = "" if context.problem is None else f": {context.problem}"
            reason = f"{FAILED} on {named(failed)}{problem}"
            failures.append(replace(context.record(comparison), peers=tuple(failed), reason=reason))
    agreeing = [
        summarized(context, group[0], digest([gathered[each.surface][0] for each in group]))
        for group in summaries.values()
    ]
    return [*agreeing, *records.values(), *failures]


def _ranks_with(value: int, ranks: Sequence[int], values: Sequence[int]) -> list[int]:
    if value not in values:
        return []
    return [rank for rank, each in zip(ranks, values, strict=True) if each == value]


def _owned(
    comparisons: Sequence[Comparison], gathered: Mapping[Surface, Sequence[int]]
) -> frozenset[Surface]:
    """Return the state that differs by design, among what is compared for the first time."""
    new = [each for each in comparisons if each.is_new]
    differing, agreeing = dict[Surface, Sequence[int]](), list[Surface]()
    for each in new:
        values = gathered[each.surface]
        if POISON in values or is_unanimous(values):
            agreeing.append(each.surface)
        else:
            differing[each.surface] = values
    local = {each.surface for each in new if each.is_local and each.surface in differing}
    return by_design(differing, agreeing) | local


def has_failed(records: Sequence[EvidenceRecord]) -> bool:
    """Whether a peer failed to compute a value."""
    return any(each.reason is not None and each.reason.startswith(FAILED) for each in records)


def depths(comparisons: Sequence[Comparison]) -> dict[Surface, int]:
    """Return the length of the longest chain of premises below each comparison."""
    found: dict[Surface, int] = {}
    for each in comparisons:  # premises come first
        found[each.surface] = 1 + max((found[premise] for premise in each.premises), default=-1)
    return found


def broken_depth(comparisons: Sequence[Comparison], records: Sequence[EvidenceRecord]) -> int | None:
    """Return the lowest depth of a premise in which peers differ, or None."""
    ties = {comparison.tie for comparison in comparisons} - {None}
    differing = [each.surface for each in records if each.scope is not None or each.reason in ties]
    differing += [each.surface for each in records if is_left_out(each)]
    if not differing:  # the usual case, and there may be thousands of comparisons
        return None
    found = depths(comparisons)
    premises = {premise for comparison in comparisons for premise in comparison.premises}
    return min((found[surface] for surface in differing if surface in premises), default=None)


def is_left_out(record: EvidenceRecord) -> bool:
    """Whether the surface was not compared because it does not repeat."""
    return record.reason is not None and record.reason.startswith(NONDETERMINISTIC)


def named_for_results(comparisons: Sequence[Comparison], records: Sequence[EvidenceRecord]) -> list[int]:
    """Return the ranks whose results differ although their inputs agree."""
    following = {comparison.surface for comparison in comparisons if comparison.premises}
    return sorted({rank for record in records if record.surface in following for rank in record.ranks})


def withhold(
    comparisons: Sequence[Comparison], records: Sequence[EvidenceRecord], depth: int
) -> list[EvidenceRecord]:
    """Return the records, without verdicts above ``depth``, at which some rank differs or failed.

    A tensor-parallel rank computes with results of its partners, so a partner's wrong weight is not its
    fault.
    """
    found = depths(comparisons)
    reason = "its premises differ, or failed, on a rank that may compute together with this one"
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
            derived = f"{NONDETERMINISTIC}: computed from {premise}, which does not repeat"
            return replace(record, reason=derived)
    if reason := left_out.get(comparison.surface) or _unrepeatable(context, comparison, values):
        return replace(record, reason=reason)
    ranks, compared = _without_failures(context.peers, values)
    if ranks and compared.count(ABSENT) == len(compared):
        return replace(record, reason=comparison.absent)
    expected = comparison.expected
    if len(ranks) < (2 if expected is None else 1):
        return replace(record, reason="fewer than two peers had a value to compare")
    verdict = consensus.exact(compared) if expected is None else consensus.known(compared, expected)
    return replace(record, peers=ranks, verdict=verdict, reason=None)


def _without_failures(ranks: tuple[int, ...], values: Sequence[int]) -> tuple[tuple[int, ...], Sequence[int]]:
    if POISON not in values:
        return ranks, values
    pairs = [(rank, value) for rank, value in zip(ranks, values, strict=True) if value != POISON]
    return tuple(rank for rank, _ in pairs), [value for _, value in pairs]


def _unrepeatable(context: Context, comparison: Comparison, values: Sequence[int]) -> str | None:
    """Return why values cannot be compared, if a rank computed them without a deterministic operator."""
    if not (marked := _ranks_with(UNREPEATABLE, context.peers, values)):
        return None
    elsewhere = f"an operator on {named(marked)} has no deterministic version"
    return f"{NONDETERMINISTIC}: {context.unrepeatable.get(comparison.surface, elsewhere)}"


def is_unanimous(values: Sequence[int]) -> bool:
    """Whether there are several peers, and all have the same value."""
    first = values[0]
    return len(values) > 1 and first not in (ABSENT, POISON) and consensus.all_equal(values)


def summarized(context: Context, first: Comparison, whole: int) -> EvidenceRecord:
    """Return one record for agreeing comparisons, given the first one and the digest of all values."""
    record = context.record(replace(first, surface=first.summary or ""))
    agreement = consensus.exact(consensus.Unanimous(whole, len(context.peers)))
    return replace(record, verdict=agreement, reason=None)


@dataclass(slots=True)
class Run:
    """A replay that every rank is ready for, with its results."""

    kind: str
    replay: Replay
    context: Context
    variants: Sequence[float]
    comparisons: Sequence[Comparison] = ()
    seen: dict[float, Observation] = field(default_factory=dict)
    """By variant."""
    problems: dict[float, str | None] = field(default_factory=dict)
    """Why this rank failed, by variant."""
    gathered: dict[float, dict[Surface, Sequence[int]]] = field(default_factory=dict)
    """The values of all peers, by variant and surface, except for agreeing summaries."""
    agreeing: dict[float, list[tuple[Comparison, int]]] = field(default_factory=dict)
    """Agreeing summaries, by variant: the first comparison and the digest of all values."""
    records: list[EvidenceRecord] = field(default_factory=list)
    refused_on_any: bool = False
    """Whether a peer has to replay without strict determinism."""
    failed_on_any: bool = False
    """Whether a peer failed."""

    def start(self) -> None:
        """Discard earlier observations."""
        self.seen = {variant: Observation(variant) for variant in self.variants}
        self.problems = dict.fromkeys(self.variants)

    @property
    def state(self) -> int:
        """How it went on this rank, for peers."""
        is_refused = any(each.refused for each in self.seen.values())
        has_failed = any(problem is not None for problem in self.problems.values())
        return is_refused * _REFUSED | has_failed * _FAILED

    def restarted(self) -> Run:
        """Return a new run of the same replay."""
        run = Run(self.kind, self.replay, self.context, self.variants, self.comparisons)
        run.start()
        return run

    def values_of(self, record: EvidenceRecord) -> tuple[tuple[int, ...], Sequence[int]]:
        """Return the peers that did not fail, and their values of the record's surface and variant."""
        suffix = (record.mode or "").partition(" ")[2]  # see ``Context.mode``
        variant = next(each for each in self.variants if suffix == ("" if each == 1 else f"x{each:g}"))
        return _without_failures(self.context.peers, self.gathered[variant][record.surface])


def gather(channel: PeerChannel, runs: Sequence[Run], *, in_full: bool = False) -> None:
    """Exchange the results of these runs among peers, all of which pass the same runs in the same order.

    With ``in_full``, values are exchanged at once instead of digests first.
    """
    if not runs:
        return
    parts = {
        (id(run), variant): _parts(number, run, variant)
        for number, run in enumerate(runs)
        for variant in run.variants
    }
    every = [part for some in parts.values() for part in some]
    states = {f"{number} {run.kind} state": run.state for number, run in enumerate(runs)}
    if in_full:
        detail = {key: value for part in every for key, value in part.detail().items()}
        values, unanimous = _gathered(channel, states | detail), set[Surface]()
    else:
        values = _gathered(channel, states | {part.key: part.whole for part in every})
        unanimous = {part.key for part in every if part.is_summary and is_unanimous(values[part.key])}
        # All peers have gathered the same values, so all of them request the same details.
        if differing := [part for part in every if part.is_summary and part.key not in unanimous]:
            detail = {key: value for part in differing for key, value in part.detail().items()}
            values |= _gathered(channel, detail)
    for run, state in zip(runs, states, strict=True):
        found = {*values[state]}
        run.refused_on_any = any(each & _REFUSED for each in found)
        run.failed_on_any = any(each & _FAILED for each in found)
        for variant in run.variants:
            some = parts[id(run), variant]
            whole = [part for part in some if part.key in unanimous]
            apart = [part for part in some if part.key not in unanimous]
            run.agreeing[variant] = [(part.comparisons[0], values[part.key][0]) for part in whole]
            run.gathered[variant] = {
                each.surface: values[f"{part.prefix} {each.surface}"]
                for part in apart
                for each in part.comparisons
            }


def judged(run: Run) -> list[EvidenceRecord]:
    """Return the records of all variants, once results are gathered."""
    records: list[EvidenceRecord] = []
    for variant, seen in run.seen.items():
        problem, gathered = run.problems[variant], run.gathered[variant]
        here = replace(run.context, variant=variant, problem=problem, unrepeatable=seen.unrepeatable)
        records += [summarized(here, first, whole) for first, whole in run.agreeing[variant]]
        records += judge(here, [each for each in run.comparisons if each.surface in gathered], gathered)
    return records


def _gathered(channel: PeerChannel, evidence: Mapping[Surface, int]) -> dict[Surface, Sequence[int]]:
    verdicts = c3.compare(channel, evidence)
    return {surface: cast("Sequence[int]", each.evidence) for surface, each in verdicts.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """One value of the exchange: of one comparison, or of all with the same summary."""

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


def _parts(number: int, run: Run, variant: float) -> list[_Part]:
    # The number, because one module may be replayed at several shapes, with the same surfaces.
    prefix, seen = f"{number} {run.kind} x{variant!r}", run.seen[variant]
    groups: dict[tuple[Surface, bool], list[Comparison]] = {}
    for each in run.comparisons:
        groups.setdefault((each.summary or each.surface, each.summary is not None), []).append(each)
    values = {
        each.surface: UNREPEATABLE
        if each.surface in seen.unrepeatable
        else seen.signatures.get(each.surface, POISON)
        for each in run.comparisons
    }
    return [_Part(prefix, every, [values[each.surface] for each in every]) for every in groups.values()]


class Ballot(NamedTuple):
    """One rank's vote on a replay; the highest value of each field counts."""

    is_refused: int
    """Whether to replay without strict determinism."""
    differs: int
    """Whether peers differ."""
    height: int
    """How high above the lowest comparison one failed that others depend on; 0 if none did."""

    @property
    def depth(self) -> int:
        """The depth of that comparison, if any failed."""
        return _HEIGHT - self.height


def ballot_of(run: Run | None) -> Ballot:
    """Return the vote on a run whose results are judged; None if this rank has none."""
    if run is None:
        return Ballot(0, 0, 0)
    depth = 0 if run.failed_on_any else broken_depth(run.comparisons, run.records)
    differs = any(each.scope is not None for each in run.records)
    return Ballot(run.refused_on_any, differs, 0 if depth is None else _HEIGHT - depth)
