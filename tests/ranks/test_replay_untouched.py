"""Replay holds on to nothing between two checks; that it changes nothing is a contract of the catalog."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.support.call_recorder import CallRecorder
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job
from torchscout.collectives.interceptor import listen
from torchscout.config import ReplayConfig


def tensors_alive(rank: int, run_dir: Path) -> list[int]:
    """After each step."""
    # From then on Python sees every collective's tensors, DDP's buckets among them.
    listen(CallRecorder()).remove()
    job, alive = Job(rank), []
    with job.attach(run_dir, ReplayConfig(interval=4)) as session:
        for _ in range(11):
            job.train()
            gc.collect()
            alive.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
            hooked = any(block._forward_pre_hooks for block in job.net.stack)
            assert hooked == ((session.step + 1) % 4 == 0), "hooks are there only in a step that is due"
    return alive


@pytest.mark.slow
def test_no_memory_is_retained_between_checks(tmp_path: Path):
    for alive in run_ranks(tensors_alive, 3, tmp_path, timeout=90):
        assert alive[1:3] == alive[4:6] == alive[8:10]
