"""A training job on paper, up to the moment when its observers are asked why it does not move.

A ``Job`` is a list of events in the order in which they happened: who entered which operation, who computed,
how much time passed, who ended and how, and when every observer was asked for a report. For example, rank 2
sleeps in its input while the others wait for it::

    Job(replica=4).enter("world", 0, 1, 3).work("input", 2).ask()

It is plain data. ``today/rounds.py`` plays it with the classes of today.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

AXES = ("replica", "shard", "tensor", "pipeline")
"""The last one varies fastest from rank to rank."""
PHASES = (
    *("start", "input", "forward", "backward", "optimizer", "idle"),
    *("checkpoint read", "checkpoint write", "evaluation"),
)
ENDINGS = ("killed", "failed", "asked", "unknown")
"""By SIGKILL, by an exception, by SIGTERM, or nobody knows how."""
CONNECTIONS = ("silent", "closed")
"""Of an observer that does not answer. Silent: its machine or the path to it is lost. Closed: its machine is
up and says that the process is gone."""


@dataclass(frozen=True)
class Operation:
    """A collective, or a message between two ranks."""

    name: str
    shape: tuple[int, ...] = (1024,)
    dtype: str | None = "float32"
    reduction: str | None = None
    root: int | None = None


ALL_REDUCE = Operation("all_reduce", reduction="sum")
ALL_GATHER = Operation("all_gather", (8,))
BARRIER = Operation("barrier", (), None)
ALL_TO_ALL = Operation("all_to_all", (), "bfloat16")
SEND, RECEIVE = Operation("send"), Operation("recv")


class Pair(NamedTuple):
    """Messages from one rank to another."""

    source: int
    destination: int
    tag: int = 0


class Event(NamedTuple):
    """Something that happens to a rank, or to the whole job; the methods of ``Job`` describe it."""

    what: str
    rank: int | None
    details: Mapping[str, Any]


class Job:
    """All methods add events and return the job. It begins before its first step."""

    def __init__(self, *, machines: Sequence[str] | None = None, stacks: str = "either way", **axes: int):
        """``axes``: how many ranks there are along each of ``AXES``. ``machines``: that of each rank, if they
        are known. ``stacks``: whether trainers show their stacks, or ``either way`` if the answer must be the
        same with and without."""
        assert stacks in ("shown", "none", "either way")
        assert axes.keys() <= {*AXES}
        self.axes = {axis: axes.get(axis, 1) for axis in AXES}
        self._places = list(product(*map(range, self.axes.values())))
        self.size = len(self._places)
        self.machines, self.stacks = machines, stacks
        self.groups: dict[str, tuple[int, ...]] = {}
        self.timeouts: dict[str, float] = {}
        self.events: list[Event] = []
        self.group("world", *range(self.size))

    # Who communicates with whom.

    def group(self, name: str, *members: int, timeout: float | None = None) -> Job:
        """``timeout``: after so many seconds the library ends ranks that wait."""
        self.groups[name] = members
        if timeout is not None:
            self.timeouts[name] = timeout
        return self

    def along(self, axis: str) -> dict[int, str]:
        """Make a group of all ranks that differ only in ``axis``; return the name of each rank's group."""
        which, members = AXES.index(axis), defaultdict[tuple[int, ...], list[int]](list)
        for rank, place in enumerate(self._places):
            members[place[:which] + place[which + 1 :]].append(rank)
        names = {}
        for ranks in members.values():
            self.group(f"{axis} {ranks[0]}", *ranks)
            names |= dict.fromkeys(ranks, f"{axis} {ranks[0]}")
        return names

    def members(self, where: str | Pair) -> tuple[int, ...]:
        return (where.source, where.destination) if isinstance(where, Pair) else self.groups[where]

    def all_but(self, *ranks: int) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in ranks)

    # What trainers do. What a rank has entered, it waits for, unless it does something else afterwards.

    def enter(self, group: str, *ranks: int, operation: Operation = ALL_REDUCE, **splits: Any) -> Job:
        """``sends`` and ``receives``: the elements that an all-to-all exchanges with each member."""
        assert {*ranks} <= {*self.groups[group]}
        return self._add("enter", ranks, where=group, operation=operation, **splits)

    def post(self, group: str, *ranks: int, operation: Operation = ALL_REDUCE) -> Job:
        """Start an operation in the background, to wait for it later."""
        return self._add("enter", ranks, where=group, operation=operation, posted=True)

    def send(
        self, source: int, destination: int, *, tag: int = 0, posted: bool = False, shape: int = 1024
    ) -> Job:
        where, operation = Pair(source, destination, tag), Operation("send", (shape,))
        return self._add("enter", [source], where=where, operation=operation, posted=posted)

    def receive(
        self, destination: int, source: int, *, tag: int = 0, posted: bool = False, shape: int = 1024
    ) -> Job:
        where, operation = Pair(source, destination, tag), Operation("recv", (shape,))
        return self._add("enter", [destination], where=where, operation=operation, posted=posted)

    def refused(self, group: str, rank: int, operation: Operation = ALL_REDUCE) -> Job:
        """The library raises instead of starting the operation, and the script goes on without it."""
        return self._add("refused", [rank], where=group, operation=operation)

    def work(self, phase: str, *ranks: int) -> Job:
        """Begin a phase of the training loop, or another layer in it."""
        assert phase in PHASES
        return self._add("work", ranks, phase=phase)

    def finish_step(self, *ranks: int) -> Job:
        """Without ranks: all of them."""
        return self._add("finish_step", ranks or range(self.size))

    def pause(self, *ranks: int) -> Job:
        """The script says that silence means nothing from now on."""
        return self._add("pause", ranks)

    def close(self, *ranks: int) -> Job:
        """Leave the training loop and say so."""
        return self._add("close", ranks)

    def steps(self, count: int) -> Job:
        """Healthy steps of all ranks, with one all-reduce each."""
        everybody = range(self.size)
        for _ in range(count):
            self.work("forward", *everybody).enter("world", *everybody).finish_step()
        return self

    # What happens to their processes and devices.

    def end(self, how: str, *ranks: int) -> Job:
        assert how in ENDINGS
        return self._add("end", ranks, how=how)

    def stop(self, *ranks: int) -> Job:
        """As by SIGSTOP or a debugger."""
        return self._add("stop", ranks)

    def leave_for_restart(self, *ranks: int) -> Job:
        """End because it was decided to restart the job."""
        return self._add("leave_for_restart", ranks)

    def devices_follow(self, *ranks: int) -> Job:
        """Operations run on devices, as over NCCL, and those of these ranks have entered all of theirs."""
        return self._add("devices_follow", ranks)

    def device_enters(self, rank: int, group: str, number: int) -> Job:
        """The device has come to operation ``number`` of the group."""
        return self._add("device_enters", [rank], where=group, number=number)

    def devices_finish(self, steps: int, *ranks: int) -> Job:
        return self._add("devices_finish", ranks, steps=steps)

    def devices_busy(self, *ranks: int) -> Job:
        return self._add("devices_busy", ranks, busy=True)

    def devices_idle(self, *ranks: int) -> Job:
        return self._add("devices_busy", ranks, busy=False)

    def capture_graph(self, *ranks: int) -> Job:
        """Capture operations in a CUDA graph. What its replays wait for is not observed."""
        return self._add("capture_graph", ranks)

    # What observers see.

    def miss_operations(self, *ranks: int) -> Job:
        """An error of our own ends the record of operations of these ranks; everything else goes on."""
        return self._add("miss_operations", ranks)

    def stack(self, rank: int, *frames: str) -> Job:
        """``waits``, ``works``, ``unclear``, or the frames of the main thread: ``file.py function``, most
        recent call first. By default the stack shows what the rank did last."""
        self.stacks = "shown"
        return self._add("stack", [rank], frames=frames)

    def no_stack(self, *ranks: int) -> Job:
        """These ranks cannot show their stacks, as if they held the interpreter's lock."""
        self.stacks = "shown"
        return self._add("stack", ranks, frames=())

    def answer_late(self, rank: int, seconds: float) -> Job:
        """The observer answers so much later than the others."""
        return self._add("answer_late", [rank], seconds=seconds)

    def no_answer(self, *ranks: int, connection: str = "silent") -> Job:
        """From now on the observers of these ranks do not answer."""
        assert connection in CONNECTIONS
        return self._add("no_answer", ranks, connection=connection)

    def record_end(self, *ranks: int) -> Job:
        """The run directory says that these ranks were asked to end."""
        return self._add("record_end", ranks)

    def answer(self, *ranks: int) -> Job:
        """They answer again."""
        return self._add("answer", ranks)

    def seconds(self, seconds: float) -> Job:
        """So much time passes."""
        return self._add("seconds", [None], seconds=seconds)

    def ask(self, after: float = 6.0) -> Job:
        """All observers are asked for a report, after so many seconds. By then every rank that has not done
        anything more counts as silent."""
        return self.seconds(after)._add("ask", [None])

    def _add(self, what: str, ranks: Sequence[int | None], **details: Any) -> Job:
        self.events += [Event(what, rank, details) for rank in ranks]
        return self

    # Whole programs.

    def run(
        self,
        programs: Mapping[int, Sequence[Act]],
        stop: Mapping[int, int] | None = None,
        stuck: tuple[str | Pair, int] | None = None,
    ) -> Job:
        """Let every rank follow its program until it waits for somebody or is done.

        The ranks of ``stop`` never come to the act of that index, and the operation ``stuck``, a group and a
        number in it, never returns.
        """
        arrived: Counter[tuple[str | Pair, int]] = Counter()
        asleep = defaultdict[tuple[str | Pair, int], list[int]](list)
        shown = dict.fromkeys(programs, "works")
        ready = deque(programs)
        lives = {
            rank: self._follow(rank, program[: (stop or {}).get(rank)]) for rank, program in programs.items()
        }
        while ready:
            rank = ready.popleft()
            shown[rank] = "works"
            for event, operation in lives[rank]:
                everybody = len(self.members(operation[0]))
                if event == "entered":
                    arrived[operation] += operation != stuck
                    if arrived[operation] == everybody:
                        ready.extend(asleep.pop(operation, ()))
                elif arrived[operation] < everybody:
                    asleep[operation].append(rank)
                    shown[rank] = "waits"
                    break
        for rank, word in shown.items():
            self._add("stack", [rank], frames=(word,))
        return self

    def _follow(self, rank: int, program: Sequence[Act]) -> Iterator[tuple[str, tuple[str | Pair, int]]]:
        issued: Counter[str | Pair] = Counter()
        for act in program:
            if isinstance(act, Work):
                self.work(act.phase, rank)
                continue
            if isinstance(act, Enter):
                issued[act.where] += 1
                self._add("enter", [rank], where=act.where, operation=act.operation, posted=act.posted)
                yield "entered", (act.where, issued[act.where])
            if isinstance(act, Wait) or not act.posted:
                yield "waits", (act.where, issued[act.where])


