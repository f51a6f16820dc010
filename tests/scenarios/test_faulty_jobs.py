"""What is said about the faults of real jobs: one after the other, on the same and on another rank.

The other tables decide on single histories and reports. Here real ranks train, real observers watch them, and
what an earlier fault leaves behind may change what is said about the next one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Finding, Row, cases, check, crash, hang, sdc, straggler
from tests.scenarios.today import jobs

SEQUENCES = int(os.environ.get("SCOUT_SEQUENCES", "2"))
"""How many random sequences of faults are tried; each takes a few seconds."""
FIRST_SEED = 1376
"""The first two have every kind of fault but for a rank that is killed, which has rows of its own."""


class Fault(NamedTuple):
    """What happens to a rank before a step."""

    what: str
    rank: int
    step: int


sleeps = partial(Fault, "sleeps")
"""Until it is reported; then it trains on."""
flips = partial(Fault, "flips a bit")
"""Of a weight, in memory."""
slow = partial(Fault, "is slow")
"""In the computation of the next steps."""
raises = partial(Fault, "raises")
killed = partial(Fault, "is killed")
loses_observer = partial(Fault, "loses its observer")
"""Which is killed as often as it is started again: four times."""


@dataclass(frozen=True)
class Job:
    """Data-parallel replicas on one machine."""

    faults: Sequence[Fault]
    ranks: int = 3
    steps: int = 24
    silence: float = 2.0
    """Seconds after which a rank that does nothing is late."""
    cores: int = 2
    """For all ranks and observers together: what happens by chance depends on it."""
    runs: int = 1
    """How often the job is run unless it is answered wrongly before, where that happens by chance."""


class Notified(NamedTuple):
    """What people learn who do not look into the run directory: the ranks that are named."""

    webhook: Sequence[int]
    output: Sequence[int]
    """Of the job, on its terminal or in the launcher's log."""
    last_line: str
    """Of rank 0 in that output: whether it says ``no incidents``."""


class Known(NamedTuple):
    """Where it is said that hang detection is off on a rank."""

    log: bool
    failures: bool
    status: bool
    last_line: str


@dataclass(frozen=True)
class Launched:
    """The same job under torchrun, which ends all other ranks once one has ended."""

    job: Job


NOT_THAT = "not that there were none"
LATE = hang([1], "rank", "restart")


def job(*faults: Fault, **settings: object) -> Job:
    return Job(faults, **settings)


def ended(rank: int) -> Finding:
    return crash([rank], "rank", "restart")


ROWS = [
    Row(
        "a rank is killed, and the others fail because of that",
        given=job(killed(2, 10)),
        must_come=[ended(2)],
        never=[0, 1],
    ),
    Row(
        "a rank is late and trains on; 80 steps later another rank is killed",
        given=job(sleeps(1, 6), killed(2, 86), steps=90, runs=3),
        must_come=[LATE, ended(2)],
        never=[0],
    ),
    Row(
        "a rank is late and trains on; 80 steps later the same rank is killed",
        given=job(sleeps(1, 6), killed(1, 86), steps=90, cores=1, runs=3),
        must_come=[LATE, ended(1)],
        never=[0, 2],
    ),
    Row(
        "a rank is killed under torchrun",
        given=Launched(job(killed(1, 10), ranks=2, runs=4)),
        must_come=Notified(webhook=[1], output=[1], last_line=NOT_THAT),
    ),
    Row(
        "the observer of a rank is killed until it is not started again",
        given=job(loses_observer(0, 6), ranks=2, silence=60.0),
        must_come=Known(log=True, failures=True, status=True, last_line=NOT_THAT),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("row", cases(ROWS))
def test_faulty_jobs(row: Row, tmp_path: Path):
    is_launched = isinstance(row.given, Launched)
    given = row.given.job if is_launched else row.given
    for number in range(given.runs):
        folder = tmp_path / str(number)
        if is_launched:
            answer = Notified(*jobs.notified(given, folder))
        elif isinstance(row.must_come, Known):
            answer = Known(*jobs.known(given, folder))
        else:
            answer = jobs.reported(given, folder)
        if row.must_come != answer:
            break
    check(row, answer)


@pytest.mark.long
def test_random_sequences_of_faults(tmp_path: Path):
    """Every fault is reported, in order, and nobody else; ``SCOUT_SEQUENCES=50`` tries more of them."""
    for seed in range(FIRST_SEED, FIRST_SEED + SEQUENCES):
        given = drawn(random.Random(seed))
        right = [finding_of(each) for each in given.faults]
        assert jobs.reported(given, tmp_path / str(seed)) == right, f"seed {seed}: {given.faults}"


def drawn(chance: random.Random) -> Job:
    """Up to three faults that training survives, then perhaps one that ends it, all of them on two ranks."""
    ranks = chance.sample(range(3), 2)
    what = chance.sample([sleeps, flips, slow], chance.randrange(4))
    what += chance.choice([[], [raises], [killed]])
    faults = [each(chance.choice(ranks), 6 + 8 * number) for number, each in enumerate(what)]
    return job(*faults, steps=6 + 8 * len(faults))


def finding_of(fault: Fault) -> Finding:
    by_kind = {
        "sleeps": hang([fault.rank], "rank", "restart"),
        "flips a bit": sdc([fault.rank], "rank", "replace"),
        "is slow": straggler([fault.rank], "rank", "inspect"),
    }
    return by_kind.get(fault.what) or ended(fault.rank)
