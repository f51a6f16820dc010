"""Real jobs that hang: which ranks are named, and the sentence (paper, section 7)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from torchscout.collectives.interceptor import listen
from torchscout.config import Parallelism
from torchscout.decision.records.record import Action, Incident, Manifestation, Scope
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

STEP_PLACE = "step"
SLOW = pytest.mark.slow


def ddp_job(rank: int, run_dir: Path, faults: FaultPlan):
    """An ordinary DDP job; returns how many faults fired and the messages its observer exchanged."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir) as session,
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
        dist.barrier()  # who leaves says goodbye, and that is a message
    return len(injector.fired), status


def only_incident(run_dir: Path, faults: FaultPlan, mesh: Mesh = Mesh.grid(replica=4)) -> Incident:  # noqa: B008
    """The one incident there is, which says exactly what was done to the job."""
    (incident,), (truth,) = incidents(run_dir), faults.truth(mesh)
    assert truth.matches(incident), (truth, incident.sentence)
    return incident


def test_a_clean_job_is_silent_and_its_observers_too(tmp_path: Path):
    for fired, status in run_ranks(ddp_job, 4, tmp_path, FaultPlan(), timeout=90):
        assert fired == 0
        assert (status["observer"]["messages"], status["failures"]) == (0, [])
    assert incidents(tmp_path) == []


@pytest.mark.parametrize(
    "place", [STEP_PLACE, *(pytest.param(each, marks=SLOW) for each in ("2/forward", "2/backward"))]
)
def test_a_late_rank_is_named(tmp_path: Path, place: str):
    faults = FaultPlan().stall(rank=2, at=place, step=FAULTY_STEP, seconds=STALL)
    results = run_ranks(ddp_job, 4, tmp_path, faults, timeout=90)
    assert [fired for fired, _ in results] == [0, 0, 1, 0]
    incident = only_incident(tmp_path, faults)
    assert (incident.manifestation, incident.scope, incident.ranks) == (Manifestation.HANG, Scope.RANK, (2,))
    assert incident.action is Action.RESTART
    assert "Rank 2" in incident.sentence
    (resolved,) = resolutions(tmp_path)
    assert resolved.ranks == (2,)
    for _, status in results:
        assert status["observer"]["threshold_seconds"] < QUICK.silence_multiple * STALL, "not a usual step"


@pytest.mark.long_cases("1-input-input")
@pytest.mark.parametrize(
    ("rank", "at", "word"),
    [(1, "input", "input"), pytest.param(3, "checkpoint_write", "checkpoint", marks=SLOW)],
)
def test_a_stall_outside_of_communication_is_named_as_such(tmp_path: Path, rank: int, at: str, word: str):
    faults = FaultPlan().stall(rank=rank, at=at, step=FAULTY_STEP, seconds=STALL)
    results = run_ranks(ddp_job, 4, tmp_path, faults, timeout=90)
    assert [fired for fired, _ in results] == [int(each == rank) for each in range(4)]
    incident = only_incident(tmp_path, faults)
    assert incident.ranks == (rank,)
    assert word in incident.sentence


@pytest.mark.long_cases("2")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=SLOW), 2])
def test_a_killed_trainer_is_named_as_gone(tmp_path: Path, victim: int):
    faults = FaultPlan().kill(rank=victim, step=FAULTY_STEP)
    with pytest.raises(RankError, match=f"rank {victim}: exited without an answer, exit code -9"):
        run_ranks(ddp_job, 4, tmp_path, faults, timeout=60)
    wait_for_incident(tmp_path)
    incident = only_incident(tmp_path, faults)
    assert incident.ranks == (victim,)
    assert f"The trainer of rank {victim}" in incident.sentence
    assert "ended before it had finished" in incident.sentence


STOPPED = {
    "SIGSTOP": FaultPlan().freeze(rank=1, step=FAULTY_STEP, seconds=2 * STALL),
    "GIL": FaultPlan().hold_interpreter(rank=1, step=FAULTY_STEP, seconds=2 * STALL),
}


