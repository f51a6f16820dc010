"""A rank's state under every layout: real ranks are interrupted and go on bitwise, or are refused."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.replayed_job import Net, batch, loss_of
from tests.support.states import Job, all_bits, identity, interrupted, streams, through_bytes
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.errors import CheckpointError

LAYOUTS = [
    ("ddp", (2,)),
    ("zero", (2,)),
    ("fsdp2", (2,)),
    ("fsdp2", (3,)),
    ("hsdp", (2, 2)),
    ("tp", (2,)),
    ("fsdp2+tp", (2, 2)),
]


class Parallel(Job):
    """Trains on this rank's own batches; with dropout, a schedule and a frozen layer."""

    data_rank = 0

    def step(self, number: int) -> None:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        for part in range(2):  # gradients are accumulated
            loss_of(self.model, 2 * number + part, self.data_rank).backward()
        optimizer.step()
        self.registered["scheduler"].step()


def make(kind: str, shape: tuple[int, ...]) -> Parallel:
    net = Net()
    net.final.requires_grad_(False)
    model: nn.Module = net
    rank = data_rank = dist.get_rank()
    if kind in ("ddp", "zero"):
        model = DistributedDataParallel(net)
    elif kind == "fsdp2":
        shard(net, init_device_mesh("cpu", shape))
    elif kind == "hsdp":
        shard(net, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    elif kind == "tp":
        divide(net, init_device_mesh("cpu", shape, mesh_dim_names=("tp",)))
        data_rank = 0
    elif kind == "fsdp2+tp":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        divide(net, mesh["tp"])
        shard(net, mesh["dp"])
        data_rank = rank // shape[-1]
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer: Any
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-2, amsgrad=True, foreach=kind != "tp")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    job = Parallel(model, [optimizer], {"scheduler": scheduler})
    job.data_rank = data_rank
    return job


def shard(net: Net, mesh: DeviceMesh) -> None:
    for block in net.stack:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def divide(net: Net, mesh: DeviceMesh) -> None:
    for block in net.stack:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def crash_and_resume(rank: int, kind: str, shape: tuple[int, ...]) -> list[tuple[bool, bool, int]]:
    """Return whether every bit and every stream was restored, and how many tensors there were, of a job that
    was interrupted before its first step and of one that was interrupted later."""
    warnings.filterwarnings("ignore")
    answers = []
    for at in (0, 2):
        whole, resumed = interrupted(lambda: make(kind, shape), at=at, steps=at + 3)
        bits = all_bits(whole)
        same = all_bits(resumed) == bits
        inner = [each.optim for job in (whole, resumed) for each in job.optimizers if hasattr(each, "optim")]
        if inner:
            ours, theirs = (all_bits(Job(nn.Module(), [each])) for each in inner)
            same = same and ours == theirs and any("exp_avg" in str(each) for each in ours.values())
        answers.append((same, whole.streams == resumed.streams, len(bits)))
    return answers


def refused(
    rank: int, kept_as: tuple[str, tuple[int, ...]], here: tuple[str, tuple[int, ...]]
) -> tuple[str, bool]:
    """Return the error of loading a state into another layout, and whether the job is unchanged."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    kept = make(*kept_as)
    kept.train(range(1))
    tree = through_bytes(kept.collect())
    job = make(*here)
    before = all_bits(job)
    try:
        job.restore(tree)
    except CheckpointError as error:
        return str(error), all_bits(job) == before
    return "", False


def after_an_evaluation(rank: int) -> bool:
    """Return whether a state that was saved while parameters were gathered is restored correctly."""
    torch.manual_seed(0)
    job = make("fsdp2", (dist.get_world_size(),))
    job.train(range(1))
    with torch.no_grad():
        before = job.model(batch(9, 0)[0])
        kept = through_bytes(job.collect())
        for parameter in job.model.parameters():
            parameter.to_local().zero_()
        job.model(batch(9, 0)[0])
        job.restore(kept)
        torch.manual_seed(1)
        job.model.eval()
        first = job.model(batch(9, 0)[0])
        job.restore(kept)
        again = job.model(batch(9, 0)[0])
    return torch.equal(first, again) and bool(before.abs().sum() > 0) and bool(first.abs().sum() > 0)


class Average:
    """A registered object that holds parts of distributed tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: each.detach().clone() for name, each in model.named_parameters()}

    def state_dict(self) -> Any:
        return self.values

    def load_state_dict(self, state: Any) -> None:
        self.values = state


