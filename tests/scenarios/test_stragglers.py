"""Who is called slow, by the times of many checks: ranks, machines, process groups, or the whole job.

In a check all ranks repeat the same layer on the same input. So ranks that have the same part of the model
should take equally long, and so should corresponding process groups for their collectives. Fetching batches
and reading and writing checkpoints are compared as training does them.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Finding, Row, cases, check, either, straggler
from tests.scenarios.today import stragglers

COMPUTING_MS, COMMUNICATING_MS = 50.0, 10.0
"""What the forward pass of a layer takes, and a collective; a backward pass takes twice the time."""


class Group(NamedTuple):
    """A process group: the ranks that differ along one axis only."""

    axis: str
    members: tuple[int, ...]


class Times(NamedTuple):
    """What one rank reports of one check, in milliseconds."""

    layer: str
    length: int
    """Of the sequences in the input. Only equal lengths are equal work."""
    computing: Mapping[str, float]
    """``forward`` and ``backward``."""
    communicating: Mapping[Group, float]
    """By itself and while it waits for the other members."""


class Layout(NamedTuple):
    """Where the ranks of a job are."""

    coordinates: Sequence[Mapping[str, int]]
    """Of each rank, by axis: ``replica``, ``shard``, ``tensor``, ``pipeline``."""
    machines: Sequence[str]

    def groups(self) -> list[Group]:
        found: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for axis in self.coordinates[0]:
            for rank, places in enumerate(self.coordinates):
                rest = tuple(place for name, place in places.items() if name != axis)
                found[axis, rest].append(rank)
        return [Group(str(axis), tuple(ranks)) for (axis, _), ranks in found.items() if len(ranks) > 1]


@dataclass(frozen=True)
class Check:
    """One check, in which everything that is not mentioned takes the ordinary time."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """How many times as long these ranks compute."""
    slow_groups: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    """How many times as long collectives take, by the members of the group."""
    only_in_layer: int | None = None
    """The ranks are slow in this layer only."""
    pace: float = 1.0
    """How many times as long everybody computes."""
    axes: Sequence[str] | None = None
    """Collectives along these axes are timed; None for all."""
    length: int = 1024


@dataclass(frozen=True)
class Job:
    """A job and its checks, each of which repeats the next layer."""

    layout: Layout
    layers: int = 1
    jitter: float = 0.02
    """The standard deviation of every time, relative to it."""
    seed: int = 0
    history: Sequence[Check] = ()

    def checks(self, count: int, *each: Mapping[str, object], **what: object) -> Job:
        """Add so many checks. Mappings in ``each`` say how they differ; they come in turn."""
        turns = itertools.cycle(each or [{}])
        new = [Check(**{**what, **next(turns)}) for _ in range(count)]  # type: ignore[arg-type]
        return replace(self, history=(*self.history, *new))

    def play(self) -> Iterator[Callable[[], list[Times | None]]]:
        """For each check a function that measures it, and measures it again if it is called again."""
        chance, groups = random.Random(self.seed), self.layout.groups()
        for number, each in enumerate(self.history):
            layer = number % self.layers

            def measure(each: Check = each, layer: int = layer) -> list[Times | None]:
                return self._measured(each, layer, groups, chance)

            yield measure

    def _measured(
        self, seen: Check, layer: int, groups: Sequence[Group], chance: random.Random
    ) -> list[Times | None]:
        def around(usual: float) -> float:
            return usual * chance.lognormvariate(0.0, self.jitter)

        slow = seen.slow if seen.only_in_layer in (None, layer) else {}
        computing = [
            {
                "forward": around(COMPUTING_MS * seen.pace * slow.get(rank, 1.0)),
                "backward": around(2 * COMPUTING_MS * seen.pace * slow.get(rank, 1.0)),
            }
            for rank in range(len(self.layout.coordinates))
        ]
        communicating: list[dict[Group, float]] = [{} for _ in computing]
        for group in groups:
            if seen.axes is None or group.axis in seen.axes:
                took = around(COMMUNICATING_MS * seen.slow_groups.get(group.members, 1.0))
                last = max(computing[rank]["forward"] for rank in group.members)
                for rank in group.members:
                    communicating[rank][group] = took + last - computing[rank]["forward"]
        return [
            Times(f"layers.{layer}", seen.length, *each)
            for each in zip(computing, communicating, strict=True)
        ]


@dataclass(frozen=True)
class Recorded:
    """A real job of other people, by the times of its training steps. Workers are replica x stage."""

    name: str
    steps: int | None = None
    """Of the trace; None for all."""

    @property
    def layout(self) -> Layout:
        replicas, stages = (len({row[each] for row in self._rows()}) for each in ("replica", "stage"))
        places = [{"replica": a, "pipeline": b} for a, b in itertools.product(range(replicas), range(stages))]
        return Layout(places, [f"machine {rank}" for rank in range(len(places))])

    def play(self) -> Iterator[Callable[[], list[Times | None]]]:
        """A worker's passes of one step are one measurement; there is no second one."""
        places = [(each["replica"], each["pipeline"]) for each in self.layout.coordinates]
        steps: dict[str, dict[tuple[int, int], Times]] = defaultdict(dict)
        for row in self._rows():
            computing = {each: float(row[f"{each}_ms"]) for each in ("forward", "backward")}
            place = int(row["replica"]), int(row["stage"])
            steps[row["step"]][place] = Times(f"stage {row['stage']}", 1, computing, {})
        for each in itertools.islice(steps.values(), self.steps):
            yield lambda each=each: [each.get(place) for place in places]

    def _rows(self) -> list[dict[str, str]]:
        with (Path(__file__).parent / "traces" / f"{self.name}.csv").open() as file:
            return list(csv.DictReader(file))