@pytest.mark.slow_cases("SIGSTOP")
@pytest.mark.long_cases("GIL", "SIGSTOP")
@pytest.mark.parametrize("how", STOPPED)
def test_a_trainer_that_cannot_run_is_named(tmp_path: Path, how: str):
    results = run_ranks(ddp_job, 4, tmp_path, STOPPED[how], timeout=90)
    assert [fired for fired, _ in results] == [0, 1, 0, 0]
    incident = only_incident(tmp_path, STOPPED[how])
    assert incident.ranks == (1,)
    assert ("stopped" in incident.sentence) is (how == "SIGSTOP")


def job_with_callback(rank: int, run_dir: Path) -> list[tuple[int, ...]]:
    reported: list[tuple[int, ...]] = []
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {
        "observer": QUICK,
        "run_dir": run_dir,
        "on_incident": lambda each: reported.append(each.ranks),
    }
    with enable_resiliency(model, optimizer, **arguments) as session:
        for step in steps():
            time.sleep(STALL if step == FAULTY_STEP and rank == 0 else 0.0)
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        assert [incident.ranks for incident in session.incidents] == [(0,)], session.incidents
    return reported


def test_the_users_callback_is_called_on_every_rank(tmp_path: Path):
    assert run_ranks(job_with_callback, 2, tmp_path, timeout=90) == [[(0,)], [(0,)]]


def fsdp_job(rank: int, run_dir: Path, faults: FaultPlan) -> int:
    model = Net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir),
        Injector(faults, rank, model, optimizer) as injector,
    ):
        for _ in steps():
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    return len(injector.fired)


@pytest.mark.long
def test_a_rank_that_never_enters_an_all_gather_of_fsdp_is_named(tmp_path: Path):
    faults = FaultPlan().stall(rank=3, at="1/forward", step=FAULTY_STEP, seconds=STALL)
    assert run_ranks(fsdp_job, 4, tmp_path, faults, timeout=90) == [0, 0, 0, 1]
    (incident,) = incidents(tmp_path)
    assert incident.ranks == (3,)
    assert "all_gather" in incident.sentence


def net_and_optimizer() -> tuple[Net, torch.optim.Optimizer]:
    """For jobs that are about communication: nothing is learnt, but steps are counted."""
    model = Net()
    return model, torch.optim.SGD(model.parameters())


def hybrid_job(rank: int, run_dir: Path, stalled: int) -> None:
    axes = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replica", "tensor"))
    model, optimizer = net_and_optimizer()
    with enable_resiliency(model, optimizer, observer=QUICK, parallelism=axes, run_dir=run_dir):
        for step in steps():
            if step == FAULTY_STEP and rank == stalled:
                time.sleep(STALL)
            for axis in ("tensor", "replica"):
                dist.all_reduce(model(torch.ones(1, 16)).detach(), group=axes.get_group(axis))
            optimizer.step()


@pytest.mark.long
def test_a_tensor_parallel_victim_is_not_blamed(tmp_path: Path):
    run_ranks(hybrid_job, 8, tmp_path, 5, timeout=120)
    (incident,) = incidents(tmp_path)
    assert incident.ranks == (5,)


def pipeline_job(rank: int, run_dir: Path, stalled: int, posted: bool) -> None:
    """Activations go down the stages, and gradients back up."""
    last = dist.get_world_size() - 1
    model, optimizer = net_and_optimizer()
    stages = Parallelism(pipeline=4)
    with enable_resiliency(model, optimizer, observer=QUICK, parallelism=stages, run_dir=run_dir):
        for step in steps():
            activation, gradient = torch.ones(8), torch.ones(8)
            if posted and rank < last:
                early = dist.irecv(gradient, src=rank + 1)
            if rank > 0:
                dist.recv(activation, src=rank - 1)
            model(torch.ones(1, 16))
            if step == FAULTY_STEP and rank == stalled:
                time.sleep(STALL)
            if rank < last:
                dist.send(activation, dst=rank + 1)
                early.wait() if posted else dist.recv(gradient, src=rank + 1)
            if rank > 0:
                dist.send(gradient, dst=rank - 1)
            optimizer.step()


@pytest.mark.parametrize(
    "posted",
    [pytest.param(False, id="in order"), pytest.param(True, id="receive posted early", marks=SLOW)],
)
@pytest.mark.parametrize("stalled", [pytest.param(0, marks=SLOW), 2])
def test_a_stalled_pipeline_stage_is_named_and_its_neighbours_are_not(
    tmp_path: Path, stalled: int, posted: bool
):
    run_ranks(pipeline_job, 4, tmp_path, stalled, posted, timeout=90)
    (incident,) = incidents(tmp_path)
    assert incident.ranks == (stalled,)


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


