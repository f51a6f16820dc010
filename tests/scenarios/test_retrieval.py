"""Which checkpoint a restarted job loads, from where, and what it refuses; what stays on disk and in memory.

Which checkpoint becomes trusted in the first place is decided in ``test_gate``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Row, cases, check, either, wrong_today
from tests.scenarios.today import retrieval

MEMORY, FILES = "memory", "files"


class Saved(NamedTuple):
    """The state of all ranks after one step, as a ledger has it."""

    step: int
    trust: str
    """``verified``; ``candidate``: one more complete cycle of checks makes it verified; ``unverified``: a
    check within a cycle has accepted it; ``being captured``: its check has accepted it, and the job ended
    before it was known whether every rank had captured it."""
    where: tuple[str, ...]
    """In memory, in files, or in both: there each rank has its own state, and another machine a copy."""
    lineage: int = 0
    """How often the job had resumed before it trained this step."""


def verified(step: int, *where: str, lineage: int = 0) -> Saved:
    return Saved(step, "verified", where, lineage)


def candidate(step: int, *where: str) -> Saved:
    return Saved(step, "candidate", where)


def unverified(step: int, *where: str) -> Saved:
    return Saved(step, "unverified", where)


def being_captured(step: int, *where: str) -> Saved:
    return Saved(step, "being captured", where)


@dataclass(frozen=True)
class Ledger:
    """What a rank has written down, in memory and in files alike."""

    saved: tuple[Saved, ...] = ()
    corruption: int | None = None
    """The step whose check found it, if the job has not resumed since."""
    lineage: int = 0
    """How often the job has resumed."""


def ledger(*saved: Saved, corruption: int | None = None, lineage: int = 0) -> Ledger:
    return Ledger(saved, corruption, lineage)


class Machine(NamedTuple):
    """It is lost, and an empty one takes its place."""

    name: str


class Reboot(NamedTuple):
    """This machine's memory is lost."""

    machine: str


class Ledgers(NamedTuple):
    """Those of one rank are lost: ``the newest``, so that the ones before are left; ``all``; or those ``in
    memory``."""

    rank: int
    which: str


OWN = ("own memory", "own files")
EVERYWHERE = (*OWN, "copy in memory", "copy in files")


class Copies(NamedTuple):
    """Of one rank's state after a step, the copies in these places are damaged."""

    rank: int
    step: int
    what: str
    """A bit is wrong in the ``weights``, which are equal on all ranks, in the rank's ``own state``, such as
    random streams, or in the ``header``; or the ``file`` is gone."""
    where: tuple[str, ...] = EVERYWHERE


@dataclass(frozen=True)
class Restart:
    """A job that was killed starts again. The answer is what all ranks load."""

    ledger: Ledger
    """Of every rank that is not in ``ledgers``. What it names is there."""
    experts: bool = False
    """A mixture of experts, whose cycle has two checks. For a dense model each check is a cycle."""
    why: str = "a hang"
    ledgers: Mapping[int, Ledger] = field(default_factory=dict)
    before: Ledger | None = None
    """What each ledger said before it was replaced."""
    beside: tuple[Saved, ...] = ()
    """What is there, too, but in no ledger."""
    lost: tuple[Machine | Reboot | Ledgers | Copies, ...] = ()
    machines: str = "ab"
    """Of each rank, when the job was killed."""
    now: str | None = None
    """Of each rank of the job that starts; None: the same."""
    any_layout: bool = False
    """It asks for checkpoints of any number of ranks."""
    job: str = "llm"
    replay_finds: str = "nothing"
    """When all checks are repeated on the loaded state: ``nothing``, ``corruption``; or ``it fails``."""
    replicas_differ_at: int | None = None
    """At this step replicas differ in what they have loaded."""

    def after(self, why: str) -> Restart:
        return replace(self, why=why)

    def without(self, *lost: Machine | Reboot | Ledgers | Copies) -> Restart:
        return replace(self, lost=lost)

    def but(self, **settings: object) -> Restart:
        return replace(self, **settings)


class Loaded(NamedTuple):
    step: int
    trust: str | None


class Refused(NamedTuple):
    """By all ranks."""

    why: str


@dataclass(frozen=True)
class Sources:
    """The answer is from where each rank loads its state."""

    restart: Restart


