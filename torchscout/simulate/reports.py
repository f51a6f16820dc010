"""What observers report about ranks that have stopped, as the product's own types."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace

from torchscout.decision.hang.table import NOTHING
from torchscout.decision.progress import IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.observer.post import Post
from torchscout.observer.post_writer import post_of
from torchscout.observer.rank_report import RankReport
from torchscout.observer.record.layout import RECENT
from torchscout.simulate.job import Job, Slot

__all__ = ["STEP", "Reporter"]

STEP = 40
"""The step in which something goes wrong."""
_SILENCE = 6.0
_MOST = 300_000
"""Reports that are kept for the next scenario: most ranks stand at the same few places."""


class Reporter:
    """Makes the reports of a job's observers.

    Where a rank stands is the number of operations it has issued since the job began.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._reports: dict[tuple[object, ...], RankReport] = {}
        self._operations: dict[tuple[int, int], IssuedOp] = {}
        self._posts: dict[int, tuple[RankReport, Post]] = {}
        self._lines = {kind: lines.tolist() for kind, lines in job.line_of.items()}

    def report(
        self,
        rank: int,
        issued: int,
        entered: int | None = None,
        *,
        waiting: bool | None,
        at_communication: bool = True,
        device_busy: bool = True,
    ) -> RankReport:
        """``entered``: how many operations the device has reached, where devices enter them."""
        key = rank, issued, entered, waiting, at_communication, device_busy
        if key not in self._reports:
            if len(self._reports) >= _MOST:
                self._reports.clear()
            progress = self._progress(rank, issued, entered, device_busy)
            progress = progress if at_communication else replace(progress, at_communication=False)
            status = RankStatus(rank, Process.RUNNING, progress, waiting)
            self._reports[key] = RankReport(status, self.job.lines_of[rank])
        return self._reports[key]

    def post(self, report: RankReport) -> Post:
        """Return the report as it arrives at the hub."""
        # By identity, since most are the reports that are kept; an entry keeps its report alive.
        if id(report) not in self._posts:
            if len(self._posts) >= _MOST:
                self._posts.clear()
            self._posts[id(report)] = report, Post(post_of(report, 1), self.job.size)
        return self._posts[id(report)][1]

    def without(self, report: RankReport, line: int, number: int) -> RankReport:
        """Return the report of a rank that left out operation ``number`` of ``line``.

        What it has issued on that line since has other numbers than on the other members.
        """
        key, recent, missed = self.job.lines[line].key, [], 0
        progress = report.status.progress
        assert progress is not None
        for each in progress.recent:
            if each.line != key or each.number < number:
                recent.append(each)
            elif each.number == number:
                missed = 1
            else:
                recent.append(replace(each, number=each.number - 1, digest=each.digest ^ 1))
        issued = {**progress.issued, key: progress.issued[key] - missed}
        entered = dict(progress.entered)
        if entered.get(key, 0) >= number:
            entered[key] -= 1
        return _with(report, replace(progress, issued=issued, entered=entered, recent=tuple(recent)))

    def diverging(self, report: RankReport, line: int, number: int) -> RankReport:
        """Return the report of a rank whose operation ``number`` on ``line`` is not that of the others."""
        key, recent = self.job.lines[line].key, []
        progress = report.status.progress
        assert progress is not None
        text = "all_reduce float32[4096] sum"
        for each in progress.recent:
            if each.line != key or each.number < number:
                recent.append(each)
            elif each.number == number:
                recent.append(IssuedOp(key, number, _hash(text), each.digest ^ 1, text))
            else:
                recent.append(replace(each, digest=each.digest ^ 1))
        return _with(report, replace(progress, recent=tuple(recent)))

    def _progress(self, rank: int, issued: int, entered: int | None, device_busy: bool) -> Progress:
        program = self.job.programs[int(self.job.stage[rank])]
        length = len(program)
        first = max(0, issued - RECENT)
        recent = tuple([self._operation(rank, place, program) for place in range(first, issued)])
        step, place = divmod(issued, length)
        return Progress(
            rank=rank,
            step=step,
            operation=place + 1,
            phase=program[place].phase if place else Phase.INPUT,
            issued=self._counts(rank, issued),
            recent=recent,
            at_communication=True,
            silent_seconds=_SILENCE,
            device_step=None if entered is None else entered // length - 1,
            entered={} if entered is None else self._counts(rank, entered),
            device_busy=None if entered is None else device_busy,
        )

    def _counts(self, rank: int, issued: int) -> dict[str, int]:
        counts = self.job.counts[int(self.job.stage[rank])]
        steps, place = divmod(issued, len(counts) - 1)
        in_step, whole, lines = counts[place], counts[-1], self.job.lines
        return {
            lines[self._lines[kind][rank]].key: steps * whole[kind] + count for kind, count in in_step.items()
        }

    def _operation(self, rank: int, place: int, program: list[Slot]) -> IssuedOp:
        step, index = divmod(place, len(program))
        slot = program[index]
        line = self._lines[slot.kind][rank]
        assert line != NOTHING, f"rank {rank} has no {slot.kind} line"
        whole = self.job.counts[int(self.job.stage[rank])][-1][slot.kind]
        number = step * whole + slot.ordinal + 1
        found = self._operations.get((line, number))
        if found is None:
            digest = _digest(slot.text, number)
            found = IssuedOp(self.job.lines[line].key, number, slot.fingerprint, digest, slot.text)
            self._operations[line, number] = found
        return found


def _with(report: RankReport, progress: Progress) -> RankReport:
    return replace(report, status=replace(report.status, progress=progress))


@functools.cache
def _digest(text: str, number: int) -> int:
    return _hash(f"{text} {number}")


@functools.cache
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
