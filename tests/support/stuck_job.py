"""A simulated job up to a hang, and the reports of its observers.

Either by hand, one operation after the other (``issue``, ``busy``), or by ``run``: every rank follows
its program until it waits for somebody, is stopped, or is done.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.decision.records.record import Incident, Manifestation, from_json
from torchscout.mesh import Mesh

ALL_REDUCE = "all_reduce float32[1024] sum"


@dataclass(frozen=True)
class Enter:
    """Issue the next operation of a line and, unless it is only posted, wait until all have."""

    line: str
    text: str = ALL_REDUCE
    posted: bool = False


@dataclass(frozen=True)
class Wait:
    """Wait until all that was posted on a line is over; nothing is published."""

    line: str


@dataclass(frozen=True)
class Busy:
    phase: Phase


Act = Enter | Wait | Busy


class StuckJob:
    def __init__(self, mesh: Mesh, *, stacks: bool = True, window: int = 12) -> None:
        self.mesh, self.stacks, self.window = mesh, stacks, window
        self.lines: dict[str, CommGroup] = {}
        self.recent: dict[int, deque[IssuedOp]] = defaultdict(lambda: deque(maxlen=window))
        self.issued: dict[int, dict[str, int]] = defaultdict(dict)
        self.digest: dict[tuple[int, str], int] = {}
        self.published: dict[int, int] = defaultdict(int)
        self.phase: dict[int, Phase] = {}
        self.inside: set[int] = set()
        """Ranks that published an operation last."""
        self.waiting: dict[int, bool | None] = {}
        """What a stack shows, where it is not what the publications suggest."""
        self.process: dict[int, Process] = {}
        self.absent: set[int] = set()
        self.silent: dict[int, float] = {}
        self.device: dict[int, int] = {}
        self.entered: dict[int, dict[str, int]] = defaultdict(dict)
        """What devices have come to, where they enter operations; see ``on_devices``."""
        self.busy_devices: set[int] = set()
        self.captured: set[int] = set()
        """Ranks with operations that went into CUDA graphs."""

    def group(self, name: str, *members: int) -> str:
        self.lines[name] = CommGroup(name, members, name)
        return name

    def along(self, axis: str) -> dict[int, str]:
        """Return the key of each rank's process group along an axis."""
        found = {}
        for members in self.mesh.groups_along(axis):
            key = self.group(f"{axis}.{members[0]}", *members)
            found |= dict.fromkeys(members, key)
        return found

    def pair(self, source: int, destination: int) -> str:
        name = f"{source} -> {destination}"
        self.lines[name] = CommGroup(name, (source, destination), name, pair=True)
        return name

    def issue(
        self,
        line: str,
        *ranks: int,
        text: str = ALL_REDUCE,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ) -> None:
        fingerprint = zlib.crc32(text.encode())
        for rank in ranks:
            number = self.issued[rank][line] = self.issued[rank].get(line, 0) + 1
            digest = zlib.crc32(f"{self.digest.get((rank, line), 0)} {fingerprint}".encode())
            self.digest[rank, line] = digest
            splits = [None if each is None else tuple(each) for each in (sends, receives)]
            self.recent[rank].append(IssuedOp(line, number, fingerprint, digest, text, *splits))
            self.published[rank] += 1
            self.inside.add(rank)

    def busy(self, *ranks: int, phase: Phase = Phase.FORWARD) -> None:
        for rank in ranks:
            self.phase[rank] = phase
            self.published[rank] += 1
            self.inside.discard(rank)

    def on_devices(self, *behind: int) -> None:
        """Devices enter the operations: all that was issued so far, but for those that are ``behind`` by
        one."""
        for rank, issued in self.issued.items():
            self.entered[rank] = {line: count - (rank in behind) for line, count in issued.items()}

    def gone(self, *ranks: int) -> None:
        self.process |= dict.fromkeys(ranks, Process.GONE)

    def stopped(self, *ranks: int) -> None:
        self.process |= dict.fromkeys(ranks, Process.STOPPED)

    def standing(self, rank: int) -> RankStatus:
        process = self.process.get(rank, Process.RUNNING)
        shown = self.waiting.get(rank, rank in self.inside if self.stacks else None)
        progress = Progress(
            rank=rank,
            step=7,
            operation=self.published[rank],
            phase=self.phase.get(rank, Phase.FORWARD),
            issued=self.issued[rank],
            recent=tuple(self.recent[rank]),
            at_communication=rank in self.inside,
            silent_seconds=self.silent.get(rank, 6.0),
            device_step=self.device.get(rank),
            entered=self.entered[rank],
            device_busy=rank in self.busy_devices if self.entered[rank] else None,
            captured=int(rank in self.captured),
        )
        return RankStatus(rank, process, progress, waiting=shown if process is Process.RUNNING else None)

    def standings(self) -> dict[int, RankStatus]:
        return {rank: self.standing(rank) for rank in range(len(self.mesh)) if rank not in self.absent}

    def diagnose(self) -> Incident | None:
        return diagnose(self.standings().values(), self.lines, self.mesh)

    def run(
        self,
        programs: Mapping[int, Sequence[Act]],
        stop: Mapping[int, int] | None = None,
        stuck: tuple[str, int] | None = None,
    ) -> None:
        """Follow the programs; the ranks of ``stop`` never come to the act of that index, and the
        operation ``stuck``, a line and a number, never returns."""
        arrived: Counter[tuple[str, int]] = Counter()
        asleep: dict[tuple[str, int], list[int]] = defaultdict(list)
        ready = deque(programs)
        lives = {
            rank: self._follow(rank, program[: (stop or {}).get(rank)]) for rank, program in programs.items()
        }
        while ready:
            rank = ready.popleft()
            self.waiting[rank] = False
            for event, operation in lives[rank]:
                if event == "entered":
                    arrived[operation] += 1
                    arrived[operation] -= operation == stuck
                    if arrived[operation] == len(self.lines[operation[0]].members):
                        ready.extend(asleep.pop(operation, ()))
                elif arrived[operation] < len(self.lines[operation[0]].members):
                    asleep[operation].append(rank)
                    self.waiting[rank] = True
                    break
        if not self.stacks:
            self.waiting.clear()

    def _follow(self, rank: int, program: Sequence[Act]) -> Iterator[tuple[str, tuple[str, int]]]:
        for act in program:
            if isinstance(act, Busy):
                self.busy(rank, phase=act.phase)
                continue
            if isinstance(act, Enter):
                self.issue(act.line, rank, text=act.text)
                yield "entered", (act.line, self.issued[rank][act.line])
            if isinstance(act, Wait) or not act.posted:
                yield "waits", (act.line, self.issued[rank].get(act.line, 0))