@dataclass(frozen=True)
class Several:
    """The answer is what is loaded in each case."""

    restarts: Sequence[Restart]


@dataclass(frozen=True)
class Checks:
    """A dense job that writes every checkpoint to files. The answer is which steps are in files then."""

    outcomes: Sequence[str]
    """Of the checks after steps 1, 2 and so on: ``healthy`` or ``corruption``."""
    blocked_from: int | None = None
    """From this step on, the ledger in files cannot be replaced."""


@dataclass(frozen=True)
class Job:
    """A job of real ranks with a check after every step is killed in step 6, and starts again."""

    then: int = 2
    now: int = 2
    """The numbers of ranks."""


class Resumed(NamedTuple):
    step: int
    trust: str
    is_bitwise: bool
    """Whether the weights are those that the killed job had after this step."""
    left: tuple[str, ...]
    """Where something of the killed job is left at the end of the second, which does seven steps."""


@dataclass(frozen=True)
class Unfinished:
    """A job begins to use a folder in which another process has begun a file. The answer is what becomes of
    the file."""

    writer: str
    """``killed`` or ``alive``."""
    is_nfs: bool = False


@dataclass(frozen=True)
class LateRequest:
    """A thread that outlives ``close`` asks for one more copy, when the program has opened files of its own.
    The answer is how many bytes are written into these."""


@dataclass(frozen=True)
class Start:
    """A job without a memory budget. The answer is whether it may start."""

    needs: int
    """For its checkpoints, in percent of the memory that was free before its first start."""
    is_second: bool = False
    """It was killed, and its checkpoints are in memory."""
    taken: int = 0
    """By other programs since its first start, in percent of the same."""


@dataclass(frozen=True)
class TwoRuns:
    """Two runs of one job begin to use its folder in memory. The answer is how many of them may."""

    is_forgotten: bool = False
    """``scout checkpoint forget`` deletes the folder when the first has opened its lock, and not taken it."""


@dataclass(frozen=True)
class Reconnecting:
    """Two ranks have left after a failed check, and are at the step at which they are to connect again. The
    answer is what each of them does."""

    knew: Sequence[int] = (0, 1)
    """The ranks that knew of the step before."""
    late_answer_to: int | None = None
    """The job's store answers this rank later than it is willing to wait."""


PLAIN = Restart(ledger(verified(4, FILES), verified(6, MEMORY, FILES)))
EXPERTS = Restart(
    ledger(verified(1, FILES), verified(2, FILES), candidate(4, FILES), unverified(5, MEMORY)), experts=True
)
YOUNG = EXPERTS.but(ledger=ledger(candidate(2, FILES), unverified(3, MEMORY)))
"""Nothing is verified yet."""
CAPTURING = PLAIN.but(
    before=ledger(verified(4, FILES), being_captured(6, MEMORY)),
    ledger=ledger(verified(4, FILES), verified(6, MEMORY, FILES), being_captured(8, MEMORY)),
)
"""It was killed when step 8 had just been captured."""

FROM_THE_BEGINNING = Loaded(0, None)
NOTHING_VERIFIED = Refused("nothing verified is left")
NOTHING_WHOLE = Refused("nothing whole is left")
OF_OTHERS = Refused("it is of another job, or of other ranks")

