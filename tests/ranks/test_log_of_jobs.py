"""What a job says in its log: where it is looked at, what is found, how it ended, and little else."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import QUICK, STALL, Net
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.observer import handle
from torchscout.run.reader import read_run

STEPS, MOST_LINES = 1000, 10


def keep_log(folder: Path, rank: int) -> None:
    """What this rank writes to standard error goes to a file from now on."""
    folder.mkdir(exist_ok=True)
    with (folder / f"log-{rank}").open("a") as log:
        os.dup2(log.fileno(), 2)


def lines_of(folder: Path, rank: int) -> list[str]:
    """Those of torchscout."""
    lines = (folder / f"log-{rank}").read_text().splitlines()
    assert not any("Traceback" in line for line in lines), lines
    return [line for line in lines if "torchscout" in line]


def healthy_job(rank: int, folder: Path) -> None:
    keep_log(folder, rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checkpoint = CheckpointConfig(folder / "checkpoints")
    with enable_resiliency(model, optimizer, checkpoint=checkpoint, run_dir=folder / "run") as session:
        session.resume()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(1, 16)).square().mean().backward()
            optimizer.step()
        dist.barrier()
        assert session.failures == []


@pytest.mark.long
def test_the_log_of_a_healthy_job_is_short_and_complete(tmp_path: Path):
    run_ranks(healthy_job, 2, tmp_path, timeout=120)
    lines, others = lines_of(tmp_path, 0), lines_of(tmp_path, 1)
    assert others == []
    assert len(lines) <= MOST_LINES, lines
    assert all("torchscout: rank 0: " in line for line in lines), lines
    first, last = lines[0], lines[-1]
    assert "2 ranks" in first
    assert str(tmp_path / "run") in first
    assert sum(str(tmp_path / "checkpoints") in line for line in lines) == 2, "before and after the training"
    assert "no incidents" in last
    assert last.count(f"step {STEPS}") == 2, "it has ended, and is certified up to there"


def unwatched_job(rank: int, folder: Path) -> None:
    keep_log(folder, rank)
    model = DistributedDataParallel(Net())
    with enable_resiliency(model, observer=None, run_dir=folder / "run"):
        dist.barrier()


def test_uncovered_parts_are_logged_at_attach(tmp_path: Path):
    run_ranks(unwatched_job, 2, tmp_path, timeout=60)
    _, hangs, numbers, checkpoints, _ = lines_of(tmp_path, 0)
    for line, reason in (
        (hangs, "observer=None"),
        (numbers, "no optimizer"),
        (checkpoints, "checkpoint=None"),
    ):
        assert reason in line
    assert lines_of(tmp_path, 1) == []


def faulty_job(rank: int, folder: Path) -> tuple[list[tuple[str, tuple[int, ...]]], int, int]:
    """Rank 2 holds a wrong weight, and later rank 1 is late."""
    keep_log(folder, rank)
    reported: list[tuple[str, tuple[int, ...]]] = []
    job = Job(rank)
    faults = FaultPlan().set_value(rank=2, at="stack.0.up/weight", step=3, value=3.0)
    with (
        Injector(faults, rank, job.net, job.optimizer) as injector,
        job.attach(
            folder / "run",
            ReplayConfig(interval=1),
            observer=replace(
                QUICK, min_silence_seconds=2.5
            ),  # checks at every step take long on a busy machine
            on_incident=lambda each: reported.append((each.manifestation.value, each.ranks)),
        ) as session,
    ):
        for step in range(1, 9):
            time.sleep(STALL if step == 6 and rank == 1 else 0.02)
            job.train()
        dist.barrier()
        incidents = len(session.incidents)
    return reported, incidents, len(injector.fired)


@pytest.mark.slow
def test_incidents_are_logged_and_passed_on_on_every_rank_without_a_run_directory(tmp_path: Path):
    (tmp_path / "run").write_text("a file is in the way")
    results = run_ranks(faulty_job, 3, tmp_path, timeout=90)
    assert [fired for *_, fired in results] == [0, 0, 1]
    assert [reported for reported, *_ in results] == [[("sdc", (2,)), ("hang", (1,))]] * 3
    assert [incidents for _, incidents, _ in results] == [2, 2, 2]
    logs = [lines_of(tmp_path, rank) for rank in range(3)]
    incidents = [[line for line in lines if "incident (" in line] for lines in logs]
    assert [len(each) for each in incidents] == [2, 0, 0], incidents
    assert all(each in incidents[0][0] for each in ("sdc", "step 3", "Rank 2")), incidents
    assert "hang" in incidents[0][1]
    assert "1 hang and 1 sdc" in logs[0][-1]
    for lines in logs:
        assert any("File exists" in line for line in lines), "each rank says that it cannot write"


def late_job(rank: int, folder: Path) -> None:
    keep_log(folder, rank)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with enable_resiliency(model, optimizer, replay=None, observer=QUICK, run_dir=folder / "run"):
        for step in range(1, 9):
            time.sleep(STALL if step == 5 and rank == 0 else 0.02)
            optimizer.zero_grad()
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()


def test_a_hang_of_the_first_rank_is_logged_by_another(tmp_path: Path):
    run_ranks(late_job, 2, tmp_path, timeout=60)
    assert not any("incident (" in line for line in lines_of(tmp_path, 0))
    (line,) = [line for line in lines_of(tmp_path, 1) if "incident (" in line]
    assert "incident (hang)" in line


def job_that_loses_an_observer(rank: int, folder: Path) -> None:
    keep_log(folder, rank)
    handle._RESTART_SECONDS = 0.05
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with enable_resiliency(model, optimizer, replay=None, run_dir=folder / "run") as session:
        while rank == 1 and not session.failures:
            with suppress(ProcessLookupError):
                os.kill(session.status()["observer"]["pid"], signal.SIGKILL)
            time.sleep(0.05)
        dist.barrier()


def test_a_rank_that_loses_its_observer_is_known_to_all(tmp_path: Path):
    run_ranks(job_that_loses_an_observer, 2, tmp_path, timeout=60)
    last = lines_of(tmp_path, 0)[-1]
    assert "because rank 1 was not watched for hangs to the end" in last
    assert read_run(tmp_path / "run").unwatched == [1]