def found(job: StuckJob) -> Incident:
    """Return the incident, after checking what every incident must have."""
    incident = job.diagnose()
    assert incident is not None
    assert incident.manifestation is Manifestation.HANG
    assert from_json(json.loads(json.dumps(incident.to_json()))) == incident
    assert incident.reporter not in job.absent, "somebody who is there must write it down"
    assert incident.records[-1].surface == "coordinate"
    assert incident.sentence[0].isupper()
    assert incident.sentence.endswith(".")
    return incident


def nodes(ranks: int, on_each: int = 2) -> list[str]:
    return [f"node-{rank // on_each}" for rank in range(ranks)]


def others(*ranks: int, count: int = 8) -> list[int]:
    return [rank for rank in range(count) if rank not in ranks]


def replicas(count: int = 8, *, stacks: bool = True, on_each: int = 2) -> StuckJob:
    """Plain data parallelism, past three healthy all-reduces."""
    job = StuckJob(Mesh.grid(replica=count, hosts=nodes(count, on_each)), stacks=stacks)
    world = job.group("world", *range(count))
    for _ in range(3):
        job.issue(world, *range(count))
        job.busy(*range(count))
    return job


def four_by_two(stacks: bool) -> StuckJob:
    """4 replicas x 2 tensor slices, a tensor group per node, everybody past one healthy step."""
    job = StuckJob(Mesh.grid(replica=4, tensor=2, hosts=nodes(8)), stacks=stacks)
    for axis in ("tensor", "replica"):
        for rank, key in job.along(axis).items():
            job.issue(key, rank)
            job.busy(rank)
    return job


with_and_without_stacks = pytest.mark.parametrize("stacks", [True, False], ids=["stacks", "no-stacks"])