ROWS = [
    # Why the job restarts decides how far what is loaded must be trusted.
    Row("a dense job hangs: what is newest is verified, too", given=PLAIN, must_come=Loaded(6, "verified")),
    Row(
        "a mixture of experts hangs: the newest is loaded, once all its checks were repeated on it",
        given=EXPERTS,
        must_come=Loaded(5, "unverified"),
    ),
    Row(
        "the repeated checks find corruption: back to what is verified, past a candidate",
        given=EXPERTS.but(replay_finds="corruption"),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "the repeated checks fail: nothing is known about the newest, so back to what is verified",
        given=EXPERTS.but(replay_finds="it fails"),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "a crash is no reason to distrust numbers: as after a hang",
        given=EXPERTS.after("a crash"),
        must_come=Loaded(5, "unverified"),
    ),
    Row(
        "a slow rank computes correctly: the newest is loaded, and no check repeated",
        given=EXPERTS.but(why="a slow rank", replay_finds="it fails"),
        must_come=Loaded(5, "unverified"),
    ),
    Row(
        "after corruption only what is verified is loaded",
        given=EXPERTS.after("corruption"),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "after corruption, if nothing is verified: all ranks refuse",
        given=YOUNG.after("corruption"),
        must_come=NOTHING_VERIFIED,
    ),
    Row(
        "one rank alone has written down that corruption was found: the job restarts as after corruption",
        given=EXPERTS.but(ledgers={1: ledger(verified(1, FILES), verified(2, FILES), corruption=6)}),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "a machine is lost: what was in its memory cannot be looked at, so only what is verified is loaded",
        given=EXPERTS.after("a lost machine").without(Machine("b")),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "a machine is lost, and nobody has noticed: its rank has no ledger, which comes to the same",
        given=EXPERTS.without(Machine("b")),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "a dense job loses a machine: its newest is verified, and another machine has a copy",
        given=PLAIN.after("a lost machine").without(Machine("b")),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "replicas turn out to differ in what was verified: back to an older one",
        given=PLAIN.but(replicas_differ_at=6),
        must_come=Loaded(4, "verified"),
    ),
    Row(
        "all memory is lost: a candidate in files may be loaded if the repeated checks find nothing",
        given=EXPERTS.without(Reboot("a"), Reboot("b")),
        must_come=either(Loaded(4, "unverified"), Loaded(2, "verified")),
    ),
    Row(
        "all memory is lost, and the repeated checks find corruption in the candidate",
        given=EXPERTS.but(replay_finds="corruption").without(Reboot("a"), Reboot("b")),
        must_come=Loaded(2, "verified"),
    ),
    Row(
        "the repeated checks find corruption, and nothing is verified: all ranks refuse",
        given=YOUNG.but(replay_finds="corruption"),
        must_come=NOTHING_VERIFIED,
    ),
    # What is damaged is never loaded: another copy is, or a replica's equal bytes, or an older generation.
    Row(
        "all copies of one rank's random streams are damaged: all ranks take the next older",
        given=PLAIN.without(Copies(1, 6, "own state")),
        must_come=Loaded(4, "verified"),
    ),
    Row(
        "one rank has lost the newest altogether: all ranks take the next older",
        given=PLAIN.without(Copies(1, 6, "file")),
        must_come=Loaded(4, "verified"),
    ),
    Row(
        "all copies of one rank's weights are damaged: the other rank has the same bytes",
        given=PLAIN.without(Copies(1, 6, "weights")),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "all copies of one rank's header are damaged: nothing says which bytes were right",
        given=PLAIN.without(Copies(1, 6, "header")),
        must_come=Loaded(4, "verified"),
    ),
    Row(
        "the newest verified is damaged: an older verified one is loaded, not a newer one that is whole",
        given=EXPERTS.after("corruption").without(Copies(1, 2, "own state", ("own files", "copy in files"))),
        must_come=Loaded(1, "verified"),
    ),
    Row(
        "nothing of what may be loaded is whole: all ranks refuse",
        given=PLAIN.without(Copies(1, 6, "own state"), Copies(0, 4, "file", ("own files", "copy in files"))),
        must_come=NOTHING_WHOLE,
    ),
    Row(
        "both machines that had one rank's state are lost: all ranks refuse, and do not begin again",
        given=PLAIN.but(machines="abc").without(Machine("b"), Machine("c")),
        must_come=NOTHING_WHOLE,
    ),
    # What counts if ranks have written down different things, or nothing.
    Row(
        "one rank was killed before it wrote down that step 6 is verified: then it is not",
        given=PLAIN.but(ledgers={1: ledger(verified(4, FILES))}),
        must_come=Loaded(4, "verified"),
    ),
    Row(
        "a check had accepted step 8, and all ranks had captured it when they were killed: it counts",
        given=CAPTURING,
        must_come=Loaded(8, "verified"),
    ),
    Row(
        "one rank was killed before it had captured step 8: all ranks take the one before",
        given=CAPTURING.without(Copies(1, 8, "file", ("own memory", "copy in memory"))),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "a file of a step that no ledger names is not loaded, however new and whole it is",
        given=PLAIN.but(beside=(verified(9, MEMORY, FILES),)),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "a rank has lost all its ledgers: that gives no more trust than losing only the newest",
        given=Several((CAPTURING.without(Ledgers(1, "the newest")), CAPTURING.without(Ledgers(1, "all")))),
        must_come=either(
            [Loaded(6, "verified"), Loaded(6, "verified")],
            [Loaded(8, "verified"), Loaded(8, "verified")],
            [Loaded(8, "verified"), Loaded(6, "verified")],
        ),
    ),
    Row(
        "the ledger in memory is lost: the one in files says the same",
        given=CAPTURING.without(Ledgers(1, "in memory")),
        must_come=Loaded(8, "verified"),
    ),
    Row(
        "no rank has a ledger: whatever is there cannot be trusted",
        given=PLAIN.without(Ledgers(0, "all"), Ledgers(1, "all")),
        must_come=Refused("no ledger can be read"),
    ),
    Row(
        "a machine is back that was away while the job resumed without it: its old ledger does not count",
        given=PLAIN.but(
            ledger=ledger(verified(4, FILES), verified(6, MEMORY, FILES, lineage=1), lineage=1),
            ledgers={1: ledger(verified(4, FILES), corruption=5)},
        ),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "one rank has step 6 only from before the job resumed, the other from after: they are not combined",
        given=PLAIN.but(
            ledger=ledger(verified(4, FILES), verified(6, MEMORY, lineage=1), lineage=1),
            beside=(verified(6, FILES),),
        ).without(Copies(1, 6, "file", ("own memory", "copy in memory"))),
        must_come=Loaded(4, "verified"),
    ),
    Row(
        "the job ended before anything was complete: nothing is lost if it begins again",
        given=PLAIN.but(ledger=ledger(being_captured(2, MEMORY))).without(
            Copies(1, 2, "file", ("own memory", "copy in memory"))
        ),
        must_come=FROM_THE_BEGINNING,
    ),
    Row(
        "the ledgers are those of another job: its checkpoints are not loaded",
        given=PLAIN.but(job="another"),
        must_come=Refused("no ledger can be read"),
    ),
    # Another number of ranks.
    Row(
        "another number of ranks starts: refused, unless it asks for checkpoints of any number",
        given=PLAIN.but(now="abc"),
        must_come=OF_OTHERS,
    ),
    Row(
        "it asks for them: the new rank is sent what it needs",
        given=PLAIN.but(now="abc", any_layout=True),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "fewer ranks ask for them, on a machine that has a copy of what the other one had",
        given=PLAIN.but(now="b", any_layout=True),
        must_come=Loaded(6, "verified"),
    ),
    Row(
        "the copy that is sent to the new rank is damaged: the others are whole",
        given=PLAIN.but(now="abc", any_layout=True).without(Copies(0, 6, "weights", ("own memory",))),
        must_come=Loaded(6, "verified"),
        wrong=wrong_today("checkpoint B11", says=Loaded(4, "verified")),
    ),
    # From where each rank loads its state: what is nearest, and whole.
    Row(
        "nothing is lost: every rank has its state in memory",
        given=Sources(PLAIN),
        must_come=["its own memory", "its own memory"],
    ),
    Row(
        "a machine was rebooted: its rank has files",
        given=Sources(PLAIN.without(Reboot("b"))),
        must_come=["its own memory", "its own files"],
    ),
    Row(
        "a machine was replaced: another one sends what it has in memory",
        given=Sources(PLAIN.without(Machine("b"))),
        must_come=["its own memory", "rank 0's memory"],
    ),
    Row(
        "a machine was replaced, and the other one rebooted: that one sends a file",
        given=Sources(PLAIN.without(Machine("b"), Reboot("a"))),
        must_come=["its own files", "rank 0's files"],
    ),
    Row(
        "a rank's memory is damaged: it takes its file",
        given=Sources(PLAIN.without(Copies(1, 6, "own state", ("own memory",)))),
        must_come=["its own memory", "its own files"],
    ),
    Row(
        "all that a rank has itself is damaged: it takes the copy in another machine's memory",
        given=Sources(PLAIN.without(Copies(1, 6, "header", OWN))),
        must_come=["its own memory", "rank 0's memory"],
    ),
    Row(
        "one tensor is damaged in all copies: all but its bytes come from the rank's own memory",
        given=Sources(PLAIN.without(Copies(1, 6, "weights"))),
        must_come=["its own memory", "its own memory"],
    ),
    # What stays in files and in memory.
    Row(
        "the last file is being written: the two before it stay, and older ones go",
        given=Checks(["healthy"] * 6),
        must_come=(4, 5, 6),
    ),
    Row(
        "corruption is found: what was verified before it stays, however long the job goes on",
        given=Checks(["healthy"] * 5 + ["corruption"] * 4),
        must_come=(4, 5),
    ),
    Row(
        "the ledger in files can no longer be replaced: what it names stays, too, for a machine that reboots",
        given=Checks(["healthy"] * 8, blocked_from=5),
        must_come=(2, 3, 4, 6, 7, 8),
    ),
    Row(
        "a killed job starts again: it goes on bitwise, and nothing of the first run is left in the end",
        given=Job(),
        must_come=Resumed(5, "verified", is_bitwise=True, left=()),
        marks=[pytest.mark.long],
    ),
    Row(
        "a killed job starts again with fewer ranks: nothing is left of those that are gone, either",
        given=Job(then=3, now=2),
        must_come=Resumed(5, "verified", is_bitwise=True, left=()),
        marks=[pytest.mark.long],
    ),
    Row(
        "a process was killed in the middle of a file: the next job removes it",
        given=Unfinished("killed"),
        must_come="is removed",
    ),
    Row(
        "a process is in the middle of a file: another job leaves it alone",
        given=Unfinished("alive"),
        must_come="stays",
    ),
    Row(
        "a process was killed in the middle of a file on NFS: the next job removes it",
        given=Unfinished("killed", is_nfs=True),
        must_come="is removed",
    ),
    Row(
        "a process is in the middle of a file on NFS: another job leaves it alone",
        given=Unfinished("alive", is_nfs=True),
        must_come="stays",
    ),
    Row(
        "copying has ended with the job: nothing is written into files that the program has opened since",
        given=LateRequest(),
        must_come=0,
        wrong=wrong_today("checkpoint B8", says=1),
    ),
    # How much memory checkpoints may take.
    Row("a job needs less than half of the memory that is free", given=Start(needs=40), must_come=True),
    Row(
        "a job needs more than half of it: the training program needs memory, too",
        given=Start(needs=60),
        must_come=False,
    ),
    Row(
        "a killed job starts again: its old checkpoints take no memory from the new ones",
        given=Start(needs=40, is_second=True),
        must_come=True,
    ),
    Row(
        "a killed job starts again, and other programs have taken memory: what it had is still its own",
        given=Start(needs=40, is_second=True, taken=30),
        must_come=True,
    ),
    # One run at a time; and all ranks, or none.
    Row("two runs of one job: the second is refused", given=TwoRuns(), must_come=1),
    Row(
        "the folder is deleted while the first run begins to use it: only one of two may, all the same",
        given=TwoRuns(is_forgotten=True),
        must_come=1,
    ),
    Row(
        "all ranks knew of the step at which they are to connect again",
        given=Reconnecting(),
        must_come=["reconnects", "reconnects"],
    ),
    Row(
        "one rank did not know of the step in time: none connects, and training goes on",
        given=Reconnecting(knew=[0]),
        must_come=["does not", "does not"],
    ),
    Row(
        "the job's store answers one rank late: none may connect alone, and wait for it",
        given=Reconnecting(late_answer_to=1),
        must_come=either(["reconnects", "reconnects"], ["does not", "does not"], ["gives up", "gives up"]),
        wrong=wrong_today("checkpoint B10", says=["reconnects", "gives up"]),
    ),
]
QUESTIONS = {
    Restart: retrieval.loaded,
    Sources: retrieval.sources,
    Several: retrieval.several,
    Checks: retrieval.in_files_after,
    Job: retrieval.resumed_job,
    Unfinished: retrieval.unfinished,
    LateRequest: retrieval.bytes_after_a_late_request,
    Start: retrieval.may_start,
    TwoRuns: retrieval.runs_in_folder,
    Reconnecting: retrieval.reconnects,
}


@pytest.mark.parametrize("row", cases(ROWS))
def test_retrieval(row: Row, tmp_path: Path):
    check(row, QUESTIONS[type(row.given)](row.given, tmp_path))
