"""What observers report about ranks that have stopped, as the product's own types."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from evaluation.simulate.job import Job
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Progress, RankReport, Window

__all__ = ["STEP", "Reporter"]

STEP = 40
"""The step in which something goes wrong."""
_RECENT = 64
"""How many operations an observer shows."""
_Groups = Sequence[CommGroup | None]
"""By rank."""


class _Shown(NamedTuple):
    """An operation of a window, in whichever group the rank has there."""

    groups: _Groups
    number: int
    text: str
    digest: int


class _Place(NamedTuple):
    """What all ranks of a stage have in common that have issued equally many operations."""

    operation: int
    phase: Phase
    steps: int
    counts: Sequence[tuple[_Groups, int]]
    """How many operations of each group."""
    shown: Sequence[_Shown]
    last: Sequence[_Shown]
    """Of these, the last one of each group."""


class Reporter:
    """Makes the reports of a job's observers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._places: dict[tuple[int, int], _Place] = {}
        self._stages: list[int] = job.stage.tolist()

    def report(
        self,
        rank: int,
        issued: int,
        entered: int | None = None,
        *,
        waiting: bool | None = True,
        at_communication: bool = True,
        busy: bool = True,
        moving: bool = False,
        first_step: int = 0,
        silent_seconds: float = 6.0,
    ) -> RankReport:
        """Return the report of a rank that has issued so many operations since ``first_step``, of which its
        device, if operations run there, has entered ``entered``."""
        place = self._place(rank, issued)
        on_device = None if entered is None else self._place(rank, entered)
        progress = Progress(
            rank=rank,
            step=first_step + place.steps,
            operation=place.operation,
            phase=place.phase,
            issued=_counted(rank, place),
            recent=_Window(rank, place),
            at_communication=at_communication and issued > 0,
            silent_seconds=0.1 if moving else silent_seconds,
            device_step=None if on_device is None else first_step + on_device.steps - 1,
            entered={}
            if on_device is None
            else {**dict.fromkeys(_counted(rank, place), 0), **_counted(rank, on_device)},
            device_busy=None if on_device is None else busy,
        )
        groups = tuple([group for of_rank, _ in place.counts if (group := of_rank[rank]) is not None])
        return RankReport(rank, progress=progress, groups=groups, waiting=waiting, moving=moving)

    def _place(self, rank: int, issued: int) -> _Place:
        key = self._stages[rank], issued
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._described(*key)
        return found

    def _described(self, stage: int, issued: int) -> _Place:
        program, counts = self.job.programs[stage], self.job.counts[stage]
        steps, done = divmod(issued, len(program))
        shown = []
        for place in range(max(0, issued - _RECENT), issued):
            step, index = divmod(place, len(program))
            slot = program[index]
            number = step * counts[-1][slot.kind] + slot.ordinal + 1
            groups = self.job.groups_of[slot.kind]
            shown.append(_Shown(groups, number, slot.text, hashed(f"{slot.text} {number}")))
        numbers = {kind: steps * whole + counts[done][kind] for kind, whole in counts[-1].items()}
        return _Place(
            done + 1,
            program[done].phase if done else Phase.INPUT,
            steps,
            [(self.job.groups_of[kind], number) for kind, number in numbers.items() if number],
            shown,
            [*{id(each.groups): each for each in shown}.values()],
        )


def _counted(rank: int, place: _Place) -> dict[str, int]:
    return {group.key: number for groups, number in place.counts if (group := groups[rank]) is not None}


class _Window(Window):
    """Operations are made when they are read: of most ranks only the last one of each group is."""

    def __init__(self, rank: int, place: _Place) -> None:
        self._rank, self._place = rank, place

    @cached_property
    def newest(self) -> tuple[str, int] | None:
        return (
            (_key(self._place.shown[-1], self._rank), self._place.shown[-1].number)
            if self._place.shown
            else None
        )

    @cached_property
    def digests(self) -> Mapping[str, int]:
        return {_key(each, self._rank): each.digest for each in self._place.last}

    @cached_property
    def last_numbers(self) -> Mapping[str, int]:
        return {_key(each, self._rank): each.number for each in self._place.last}

    def has_splits(self, group: str) -> bool:
        return False

    def last_entered(self, entered: Mapping[str, int]) -> tuple[str, int] | None:
        for each in reversed(self._place.shown):
            if each.number <= entered.get(key := _key(each, self._rank), -1):
                return key, each.number
        return None

    def __len__(self) -> int:
        return len(self._place.shown)

    @cached_property
    def _operations(self) -> Sequence[IssuedOp]:  # type: ignore[override]
        return [
            IssuedOp(_key(each, self._rank), each.number, hashed(each.text), each.digest, each.text)
            for each in self._place.shown
        ]


def _key(shown: _Shown, rank: int) -> str:
    group = shown.groups[rank]
    assert group is not None, f"rank {rank} has no such group"
    return group.key


def without(report: RankReport, key: str, number: int) -> RankReport:
    """Return the report of a rank that left out operation ``number`` of a group.

    What it has issued there since has other numbers than on the other members.
    """
    progress, recent = report.progress, []
    assert progress is not None
    for each in progress.recent:
        if each.group != key or each.number < number:
            recent.append(each)
        elif each.number > number:
            recent.append(replace(each, number=each.number - 1, digest=each.digest ^ 1))
    missed = int(progress.issued.get(key, 0) >= number)
    issued = {**progress.issued, key: progress.issued.get(key, 0) - missed}
    entered = dict(progress.entered)
    if entered.get(key, 0) >= number:
        entered[key] -= 1
    return replace(report, progress=replace(progress, issued=issued, entered=entered, recent=Window(recent)))


def diverging(report: RankReport, key: str, number: int) -> RankReport:
    """Return the report of a rank whose operation ``number`` of a group is not that of the other members."""
    progress, recent, text = report.progress, [], "all_reduce float32[4096] sum"
    assert progress is not None
    for each in progress.recent:
        if each.group == key and each.number >= number:
            each = replace(each, digest=each.digest ^ 1)
        if (each.group, each.number) == (key, number):
            each = replace(each, fingerprint=hashed(text), text=text)
        recent.append(each)
    return replace(report, progress=replace(progress, recent=Window(recent)))


@functools.cache
def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