@dataclass(frozen=True)
class Phases:
    """Surveys of how long ranks take for what nothing repeats: ``input``, ``checkpoint read``,
    ``checkpoint write``."""

    layout: Layout
    phase: str
    surveys: Sequence[Sequence[float | None]]
    """Milliseconds by rank; None if a rank does not do it."""


@dataclass(frozen=True)
class RealJob:
    """A job of real ranks that makes a check after each step, in which the next layer has its turn."""

    ranks: int
    steps: int
    slow_rank: int
    slow_steps: range
    """In these steps every layer of the rank takes a quarter of a second longer."""
    layers: int = 2


@dataclass(frozen=True)
class Rate:
    """How often somebody is reported in healthy jobs, of which each has other random times."""

    job: Job
    jobs: int


@dataclass(frozen=True)
class Memory:
    """How much is remembered of a job after half of its checks, and after all of them."""

    job: Job


PROMISED = 1 / 4000
"""False alarms a check, of a job of any size, from its first check on."""


def job(
    ranks_on_machine: int = 1, machines: Sequence[str] | None = None, jitter: float = 0.02, **degrees: int
) -> Job:
    """Ranks are numbered so that the last axis varies fastest."""
    places = [
        dict(zip(degrees, each, strict=True))
        for each in itertools.product(*(range(degree) for degree in degrees.values()))
    ]
    machines = machines or [f"machine {rank // ranks_on_machine}" for rank in range(len(places))]
    return Job(Layout(places, machines), jitter=jitter)


def paper_figure() -> Job:
    """The paper's 16 ranks: 4 replicas of 2 shards of 2 tensor slices. The two slices share a machine: ranks
    4 and 12 are on machine 4, and ranks 4 and 5 are a shard group."""
    return job(tensor=2, replica=4, shard=2, machines=[f"machine {rank % 8}" for rank in range(16)])


def surveyed(phase: str, *surveys: Sequence[float | None], **degrees: int) -> Phases:
    return Phases(job(**degrees).layout, phase, surveys)


def lengths(count: int) -> list[Mapping[str, object]]:
    """Every check has another sequence length."""
    return [{"length": 64 * number} for number in range(1, count + 1)]


