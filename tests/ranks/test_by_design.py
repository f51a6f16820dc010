"""State that differs between ranks by design names nobody and is watched; shared state is compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evaluation.jobs.optimizers import ShardedAdamW
from tests.support.findings import Findings, findings_of
from tests.support.ranks import LiveRanks
from tests.support.replayed_job import Block, Net, flip_in_memory, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, Parallelism, ReplayConfig


@dataclass(frozen=True, slots=True)
class Owning:
    """One job."""

    run_dir: Path
    steps: int = 20
    is_sliced: bool = False
    """Whether an optimizer reduces gradients and shards its state by itself."""
    is_local: bool = False
    """Whether every rank keeps a bias of its own."""
    extra: tuple[int, ...] = ()
    """Ranks with one more layer, which is not trained."""
    keeps: bool = False
    """Whether the session keeps checkpoints."""
    flip: tuple[int, int, str] | None = None
    """A rank, the step after whose update one of its bits changes, and of what: ``weight`` or a slot."""


def owning(rank: int, jobs: Iterator[Owning]) -> Iterator[Findings]:
    for job in jobs:
        yield _train(rank, job)


def _train(rank: int, job: Owning) -> Findings:
    torch.manual_seed(0)
    os.environ["TORCHSCOUT_MEMORY"] = str(job.run_dir / "memory")
    net = Net()
    if rank in job.extra:
        net.stack.append(Block().requires_grad_(False))
    if job.is_local:
        nn.init.constant_(net.head.bias, float(rank))
    trained = [each for each in net.parameters() if each.requires_grad]
    shared = [each for each in trained if not (job.is_local and each is net.head.bias)]
    make = ShardedAdamW if job.is_sliced else torch.optim.AdamW
    optimizer = make(trained, lr=1e-3)
    session = enable_resiliency(
        net,
        optimizer,
        replay=ReplayConfig(interval=5),
        observer=None,
        checkpoint=CheckpointConfig(job.run_dir / "checkpoints") if job.keeps else None,
        parallelism=Parallelism(replica=dist.get_world_size()),
        run_dir=job.run_dir,
    )
    fired = 0
    for step in range(1, job.steps + 1):
        optimizer.zero_grad()
        loss_of(net, step, rank).backward()
        for each in [] if job.is_sliced else shared:
            dist.all_reduce(each.grad)
        optimizer.step()
        if job.flip is not None and job.flip[:2] == (rank, step):
            weight = net.head.weight  # whose rows can be divided among three
            tensor = weight.detach() if job.flip[2] == "weight" else optimizer.state[weight][job.flip[2]]
            fired += flip_in_memory(tensor.flatten()[-1:], 18)  # of rank 2's rows
    return Findings(fired=fired, **findings_of(session))


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(owning, 3) as ranks:
        yield ranks


@pytest.mark.slow_cases("a local bias")
@pytest.mark.parametrize(
    ("job", "compared"),
    [
        (Owning(Path(), is_local=True), 0.99),
        (Owning(Path(), extra=(1,)), 0.6),
    ],
    ids=["a local bias", "a layer of one rank"],
)
def test_a_healthy_job_is_silent_and_certified(
    three: LiveRanks, job: Owning, compared: float, tmp_path: Path
):
    job = Owning(tmp_path, is_local=job.is_local, extra=job.extra)
    for each in three.ask(job, 60):
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == 20
        share = each.replay["covered"]["compared"]
        assert isinstance(share, float)
        assert share >= compared
        assert share == 1 or each.replay["covered"]["watched"]


def test_checkpoints_contain_owned_and_shared_state(three: LiveRanks, tmp_path: Path):
    for each in three.ask(Owning(tmp_path, is_sliced=True, keeps=True), 60):
        assert (each.incidents, each.failures) == ([], [])
        assert each.status["checkpoint"]["verified"] == 15, "20 is still being sealed"


@pytest.mark.slow_cases("exp_avg_sq", "weight")
@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_flip_names_its_rank_though_state_is_sharded_by_hand(three: LiveRanks, what: str, tmp_path: Path):
    """A wrong weight is handed on to all ranks by the next update, which gathers it."""
    found = three.ask(Owning(tmp_path, is_sliced=True, flip=(2, 13, what)), 60)
    assert [each.fired for each in found] == [0, 0, 1]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert incident.records[0].surface == "state/owned"
    assert all(each.replay["certified"] == 10 for each in found)


def test_a_flip_of_what_replicas_share_names_its_rank(three: LiveRanks, tmp_path: Path):
    found = three.ask(Owning(tmp_path, is_local=True, flip=(2, 13, "exp_avg")), 60)
    assert [each.fired for each in found] == [0, 0, 1]
    incident = found[0].incidents[0]
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert all(each.replay["certified"] == 10 for each in found)
