"""The small job itself, on which the tests of observers rely."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.small_job import small_job, until


def test_no_rank_goes_on_without_one_that_was_lost_in_an_exchange(tmp_path: Path):
    with small_job(3, tmp_path, min_silence_seconds=60.0) as job:
        job.order(2, do="sleep", seconds=1.0)
        until(lambda: min(job.steps[:2]) > job.steps[2], "ranks 0 and 1 wait for rank 2")
        job.trainers[1].kill()
        last = job.steps[1] + 1
        until(lambda: job.steps[0] == job.steps[2] == last, "they enter the next exchange")
        time.sleep(0.3)
        assert job.steps == [last, last - 1, last]
