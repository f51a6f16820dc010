"""Observers whose messages pass through relays, one on each machine. Real observers, small trainers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_job import SmallJob, small_job, until
from torchscout.decision.types import Incident, Resolved, Scope
from torchscout.utils.procfs import is_running

LONG = 600.0
HOSTS = ["a", "a", "a", "b", "b", "b"]
"""The hub is on rank 0, the standby on rank 5; ranks 0 and 3 are relays."""


@contextmanager
def relayed_job(run_dir: Path, **settings: Any) -> Iterator[SmallJob]:
    with small_job(len(HOSTS), run_dir, hosts=HOSTS, min_relayed_ranks=2, **settings) as job:
        until(lambda: all(connected(job, rank) == [True, True] for rank in range(job.size)), "all connect")
        yield job


def connected(job: SmallJob, rank: int) -> list[bool]:
    return job.ask(rank, do="status")["connected"]


def connections(port: int) -> int:
    """How many clients are connected to a port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[1].partition(":")[2], 16) == port and row[3] == "01" for row in rows)


def one_incident(job: SmallJob) -> Incident:
    incident = until(job.lines, "an incident is written")[0]
    time.sleep(3.0)  # what lasts is looked at again, more than once
    assert len(job.lines()) == 1, job.lines()
    return incident


def goes_on(job: SmallJob) -> None:
    before = min(job.steps)
    until(lambda: min(job.steps) > before + 20, "training goes on")


@pytest.mark.long
def test_a_hub_has_one_connection_to_each_machine_and_names_a_late_rank(tmp_path: Path):
    # On a busy machine a hub may answer after a second, and the standby would report the same hang.
    patient = {"min_silence_seconds": 30.0, "grace_seconds": 120.0, "failover_seconds": 10.0}
    with relayed_job(tmp_path, **patient) as job:
        goes_on(job)
        statuses = [job.ask(rank, do="status") for rank in range(job.size)]
        assert [status["messages"] for status in statuses] == [0] * job.size
        assert [connections(port) for port in job.ports[:2]] == [2, 2]
        for rank in range(job.size):
            job.order(rank, do="change", min_silence_seconds=0.6)
        until(lambda: job.ask(5, do="status")["threshold_seconds"] == 0.6, "the new threshold holds")
        job.order(4, do="sleep", seconds=3.0)
        incident = until(job.lines, "an incident is written")[0]
        assert (incident.ranks, incident.hosts) == ((4,), ("b",))
        stacks = {each.progress["rank"]: each.progress["stack"] for each in incident.records if each.progress}
        assert "in _do_sleep" in stacks[4]
        resolved = until(lambda: job.lines()[1:], "it is resolved")[0]
        assert isinstance(resolved, Resolved)
        assert job.ask(0, do="status")["malformed"] == 0
        for rank in range(job.size):
            job.order(rank, do="finish")
        until(lambda: not any(map(is_running, job.observers)), "the observers leave")
        assert len(job.lines()) == 2
        assert list((tmp_path / "observers").iterdir()) == [], "none of them has an error to tell"


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_observers_whose_relay_is_lost_reach_the_hubs_themselves(tmp_path: Path, how: signal.Signals):
    """Nobody names the machine, nor anybody else on it, though its relay does not answer."""
    with relayed_job(tmp_path) as job:
        os.kill(job.observers[3], how)
        job.order(4, do="sleep", seconds=LONG)
        incident = one_incident(job)
        assert (incident.ranks, incident.scope) == ((4,), Scope.RANK), incident.sentence


def test_a_relay_that_is_lost_while_all_is_well_changes_nothing(tmp_path: Path):
    with relayed_job(tmp_path) as job:
        os.kill(job.observers[3], signal.SIGKILL)
        until(lambda: connected(job, 4) == connected(job, 5) == [True, True], "they connect themselves")
        goes_on(job)
        assert job.lines() == []


@pytest.mark.long
def test_a_machine_that_is_lost_is_named(tmp_path: Path):
    with relayed_job(tmp_path) as job:
        for rank in (3, 4, 5):
            os.kill(job.observers[rank], signal.SIGKILL)
            job.trainers[rank].kill()
        incident = one_incident(job)
        assert (incident.ranks, incident.scope) == ((3, 4, 5), Scope.MACHINE), incident.sentence
        assert incident.hosts == ("b",)


@pytest.mark.long
def test_with_hub_and_standby_lost_another_hub_is_found_through_the_relays(tmp_path: Path):
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    with small_job(8, tmp_path, hosts=hosts, min_relayed_ranks=2, election_seconds=2.0) as job:
        until(lambda: all(all(connected(job, rank)) for rank in range(8)), "all connect")
        for rank in (0, 7):
            os.kill(job.observers[rank], signal.SIGKILL)
        until(lambda: not any(is_running(job.observers[rank]) for rank in (0, 7)), "they are gone")
        alive = range(1, 7)
        until(lambda: {job.ask(rank, do="status")["hub"] for rank in alive} == {2}, "all reach another hub")
        job.order(4, do="sleep", seconds=LONG)
        incident = one_incident(job)
        assert incident.ranks == (4,), incident.sentence
        assert connections(job.ports[2]) == 4, "machines b, c and d, and rank 1, whose relay is gone"
