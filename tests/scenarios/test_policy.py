"""What is done about an incident: nothing, restart, replace machines, or stop.

1. The first incident of a job: what it calls for is what is done, as far as the user permits it.
2. Histories: what is done about an incident also depends on those before it.
3. Slow ranks: what is done depends on what they cost.
4. What the job loads after the restart.
5. A real job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scenarios.rows import (
    Finding,
    Row,
    cases,
    check,
    crash,
    divergence,
    either,
    hang,
    sdc,
    straggler,
)
from tests.scenarios.today import policy

# 1. The first incident of a job.


@dataclass(frozen=True)
class Seen:
    """What happened, and to which ranks."""

    what: str
    ranks: Sequence[int] = ()
    machines: Sequence[str] = ("a", "a", "b", "b", "c", "c")
    """The machine of each rank."""


PERMISSIONS: tuple[Collection[str], ...] = ((), ("restart",), ("restart", "replace"))
"""What a user may permit. A stop ends the workers as a restart does, and needs the same permission."""


class Agreed(NamedTuple):
    """The action that the incident names, and what is done with each of the permissions."""

    incident: str
    nothing_permitted: str
    restart_permitted: str
    all_permitted: str


NOBODY_REPLACED = either("restart", "preflight")
RIGHT = {
    "inspect": Agreed("inspect", "nothing", "nothing", "nothing"),
    "restart": Agreed("restart", "nothing", "restart", "restart"),
    "stop": Agreed("stop", "nothing", "stop", "stop"),
    # What is not permitted falls back to the strongest action that is.
    "replace b": Agreed("replace", "nothing", "restart", "replace b"),
    "replace c and d": Agreed("replace", "nothing", "restart", "replace c and d"),
    # The state may be wrong, so that training must not go on with it. Which machine is at fault is for a
    # preflight to find out.
    "preflight": Agreed("preflight", "nothing", NOBODY_REPLACED, NOBODY_REPLACED),
}


def first(name: str, seen: Seen, *right: str) -> Row:
    """``right``: the action, or several of which each is right."""
    return Row(name, given=seen, must_come=either(*(RIGHT[each] for each in right)))


FIRST_INCIDENTS = [
    # Hangs and ends.
    first("a rank is late", Seen("late", [2]), "restart"),
    first(
        "both ranks of a machine are late",
        Seen("late", [2, 3]),
        "restart",
    ),
    first(
        "a rank was stopped by a signal",
        Seen("stopped by a signal", [2]),
        "restart",
    ),
    first("a rank ended", Seen("ended", [2]), "restart"),
    first(
        "all ranks ended at the same time, as with a mistake in the script",
        Seen("ended", range(6)),
        "inspect",
        "restart",
    ),
    first("all ranks are in the same operation, and none is behind", Seen("late"), "inspect", "restart"),
    first(
        "a machine cannot be reached",
        Seen("unreachable", [2, 3]),
        "replace b",
    ),
    first("most machines cannot be reached", Seen("unreachable", [2, 3, 4, 5]), "inspect"),
    # Ranks that communicate different things are a mistake in the program: a restart hangs again.
    first(
        "a rank issued another operation than the five others",
        Seen("another operation", [2]),
        "stop",
    ),
    first(
        "half of the ranks issued another operation",
        Seen("another operation", [3, 4, 5]),
        "stop",
    ),
    # Corruption. Whoever is left as it is trains on with wrong weights and ends with exit status 0.
    first(
        "a rank has wrong numbers",
        Seen("wrong numbers", [2]),
        "replace b",
    ),
    first(
        "both ranks of a machine have wrong numbers",
        Seen("wrong numbers", [2, 3]),
        "replace b",
    ),
    first(
        "two ranks on two machines, which compute together, have wrong numbers",
        Seen("wrong numbers of tensor-parallel partners", [2, 3], machines="abcdef"),
        "replace c and d",
        "preflight",
    ),
    first(
        "two replicas disagree, and there is no third",
        Seen("wrong numbers", [1], machines="ab"),
        "preflight",
    ),
    first(
        "three replicas disagree with three others",
        Seen("wrong numbers", [3, 4, 5]),
        "preflight",
    ),
    # Slow ranks that nobody can be blamed for.
    first("one of two ranks is slower", Seen("slow", [1], machines="ab"), "inspect"),
    first("a rank is slow in its input, which is no fault of a machine", Seen("slow input", [2]), "inspect"),
]


@pytest.mark.parametrize("row", cases(FIRST_INCIDENTS))
def test_an_incident_and_what_is_done_about_it_agree(row: Row, tmp_path: Path):
    check(row, Agreed(*policy.agreed(row.given, tmp_path, PERMISSIONS)))


# 2. Histories.


@dataclass(frozen=True)
class Event:
    """An incident in the history of a job. It was handled before the next one came."""

    finding: Finding
    step: int
    day: int = 0
    """Since the first start of the job."""
    machines: Sequence[str] = ("a", "a", "b", "b")
    """The machine of each rank at that time."""
    undecided: bool = False
    """The evidence was not enough to name anybody."""
    resuming: bool = False
    """While the checkpoint of this step was being loaded: no step was made since the restart."""
    work: str = "module"
    """What a slow rank is slow in."""
    work_takes: float = 1.0
    """How much longer that takes than on the peers of a slow rank: 2.0 for twice as long."""
    step_takes: float = 1.0
    """How much longer a step of the job takes since the rank is slow."""
    others_first: bool = False
    """The proof begins with comparisons in which nobody is slow, such as those of another pipeline stage."""


@dataclass(frozen=True)
class History:
    """Incidents, oldest first. The answer is what is done about each of them."""

    events: Sequence[Event]
    act: Collection[str] = ("restart", "replace")
    """What the user permits."""
    has_verified: bool = True
    """Whether there is a checkpoint that is known to be correct."""
    restart_costs: float | None = None
    """In seconds; None for the default, 300."""


def after(*events: Event, **settings: object) -> History:
    return History(events, **settings)  # type: ignore[arg-type]


def late(rank: int, step: int, **more: object) -> Event:
    return Event(hang([rank], "rank", "restart"), step, **more)  # type: ignore[arg-type]


def wrong_numbers(rank: int, step: int, **more: object) -> Event:
    return Event(sdc([rank], "rank", "replace"), step, **more)  # type: ignore[arg-type]


def deadlock(step: int, **more: object) -> Event:
    return Event(hang(range(4), "process group", "restart"), step, undecided=True, **more)  # type: ignore[arg-type]


def differing(step: int) -> Event:
    return Event(divergence(range(4), "process group", "stop"), step, undecided=True)


ONE_EACH = ("a", "b", "c", "d")
"""A machine for each rank."""
C_FOR_B, D_FOR_B = ("a", "a", "c", "c"), ("a", "a", "d", "d")
"""Machine c, or d, runs the ranks of machine b, which is not used any more."""

HISTORIES = [
    # A failure comes back.
    Row(
        "a rank is late, and again 50 steps after the restart: its machine is replaced",
        given=after(late(2, 40), late(2, 90)),
        must_come=["restart", "replace b"],
    ),
    Row(
        "after the restart a rank of another machine is late: nothing connects the two",
        given=after(late(2, 40), late(0, 90)),
        must_come=["restart", "restart"],
    ),
    Row(
        "a rank ended, and after the restart it is late: its machine is replaced",
        given=after(Event(crash([2], "rank", "restart"), 40), late(2, 90)),
        must_come=["restart", "replace b"],
    ),
    Row(
        "the ranks were renumbered, and the machine that was late is late again: it moves with the machine",
        given=after(late(2, 40), late(0, 90, machines=("b", "b", "a", "a"))),
        must_come=["restart", "replace b"],
    ),
    Row(
        "a rank is late again 89,000 steps and nine days after its first restart: that one was long ago",
        given=after(late(2, 1000), late(2, 90_000, day=9)),
        must_come=["restart", "restart"],
    ),
    Row(
        "a machine was replaced for wrong numbers, and half a million steps later its successor is late once",
        given=after(wrong_numbers(2, 100), late(2, 500_000, day=50, machines=C_FOR_B)),
        must_come=["replace b", "restart"],
    ),
    Row(
        "a rank is late at the same step on a second machine: the program or the data is at fault",
        given=after(late(2, 40), late(2, 40), late(2, 40, machines=C_FOR_B)),
        must_come=["restart", "replace b", "stop"],
    ),
    Row(
        "numbers are wrong at the same step on three machines, one after the other: replacing ends",
        given=after(
            wrong_numbers(2, 40),
            wrong_numbers(2, 40, machines=C_FOR_B),
            wrong_numbers(2, 40, machines=D_FOR_B),
        ),
        must_come=either(["replace b", "replace c", "stop"], ["replace b", "stop"]),
    ),
    # Nobody is named, so that nobody is replaced.
    Row(
        "ranks wait for each other in a circle, after each restart: the job is stopped in the end",
        given=after(*(deadlock(step) for step in (40, 40, 40, 40))),
        must_come=either(*(["restart"] * count + ["stop"] for count in (1, 2, 3))),
    ),
    Row(
        "ranks wait for each other in a circle, twice in nine days: that is no reason to stop the job",
        given=after(deadlock(40), deadlock(90_000, day=9)),
        must_come=["restart", "restart"],
    ),
    Row(
        "half of the ranks issued another operation than the others: a restart hangs again",
        given=after(differing(40), differing(60)),
        must_come=["stop"],
    ),
    # Only restarts are permitted.
    Row(
        "a rank is late again long after a restart: the job is not left hanging",
        given=after(late(2, 1000), late(2, 90_000, day=9), act=["restart"]),
        must_come=["restart", "restart"],
    ),
    Row(
        "a rank is late after each restart: its machine may not be replaced, so that the job is stopped",
        given=after(*(late(2, 40) for _ in range(4)), act=["restart"]),
        must_come=either(["restart", "restart", "stop"], ["restart", "restart", "restart", "stop"]),
    ),
    # The job is stopped if restarts do not help, and only then.
    Row(
        "three restarts, for other ranks each time, have not brought the job past step 40",
        given=after(*(late(rank, step, machines=ONE_EACH) for rank, step in enumerate((50, 45, 40, 40)))),
        must_come=["restart", "restart", "restart", "stop"],
    ),
    Row(
        "ranks of three machines are late at one step, one after the other: restarts do not help there",
        given=after(*(late(rank, 40, machines=ONE_EACH) for rank in range(3))),
        must_come=["restart", "restart", "stop"],
    ),
    Row(
        "a rank is late after three restarts, past the step of the last two",
        given=after(*(late(rank, step, machines=ONE_EACH) for rank, step in enumerate((50, 45, 40, 47)))),
        must_come=["restart"] * 4,
    ),
    Row(
        "a rank is late after three restarts, at a step to which the job had not come before",
        given=after(*(late(rank, step, machines=ONE_EACH) for rank, step in enumerate((50, 45, 40, 51)))),
        must_come=["restart", "restart", "restart", "restart"],
    ),
    Row(
        "a rank is late while the job resumes, after three restarts with thousands of steps between them",
        given=after(
            *(late(rank, 4000 * rank + 1000, day=rank, machines=ONE_EACH) for rank in range(3)),
            late(3, 9000, day=2, machines=ONE_EACH, resuming=True),
        ),
        must_come=["restart", "restart", "restart", "restart"],
    ),
    Row(
        "a rank is late each time the job resumes, another one each time: the job is stopped",
        given=after(*(late(rank, 9000, machines=ONE_EACH, resuming=True) for rank in range(4))),
        must_come=either(["restart", "restart", "stop"], ["restart", "restart", "restart", "stop"]),
    ),
    Row(
        "a rank has wrong numbers, and no checkpoint is known to be correct",
        given=after(wrong_numbers(2, 40), has_verified=False),
        must_come=["stop"],
    ),
    Row(
        "the same, and only restarts are permitted: to stop needs no more",
        given=after(wrong_numbers(2, 40), has_verified=False, act=["restart"]),
        must_come=["stop"],
    ),
    Row(
        "a rank is late, and no checkpoint is known to be correct: the latest one does",
        given=after(late(2, 40), has_verified=False),
        must_come=["restart"],
    ),
]


# 3. Slow ranks. Of a day, a slowdown of all steps by 0.35% costs as much as a restart by default.


def slow(**how: object) -> History:
    """A rank is slow, for the first time."""
    settings = {name: how.pop(name) for name in ("restart_costs", "act") if name in how}
    return after(Event(straggler([2], "rank", "inspect"), step=400, **how), **settings)  # type: ignore[arg-type]


def slow_links(**how: object) -> History:
    """Collectives within machine b take 25 times as long as within the others."""
    finding = straggler([2, 3], "machine", "inspect")
    how |= {"work": "all_reduce", "work_takes": 25.0, "step_takes": 1.33}
    return after(Event(finding, step=400, **how))  # type: ignore[arg-type]


SLOW_RANKS = [
    Row(
        "a rank's layers take twice as long, and the steps of the job a third longer",
        given=slow(work_takes=2.0, step_takes=1.33),
        must_come=["replace b"],
    ),
    Row(
        "the same, and only restarts are permitted: its machine is not replaced",
        given=slow(work_takes=2.0, step_takes=1.33, act=["restart"]),
        must_come=either(["nothing"], ["restart"]),
    ),
    Row(
        "the same, but a restart costs most of a day",
        given=slow(work_takes=2.0, step_takes=1.33, restart_costs=80_000.0),
        must_come=["nothing"],
    ),
    Row(
        "one layer of a rank takes twice as long, which makes the steps of the job longer by a thousandth",
        given=slow(work_takes=2.0, step_takes=1.001),
        must_come=["nothing"],
    ),
    Row(
        "the update of a rank takes twice as long, and the steps of the job a third longer",
        given=slow(work="optimizer", work_takes=2.0, step_takes=1.33),
        must_come=["replace b"],
    ),
    Row(
        "a rank takes three times as long to fetch its batches: that need not be its machine",
        given=slow(work="input", work_takes=3.0, step_takes=1.5),
        must_come=["nothing"],
    ),
    Row(
        "a rank takes three times as long to write checkpoints: that need not be its machine",
        given=slow(work="checkpoint_write", work_takes=3.0, step_takes=1.01),
        must_come=["nothing"],
    ),
    Row(
        "the links between the machines become slow, and then all ranks together: no machine is at fault",
        given=after(
            Event(straggler(range(4), "process group", "inspect"), step=400, undecided=True, step_takes=1.5),
            Event(straggler([], "job", "inspect"), step=600, undecided=True, step_takes=2.0),
        ),
        must_come=["nothing", "nothing"],
    ),
    Row(
        "the links inside a machine of the first pipeline stage are slow",
        given=slow_links(),
        must_come=["replace b"],
    ),
    Row(
        "the links inside a machine of a later pipeline stage are slow",
        given=slow_links(others_first=True),
        must_come=["replace b"],
    ),
]


@pytest.mark.parametrize("row", cases([*HISTORIES, *SLOW_RANKS]))
def test_policy(row: Row, tmp_path: Path):
    check(row, policy.done(row.given, tmp_path))


def test_the_observer_of_a_rank_that_has_ended_decides_as_the_rank_would(tmp_path: Path):
    for number, row in enumerate(HISTORIES):
        if all(event.finding.kind != "sdc" for event in row.given.events):  # wrong numbers end no rank
            answers = [
                policy.done(row.given, tmp_path / f"{number}-{who}", by_observer=who == "observer")
                for who in ("rank", "observer")
            ]
            assert answers[0] == answers[1], row.name


# 4. What the job loads after its last restart. After corruption nothing but the verified checkpoint will do.

LOADED = [
    Row("a rank had wrong numbers", given=after(wrong_numbers(2, 40)), must_come="verified"),
    Row(
        "a rank had wrong numbers, and machines may not be replaced",
        given=after(wrong_numbers(2, 40), act=["restart"]),
        must_come="verified",
    ),
    Row(
        "a rank had wrong numbers, and another one was late while the job resumed",
        given=after(wrong_numbers(2, 40), late(0, 40, machines=C_FOR_B, resuming=True)),
        must_come="verified",
    ),
    Row(
        "a rank had wrong numbers, and another one was late after the job had resumed",
        given=after(wrong_numbers(2, 40), late(0, 90, machines=C_FOR_B)),
        must_come="latest, if a sweep finds nothing",
    ),
    Row(
        "a rank was slow, which does not affect the numbers",
        given=slow(work_takes=2.0, step_takes=1.33),
        must_come="latest",
    ),
]


@pytest.mark.parametrize("row", cases(LOADED))
def test_what_is_loaded_after_the_restart(row: Row, tmp_path: Path):
    check(row, policy.loaded(row.given, tmp_path))


# 5. A real job.

CORRUPT_JOB = Row(
    "a weight of one of three ranks changes, and only restarts are permitted",
    given=["restart"],
    must_come="all ranks leave, to be restarted",
    marks=[pytest.mark.long],
)


@pytest.mark.parametrize("row", cases([CORRUPT_JOB]))
def test_a_job_with_wrong_weights(row: Row, tmp_path: Path):
    check(row, policy.job_with_wrong_weights(row.given, tmp_path))
