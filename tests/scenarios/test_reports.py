"""What a person, a script or a launcher is told about a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Row, cases, check, either, lost, wrong_today
from tests.scenarios.test_policy import ONE_EACH, Event, History, after, late, wrong_numbers
from tests.scenarios.today import reports

# 1. Is the run healthy? A script reads the exit status of ``scout status``.


@dataclass(frozen=True)
class Rank:
    """What is on record about one rank."""

    ended: str | None = None
    """How it ended, if that was written down."""
    process: str | None = None
    """On this machine: ``alive``, or ``killed`` before anybody could write down its end."""
    elsewhere: bool = False
    """It runs, or ran, on a machine that this one cannot look at. The run directory is shared."""
    is_listed: bool = True
    """False if its machine does not share the run directory."""


@dataclass(frozen=True)
class Run:
    ranks: Sequence[Rank]
    incidents: Sequence[tuple[str, str]] = ()
    """Kind of an incident, and whether it is open, resolved or recovered from."""
    heard: str = ""
    """When rank 0 was last heard of: ``now`` or ``an hour ago``."""


class Status(NamedTuple):
    health: str
    """``healthy``, ``unhealthy`` or ``unknown``."""
    state: str | None


def run(*ranks: Rank, incident: tuple[str, str] | None = None, heard: str = "") -> Run:
    return Run(ranks, () if incident is None else (incident,), heard)


FINISHED, INTERRUPTED, FAILED, KILLED = map(Rank, ("finished", "interrupted", "failed", "killed"))
ALIVE = Rank(process="alive")
ELSEWHERE = Rank(elsewhere=True)
NOT_KNOWN = either(Status("unknown", "elsewhere"), Status("unknown", "unknown"))

STATES = [
    Row("all ranks finished", run(FINISHED, FINISHED), Status("healthy", "finished")),
    Row(
        "one rank finished and one was interrupted",
        run(FINISHED, INTERRUPTED),
        Status("healthy", "interrupted"),
    ),
    Row("one rank failed", run(FINISHED, FAILED), Status("unhealthy", "failed")),
    Row("one rank failed and one was killed", run(FAILED, KILLED), Status("unhealthy", "killed")),
    Row("a rank runs on this machine", run(ALIVE), Status("healthy", "running")),
    Row(
        "a rank of this machine was killed, and nobody wrote it down",
        run(Rank(process="killed")),
        Status("unhealthy", "killed"),
    ),
    Row(
        "a rank runs that failed in an earlier session",
        run(Rank("failed", process="alive")),
        Status("healthy", "running"),
    ),
    Row(
        "all ranks finished on other machines, and wrote that down",
        run(Rank("finished", elsewhere=True), Rank("finished", elsewhere=True)),
        Status("healthy", "finished"),
    ),
    # A power loss or ``scancel`` leaves nothing behind that says so. Only a sign of life would do.
    Row(
        "all ranks are on other machines, and nothing says whether they still run",
        run(ELSEWHERE, ELSEWHERE),
        NOT_KNOWN,
    ),
    Row(
        "all ranks are on other machines, and rank 0 was heard of a moment ago",
        run(ELSEWHERE, ELSEWHERE, heard="now"),
        Status("healthy", "running"),
    ),
    Row(
        "all ranks are on other machines, and rank 0 was heard of an hour ago",
        run(ELSEWHERE, ELSEWHERE, heard="an hour ago"),
        NOT_KNOWN,
    ),
    Row(
        "rank 0 was heard of a moment ago, and another rank was killed",
        run(ELSEWHERE, Rank("killed", elsewhere=True), heard="now"),
        Status("unhealthy", "killed"),
    ),
    Row(
        "rank 0 was heard of a moment ago, and an incident is open",
        run(ELSEWHERE, ELSEWHERE, incident=("hang", "open"), heard="now"),
        Status("unhealthy", "running"),
    ),
    Row(
        "a rank finished here, and nothing says what became of the one on another machine",
        run(FINISHED, ELSEWHERE),
        NOT_KNOWN,
    ),
    Row(
        "a rank finished, and the machine of another one does not share the run directory",
        run(FINISHED, Rank(is_listed=False)),
        Status("unknown", "finished"),
    ),
    Row("there is no run", run(), Status("unknown", None)),
    # Incidents.
    Row(
        "the ranks are on other machines, and an incident is open",
        run(ELSEWHERE, ELSEWHERE, incident=("hang", "open")),
        either(Status("unhealthy", "elsewhere"), Status("unhealthy", "unknown")),
    ),
    Row(
        "the job finished with wrong numbers",
        run(FINISHED, FINISHED, incident=("sdc", "open")),
        Status("unhealthy", "finished"),
    ),
    Row(
        "wrong numbers were found, and a later run began with an earlier checkpoint",
        run(FINISHED, FINISHED, incident=("sdc", "recovered")),
        Status("healthy", "finished"),
    ),
    Row(
        "a rank was late, and moved again",
        run(FINISHED, FINISHED, incident=("hang", "resolved")),
        Status("healthy", "finished"),
    ),
    Row(
        "checks for wrong numbers have stopped",
        run(FINISHED, FINISHED, incident=("not_checked", "open")),
        Status("unhealthy", "finished"),
    ),
]

WATCHED = [
    Row("a person watches a run that has finished", run(FINISHED), "ends"),
    Row("a person watches a run of this machine", run(ALIVE), "goes on"),
    Row(
        "a person watches a run of other machines",
        run(ELSEWHERE, ELSEWHERE),
        "goes on",
    ),
]

INCIDENTS_FIRST = [
    Row(
        "a person looks at a run of 512 ranks with an incident: what stands above it",
        run(*[ELSEWHERE] * 512, incident=("sdc", "open")),
        "0 lines about ranks",
    )
]


# 2. Which machines must a launcher leave out? It reads them, and the exit status, from ``scout hosts``.


@dataclass(frozen=True)
class Job:
    history: History
    """The incidents, which were handled."""
    asked: str = "folder of checkpoints"
    """Or ``run directory``: that of the last incident."""
    repaired: Sequence[str] = ()
    """Machines that a person has repaired and removed from the restart plan, as the documentation says."""
    is_plan_removed: bool = False
    """A person has removed the restart plan, so that the job may start again."""
    is_plan_damaged: bool = False
    then_finished_on: Sequence[str] = ()
    """The machines of the ranks on which the job then ran to its end, with the same run directory."""


class Hosts(NamedTuple):
    status: str
    """``nothing`` to do, ``replace``, ``stopped``, or ``refused``."""
    machines: tuple[str, ...] = ()


CORRUPT = after(wrong_numbers(2, 40))
CORRUPT_DRY_RUN = after(wrong_numbers(2, 40), act=[])
UNREACHABLE = Event(lost([2, 3], "machine", "replace"), 40)
LATE_TWICE = after(late(2, 40), late(2, 90))
STOPPED = after(*(late(rank, 40, machines=ONE_EACH) for rank in range(4)))
MACHINES = ("a", "a", "b", "b")

LEFT_OUT = [
    Row("a rank was late, and the job was restarted", Job(after(late(2, 40))), Hosts("nothing")),
    Row("a machine was replaced", Job(CORRUPT), Hosts("replace", ("b",))),
    Row(
        "a machine was replaced; asked by the run directory",
        Job(CORRUPT, asked="run directory"),
        Hosts("replace", ("b",)),
    ),
    Row("the job was stopped", Job(STOPPED), Hosts("stopped")),
    Row("the restart plan is damaged", Job(CORRUPT, is_plan_damaged=True), Hosts("refused")),
    Row(
        "the machine to replace has no name that can be given to a command",
        Job(after(wrong_numbers(2, 40, machines=("a", "a", "--all", "--all")))),
        Hosts("nothing"),
    ),
    # In a dry run the launcher carries out what torchscout only decides.
    Row(
        "a machine would have been replaced, in a dry run",
        Job(CORRUPT_DRY_RUN, asked="run directory"),
        Hosts("replace", ("b",)),
    ),
    Row(
        "the same, asked by the folder of the checkpoints, as the script for Slurm does",
        Job(CORRUPT_DRY_RUN),
        Hosts("replace", ("b",)),
    ),
    # What a later success has disproved is forgotten, and nothing else.
    Row(
        "a machine was replaced, and the job finished without it",
        Job(LATE_TWICE, asked="run directory", then_finished_on=("a", "a", "c", "c")),
        Hosts("replace", ("b",)),
    ),
    Row(
        "a machine was repaired, and the job finished on it",
        Job(LATE_TWICE, repaired=["b"], then_finished_on=MACHINES),
        Hosts("nothing"),
    ),
    Row(
        "a machine was repaired, and the job finished on it; asked by the run directory",
        Job(LATE_TWICE, asked="run directory", repaired=["b"], then_finished_on=MACHINES),
        Hosts("nothing"),
    ),
    Row(
        "a machine could not be reached in a dry run, came back, and the job finished on it",
        Job(after(UNREACHABLE, act=[]), asked="run directory", then_finished_on=MACHINES),
        Hosts("nothing"),
    ),
    Row(
        "the job was stopped; a person removed the restart plan, and it finished",
        Job(STOPPED, asked="run directory", is_plan_removed=True, then_finished_on=ONE_EACH),
        Hosts("nothing"),
    ),
]


# 3. The script for Slurm in docs/recovery.md.

OPTIONS = [
    Row(
        "what is left to torchrun, whose defaults are no restart and one rank for each machine",
        given="the script",
        must_come=[],
    )
]

SLURM = [
    Row(
        "the job ended, and nothing was decided: nothing is asked of Slurm",
        given=after(),
        must_come=[],
    ),
    Row(
        "two machines were replaced: they are drained, and the job is submitted without them",
        given=after(wrong_numbers(2, 40), wrong_numbers(0, 90, machines=("a", "a", "c", "c"))),
        must_come=[
            "scontrol update NodeName=b,a State=DRAIN Reason=torchscout",
            "sbatch --exclude=b,a train.sbatch",
        ],
    ),
]

HANG = [
    Row(
        "a rank hung, and all ranks have left, to be restarted by torchrun",
        given=after(late(2, 40)),
        must_come=either("trains again", "is submitted again"),
        marks=[pytest.mark.long],
    )
]


# 4. What is a machine called? Decisions and the exclusion of machines take the scheduler's name.

PREFLIGHT = [
    Row(
        "a preflight in a pod on node-7, whose name is in each of the three variables in turn",
        given="node-7",
        must_come=["node-7"] * 3,
        wrong=wrong_today("interfaces #6", says=["the hostname"] * 3),
    )
]


# 5. Most comparisons find nothing. They are counted; what a finding may rest on is written with its numbers.


@dataclass(frozen=True)
class Comparison:
    of: str
    """``results``, which must be equal, or ``times`` in milliseconds."""
    values: Sequence[float]


def results(*values: int) -> Comparison:
    return Comparison("results", values)


def times(*values: float) -> Comparison:
    return Comparison("times", values)


COMPARISONS = [
    Row("three ranks agree", results(7, 7, 7), "counted"),
    Row("one of three ranks has another result", results(7, 9, 7), "with its numbers"),
    Row("two ranks have different results", results(7, 9), "with its numbers"),
    Row("a rank takes half as long again", times(10.0, 10.01, 10.0, 15.0), "with its numbers"),
    Row("a rank takes a twentieth longer", times(10.0, 10.01, 10.0, 10.5), "counted"),
    Row("a rank takes longer by less than a millisecond", times(1.0, 1.001, 1.0, 1.9), "counted"),
    Row("a rank is faster than the others", times(10.0, 10.01, 10.0, 2.0), "counted"),
    Row("most ranks could not be timed", times(10.0, math.inf, math.inf), "with its numbers"),
]


class Asked(NamedTuple):
    question: Callable[..., object]
    about: object


ROWS = [
    replace(row, given=Asked(question, row.given))
    for question, rows in {
        reports.state: STATES,
        reports.watched: WATCHED,
        reports.screen: INCIDENTS_FIRST,
        reports.hosts: LEFT_OUT,
        reports.left_to_torchrun: OPTIONS,
        reports.commands_after: SLURM,
        reports.after_a_hang: HANG,
        reports.names_in_preflight: PREFLIGHT,
        reports.written: COMPARISONS,
    }.items()
    for row in rows
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_reports(row: Row, tmp_path: Path):
    question, about = row.given
    check(row, question(about, tmp_path))
