"""Slow and wrong communication outside of layers: on training's own groups, whatever they are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from evaluation.jobs.models import GPT, next_token_loss, text
from tests.support.findings import Findings, all_records, findings_of
from tests.support.ranks import LiveRanks, run_ranks
from torchscout.attach import enable_resiliency
from torchscout.collectives.call import SCOUT_GROUP
from torchscout.config import BaselineConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.replay.recipes.process_groups import CommunicationLog, GroupUse

ONLY = ReplayConfig(interval=1, recipes=("process_groups",), baseline=BaselineConfig(warmup=3))
SLOW = range(3, 9)


@dataclass(frozen=True, slots=True)
class Job:
    replica: int
    pipeline: int = 1
    """Stages, each of which trains a model of its own, and passes something on to the next."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    steps: int = 6
    silent: bool = False
    """Whether nobody says anything: all train on the same."""
    anyone: bool = False
    """Whether a stage takes what comes from whoever sends it."""
    replay: ReplayConfig = ReplayConfig(interval=1)  # noqa: RUF009  frozen

    def mesh(self) -> Mesh:
        ranks = self.replica * self.pipeline
        return Mesh.grid(
            replica=self.replica, pipeline=self.pipeline, hosts=[f"machine-{rank}" for rank in range(ranks)]
        )


@dataclass(frozen=True, kw_only=True)
class Result(Findings):
    weights: torch.Tensor
    """All of them, after training."""


def answering(rank: int, jobs: Iterator[tuple[Job, Path | None]]) -> Iterator[Result]:
    for job, run_dir in jobs:
        yield _train(rank, job, run_dir)


def _train(rank: int, job: Job, run_dir: Path | None) -> Result:
    devices = init_device_mesh("cpu", (job.replica, job.pipeline), mesh_dim_names=("dp", "pp"))
    stage = rank % job.pipeline
    torch.manual_seed(stage)
    net = GPT()
    model = net if job.silent else DistributedDataParallel(net, process_group=devices.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = None
    with Injector(job.faults, rank, net, optimizer) as injector:
        if run_dir is not None:
            session = enable_resiliency(
                model,
                optimizer,
                replay=all_records(job.replay),
                observer=None,
                parallelism=job.mesh(),
                run_dir=run_dir,
            )
        for step in range(1, job.steps + 1):
            optimizer.zero_grad()
            tokens, targets = text(step, 0 if job.silent else rank)
            loss = next_token_loss(model(tokens), targets)
            loss.backward()
            if job.pipeline > 1:
                _pass_on(loss.detach(), devices.get_group("pp"), stage, job)
            optimizer.step()
    weights = torch.cat([each.detach().flatten() for each in net.parameters()])
    found = {} if session is None else findings_of(session)
    dist.barrier()
    return Result(weights=weights, fired=len(injector.fired), **found)


def _pass_on(value: torch.Tensor, group: dist.ProcessGroup, stage: int, job: Job) -> None:
    got = torch.empty_like(value)
    if stage > 0:
        dist.recv(got, group=group, group_src=None if job.anyone else stage - 1)
    if stage < job.pipeline - 1:
        dist.send(value, group=group, group_dst=stage + 1)


REPLICAS, STAGES = Job(replica=2, pipeline=3), Job(replica=3, pipeline=2)


@pytest.fixture(scope="module")
def six() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 6) as ranks:
        yield ranks


def slow(ranks: tuple[int, ...], at: str, axis: str, steps: range = SLOW, seconds: float = 0.25) -> FaultPlan:
    return FaultPlan().slow_collective(ranks=ranks, at=at, axis=axis, step=steps, seconds=seconds)


