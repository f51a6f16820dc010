"""Real jobs that hang, over Gloo: what is published there suffices to name the rank (paper, section 7).

Who is named for what is held by the tables in ``tests/scenarios``, and that a late, killed or diverging rank
of every kind of job is found by ``tests/contracts``.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import (
    FAULTY_STEP,
    QUICK,
    STALL,
    Net,
    give_up_soon,
    incidents,
    resolutions,
    steps,
    until_it_raises,
    wait_for_incident,
)
from tests.support.ranks import RankError, run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism
from torchscout.decision.types import Action, Manifestation, Scope
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

NOBODY = -1
LATE = FaultPlan().stall(rank=2, at="step", step=FAULTY_STEP, seconds=STALL)


def ddp_job(rank: int, run_dir: Path, faults: FaultPlan):
    """An ordinary DDP job; returns how many faults fired, and its status, with what its callback was told."""
    told: list[tuple[int, ...]] = []
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {"observer": QUICK, "run_dir": run_dir, "on_incident": lambda each: told.append(each.ranks)}
    with (
        enable_resiliency(model, optimizer, **arguments) as session,
        Injector(faults, rank, model.module, optimizer) as injector,
    ):
        batches = injector.input(torch.randn(4, 16) for _ in range(100))
        for step, batch in zip(steps(), session.watch_input(batches), strict=False):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if step == FAULTY_STEP:
                with session.checkpoint_io("write"), injector.checkpoint_io("write"):
                    pass
        status = session.status()
        assert [each.ranks for each in session.incidents] == told
        dist.barrier()  # who leaves says goodbye, and that is a message
    return len(injector.fired), status | {"told": told}


def test_a_clean_job_is_silent_and_its_observers_too(tmp_path: Path):
    for fired, status in run_ranks(ddp_job, 4, tmp_path, FaultPlan(), timeout=90):
        assert (fired, status["told"]) == (0, [])
        assert (status["observer"]["messages"], status["failures"]) == (0, [])
    assert incidents(tmp_path) == []


def test_a_late_rank_is_named_and_every_rank_is_told(tmp_path: Path):
    results = run_ranks(ddp_job, 4, tmp_path, LATE, timeout=90)
    assert [fired for fired, _ in results] == [0, 0, 1, 0]
    (incident,), (truth,) = incidents(tmp_path), LATE.truth(Mesh.grid(replica=4))
    assert truth.matches(incident), (truth, incident.sentence)
    assert (incident.manifestation, incident.scope, incident.ranks) == (Manifestation.HANG, Scope.RANK, (2,))
    assert incident.action is Action.RESTART
    assert [each.ranks for each in resolutions(tmp_path)] == [(2,)]
    for _, status in results:
        assert status["told"] == [(2,)]
        assert status["observer"]["threshold_seconds"] < QUICK.silence_multiple * STALL, "not a usual step"


def net_and_optimizer() -> tuple[Net, torch.optim.Optimizer]:
    """For jobs that are about communication: nothing is learnt, but steps are counted."""
    model = Net()
    return model, torch.optim.SGD(model.parameters())


def pipeline_job(rank: int, run_dir: Path, stalled: int) -> None:
    """Activations go down the stages, and gradients back up; their receives are posted early."""
    last = dist.get_world_size() - 1
    model, optimizer = net_and_optimizer()
    stages = Parallelism(pipeline=4)
    with enable_resiliency(model, optimizer, observer=QUICK, parallelism=stages, run_dir=run_dir):
        for step in steps():
            activation, gradient = torch.ones(8), torch.ones(8)
            if rank < last:
                early = dist.irecv(gradient, src=rank + 1)
            if rank > 0:
                dist.recv(activation, src=rank - 1)
            model(torch.ones(1, 16))
            if step == FAULTY_STEP and rank == stalled:
                time.sleep(STALL)
            if rank < last:
                dist.send(activation, dst=rank + 1)
                early.wait()
            if rank > 0:
                dist.send(gradient, dst=rank - 1)
            optimizer.step()


@pytest.mark.long_cases("no fault")
@pytest.mark.parametrize("stalled", [2, NOBODY], ids=["late", "no fault"])
def test_a_stalled_pipeline_stage_is_named_and_its_neighbours_are_not(tmp_path: Path, stalled: int):
    run_ranks(pipeline_job, 4, tmp_path, stalled, timeout=90)
    assert [each.ranks for each in incidents(tmp_path)] == [(stalled,)] * (stalled != NOBODY)


def pausing_job(rank: int, run_dir: Path) -> None:
    """One rank pauses for long, and says so; later another one is late."""
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=4)
    with enable_resiliency(
        model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir
    ) as session:
        for step in steps():
            model(torch.ones(1, 16))
            if step == FAULTY_STEP - 1:
                with session.pause_observer():
                    time.sleep(STALL if rank == 0 else 0.0)
                    dist.barrier()
            if step == FAULTY_STEP + 1 and rank == 2:
                time.sleep(2 * STALL)
            dist.all_reduce(torch.ones(3))
            optimizer.step()


@pytest.mark.long
def test_a_pause_that_was_announced_blames_nobody_and_hides_no_later_hang(tmp_path: Path):
    run_ranks(pausing_job, 4, tmp_path, timeout=90)
    assert [each.ranks for each in incidents(tmp_path)] == [(2,)]


TRAINING = {"at": "all_reduce@training", "axis": "replica"}


def communicating_job(rank: int, run_dir: Path, faults: FaultPlan, hidden: bool = False) -> tuple[bool, int]:
    """Two groups of all ranks. Gloo may hang over what is done to them, then gives up; and what fired.

    Where the first collective is ``hidden``, it is waited for only after the second was issued.
    """
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=4)
    with (
        enable_resiliency(model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir),
        Injector(faults, rank, model, optimizer) as injector,
    ):
        first, second = give_up_soon(), give_up_soon()

        def train() -> None:
            for _ in steps():
                model(torch.ones(1, 16))
                work = dist.all_reduce(torch.ones(4000), group=first, async_op=hidden)
                dist.all_reduce(torch.ones(3), group=first if hidden else second)
                if hidden:
                    work.wait()
                optimizer.step()

        return until_it_raises(train), len(injector.fired)


def test_a_rank_that_sends_another_shape_is_named_though_gloo_may_end_others_over_it(tmp_path: Path):
    faults = FaultPlan().change_collective(rank=1, step=FAULTY_STEP, what="shape", **TRAINING)
    with suppress(RankError):
        results = run_ranks(communicating_job, 4, tmp_path, faults, timeout=90)
        assert any(raised for raised, _ in results)
        assert [fired for _, fired in results] == [0, 1, 0, 0]
    wait_for_incident(tmp_path)
    (truth,) = faults.truth(Mesh.grid(replica=4))
    assert all(truth.matches(each) for each in incidents(tmp_path)), (truth, incidents(tmp_path))
    assert {each.ranks for each in incidents(tmp_path)} == {(1,)}


def job_that_loses_its_hub(rank: int, run_dir: Path) -> int:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir) as session:
        for step in steps():
            if step == 3 and rank == 0:
                os.kill(session._monitor.observer.pid, signal.SIGKILL)
            time.sleep(STALL if step == FAULTY_STEP and rank == 2 else 0.0)
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        dist.barrier()
        return session.step


def test_a_lost_hub_neither_stops_training_nor_hides_a_hang(tmp_path: Path):
    assert run_ranks(job_that_loses_its_hub, 4, tmp_path, timeout=90) == [8] * 4
    assert [each.ranks for each in incidents(tmp_path)] == [(2,)]
