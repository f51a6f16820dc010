"""What one check has seen of its replays, compared with the peers in one exchange (paper, section 5.1).

Of many things that mostly agree, such as all state, one digest is exchanged first, and each of them only
where digests differ. What the values mean is decided by ``judgement``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torchscout.decision import c3
from torchscout.decision.channel import PeerChannel
from torchscout.decision.consensus import Verdict
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.evidence.replay.digest import digest
from torchscout.evidence.replay.judgement import Context, is_sound, judge, summed
from torchscout.evidence.replay.recipe import (
    ABSENT,
    POISON,
    UNREPEATABLE,
    Comparison,
    Observation,
    Replay,
)

__all__ = ["Run", "compare", "gather"]


@dataclass(slots=True)
class Run:
    """A replay that every rank is ready for, and what came of it."""

    kind: str
    """Of the recipe."""
    replay: Replay
    context: Context
    variants: Sequence[float]
    comparisons: Sequence[Comparison] = ()
    seen: dict[float, Observation] = field(init=False)
    """By variant."""
    problems: dict[float, str | None] = field(init=False)
    """Why this rank failed, by variant."""
    records: list[EvidenceRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen = {variant: Observation() for variant in self.variants}
        self.problems = dict.fromkeys(self.variants)

    @property
    def has_failed(self) -> bool:
        return any(problem is not None for problem in self.problems.values())

    def again(self) -> Run:
        """The same, with nothing seen yet."""
        return Run(self.kind, self.replay, self.context, self.variants, self.comparisons)


def compare(channel: PeerChannel, runs: Sequence[Run]) -> None:
    """Fill in the records of these runs, which all peers have, in the same order."""
    if not runs:
        return
    parts_of = [[_parts(run, variant) for variant in run.variants] for run in runs]
    parts = [part for of_run in parts_of for of_variant in of_run for part in of_variant]
    evidence = {part.key: part.whole for part in parts}
    verdicts = c3.compare(channel, exact=evidence)
    # All peers have gathered the same, and so all of them need the same details.
    unsound = [part for part in parts if part.is_summary and not is_sound(_integers(verdicts[part.key]))]
    if unsound:
        detail = {key: value for part in unsound for key, value in part.detail().items()}
        verdicts |= c3.compare(channel, exact=detail)
    for run, of_run in zip(runs, parts_of, strict=True):
        run.records = [
            record
            for variant, of_variant in zip(run.variants, of_run, strict=True)
            for record in _judged(run, variant, of_variant, verdicts)
        ]


def gather(channel: PeerChannel, runs: Sequence[Run]) -> list[dict[tuple[float, Surface], Sequence[int]]]:
    """What every peer has of each of these runs, by variant and surface; nothing is judged or summed up."""
    if not runs:
        return []
    values = {
        (place, variant, each.surface): _value(run.seen[variant], each.surface)
        for place, run in enumerate(runs)
        for variant in run.variants
        for each in run.comparisons
    }
    keys = {key: f"{runs[key[0]].kind} x{key[1]!r} {key[2]}" for key in values}
    verdicts = c3.compare(channel, exact={keys[key]: value for key, value in values.items()})
    found: list[dict[tuple[float, Surface], Sequence[int]]] = [{} for _ in runs]
    for place, variant, surface in values:
        found[place][variant, surface] = _integers(verdicts[keys[place, variant, surface]])
    return found


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
    prefix = f"{run.kind} x{variant!r}"
    groups: dict[tuple[Surface, bool], list[Comparison]] = {}
    for each in run.comparisons:
        groups.setdefault((each.summary or each.surface, each.summary is not None), []).append(each)
    return [
        _Part(prefix, every, [_value(run.seen[variant], each.surface) for each in every])
        for every in groups.values()
    ]


def _value(seen: Observation, surface: Surface) -> int:
    return UNREPEATABLE if surface in seen.unrepeatable else seen.signatures.get(surface, POISON)


def _judged(
    run: Run, variant: float, parts: Sequence[_Part], verdicts: Mapping[Surface, Verdict]
) -> list[EvidenceRecord]:
    context = replace(
        run.context,
        variant=variant,
        problem=run.problems[variant],
        unrepeatable=run.seen[variant].unrepeatable,
    )
    agreeing: list[EvidenceRecord] = []
    apart: list[Comparison] = []
    gathered: dict[Surface, Sequence[int]] = {}
    for part in parts:
        values = _integers(verdicts[part.key])
        if part.is_summary and is_sound(values):
            agreeing.append(summed(context, part.comparisons[0], values[0]))
            continue
        apart += part.comparisons
        for each in part.comparisons:
            gathered[each.surface] = _integers(verdicts[f"{part.prefix} {each.surface}"])
    return [*agreeing, *judge(context, apart, gathered)]


def _integers(verdict: Verdict) -> Sequence[int]:
    return cast("Sequence[int]", verdict.evidence)