@pytest.mark.parametrize(
    "hidden",
    [pytest.param(False, id="seen"), pytest.param(True, id="hidden behind later operations", marks=SLOW)],
)
@pytest.mark.parametrize(
    "what", ["shape", *(pytest.param(each, marks=SLOW) for each in ("operation", "dtype"))]
)
def test_a_rank_that_does_something_else_is_named(tmp_path: Path, what: str, hidden: bool):
    faults = FaultPlan().change_collective(rank=1, step=FAULTY_STEP, what=what, **TRAINING)
    with suppress(RankError):  # Gloo may abort a process over it
        results = run_ranks(communicating_job, 4, tmp_path, faults, hidden, timeout=90)
        assert any(raised for raised, _ in results)
        assert [fired for _, fired in results] == [0, 1, 0, 0]
    wait_for_incident(tmp_path)
    (truth,) = faults.truth(Mesh.grid(replica=4))
    assert all(truth.matches(incident) for incident in incidents(tmp_path)), (truth, incidents(tmp_path))
    assert {incident.ranks for incident in incidents(tmp_path)} == {(1,)}


@pytest.mark.long
def test_a_rank_that_leaves_a_collective_out_is_named(tmp_path: Path):
    """It comes to the next one on that group in the next step, and all others are a step behind it there."""
    faults = FaultPlan().skip_collective(rank=2, step=FAULTY_STEP, **TRAINING)
    with suppress(RankError):
        results = run_ranks(communicating_job, 4, tmp_path, faults, timeout=90)
        assert [fired for _, fired in results] == [0, 0, 1, 0]
    wait_for_incident(tmp_path)
    incident = only_incident(tmp_path, faults)
    assert incident.ranks == (2,)


@SLOW
def test_a_rank_that_enters_two_collectives_in_another_order_is_named(tmp_path: Path):
    faults = FaultPlan().swap_collectives(rank=2, step=FAULTY_STEP, **TRAINING)
    results = run_ranks(communicating_job, 4, tmp_path, faults, timeout=90)
    assert [fired for _, fired in results] == [0, 0, 1, 0]
    incident = only_incident(tmp_path, faults)
    assert incident.ranks == (2,)


def other_argument(rank: int, run_dir: Path, what: str) -> bool:
    """Rank 1 names another root, or reduces otherwise, which hangs nobody: the operation after it does."""
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=4)
    stuck = StuckTransport(FAULTY_STEP + 1) if what == "reduction" else StuckTransport(0)
    with (
        enable_resiliency(model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir),
        listen(stuck),
    ):
        group = give_up_soon()

        def train() -> None:
            for step in steps():
                model(torch.ones(1, 16))
                odd = step == FAULTY_STEP and rank == 1
                if what == "root":
                    dist.broadcast(torch.ones(4000), src=2 if odd else 0, group=group)
                else:
                    dist.all_reduce(
                        torch.ones(9), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group
                    )
                optimizer.step()

        return until_it_raises(train)


@SLOW
@pytest.mark.parametrize("what", ["root", "reduction"])
def test_a_rank_that_names_another_root_or_reduction_is_named(tmp_path: Path, what: str):
    with suppress(RankError):
        run_ranks(other_argument, 4, tmp_path, what, timeout=90)
    wait_for_incident(tmp_path)
    assert {incident.ranks for incident in incidents(tmp_path)} == {(1,)}


@pytest.mark.long
def test_a_deadlock_by_order_inversion_is_reported_as_one(tmp_path: Path):
    """Half of the ranks enter one group first, the others the other."""
    faults = FaultPlan()
    for rank in (1, 3):
        faults = faults.swap_collectives(rank=rank, step=FAULTY_STEP, **TRAINING)
    results = run_ranks(communicating_job, 4, tmp_path, faults, timeout=90)
    assert results == [(True, 0), (True, 1)] * 2
    incident = only_incident(tmp_path, faults)
    assert incident.ranks == (0, 1, 2, 3)  # two against two: nobody is named
    assert incident.scope is Scope.PROCESS_GROUP
    assert (
        "wait for each other, having entered operations in different orders or left one out"
        in incident.sentence
    )


