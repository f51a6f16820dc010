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
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.evidence.replay.digest import digest
from torchscout.evidence.replay.judgement import Context, is_sound, judge, summed
from torchscout.evidence.replay.recipe import ABSENT, POISON, UNREPEATABLE, Comparison, Observation, Replay

__all__ = ["Run", "gather", "judged"]


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
    verdicts = c3.compare(channel, exact=evidence)
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
