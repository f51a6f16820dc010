"""What observers report about ranks that have stopped, as the product's own types."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from typing import NamedTuple

from torchscout.decision.hang.table import NOTHING
from torchscout.decision.progress import IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.observer.record.layout import RECENT, runs_of
from torchscout.observer.rounds.post import HEADER, ROW, RUN, Header, Post, Row, hash_of
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.simulate.job import Job, Slot

__all__ = ["STEP", "Reporter", "Stand"]

STEP = 40
"""The step in which something goes wrong."""
_SILENCE = 6.0
_MOST = 100_000
"""Posts that are kept for the next scenario: most ranks stand at the same few places."""


class Stand(NamedTuple):
    """Where a rank stands, and how it looks from outside."""

    issued: int
    """Operations since the job began."""
    entered: int | None = None
    """How many of them the device has reached, where devices enter them."""
    waiting: bool | None = True
    at_communication: bool = True
    device_busy: bool = True
    moving: bool = False
    silent_seconds: float = _SILENCE


class _Template(NamedTuple):
    """The parts of a post that are the same for all ranks of a stage that stand alike."""

    header: Header
    rows: tuple[Row, ...]
    operations: bytes
    phrases: bytes
    texts: bytes


class _LineParts(NamedTuple):
    """The parts of a post that declare a line."""

    key_hash: int
    key: int
    name: int
    runs: int
    packed_runs: bytes
    strings: bytes


class Reporter:
    """Makes the reports of a job's observers, and their posts."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._posts: dict[tuple[int, Stand], Post] = {}
        self._templates: dict[tuple[int, Stand], _Template] = {}
        self._parts: dict[int, _LineParts] = {}
        self._operations: dict[tuple[int, int], IssuedOp] = {}
        self._stages: list[int] = job.stage.tolist()
        self._lines = {kind: lines.tolist() for kind, lines in job.line_of.items()}

    def report(self, rank: int, stand: Stand) -> RankReport:
        status = RankStatus(rank, Process.RUNNING, self._progress(rank, stand), stand.waiting)
        return RankReport(status, self.job.lines_of[rank], moving=stand.moving)

    def post(self, rank: int, report: Stand | RankReport) -> Post:
        """Return what arrives at the hub."""
        if isinstance(report, RankReport):
            return Post(post_of(report, 1), self.job.size)
        found = self._posts.get((rank, report))
        if found is None:
            if len(self._posts) >= _MOST:
                self._posts.clear()
            found = self._posts[rank, report] = Post(self._written(rank, report), self.job.size)
        return found

    def _written(self, rank: int, stand: Stand) -> bytes:
        """Return the bytes of ``post_of``, of which most are those of another rank."""
        plain = stand._replace(silent_seconds=_SILENCE)
        template = self._templates.get((self._stages[rank], plain))
        if template is None:
            template = self._templates[self._stages[rank], plain] = self._template(rank, plain)
        lines = [each[rank] for each in self._lines.values() if each[rank] != NOTHING]
        parts = [self._parts.get(line) or self._part(line) for line in lines]
        rows = [
            ROW.pack(part.key_hash, row[1], row[2], row[3], part.runs, part.key, part.name, row[7])
            for row, part in zip(template.rows, parts, strict=True)
        ]
        strings = b"".join([part.strings for part in parts]) + template.texts
        runs = sum(part.runs for part in parts)
        header = template.header._replace(
            rank=rank, runs=runs, strings=len(strings), silent_seconds=stand.silent_seconds
        )
        packed_runs = [part.packed_runs for part in parts]
        middle = [template.operations, *packed_runs, template.phrases, strings]
        return b"".join([HEADER.pack(*header), *rows, *middle])

    def _template(self, rank: int, stand: Stand) -> _Template:
        post = Post(post_of(self.report(rank, stand), 1), self.job.size)
        _, operations, runs, phrases, strings, end = post.starts
        rows, data = tuple(post.rows()), post.data
        texts = strings + sum(row.key + row.name for row in rows)
        return _Template(post.header, rows, data[operations:runs], data[phrases:strings], data[texts:end])

    def _part(self, line: int) -> _LineParts:
        declared = self.job.lines[line]
        key, name, runs = declared.key.encode(), declared.name.encode(), runs_of(declared.members)
        packed = b"".join(RUN.pack(*run) for run in runs)
        part = _LineParts(hash_of(declared.key), len(key), len(name), len(runs), packed, key + name)
        self._parts[line] = part
        return part

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

    def _progress(self, rank: int, stand: Stand) -> Progress:
        issued, entered, program = stand.issued, stand.entered, self.job.programs[self._stages[rank]]
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
            at_communication=stand.at_communication,
            silent_seconds=stand.silent_seconds,
            device_step=None if entered is None else entered // length - 1,
            entered={} if entered is None else self._counts(rank, entered),
            device_busy=None if entered is None else stand.device_busy,
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