class StuckTransport:
    """Holds every member inside one operation, after all have published that they enter it."""

    def __init__(self, number: int) -> None:
        self._left = number

    def before(self, _: Any) -> None:
        self._left -= 1
        if self._left == 0:
            time.sleep(STALL)

    def issued(self, *_: Any) -> None:
        """Not of interest."""


def test_when_all_have_entered_and_nobody_returns_the_group_is_named_and_nobody_in_it(tmp_path: Path):
    faults = FaultPlan().stick_collective(ranks=range(4), step=FAULTY_STEP, seconds=STALL, **TRAINING)
    assert run_ranks(communicating_job, 4, tmp_path, faults, timeout=90) == [(False, 1)] * 4
    incident = only_incident(tmp_path, faults)
    assert incident.scope is Scope.PROCESS_GROUP
    assert incident.action is Action.INSPECT
    assert incident.ranks == (0, 1, 2, 3)
    assert incident.records[0].ranks == ()


@SLOW
def test_a_rank_that_does_not_enter_a_collective_is_named_and_its_group_is_not(tmp_path: Path):
    faults = FaultPlan().stall(rank=2, at=TRAINING["at"], step=FAULTY_STEP, seconds=STALL)
    results = run_ranks(communicating_job, 4, tmp_path, faults, timeout=90)
    assert [fired for _, fired in results] == [0, 0, 1, 0]
    assert only_incident(tmp_path, faults).scope is Scope.RANK


def a_minority_ahead(rank: int, run_dir: Path) -> None:
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=4)
    with enable_resiliency(model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir):
        for step in steps():
            model(torch.ones(1, 16))
            if step == FAULTY_STEP and rank != 3:
                time.sleep(STALL)
            dist.all_reduce(torch.ones(3))
            optimizer.step()


@SLOW
def test_a_rank_ahead_of_the_majority_is_not_blamed(tmp_path: Path):
    run_ranks(a_minority_ahead, 4, tmp_path, timeout=90)
    (incident,) = incidents(tmp_path)
    assert incident.ranks == (0, 1, 2)


def a_pair_that_differs(rank: int, run_dir: Path) -> bool:
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=2)
    with enable_resiliency(model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir):
        group = give_up_soon()

        def train() -> None:
            for step in steps():
                model(torch.ones(1, 16))
                if step == FAULTY_STEP and rank == 1:
                    dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=group)
                else:
                    dist.broadcast(torch.ones(4), src=1, group=group)
                optimizer.step()

        return until_it_raises(train)


def test_neither_of_two_ranks_that_differ_is_named(tmp_path: Path):
    with suppress(RankError):
        run_ranks(a_pair_that_differs, 2, tmp_path, timeout=90)
    wait_for_incident(tmp_path)
    (incident,) = incidents(tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))


def routed_job(rank: int, run_dir: Path, incompatible: bool) -> bool:
    """Uneven all-to-alls; rank 2 then expects less from rank 0 than it gets."""
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=4)
    with enable_resiliency(model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir):
        group = give_up_soon()

        def train() -> None:
            for step in steps():
                model(torch.ones(1, 16))
                # What goes from i to j, in rows of 1,000.
                sent = [[(i + 2 * j + step) % 3 + 1 for j in range(4)] for i in range(4)]
                expected = [sent[i][rank] for i in range(4)]
                if incompatible and step == FAULTY_STEP and rank == 2:
                    expected = [count + 1 for count in expected]
                dist.all_to_all_single(
                    torch.empty(sum(expected), 1000),
                    torch.ones(sum(sent[rank]), 1000),
                    expected,
                    sent[rank],
                    group=group,
                )
                optimizer.step()

        return until_it_raises(train)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("incompatible", [False, True])
def test_uneven_splits_are_healthy_and_incompatible_ones_are_not(tmp_path: Path, incompatible: bool):
    if not incompatible:
        assert run_ranks(routed_job, 4, tmp_path, incompatible, timeout=90) == [False] * 4
        assert incidents(tmp_path) == []
        return
    with suppress(RankError):
        run_ranks(routed_job, 4, tmp_path, incompatible, timeout=90)
    wait_for_incident(tmp_path)
    assert {incident.ranks for incident in incidents(tmp_path)} == {(2,)}


