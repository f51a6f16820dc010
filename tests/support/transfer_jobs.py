"""Jobs that communicate outside of layers: replicas of several parts, stages that pass on what they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.all_records import all_records
from tests.support.findings import Findings, findings_of
from tests.support.replayed_job import Net, batch
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

__all__ = ["Job", "Result", "answering"]


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
    net = Net()
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
            tokens, targets = batch(step, 0 if job.silent else rank)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
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
