"""What observers report about ranks that have stopped, as the product's own types."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from evaluation.simulate.job import Job
from torchscout.decision.progress import IssuedOp, Phase, Progress, RankReport, Window

__all__ = ["STEP", "Reporter"]

STEP = 40
"""The step in which something goes wrong."""
_RECENT = 64
"""How many operations an observer shows."""


class _Shown(NamedTuple):
    """An operation of a window, in whichever group the rank has there."""

    keys: Sequence[str]
    """The key of that group, by rank."""
    number: int
    text: str
    digest: int

    def of(self, rank: int) -> IssuedOp:
        return IssuedOp(self.keys[rank], self.number, hashed(self.text), self.digest, self.text)


class _Place(NamedTuple):
    """What all ranks of a stage have in common that have come to the same tick."""

    steps: int
    operation: int
    phase: Phase
    counts: Mapping[str, int]
    """By kind of group."""
    shown: Sequence[_Shown]
    last: Sequence[_Shown]
    """Of these, the last one of each group."""


class Reporter:
    """Makes the reports of a job's observers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._stages: list[int] = job.stage.tolist()
        self._places: dict[tuple[int, int], _Place] = {}

    def report(
        self,
        rank: int,
        issued: int,
        entered: int | None = None,
        *,
        first_step: int = 0,
        waiting: bool | None = True,
        at_communication: bool = True,
        busy: bool = True,
        moving: bool = False,
    ) -> RankReport:
        """Return the report of a rank that has come to a tick, counted from ``first_step``. Its device, if
        operations run there, has come to ``entered``."""
        place = self._place(rank, issued)
        progress = Progress(
            rank=rank,
            step=first_step + place.steps,
            operation=place.operation,
            phase=place.phase,
            issued=self._counts(rank, place, place),
            recent=_Window(rank, place),
            at_communication=at_communication and bool(place.shown),
            silent_seconds=0.1 if moving else 6.0,
        )
        if entered is not None:
            device = self._place(rank, entered)
            progress = replace(
                progress,
                device_step=first_step + device.steps - 1,
                entered=self._counts(rank, place, device),
                device_busy=busy,
            )
        groups = tuple([self.job.lines[self.job.line_of[kind][rank]] for kind in place.counts])
        return RankReport(rank, progress=progress, groups=groups, waiting=waiting, moving=moving)

    def _counts(self, rank: int, place: _Place, reached: _Place) -> dict[str, int]:
        """Return the operations up to ``reached`` of each group that is used up to ``place``."""
        return {self.job.keys_of[kind][rank]: reached.counts.get(kind, 0) for kind in place.counts}

    def _place(self, rank: int, place: int) -> _Place:
        stage = self._stages[rank]
        if (found := self._places.get((stage, place))) is None:
            found = self._places[stage, place] = self._described(stage, place)
        return found

    def _described(self, stage: int, place: int) -> _Place:
        ticks, program, counts = self.job.ticks, self.job.programs[stage], self.job.counts[stage]
        steps, tick = divmod(place, len(ticks))
        shown = list[_Shown]()
        for before in range(place - 1, -1, -1):
            step, at = divmod(before, len(ticks))
            if (kind := program[at]) is not None and len(shown) < _RECENT:
                number = step * counts[-1][kind] + counts[at].get(kind, 0) + 1
                digest = hashed(f"{ticks[at].text} {number}")
                shown.insert(0, _Shown(self.job.keys_of[kind], number, ticks[at].text, digest))
        numbers = {kind: steps * whole + counts[tick].get(kind, 0) for kind, whole in counts[-1].items()}
        used = {kind: number for kind, number in numbers.items() if number}
        last = [*{id(each.keys): each for each in shown}.values()]
        return _Place(steps, tick + 1, ticks[tick].phase if tick else Phase.INPUT, used, shown, last)


class _Window(Window):
    """Operations are made when they are read: of most ranks only the last one of each group is."""

    def __init__(self, rank: int, place: _Place) -> None:
        self._rank, self._place = rank, place

    @cached_property
    def newest(self) -> tuple[str, int] | None:
        return next(((each.keys[self._rank], each.number) for each in self._place.shown[-1:]), None)

    @cached_property
    def digests(self) -> Mapping[str, int]:
        return {each.keys[self._rank]: each.digest for each in self._place.last}

    @cached_property
    def last_numbers(self) -> Mapping[str, int]:
        return {each.keys[self._rank]: each.number for each in self._place.last}

    def has_splits(self, _: str) -> bool:
        return False

    def last_entered(self, entered: Mapping[str, int]) -> tuple[str, int] | None:
        for each in reversed(self._place.shown):
            if each.number <= entered.get(key := each.keys[self._rank], -1):
                return key, each.number
        return None

    def __len__(self) -> int:
        return len(self._place.shown)

    @cached_property
    def _operations(self) -> Sequence[IssuedOp]:  # type: ignore[override]
        return [each.of(self._rank) for each in self._place.shown]


def differing(report: RankReport, key: str, number: int, *, skips: bool) -> RankReport:
    """Return the report of a rank whose operation ``number`` of a group is not that of the other members, or
    that ``skips`` it: then what it has issued there since has other numbers than on the other members."""
    progress, recent, text = report.progress, [], "all_reduce float32[4096] sum"
    assert progress is not None
    for each in progress.recent:
        if each.group != key or each.number < number:
            recent.append(each)
        elif each.number > number:
            recent.append(replace(each, number=each.number - skips, digest=each.digest ^ 1))
        elif not skips:
            recent.append(replace(each, digest=each.digest ^ 1, fingerprint=hashed(text), text=text))
    progress = replace(progress, recent=Window(recent))
    if skips:
        counts = (progress.issued, progress.entered)
        issued, entered = ({k: n - (k == key and n >= number) for k, n in each.items()} for each in counts)
        progress = replace(progress, issued=issued, entered=entered)
    return replace(report, progress=progress)


@functools.cache
def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