def benign_pause(rank: int, run_dir: Path) -> None:
    """Everybody pauses beyond the threshold at once; later one rank stalls in earnest."""
    model, optimizer = net_and_optimizer()
    replicas = Parallelism(replica=4)
    with enable_resiliency(
        model, optimizer, observer=QUICK, parallelism=replicas, run_dir=run_dir
    ) as session:
        for step in steps():
            model(torch.ones(1, 16))
            if step == 3:
                time.sleep(2.5)
            if step == 4:
                with session.pause_observer():
                    time.sleep(2.5 if rank == 0 else 0.0)
                    dist.barrier()
            if step == FAULTY_STEP + 1 and rank == 2:
                time.sleep(2 * STALL)
            dist.all_reduce(torch.ones(3))
            optimizer.step()


@pytest.mark.long
def test_a_benign_pause_blames_nobody_and_hides_no_later_hang(tmp_path: Path):
    run_ranks(benign_pause, 4, tmp_path, timeout=90)
    assert [incident.ranks for incident in incidents(tmp_path)] == [(2,)]


def job_that_loses_an_observer(rank: int, run_dir: Path, loser: int, number: signal.Signals) -> int:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir) as session:
        for step in steps():
            if step == 3 and rank == loser:
                os.kill(session._monitor.observer.pid, number)
            time.sleep(STALL if step == FAULTY_STEP and rank == 2 else 0.0)
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        dist.barrier()
        if rank == loser and number == signal.SIGSTOP:
            os.kill(session._monitor.observer.pid, signal.SIGKILL)  # nobody else would ever end it
        return session.step


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=SLOW)],
)
@pytest.mark.parametrize("loser", [pytest.param(0, id="hub"), pytest.param(1, id="other", marks=SLOW)])
def test_a_lost_observer_neither_stops_training_nor_hides_a_hang(
    tmp_path: Path, loser: int, number: signal.Signals
):
    assert run_ranks(job_that_loses_an_observer, 4, tmp_path, loser, number, timeout=90) == [8] * 4
    assert [incident.ranks for incident in incidents(tmp_path)] == [(2,)]


def job_that_loses_a_rank_with_its_observer(rank: int, run_dir: Path) -> None:
    """Does not close its session, as a script that ends with an exception."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    session = enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir)
    try:
        for step in steps():
            if step == FAULTY_STEP and rank == 2:
                os.kill(session._monitor.observer.pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    except RuntimeError:
        os._exit(1)


def test_peers_of_a_rank_that_is_lost_with_its_observer_are_not_named(tmp_path: Path):
    """Their trainers fail as they lose their connections, and nobody reports how the lost one ended."""
    with pytest.raises(RankError, match="exited without an answer"):
        run_ranks(job_that_loses_a_rank_with_its_observer, 4, tmp_path, timeout=60)
    wait_for_incident(tmp_path)
    (incident,) = incidents(tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3)), incident.sentence
    assert incident.records[0].status == "inconclusive"
    assert "Rank 2 did not answer: its trainer may have ended first." in incident.sentence


NOBODY = -1


@pytest.mark.slow_cases("fsdp_job-4-arguments0", "hybrid_job-8-arguments1", "pipeline_job-4-arguments2")
@pytest.mark.parametrize(
    ("job", "size", "arguments"),
    [
        (fsdp_job, 4, (FaultPlan(),)),
        (hybrid_job, 8, (NOBODY,)),
        (pipeline_job, 4, (NOBODY, False)),
        pytest.param(pipeline_job, 4, (NOBODY, True), marks=SLOW),
        (communicating_job, 4, (FaultPlan(), False)),
        pytest.param(communicating_job, 4, (FaultPlan(), True), marks=SLOW),
    ],
)
def test_the_same_jobs_without_a_fault_are_silent(
    tmp_path: Path, job: Any, size: int, arguments: tuple[Any, ...]
):
    results = run_ranks(job, size, tmp_path, *arguments, timeout=120)
    assert all(each in (None, 0, (False, 0)) for each in results), results  # nothing raised, nothing fired
    assert incidents(tmp_path) == []
