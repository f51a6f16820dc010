"""Training with the real Megatron-Core, and its results."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.findings import Findings, all_records, findings_of
from tests.support.megatron_models import Job, Trial, build, called, inner, leave, one_step
from torchscout.config import CheckpointConfig
from torchscout.faults.effects import FlipBit
from torchscout.faults.injector import Injector
from torchscout.mesh import LayerKind, Mesh
from torchscout.session.checkpoints.resumption import Resumption


@dataclass(frozen=True)
class Result(Findings):
    """The result of one rank."""

    bits: dict[int, str]
    """Of all that training is about, after every step."""
    groups: dict[str, list[int]]
    """Megatron's own, of this rank."""
    places: dict[str, list[int]] = field(default_factory=dict)
    """Who SCOUT thinks is along which axis."""
    resumed: Resumption | None = None
    scales: list[float] = field(default_factory=list)
    """Of the loss, after every step."""
    attach_seconds: float = 0.0


def answering(rank: int, questions: Iterator[tuple[Trial, Path | None]]) -> Iterator[Result]:
    for trial, run_dir in questions:
        yield train(rank, trial, run_dir)


def train(rank: int, trial: Trial, run_dir: Path | None) -> Result:
    session, resumed = None, None
    bits: dict[int, str] = {}
    seconds, scales = 0.0, []
    try:
        job = build(trial)
        with Injector(trial.faults, rank, called(job), inner(job)[0], log=trial.log) as injector:
            if run_dir is not None:
                begin = time.perf_counter()
                session = attached(job, run_dir)
                seconds = time.perf_counter() - begin
                resumed = session.resume() if trial.directory is not None else None
            for step in range(resumed.step + 1 if resumed else 1, trial.steps + 1):
                flip = partial(_flip, job, rank)
                is_flipped = trial.overwritten == (rank, step)
                if is_flipped and trial.when == "before forward":
                    flip()
                one_step(job, flip if is_flipped and trial.when == "before the second batch" else _nothing)
                if trial.killed == step:
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                if trial.spoiled == (rank, step):
                    _spoil(inner(job)[0])
                bits[step] = state_of(job)
                scales.append(float(job.optimizer.get_loss_scale()))
        found = {} if session is None else findings_of(session)
        fired = len(injector.fired)
        return Result(bits, groups(), _places(job, rank), resumed, scales, seconds, fired=fired, **found)
    finally:
        if session is not None:
            session.close()
        leave()


def attached(job: Job, run_dir: Path) -> Any:
    from torchscout.attach import enable_resiliency

    chunks = job.chunks if len(job.chunks) > 1 else job.chunks[0]
    trial, kept = job.trial, None
    if trial.directory is not None:
        os.environ["TORCHSCOUT_MEMORY"] = str(trial.directory / "memory")
        kept = CheckpointConfig(trial.directory / "files")
    machines = [f"machine-{rank // trial.tensor}" for rank in range(dist.get_world_size())]
    session = enable_resiliency(
        chunks,
        job.optimizer,
        replay=all_records(trial.replay),
        observer=trial.observer,
        checkpoint=kept,
        parallelism=_mesh(job, machines) if trial.observer is None else None,
        run_dir=run_dir,
    )
    if kept is not None:
        session.register_state("schedule", job.schedule)
        session.register_state("loader", job.loader)
    return session


def state_of(job: Job) -> str:
    """Parameters, gradients, buffers, optimizer slots, and where the random streams stand."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    tensors = [each for chunk in job.chunks for each in chunk.module.buffers()]
    # Others' shards arrive as late as they are needed.
    if not job.trial.fsdp and not (job.trial.overlap and job.trial.sharded):
        tensors += [each for chunk in job.chunks for each in chunk.parameters()]
        tensors += [each.main_grad for chunk in job.chunks for each in chunk.parameters()]
    for optimizer in inner(job):
        for group in optimizer.param_groups:
            for each in group["params"]:
                tensors += [each, *(slot for slot in optimizer.state[each].values() if torch.is_tensor(slot))]
    tensors += [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]
    tensors += [each["values"] for each in get_moe_layer_wise_logging_tracker().values()]
    digest = hashlib.blake2b()
    for each in tensors:
        local = each.to_local() if isinstance(each, DTensor) else each
        digest.update(local.detach().clone().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def groups() -> dict[str, list[int]]:
    from megatron.core import parallel_state as state

    found = {
        "replica": state.get_data_parallel_group(),
        "tensor": state.get_tensor_model_parallel_group(),
        "pipeline": state.get_pipeline_model_parallel_group(),
        "context": state.get_context_parallel_group(),
        "expert replica": state.get_expert_data_parallel_group(),
        "expert tensor": state.get_expert_tensor_parallel_group(),
        "expert expert": state.get_expert_model_parallel_group(),
    }
    return {name: sorted(dist.get_process_group_ranks(each)) for name, each in found.items()}


def _places(job: Job, rank: int) -> dict[str, list[int]]:
    """As SCOUT reads them off Megatron, by the names that ``groups`` gives them."""
    mesh = _mesh(job, ["machine"] * dist.get_world_size())
    axes = {"replica": "shard"} if job.trial.fsdp else {}
    dense = ("replica", "tensor", "pipeline", "context")
    found = {axis: mesh.ranks_along(axes.get(axis, axis), rank, LayerKind.DENSE) for axis in dense}
    if job.trial.experts:
        for axis in ("replica", "tensor", "expert"):
            found[f"expert {axis}"] = mesh.ranks_along(axes.get(axis, axis), rank, LayerKind.EXPERT)
    return {name: list(ranks) for name, ranks in found.items()}


def _mesh(job: Job, machines: list[str]) -> Mesh:
    from torchscout.adapters.registry import adapter_for

    return adapter_for(job.chunks, job.optimizer, None).mesh(machines)


def _nothing() -> None:
    pass


def _flip(job: Job, rank: int) -> None:
    """As memory does it."""
    chunk, which = job.chunks[0], job.trial.which
    if which is None:
        gathered = chunk.bucket_groups[0].buckets[0].param_data
        parameter = gathered.chunk(dist.get_world_size())[rank]
    else:
        parameter = [*chunk.parameters()][which]
    version = parameter._version
    with torch.autograd._unsafe_preserve_version_counter(parameter):
        assert FlipBit(9).corrupt(parameter.detach()) is not None
    assert parameter._version == version


def _spoil(optimizer: torch.optim.Optimizer) -> None:
    """As memory does it: PyTorch does not count it as a write."""
    FlipBit(20).corrupt(next(iter(optimizer.state.values()))["exp_avg"])
