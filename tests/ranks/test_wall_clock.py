"""A wall clock that jumps by hours says nothing about anybody's silence (paper, section 7)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.small_job import SmallJob, small_job, until
from tests.support.wall_clock import WallClock, why_impossible
from torchscout.run.reader import Stamped, incident_lines

pytestmark = pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))

HOUR = 3600
FLOOR_SECONDS = 2.0


def trains_on_unasked(job: SmallJob) -> None:
    """For longer than a silence may last, and no observer has a word to say."""
    end, before = time.monotonic() + 1.5 * FLOOR_SECONDS, min(job.steps)
    until(lambda: time.monotonic() > end and min(job.steps) > before + 20, "training goes on")
    statuses = [job.ask(rank, do="status") for rank in range(job.size)]
    assert [(status["rounds"], status["messages"]) for status in statuses] == [(0, 0)] * job.size
    assert job.lines() == []


def hours_ahead(clock: float) -> int:
    return round((clock - time.time()) / HOUR)


@pytest.mark.slow
def test_jumps_of_the_wall_clock_neither_make_nor_hide_a_hang(tmp_path: Path):
    clock = WallClock(tmp_path)
    with small_job(3, tmp_path, variables=clock.variables, min_silence_seconds=FLOOR_SECONDS) as job:
        for hours in (1, -1):
            clock.shift(hours * HOUR)
            assert [hours_ahead(job.ask(rank, do="time")["time"]) for rank in range(3)] == [hours] * 3
            trains_on_unasked(job)
        job.order(1, do="sleep", seconds=600.0)
        until(lambda: job.steps[0] == job.steps[1] + 1, "the others wait")
        clock.shift(2 * HOUR)
        (incident,) = until(job.lines, "an incident is written")
        assert incident.ranks == (1,)
        assert incident.records[0].stall_seconds < HOUR / 2
    (line,) = incident_lines(tmp_path)
    assert isinstance(line, Stamped)
    assert hours_ahead(line.time) == 2, "the observers' clock jumped, too"