def registered_parts(rank: int) -> tuple[bool, str]:
    torch.manual_seed(0)
    job = make("fsdp2", (dist.get_world_size(),))
    job.registered["average"] = Average(job.model)
    bits = all_bits(job)
    tree = through_bytes(job.collect())
    torch.manual_seed(1)
    other = make("fsdp2", (dist.get_world_size(),))
    other.registered["average"] = Average(other.model)
    other.restore(tree)
    plain = make("ddp", ())
    plain.registered["average"] = Average(plain.model)
    try:
        plain.restore(tree)
    except CheckpointError as error:
        return all_bits(other) == bits, str(error)
    return False, ""


def captured_while_training(
    rank: int, kind: str, shape: tuple[int, ...], folder: Path
) -> list[tuple[str | None, bool]]:
    """Capture after every update: return its problem, and whether it is the state of exactly that step."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    job = make(kind, shape)
    snapshots = Snapshots(folder, rank)
    snapshots.prepare(job.collect().bytes)
    for optimizer in job.optimizers:
        optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    outcomes = []
    kept: tuple[Any, Any] | None = None
    for number in range(1, 6):
        job.step(number)
        if kept is not None:  # it was copied during this step
            outcomes.append(_outcome(*kept, make(kind, shape)))
        name = identity(number, rank=rank, world_size=dist.get_world_size())
        assert snapshots.wait_until_ready(30)
        kept = snapshots.capture(name, TrustLevel.LATEST, job.collect()), all_bits(job)
    snapshots.close()
    assert shards.clean(folder) == []
    return outcomes


def _outcome(capture: Capture, bits: Any, fresh: Job) -> tuple[str | None, bool]:
    if not capture.wait(30):
        return capture.problem, False
    before = streams()
    fresh.restore(shards.load(capture.path).tree)
    same = all_bits(fresh) == bits
    torch.set_rng_state(torch.frombuffer(bytearray(before[0]), dtype=torch.uint8))
    return None, same


@pytest.mark.slow_except("ddp-2", "fsdp2-2", "tp-2")
@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(kind, shape, id=f"{kind}-{'x'.join(map(str, shape))}") for kind, shape in LAYOUTS],
)
def test_interrupted_ranks_are_bitwise_the_uninterrupted_ones(kind: str, shape: tuple[int, ...]):
    for answers in run_ranks(crash_and_resume, math.prod(shape), kind, shape):
        for same, same_streams, count in answers:
            assert same
            assert same_streams
            assert count > 18, "parameters and groups at least"


@pytest.mark.parametrize(("kind", "shape"), [("ddp", (2,)), ("fsdp2", (2,)), ("fsdp2+tp", (2, 2))])
def test_what_is_captured_while_ranks_train_on_is_the_state_of_one_step(
    kind: str, shape: tuple[int, ...], tmp_path: Path
):
    for outcomes in run_ranks(captured_while_training, math.prod(shape), kind, shape, tmp_path):
        assert outcomes == [(None, True)] * 4


@pytest.mark.parametrize(
    ("kept", "here", "expected"),
    [
        (("ddp", ()), ("fsdp2", (2,)), "'module.tokens.weight'"),
        (("tp", (2,)), ("fsdp2", (2,)), "'stack.0.up.weight' .* mesh"),
        (("fsdp2", (2,)), ("tp", (2,)), "'tokens.weight' .*24, 16.*12, 16"),
        (("hsdp", (2, 2)), ("hsdp", (4, 1)), "shape|4, 1.*2, 2"),
    ],
)
def test_another_layout_is_refused_and_nothing_changes(kept, here, expected: str):
    for message, unchanged in run_ranks(refused, math.prod(here[1]), kept, here):
        assert unchanged
        assert re.search(expected, message), message


def test_gathered_parameters_are_neither_kept_nor_left_stale():
    assert run_ranks(after_an_evaluation, 2) == [True, True]


def test_registered_parts_of_distributed_tensors_come_back_where_they_were():
    for same, message in run_ranks(registered_parts, 2):
        assert same
        assert "does not fit this job" in message