def found(results: list[Result]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {
        (each.manifestation.value, each.scope.value, each.ranks) for one in results for each in one.incidents
    }


def timed(result: Result) -> set[str]:
    return {each.surface for each in result.records if each.surface.startswith("time/process_groups")}


@pytest.mark.parametrize("job", [REPLICAS, STAGES], ids=["three stages", "two stages"])
def test_every_group_of_training_is_tried_and_training_is_the_same(six: LiveRanks, job: Job, tmp_path: Path):
    alone, watched = six.ask((job, None), 60), six.ask((job, tmp_path), 60)
    for plain, result in zip(alone, watched, strict=True):
        assert result.weights.equal(plain.weights)
        assert (result.incidents, result.failures, result.unchecked) == ([], [], {})
        assert "process_groups/received" in result.agreed
        assert timed(result) == {
            "time/process_groups_all_reduce@replica",
            "time/process_groups_send@pipeline",
        }


@pytest.mark.parametrize(
    ("job", "ranks", "at", "axis", "named"),
    [
        pytest.param(REPLICAS, (1, 4), "all_reduce@mesh_dp", "replica", (1, 4), id="replicas of one stage"),
        pytest.param(STAGES, (2, 3), "send@mesh_pp", "pipeline", (2, 3), id="two stages"),
        # Rank 3 is a first stage, and has one neighbour: a middle one.
        pytest.param(REPLICAS, (3,), "send@mesh_pp", "pipeline", (3, 4), id="one link of a long pipeline"),
    ],
)
def test_a_slow_link_names_those_it_connects(
    six: LiveRanks,
    job: Job,
    ranks: tuple[int, ...],
    at: str,
    axis: str,
    named: tuple[int, ...],
    tmp_path: Path,
):
    job = replace(job, faults=slow(ranks, at, axis))
    results = six.ask((job, tmp_path), 60)
    assert results[ranks[0]].fired > 4
    (truth,) = job.faults.truth(job.mesh())
    (incident,) = results[0].incidents
    assert truth.ranks == named
    assert truth.matches(incident), incident.sentence


def test_two_groups_of_which_one_is_slow_are_reported_together(six: LiveRanks, tmp_path: Path):
    job = replace(STAGES, faults=slow((1, 3, 5), "all_reduce@mesh_dp", "replica"))
    results = six.ask((job, tmp_path), 60)
    assert found(results) == {("straggler", "process_group", (0, 1, 2, 3, 4, 5))}
    assert "no third such group" in results[0].incidents[0].sentence


def test_a_group_that_is_the_whole_job_is_compared_with_its_own_history(six: LiveRanks, tmp_path: Path):
    # Of a mesh dimension that has all ranks, PyTorch makes no group of its own.
    faults = slow(tuple(range(6)), "all_reduce@default_pg", "replica", range(6, 12), seconds=1.0)
    results = six.ask((Job(replica=6, steps=10, replay=ONLY, faults=faults), tmp_path), 60)
    assert found(results) == {("straggler", "job", ())}
    assert "time/process_groups_all_reduce@replica" in results[0].incidents[0].sentence


def test_corrupted_received_data_names_the_receiver(six: LiveRanks, tmp_path: Path):
    replayed = range(1, 9)
    faults = FaultPlan().flip_bit(rank=3, at="all_reduce@mesh_dp", step=3, bit=20, calls=replayed)
    results = six.ask((replace(STAGES, faults=faults, replay=ONLY), tmp_path), 60)
    assert results[3].fired > 0
    assert found(results) == {("sdc", "rank", (3,))}
    assert {each.surface for each in results[0].incidents[0].records} == {"process_groups/received"}


def test_a_line_that_only_one_end_has_logged_is_skipped(six: LiveRanks, tmp_path: Path):
    for result in six.ask((replace(STAGES, anyone=True, steps=3), tmp_path), 60):
        assert (result.incidents, result.failures, result.unchecked) == ([], [], {})
        assert timed(result) == {"time/process_groups_all_reduce@replica"}


def test_a_job_without_communication_is_certified(six: LiveRanks, tmp_path: Path):
    for result in six.ask((Job(replica=6, silent=True, steps=3), tmp_path), 60):
        assert (result.incidents, result.failures, result.unchecked) == ([], [], {})
        assert timed(result) == set()
        assert result.status["replay"]["certified"] == 3


def logged_on(rank: int, device: str) -> set[GroupUse]:
    log = CommunicationLog(torch.device(device))
    log.start()
    dist.all_reduce(torch.ones(2))
    dist.all_gather_object([None, None], rank, group=dist.new_group(group_desc=SCOUT_GROUP))
    dist.barrier()
    log.stop()
    dist.broadcast(torch.ones(2), src=0)
    return {*log.groups()}


def test_communication_on_another_device_type_is_not_logged():
    for uses in run_ranks(logged_on, 2, "cpu", timeout=60):
        assert {use[:2] for use in uses} == {("all_reduce", (0, 1))}
    assert run_ranks(logged_on, 2, "cuda", timeout=60) == [set(), set()]
