"""How often replay checks what, what it says about itself, and what attaching and closing leave behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.hangs import QUICK
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import (
    EVERY_STEP,
    GridJob,
    Job,
    bytes_of,
    hooks_of,
    in_replay,
    records,
    steps_of,
)
from tests.support.replayed_job import Block, Net
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig


def budgeted_job(rank: int, run_dir: Path) -> tuple[list[int], dict]:
    job = Job(rank)
    with job.attach(run_dir, ReplayConfig(interval=1, recipes=("layer",), max_overhead=0.2)) as session:
        if rank == 1:
            for block in job.net.stack:
                in_replay(block, lambda: time.sleep(0.3))
        for _ in range(10):
            time.sleep(0.05)
            job.train()
        assert session.failures == []
        return sorted({each.step for each in records(run_dir, rank)}), session.status()["replay"]


def test_a_budget_stretches_intervals_on_all_ranks_alike(tmp_path: Path):
    results = run_ranks(budgeted_job, 3, tmp_path, timeout=90)
    steps, status = results[0]
    assert steps[0] == 1
    assert len(steps) < 10
    for checked, replay in results:
        assert checked == steps
        assert replay["coverage"] == status["coverage"]
        assert replay["coverage"]["layer"]["interval"] > 1
        assert replay["max_overhead"] == 0.2
        assert 0 < replay["share"] < 1


def own_intervals_job(rank: int, run_dir: Path) -> tuple[list[int], list[int], dict]:
    job = Job(rank)
    with job.attach(run_dir, ReplayConfig(recipes={"replicated_state": 1, "layer": 3})) as session:
        job.train(7)
        found = records(run_dir, rank)
        return steps_of(found, "state/parameters"), steps_of(found, "/output"), session.status()["replay"]


def test_every_recipe_keeps_its_own_interval_and_status_shows_it(tmp_path: Path):
    for census, layer, status in run_ranks(own_intervals_job, 3, tmp_path, timeout=90):
        assert census == [1, 2, 3, 4, 5, 6, 7]
        assert layer == [3, 6]
        assert status["peers"] == [0, 1, 2]
        assert status["checks"] == 7
        assert status["coverage"] == {
            "replicated_state": {"targets": 1, "visited": 1, "cycles": 7, "interval": 1, "next_step": 8},
            "layer": {"targets": 2, "visited": 2, "cycles": 1, "interval": 3, "next_step": 9},
        }
        assert status["last"]["stack.0"] == {"step": 3, "clean": True}
        assert status["last"]["stack.1"] == {"step": 6, "clean": True}
        assert status["last"]["state/parameters"] == {"step": 7, "clean": True}
        assert status["not_checked"] == {}
        assert status["max_overhead"] is None


def reattached_job(rank: int, run_dir: Path) -> list[list[int]]:
    """Close in the middle of a step that is being captured; attach again, twice."""
    job, found = Job(rank), []
    hooks = hooks_of(job.net, [job.optimizer])
    for life in range(3):
        session = job.attach(run_dir / str(life))
        job.train(2)
        loss = job.forward()
        assert hooks_of(job.net, [job.optimizer]) != hooks
        session.close()
        assert hooks_of(job.net, [job.optimizer]) == hooks
        loss.backward()
        job.optimizer.step()
        assert (session.step, session.failures) == (2, [])
        assert session.status()["replay"] == {"off": "it has stopped: the session is closed"}
        found.append(steps_of(records(run_dir / str(life), rank), "/output"))
    return found


def test_closing_within_a_captured_step_leaves_no_hooks_and_allows_attaching_again(tmp_path: Path):
    assert run_ranks(reattached_job, 3, tmp_path, timeout=90) == [[[1, 2]] * 3] * 3


def reattached_grid(_: int, run_dir: Path) -> list[tuple[int, list[str], dict]]:
    job, found = GridJob(), []
    for life in range(3):
        with job.attach(run_dir / str(life), ReplayConfig(interval=1, recipes=("layer",))) as session:
            job.train(1)
            status = session.status()["replay"]
            found.append((status["checks"], session.failures, status["not_checked"]))
    return found


@pytest.mark.slow
def test_a_grid_can_be_attached_again(tmp_path: Path):
    assert run_ranks(reattached_grid, 8, tmp_path, timeout=120) == [[(1, [], {})] * 3] * 8


def unasked_job(rank: int, how: str, run_dir: Path) -> dict:
    job = Job(rank)
    hooks = hooks_of(job.net, [])
    optimizer = None if how == "no optimizer" else job.optimizer
    replay = None if how == "no replay" else EVERY_STEP
    with enable_resiliency(job.model, optimizer, replay=replay, observer=None, run_dir=run_dir) as session:
        assert hooks_of(job.net, []) == hooks
        job.train(2)
        assert session.failures == []
        return session.status()["replay"]


@pytest.mark.parametrize(
    ("how", "ranks", "reason"),
    [
        ("no replay", 2, "replay=None"),
        ("no optimizer", 2, "there is no optimizer whose update would end a step"),
    ],
)
def test_status_gives_the_reason_why_replay_is_off(tmp_path: Path, how: str, ranks: int, reason: str):
    assert run_ranks(unasked_job, ranks, how, tmp_path, timeout=60) == [{"off": reason}] * ranks
    assert not (tmp_path / "records").exists()


def test_without_peers_state_is_watched_and_certified(tmp_path: Path):
    (status,) = run_ranks(lonely_job, 1, tmp_path, timeout=60)
    assert status["certified"] == 3
    assert status["covered"]["watched"] == 1.0
    assert status["lacking"].startswith("No two ranks of this job do the same work")


def lonely_job(rank: int, run_dir: Path) -> dict:
    job = Job(rank)
    with enable_resiliency(
        job.model, job.optimizer, replay=EVERY_STEP, observer=None, run_dir=run_dir
    ) as session:
        job.train(3)
        assert session.failures == []
        return session.status()["replay"]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([Block(), Block()])
        self.left, self.right = nn.Linear(16, 3), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.stack:
            x = block(x)
        return self.left(x).sum() + self.right(x).sum()


def ambiguous_job(rank: int, run_dir: Path) -> str:
    job = Job(rank, TwoHeads())
    hooks = hooks_of(job.net, [job.optimizer])
    with pytest.raises(ValueError, match=r"does not show which of .* is the output layer") as error:
        job.attach(run_dir, observer=QUICK)
    assert hooks_of(job.net, [job.optimizer]) == hooks
    with job.attach(run_dir, ReplayConfig(interval=1, output="right")) as session:
        job.model(torch.randn(2, 4, 16)).backward()
        job.optimizer.step()
        assert (session.failures, session.status()["replay"]["checks"]) == ([], 1)
    return str(error.value)


def test_an_ambiguous_model_is_refused_on_every_rank_before_anything_is_attached(tmp_path: Path):
    for result in run_ranks(ambiguous_job, 2, tmp_path, timeout=60):
        assert "left, right" in result
        assert "pass ReplayConfig(output='right')" in result


def in_backward_job(rank: int, run_dir: Path | None) -> tuple[list[str], dict[str, str], bytes]:
    """Each parameter is updated by an optimizer of its own as soon as its gradient is there."""
    torch.manual_seed(0)
    net = Net()
    updates = {each: torch.optim.AdamW([each], lr=1e-3) for each in net.parameters()}

    def update(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        updates[parameter].step()
        updates[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    failures: list[str] = []
    status: dict[str, Any] = {"not_checked": {}}
    session = None
    if run_dir is not None:
        session = enable_resiliency(
            net,
            [*updates.values()][-1],
            replay=EVERY_STEP,
            observer=None,
            parallelism=Parallelism(replica=2),
            run_dir=run_dir,
        )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        net(torch.randint(24, (4, 8), generator=generator)).square().mean().backward()
    if session is not None:
        failures, status = list(session.failures), session.status()["replay"]
        assert session.step == 3
        assert session.incidents == []
        session.close()
    return failures, status["not_checked"], bytes_of(net.parameters())


def test_an_optimizer_that_steps_inside_backward_is_not_checked_and_not_disturbed(tmp_path: Path):
    alone = run_ranks(in_backward_job, 2, None, timeout=60)
    for rank, (failures, unchecked, weights) in enumerate(
        run_ranks(in_backward_job, 2, tmp_path, timeout=60)
    ):
        assert failures == []
        assert weights == alone[rank][-1]
        reasons = {each.partition(": ")[2] for each in unchecked.values()}
        assert reasons == {"the optimizer steps inside the backward pass"}, unchecked
        assert {"replicated_state", "tokens/embedding", "stack.0/layer", "head/output"} <= unchecked.keys()