class Enter(NamedTuple):
    """Enter the next operation of a group and, unless it is only posted, wait until all have."""

    where: str | Pair
    operation: Operation = ALL_REDUCE
    posted: bool = False


class Wait(NamedTuple):
    """Wait until all that was posted is over."""

    where: str | Pair


class Work(NamedTuple):
    phase: str


Act = Enter | Wait | Work


def replicas(count: int = 4, machines: Sequence[str] | None = None, **settings: Any) -> Job:
    """Plain data parallelism after three healthy steps, on machines of two ranks each."""
    return Job(replica=count, machines=machines or two_each(count), **settings).steps(3)


def two_each(ranks: int) -> list[str]:
    return [f"machine {rank // 2}" for rank in range(ranks)]


def one_each(ranks: int) -> list[str]:
    return [f"machine {rank}" for rank in range(ranks)]


def pipeline_programs(job: Job, steps: int = 3, microbatches: int = 2) -> dict[int, list[Act]]:
    """Pipeline, tensor, sharded and data parallelism together: receives are posted early, and gradients are
    reduced in the background."""
    groups = {axis: job.along(axis) for axis in ("replica", "shard", "tensor")}
    stages = job.along("pipeline")

    def step(rank: int) -> list[Act]:
        line = job.groups[stages[rank]]
        stage = line.index(rank)
        before = line[stage - 1] if stage else None
        after = line[stage + 1] if stage + 1 < len(line) else None
        shard, tensor, replica = (groups[axis][rank] for axis in ("shard", "tensor", "replica"))
        acts: list[Act] = [Work("input")]
        for _ in range(microbatches):
            if after is not None:
                acts.append(Enter(Pair(after, rank), RECEIVE, posted=True))
            if before is not None:
                acts.append(Enter(Pair(before, rank), RECEIVE))
            acts += [Work("forward"), Enter(shard, ALL_GATHER), Enter(tensor)]
            if after is not None:
                acts += [Enter(Pair(rank, after), SEND), Wait(Pair(after, rank))]
            acts += [Work("backward"), Enter(tensor), Enter(replica, posted=True)]
            if before is not None:
                acts.append(Enter(Pair(rank, before), SEND))
        return [*acts, Work("optimizer"), Wait(replica)]

    return {rank: step(rank) * steps for rank in range(job.size)}