def slow_ranks(*ranks: int) -> list[Finding]:
    return [straggler([rank], "rank", "inspect") for rank in ranks]


SHARDS, SLICES = (4, 5), (4, 12)
"""A shard group between machines 4 and 5, and a tensor group within machine 4."""
TWO_MACHINES = [SHARDS, SLICES, (10, 11), (2, 10)]
MACHINE_4 = straggler((4, 12), "machine", "replace")
FOUR = job(replica=4)
PAIRS = job(replica=3, tensor=2, ranks_on_machine=2)
"""Tensor-parallel pairs (0, 1), (2, 3) and (4, 5), each on a machine."""

LONG = [pytest.mark.long]
ROWS = [
    # Who computes slowly.
    Row(
        "a rank takes twice as long as its peers, whatever layer is repeated",
        given=replace(FOUR, layers=6).checks(3).checks(4, slow={2: 2.0}),
        must_come=slow_ranks(2),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is slow in one layer of six, and as fast as its peers in the five checks between",
        given=replace(FOUR, layers=6).checks(24, slow={2: 1.5}, only_in_layer=3),
        must_come=slow_ranks(2),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is slow from the first check of a job on",
        given=FOUR.checks(4, slow={2: 2.0}),
        must_come=slow_ranks(2),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is slow for a hundred checks, and is reported once; then another one becomes slow as well",
        given=job(replica=8).checks(100, slow={2: 2.0}).checks(6, slow={2: 2.0, 3: 2.0}),
        must_come=slow_ranks(2, 3),
        never=[0, 1, 4, 5, 6, 7],
    ),
    Row(
        "a rank is slow, as fast as its peers for a while, and slow again",
        given=FOUR.checks(4, slow={2: 2.0}).checks(4).checks(6, slow={2: 2.0}),
        must_come=slow_ranks(2, 2),
    ),
    Row(
        "a rank is slow in two layers of three, one after the other: named once",
        given=replace(FOUR, layers=3).checks(12, {"slow": {2: 2.0}}, {}, {"slow": {2: 2.0}}),
        must_come=slow_ranks(2),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is slow in every second check, and hardly slow in those between",
        given=FOUR.checks(6, {"slow": {2: 2.0}}, {"slow": {2: 1.12}}),
        must_come=slow_ranks(2),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is slow while every check has another sequence length",
        given=FOUR.checks(6, *lengths(6), slow={2: 2.0}),
        must_come=slow_ranks(2),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is slow by 15% among 64 whose times differ by 1%",
        given=job(replica=64, jitter=0.01).checks(20).checks(5, slow={40: 1.15}),
        must_come=slow_ranks(40),
    ),
    Row(
        "all four ranks of a machine are slow, of 32",
        given=job(replica=32, ranks_on_machine=4).checks(5).checks(8, slow=dict.fromkeys(range(4, 8), 2.0)),
        must_come=either(slow_ranks(4, 5, 6, 7), [straggler([4, 5, 6, 7], "machine", "inspect")]),
        never=[*range(4), *range(8, 32)],
    ),
    Row(
        "a rank waits in a collective for its tensor-parallel partner, which is slow",
        given=PAIRS.checks(3).checks(4, slow={2: 6.0}),
        must_come=slow_ranks(2),
        never=[0, 1, 3, 4, 5],
    ),
    Row(
        "of two replicas one is slower: two peers have no majority",
        given=job(replica=2).checks(3).checks(4, slow={1: 2.0}),
        must_come=[straggler([0, 1], "peer group", "inspect")],
        never=[0, 1],
    ),
    Row(
        "two of four ranks become slow after a healthy time: there is no majority, and half is not all",
        given=FOUR.checks(12).checks(6, slow={2: 2.0, 3: 2.0}),
        must_come=either([], [straggler(range(4), "peer group", "inspect")], slow_ranks(2, 3)),
        never=[0, 1],
    ),
    # Who is not slow: it does not matter, does not last, or is not comparable.
    Row(
        "a rank is slow in one check, and in every fifth one",
        given=FOUR.checks(60, {"slow": {2: 3.0}}, {}, {}, {}, {}),
        must_come=[],
    ),
    Row(
        "in every check another rank is slow",
        given=FOUR.checks(24, *[{"slow": {rank: 2.0}} for rank in (0, 2, 1, 3)]),
        must_come=[],
    ),
    Row(
        "of two replicas one is slower in every second check, and the other one in the others",
        given=job(replica=2).checks(3).checks(20, {"slow": {1: 2.0}}, {"slow": {0: 2.0}}),
        must_come=[],
    ),
    Row("a rank is slow by 8%, always", given=FOUR.checks(30, slow={2: 1.08}), must_come=[]),
    Row(
        "a rank is slow by half a millisecond, which is a third of its time",
        given=FOUR.checks(30, slow={2: 1.33}, pace=0.01),
        must_come=[],
    ),
    Row(
        "a rank is faster than its peers, always",
        given=FOUR.checks(30, slow={2: 0.4}),
        must_come=[],
    ),
    Row(
        "the second tensor-parallel ranks always have more to do than the first ones",
        given=PAIRS.checks(30, slow={1: 2.0, 3: 2.0, 5: 2.0}),
        must_come=[],
    ),
    Row(
        "real ranks: a rank is slow only when each layer is repeated for the first time, as when it compiles",
        given=RealJob(ranks=3, steps=5, slow_rank=2, slow_steps=range(1, 3)),
        must_come=[],
        marks=LONG,
    ),
    Row(
        "real ranks: a rank is slow for as many checks, after that",
        given=RealJob(ranks=3, steps=5, slow_rank=2, slow_steps=range(3, 5)),
        must_come=slow_ranks(2),
        never=[0, 1],
        marks=LONG,
    ),
    # Slow communication: it delays all members, so that only what slow groups have in common names anybody.
    Row(
        "a group between two machines and one within the first are slow: they meet on that machine",
        given=paper_figure().checks(3).checks(8, slow_groups={SHARDS: 5.0, SLICES: 5.0}),
        must_come=[MACHINE_4],
        never=[*range(4), *range(5, 12), 13, 14, 15],
    ),
    Row(
        "the same, where checks time the two axes in turn: it does not pass for the network on the way",
        given=paper_figure().checks(
            8, {"axes": ["shard"]}, {"axes": ["tensor"]}, slow_groups={SHARDS: 5.0, SLICES: 5.0}
        ),
        must_come=[MACHINE_4],
    ),
    Row(
        "a group within a machine is slow, and none between machines",
        given=paper_figure().checks(3).checks(8, slow_groups={SLICES: 5.0}),
        must_come=[straggler(SLICES, "machine", "inspect")],
    ),
    Row(
        "groups of two machines are slow, between machines and within",
        given=paper_figure().checks(3).checks(8, slow_groups=dict.fromkeys(TWO_MACHINES, 5.0)),
        must_come=[straggler((2, 4, 10, 12), "machine", "replace")],
    ),
    Row(
        "a group within a machine is slow, is normal for a while, and slow again",
        given=paper_figure()
        .checks(4, slow_groups={SLICES: 5.0})
        .checks(4)
        .checks(8, slow_groups={SLICES: 5.0}),
        must_come=[straggler(SLICES, "machine", "inspect")] * 2,
    ),
    Row(
        "a group within a machine is slow, and then one of another machine as well",
        given=paper_figure()
        .checks(4, slow_groups={SLICES: 5.0})
        .checks(8, slow_groups={SLICES: 5.0, (3, 11): 5.0}),
        must_come=[straggler(SLICES, "machine", "inspect"), straggler((3, 4, 11, 12), "machine", "inspect")],
    ),
    Row(
        "a group is slow in one check, and in every tenth one",
        given=paper_figure().checks(60, {"slow_groups": {SHARDS: 5.0, SLICES: 5.0}}, *[{}] * 9),
        must_come=[],
    ),
    Row(
        "a group is faster than the others, always",
        given=paper_figure().checks(10, slow_groups={SHARDS: 0.1}),
        must_come=[],
    ),
    Row(
        "of four shard groups one leaves its machine, and takes longer than the others",
        given=job(replica=4, shard=2, machines="aabbccde").checks(
            10, slow_groups={(6, 7): 5.0}, axes=["shard"]
        ),
        must_come=[],
    ),
    Row(
        "the only group along its axis becomes slow: there is nothing to compare it with",
        given=job(tensor=4, ranks_on_machine=4).checks(3).checks(8, slow_groups={(0, 1, 2, 3): 5.0}),
        must_come=[],
    ),
    Row(
        "a group between two machines is slow, and both are normal inside: the network between them",
        given=paper_figure().checks(3).checks(8, slow_groups={SHARDS: 5.0}),
        must_come=[straggler(SHARDS, "process group", "inspect")],
        never=range(16),
    ),
    Row(
        "a group between two machines is slow, and nobody knows how they are inside",
        given=job(replica=4, shard=2).checks(3).checks(8, slow_groups={SHARDS: 5.0}, axes=["shard"]),
        must_come=[straggler(SHARDS, "process group", "inspect")],
        never=range(8),
    ),
    Row(
        "one of two corresponding groups is slow: there is no third to compare with",
        given=job(replica=2, tensor=4, ranks_on_machine=4).checks(8, slow_groups={(4, 5, 6, 7): 5.0}),
        must_come=[straggler(range(8), "process group", "inspect")],
        never=range(8),
    ),
    Row(
        "groups of half of the machines are slow: it is the job or its cluster, not a machine",
        given=paper_figure().checks(10, slow_groups={SHARDS: 5.0, (0, 1): 5.0, (2, 10): 5.0, (7, 15): 5.0}),
        must_come=[straggler([], "job", "continue")],
        never=range(16),
    ),
    Row(
        "a group is hardly slow, and normal in every eighth check: it is one finding, not eight",
        given=paper_figure().checks(64, *[{"slow_groups": {SHARDS: 1.5}}] * 7, {}),
        must_come=[straggler(SHARDS, "process group", "inspect")],
    ),
    Row(
        "a slow machine is found while every check has another sequence length",
        given=paper_figure().checks(12, *lengths(12), slow_groups={SHARDS: 5.0, SLICES: 5.0}),
        must_come=[MACHINE_4],
    ),
    Row(
        "a slow machine shows in large transfers only, and every second check has small ones",
        given=paper_figure().checks(
            16, {"length": 4096, "slow_groups": {SHARDS: 5.0, SLICES: 5.0}}, {"length": 64}
        ),
        must_come=[MACHINE_4],
    ),
    # All are slow alike: history shows it, and nobody is named.
    Row(
        "all ranks compute half as fast as before",
        given=FOUR.checks(12).checks(6, pace=2.0),
        must_come=[straggler([], "job", "inspect")],
        never=range(4),
    ),
    Row(
        "all ranks compute 15% slower than before, or half as fast for two checks",
        given=FOUR.checks(12).checks(20, pace=1.15).checks(5).checks(2, pace=2.0).checks(5),
        must_come=[],
    ),
    # What nothing repeats.
    Row(
        "a rank takes long to fetch batches, in two surveys",
        given=surveyed("input", (18, 17, 18, 410), (18, 17, 19, 412), (18, 17, 19, 411), replica=4),
        must_come=slow_ranks(3),
        never=[0, 1, 2],
    ),
    Row(
        "a rank takes long to write checkpoints",
        given=surveyed("checkpoint write", *[(0.1, 0.1, 0.2, 900)] * 3, replica=4),
        must_come=slow_ranks(3),
        never=[0, 1, 2],
    ),
    Row(
        "a rank takes long to read a checkpoint, in one survey only, and all of them do in the others",
        given=surveyed("checkpoint read", (9, 9, 9, 900), *[(900, 905, 901, 903)] * 3, replica=4),
        must_come=[],
    ),
    Row(
        "of two ranks one takes long to fetch batches",
        given=surveyed("input", *[(18, 412)] * 3, replica=2),
        must_come=[straggler([0, 1], "peer group", "inspect")],
        never=[0, 1],
    ),
    Row(
        "one rank of each tensor-parallel pair fetches the batch, and its partner waits for it",
        given=surveyed("input", *[(400, 1, 401, 1, 400, 1)] * 4, replica=3, tensor=2),
        must_come=[],
    ),
    Row(
        "one rank writes for all, and another one now and then",
        given=surveyed("checkpoint write", *[(900, 18, None, None)] * 4, replica=4),
        must_come=[],
    ),
    # Jobs of other people; see traces/README.md.
    Row(
        "a worker was slowed down on purpose: it is named after three steps",
        given=Recorded("one-slow-worker", steps=3),
        must_come=slow_ranks(0),
        never=range(1, 16),
    ),
    Row(
        "the same worker, in all 44 steps: nobody else, and once",
        given=Recorded("one-slow-worker"),
        must_come=slow_ranks(0),
        never=range(1, 16),
    ),
    Row(
        "batches differ in sequence length among 32 replicas, so that steps take half as long again",
        given=Recorded("sequence-length-imbalance"),
        must_come=[],
    ),
    Row(
        "the last of four stages has twice as much to do as the others",
        given=Recorded("stage-imbalance"),
        must_come=[],
    ),
    # Healthy jobs.
    Row(
        "the paper's figure is healthy for 600 checks",
        given=replace(paper_figure(), jitter=0.03).checks(600),
        must_come=[],
        marks=LONG,
    ),
    Row(
        "eight replicas are healthy for 600 checks, with 10% noise and another length in each",
        given=job(replica=8, jitter=0.1).checks(600, *lengths(600)),
        must_come=[],
    ),
    *(
        Row(
            f"{name} are healthy, with 6% noise, and make six checks each",
            given=Rate(job(jitter=0.06, **degrees).checks(6), jobs),
            must_come="within the promised rate",
            marks=LONG,
        )
        for name, degrees, jobs in (
            ("200 jobs of two ranks", {"replica": 2}, 200),
            ("200 jobs of three replicas of two ranks", {"replica": 3, "tensor": 2}, 200),
            ("200 jobs of four ranks", {"replica": 4}, 200),
            ("50 jobs of 32 ranks", {"replica": 32}, 50),
        )
    ),
    Row(
        "what is remembered of a job does not grow with every sequence length that occurs",
        given=Memory(job(replica=3, tensor=2).checks(600, *lengths(600))),
        must_come="bounded",
        marks=LONG,
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_stragglers(row: Row, tmp_path: Path):
    check(row, answer(row.given, tmp_path))


def answer(given: object, folder: Path) -> object:
    if isinstance(given, Phases):
        return stragglers.found_in_phases(given)
    if isinstance(given, RealJob):
        return stragglers.found_in_training(given, folder)
    if isinstance(given, Memory):
        half, whole = stragglers.remembered(given.job)
        return "grows with every length" if whole > 1.5 * half else "bounded"
    if isinstance(given, Rate):
        return rate(given)
    return stragglers.found(given)


def rate(given: Rate) -> str:
    """How often somebody is reported, against what is promised."""
    alarms = sum(len(stragglers.found(replace(given.job, seed=seed))) for seed in range(given.jobs))
    promised = PROMISED * given.jobs * len(given.job.history)
    if alarms > 10 * promised:
        return "more than ten times the promised rate"
    # Three standard deviations of a count of rare events.
    return "within the promised rate" if alarms <= promised + 3 * promised**0.5 else "above the promised rate"
