"""Hub and standby are lost for good: another observer becomes the hub. Real observers, small trainers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.small_job import SmallJob, small_job, until
from torchscout.decision.types import Incident, Resolved
from torchscout.utils.procfs import is_running

LONG = 600.0
ELECTED = 2
"""The place of the first candidate, which is rank 1 in a job on one machine."""


def lose(job: SmallJob, *ranks: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Observers that nobody starts again."""
    for rank in ranks:
        os.kill(job.observers[rank], how)
    if how is signal.SIGKILL:
        until(lambda: not any(is_running(job.observers[rank]) for rank in ranks), "they are gone")


def elected(job: SmallJob, *ranks: int) -> None:
    until(
        lambda: all(job.ask(rank, do="status")["hub"] == ELECTED for rank in ranks),
        "all reach the elected hub",
    )


def goes_on(job: SmallJob) -> None:
    before = min(job.steps)
    until(lambda: min(job.steps) > before + 20, "training goes on")


def one_incident(job: SmallJob) -> Incident:
    incident = until(job.lines, "an incident is written")[0]
    time.sleep(3.0)  # what lasts is looked at again, more than once
    assert len(job.lines()) == 1
    return incident


@pytest.mark.long
def test_with_hub_and_standby_lost_for_good_a_rank_that_hangs_is_named(tmp_path: Path):
    with small_job(5, tmp_path, election_seconds=1.0) as job:
        lose(job, 0, 4)
        elected(job, 1, 2, 3)
        job.order(3, do="sleep", seconds=LONG)
        assert one_incident(job).ranks == (3,)
        assert "candidate 2" in (tmp_path / "observers/rank-1.log").read_text()


@pytest.mark.long
def test_with_hub_and_standby_lost_a_job_that_goes_on_is_silent(tmp_path: Path):
    with small_job(5, tmp_path, election_seconds=1.0) as job:
        lose(job, 0, 4)
        elected(job, 1, 2, 3)
        goes_on(job)
        statuses = [job.ask(rank, do="status") for rank in (1, 2, 3)]
        assert [status["messages"] for status in statuses] == [0, 0, 0]
        assert not any("problem" in status for status in statuses)
        assert job.lines() == []


@pytest.mark.long
def test_a_minority_of_observers_decides_nothing(tmp_path: Path):
    with small_job(4, tmp_path, election_seconds=0.5) as job:
        lose(job, 0, 1, 3)
        job.order(1, do="sleep", seconds=5.0)
        record = until(lambda: job.records(2), "the last observer writes down what it knows")[0]
        assert record.status == "not_checked"
        assert "no hub" in record.reason
        goes_on(job)
        assert "1 of 4 observers" in job.ask(2, do="status")["problem"]
        assert job.lines() == []


@pytest.mark.slow_cases("the elected hub writes it")
@pytest.mark.long_cases("the standby writes it")
@pytest.mark.parametrize(
    "lost",
    [pytest.param((0,), id="the standby writes it"), pytest.param((0, 4), id="the elected hub writes it")],
)
def test_the_end_of_an_incident_that_a_lost_hub_reported_is_written_once(
    tmp_path: Path, lost: tuple[int, ...]
):
    with small_job(5, tmp_path, election_seconds=1.0) as job:
        job.order(3, do="sleep", seconds=10.0)
        incident = until(job.lines, "the hub reports it")[0]
        time.sleep(0.5)  # and tells the observers
        lose(job, *lost)
        assert job.lines() == [incident]
        end = until(lambda: job.lines()[1:], "its end is written")[0]
        assert isinstance(end, Resolved)
        assert (end.ranks, end.sentence) == ((3,), incident.sentence)
        goes_on(job)
        assert job.lines() == [incident, end]


@pytest.mark.slow
def test_stopped_hubs_are_replaced_and_report_nothing_after_they_continue(tmp_path: Path):
    with small_job(5, tmp_path, election_seconds=2.0) as job:
        lose(job, 0, 4, how=signal.SIGSTOP)
        job.order(3, do="sleep", seconds=LONG)
        assert until(job.lines, "an incident is written")[0].ranks == (3,)
        for rank in (0, 4):
            os.kill(job.observers[rank], signal.SIGCONT)
        assert one_incident(job).ranks == (3,)


@pytest.mark.slow
def test_a_trainer_that_ends_while_there_is_no_hub_is_named(tmp_path: Path):
    with small_job(5, tmp_path, election_seconds=2.0) as job:
        lose(job, 0, 4)
        job.trainers[3].kill()
        assert one_incident(job).ranks == (3,)


@pytest.mark.slow
def test_observers_of_a_job_with_an_elected_hub_leave_with_their_trainers(tmp_path: Path):
    with small_job(5, tmp_path, election_seconds=1.0, grace_seconds=8.0) as job:
        lose(job, 0, 4)
        elected(job, 1, 2, 3)
        for rank in range(5):
            job.order(rank, do="finish")
        until(lambda: not any(map(is_running, job.observers)), "the observers leave")
        assert job.lines() == []
