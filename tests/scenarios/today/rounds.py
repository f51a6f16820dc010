"""Plays the jobs of ``paper`` with the classes of today, and concludes from each round what hubs conclude.

What a trainer does goes through the real listener and publisher into a real progress record, and a real
``TrainerView`` reports it. Only the clock, the process and its device are on paper. Every round is concluded
twice: from reports, and from the bytes that a hub receives.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.scenarios.paper import ALL_REDUCE, Pair
from tests.scenarios.rows import Finding
from torchscout.collectives.call import Group
from torchscout.collectives.interceptor import Handle, listen
from torchscout.config import ObserverConfig
from torchscout.decision.hang import Diagnosis, Round, diagnose
from torchscout.decision.progress import CommGroup, Phase, Process, RankReport
from torchscout.decision.types import Action, Incident, Manifestation
from torchscout.mesh import Mesh
from torchscout.observer import stacks
from torchscout.observer import trainer as trainer_module
from torchscout.observer.publisher import Publisher, line_of
from torchscout.observer.record import reader as reader_module
from torchscout.observer.record import writer as writer_module
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds.hub import CONFIRMING_SECONDS, Stack
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.reported_incidents import Finding as Summary
from torchscout.observer.rounds.reported_incidents import ReportedIncidents
from torchscout.observer.silence import SilenceDetector
from torchscout.observer.trainer import TrainerView

if TYPE_CHECKING:
    from tests.scenarios.paper import Job, Operation
    from tests.scenarios.test_hangs import Silence

CONFIG = ObserverConfig()
ACTIONS = {
    Action.CONTINUE: "continue",
    Action.RESTART: "restart",
    Action.INSPECT: "inspect",
    Action.PREFLIGHT: "preflight",
    Action.REPLACE: "replace",
    Action.STOP: "stop",
}
TORCH = "/env/lib/python3.11/site-packages/torch"
WAITS, WORKS, UNCLEAR = (
    f"{TORCH}/distributed/distributed_c10d.py all_reduce",
    f"{TORCH}/utils/data/dataloader.py __next__",
    "/home/me/train.py main",
)
FRAMES = {"waits": WAITS, "works": WORKS, "unclear": UNCLEAR}
PHASE_FRAMES = {
    "input": WORKS,
    "forward": f"{TORCH}/nn/modules/linear.py forward",
    "backward": f"{TORCH}/autograd/graph.py _engine_run_backward",
    "checkpoint read": f"{TORCH}/serialization.py load",
    "checkpoint write": f"{TORCH}/serialization.py save",
}
WAIT_STATUS = {"killed": 9, "failed": 1 << 8, "asked": 15, "unknown": None}


def conclusions(job: Job) -> list[list[Finding]]:
    """What is concluded from each round; equal with and without stacks if the job says so."""
    shown = {"either way": (True, False), "shown": (True,), "none": (False,)}[job.stacks]
    found = []
    for with_stacks in shown:
        with closing(_Play(job, with_stacks).events()) as events:
            rounds = [concluded for concluded in events if concluded is not None]
            found.append([[finding_of(each) for each in incidents] for incidents, _ in rounds])
    assert all(each == found[0] for each in found), f"with stacks {found[0]}, without {found[1]}"
    return found[0]


Reports = dict[int, RankReport]


def last_round(job: Job) -> tuple[tuple[Incident, ...], Reports]:
    """What is concluded from the last round, in full, and what it is concluded from."""
    with closing(_Play(job, job.stacks != "none").events()) as events:
        *_, last = (each for each in events if each is not None)
    return last


def written(job: Job) -> list[tuple[str, Finding | tuple[int, ...]]]:
    """What a hub writes: ``new`` with a finding, and ``over`` with the ranks of one that is over."""
    play, reported, lines = _Play(job, job.stacks != "none"), ReportedIncidents(), []
    named: dict[int, tuple[int, list[Summary]]] = {}
    """What the observer of a rank knows: at which step it was named, and in which findings."""
    with closing(play.events()) as events:
        for concluded in events:
            steps = [each.view.reader.read().step for each in play.ranks]
            if concluded is None:
                for rank, (step, known) in [*named.items()]:
                    if steps[rank] > step:
                        del named[rank]
                        lines += [("over", each.ranks) for each in reported.moved(rank, 0.0, known)]
                continue
            incidents, reports = concluded
            for each in incidents:
                incident = reported.traced(each, reports)
                if incident is not None and reported.report(incident, reports):
                    lines.append(("new", finding_of(incident)))
            for rank, step in enumerate(steps):
                if here := [each for each in reported.findings if rank in each.ranks]:
                    named[rank] = named.get(rank, (step,))[0], here
    return lines


def finding_of(incident: Incident) -> Finding:
    """In the words of the tables, for which a divergence and a lost machine are no hangs."""
    kind, deciding = incident.manifestation.value, incident.records[0]
    if deciding.surface.partition("/")[0] in ("fingerprint", "digest", "splits"):
        kind = "divergence"
    elif incident.action is Action.REPLACE:
        assert incident.manifestation is Manifestation.HANG
        kind = "lost"
    return Finding(kind, incident.ranks, incident.scope.value.replace("_", " "), ACTIONS[incident.action])


class _Process:
    """The process of a trainer on paper, in place of a ``ProcessIdentity``."""

    def __init__(self, rank: int) -> None:
        self.pid, self.state = rank, Process.RUNNING
        self.wait_status: int | None = None

    def process(self) -> Process:
        return self.state


@dataclass
class _Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class _Rank:
    """A trainer and its observer."""

    def __init__(self, rank: int, folder: Path, clock: _Clock) -> None:
        self.rank, self._clock = rank, clock
        self.writer = ProgressWriter.create(folder, rank)
        self.errors: list[Exception] = []
        self.listener = Handle(Publisher(self.writer), self.errors.append)
        self.view = TrainerView(self.writer.path, None)
        if self.view.pidfd is not None:
            os.close(self.view.pidfd)
        self.process = self.view.reader._trainer = _Process(rank)
        self.issued: dict[int, int] = {}
        """By the index of the group in the record; what the host has issued."""
        self.has_device, self.busy = False, None
        self.frames: tuple[str, ...] = (UNCLEAR,)
        """Of its main thread."""
        self.late, self.is_absent, self.has_closed, self.is_on_record = 0.0, False, False, False

    def issue(self, call: SimpleNamespace, timeout: float | None) -> None:
        """Let the listener see the operation, as right before it is issued."""
        index = self.writer.declare(replace(line_of(call), timeout=timeout))
        self.issued[index] = self.issued.get(index, 0) + 1
        self.listener.before(call)

    def look(self) -> None:
        if self.has_device and self.process.state is Process.RUNNING:
            self.writer.device_asked(self.busy, self._clock.now)
        self.view.look(self._clock.now)

    def report(self) -> RankReport:
        now = self._clock.now + self.late
        self.view.look(now)
        silent = 0.0 if self.view.progress is None else self.view.progress.silent_seconds
        return self.view.report(CONFIG, silent, now)

    def stack(self) -> Stack | None:
        if not self.frames:
            return None
        named = [FRAMES.get(each, each).rsplit(" ", 1) for each in self.frames]
        lines = [f'  File "{file}", line 1 in {function}' for file, function in named]
        text = "\n".join(["Main thread (most recent call first):", *lines])
        return Stack(text, stacks.is_waiting(text))


class _Play:
    """Handles one event of a job after the other."""

    def __init__(self, job: Job, with_stacks: bool) -> None:
        self._job, self._with_stacks = job, with_stacks
        self.mesh = Mesh.grid(**job.axes, hosts=job.machines)
        self.clock = _Clock()
        self.ranks: list[_Rank] = []
        self._last_coordinates: dict[int, tuple[int, int]] = {}
        self._absent: dict[int, float] = {}
        """Rank -> when it did not answer for the first time."""

    def events(self) -> Generator[tuple[tuple[Incident, ...], Reports] | None]:
        """Yield what is concluded from a round, and None after any other event."""
        with self._on_paper():
            for event in self._job.events:
                self.clock.now += 1e-4
                if event.what == "ask":
                    yield self._round()
                    continue
                if event.what == "seconds":
                    self._pass(**event.details)
                else:
                    getattr(self, f"_{event.what}")(self.ranks[event.rank], **event.details)
                yield None

    @contextmanager
    def _on_paper(self) -> Iterator[None]:
        def wait_status(pid: int) -> int | None:
            return self.ranks[pid].process.wait_status

        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(writer_module, "monotonic", self.clock),
            patch.object(reader_module, "monotonic", self.clock),
            patch.object(trainer_module, "_wait_status", wait_status),
        ):
            self.ranks = [_Rank(rank, Path(folder), self.clock) for rank in range(self._job.size)]
            yield

    def _round(self) -> tuple[tuple[Incident, ...], Reports]:
        for each in self.ranks:
            each.look()
        reports = {each.rank: each.report() for each in self.ranks if not each.is_absent}
        coordinates = {
            rank: each.progress.coordinate
            for rank, each in reports.items()
            if not each.moving and each.process is Process.RUNNING and each.progress is not None
        }
        is_repeat = any(self._last_coordinates.get(rank) == each for rank, each in coordinates.items())
        self._last_coordinates = coordinates
        absent = {each.rank for each in self.ranks if each.is_absent}
        self._absent = {rank: self._absent.get(rank, self.clock.now) for rank in absent}
        confirmed = {
            rank for rank, since in self._absent.items() if self.clock.now - since >= CONFIRMING_SECONDS
        }
        closed = {rank for rank in absent if self.ranks[rank].has_closed}
        not_expected = {rank for rank in absent if self.ranks[rank].is_on_record}
        groups: dict[bytes, CommGroup] = {}
        sent = {rank: Post(post_of(each), self._job.size).report(groups) for rank, each in reports.items()}
        concluded = [
            self._concluded(each, is_repeat, confirmed, closed, not_expected) for each in (reports, sent)
        ]
        assert concluded[0] == concluded[1]
        return concluded[1].incidents, sent

    def _concluded(self, reports: Reports, *settings: Any) -> Diagnosis:
        for rank, report in reports.items():
            is_still = not report.moving and report.process is Process.RUNNING
            stack = self.ranks[rank].stack() if is_still and self._with_stacks else None
            if stack is not None:
                reports[rank] = replace(report, stack=stack.text, waiting=stack.waiting)
        return diagnose(Round(reports, self.mesh, *settings))

    def _pass(self, seconds: float) -> None:
        self.clock.now += seconds
        for each in self.ranks:
            each.look()

    def _call(self, rank: _Rank, where: str | Pair, operation: Operation, **splits: Any) -> SimpleNamespace:
        if isinstance(where, Pair):
            members, name = tuple(range(self._job.size)), "messages"
            ends = {where.source: where.destination, where.destination: where.source}
            peer, tag = ends[rank.rank], where.tag
        else:
            members, name, peer, tag = self._job.groups[where], where, None, None
        return SimpleNamespace(
            operation=operation.name,
            group=Group(name, name, members.index(rank.rank), len(members), members),
            device=None,
            peer=peer,
            tag=tag,
            dtype=operation.dtype,
            input_shapes=(operation.shape,) if operation.shape else (),
            output_shapes=(operation.shape,) if operation.shape else (),
            reduction=operation.reduction,
            root=operation.root,
            splits=(splits["sends"], splits["receives"]) if splits else None,
        )

    def _enter(
        self, rank: _Rank, where: str | Pair, operation: Operation, posted: bool = False, **splits: Any
    ) -> None:
        timeout = None if isinstance(where, Pair) else self._job.timeouts.get(where)
        rank.issue(self._call(rank, where, operation, **splits), timeout)
        rank.frames = (UNCLEAR if posted else WAITS,)

    def _refused(self, rank: _Rank, where: str, operation: Operation) -> None:
        if counts_what_is_refused():
            rank.listener.before(self._call(rank, where, operation))
        rank.frames = (UNCLEAR,)

    def _work(self, rank: _Rank, phase: str) -> None:
        rank.writer.advance(Phase(phase.replace(" ", "_")))
        rank.frames = (PHASE_FRAMES.get(phase, UNCLEAR),)

    def _finish_step(self, rank: _Rank) -> None:
        rank.writer.next_step()
        rank.frames = (UNCLEAR,)

    def _pause(self, rank: _Rank) -> None:
        rank.writer.pause()

    def _close(self, rank: _Rank) -> None:
        rank.writer.finished()

    def _end(self, rank: _Rank, how: str) -> None:
        rank.process.state, rank.process.wait_status = Process.GONE, WAIT_STATUS[how]
        rank.look()

    def _stop(self, rank: _Rank) -> None:
        rank.process.state = Process.STOPPED

    def _leave_for_restart(self, rank: _Rank) -> None:
        rank.writer.restarting()
        self._end(rank, "asked")

    def _devices_follow(self, rank: _Rank) -> None:
        rank.has_device = True
        for index, number in rank.issued.items():
            rank.writer.device_entered(index, number)

    def _device_enters(self, rank: _Rank, where: str, number: int) -> None:
        rank.has_device = True
        line = line_of(self._call(rank, where, ALL_REDUCE))
        rank.writer.device_entered(rank.writer.declare(line), number)

    def _devices_finish(self, rank: _Rank, steps: int) -> None:
        rank.has_device = True
        rank.writer.device_step(steps)

    def _devices_busy(self, rank: _Rank, busy: bool) -> None:
        rank.has_device, rank.busy = True, busy

    def _capture_graph(self, rank: _Rank) -> None:
        rank.writer.captured()

    def _miss_operations(self, rank: _Rank) -> None:
        rank.listener.before(SimpleNamespace())  # it has none of the attributes of a call
        assert len(rank.errors) == 1

    def _stack(self, rank: _Rank, frames: tuple[str, ...]) -> None:
        rank.frames = frames

    def _answer_late(self, rank: _Rank, seconds: float) -> None:
        rank.late = seconds

    def _no_answer(self, rank: _Rank, connection: str) -> None:
        rank.is_absent, rank.has_closed = True, connection == "closed"

    def _record_end(self, rank: _Rank) -> None:
        rank.is_on_record = True

    def _answer(self, rank: _Rank) -> None:
        rank.is_absent = rank.has_closed = False


@cache
def counts_what_is_refused() -> bool:
    """Whether a real record counts an operation that Gloo refuses to start."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            writer = ProgressWriter.create(Path(folder) / "records", 0)
            reader = ProgressReader(writer.path)
            with listen(Publisher(writer)):
                dist.all_reduce(torch.ones(2))
                before = sum(reader.read().issued.values())
                with pytest.raises(RuntimeError, match="invalid tensor size"):
                    dist.all_gather([torch.ones(3)], torch.ones(2))
            writer.close()
            assert before == 1, "the one that was started"
            return sum(reader.read().issued.values()) > before
    finally:
        dist.destroy_process_group()


def patience(silence: Silence) -> int | None:
    """After how many whole seconds of silence nobody has been asked yet; None if nobody is within 2,000 s."""
    clock = _Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(writer_module, "monotonic", clock),
        patch.object(reader_module, "monotonic", clock),
    ):
        writer, detector = ProgressWriter.create(Path(folder) / "records", 0), SilenceDetector(CONFIG)
        reader = ProgressReader(writer.path)
        for number, seconds in enumerate(silence.steps, 1):
            if number == silence.round_in_step:
                detector.round_held(reader.read().coordinate, clock.now)
            clock.now += seconds
            writer.next_step()
        writer.advance(Phase(silence.phase.replace(" ", "_")))
        if silence.paused:
            writer.pause()
        for silent in range(2000):
            clock.now += 1.0
            if detector.is_due(reader.read(), reader.step_seconds(), paused=reader.paused, now=clock.now):
                return silent
        return None
