"""What jobs of replicas write down and call when replay names somebody; whom it names is in the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job, records
from tests.support.replayed_job import WIDTH, Block, checked_training
from torchscout.config import ReplayConfig
from torchscout.decision.types import Incident
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

STEPS = 5


def corrupted(rank: int) -> FaultPlan:
    return FaultPlan().set_value(rank=rank, at="stack.0.up/weight", step=3, value=3.0)


CONTRACT = {"schema", "kind", "time", "step", "manifestation", "scope", "ranks", "hosts"}
CONTRACT |= {"surface", "status", "peers", "bitmap", "action", "sentence"}


def test_one_rank_writes_the_incident_and_every_rank_its_records(tmp_path: Path):
    found = run_ranks(checked_training, 4, corrupted(0), STEPS, (), tmp_path, timeout=90)
    assert [(each.failures, each.incidents) for each in found] == [([], found[0].incidents)] * 4
    files = sorted((tmp_path / "incidents").iterdir())
    line, decision = [json.loads(each) for path in files[::-1] for each in path.read_text().splitlines()]
    assert (decision["kind"], decision["is_carried_out"]) == ("decision", False)
    assert line.keys() >= CONTRACT
    assert (line["kind"], line["manifestation"], line["scope"]) == ("incident", "sdc", "rank")
    assert (line["ranks"], line["peers"], line["bitmap"]) == ([0], [0, 1, 2, 3], [1, 0, 0, 0])
    assert (line["status"], line["action"]) == ("attributed", "replace_machine")
    assert len(line["hosts"]) == 1
    written = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert written == [f"rank-{rank}.jsonl" for rank in range(4)]
    for path in (tmp_path / "records").iterdir():
        lines = [json.loads(each) for each in path.read_text().splitlines()]
        assert lines
        assert all(each.keys() >= CONTRACT for each in lines)


def job_with_callback(rank: int, run_dir: Path) -> list[tuple[str, tuple[int, ...]]]:
    reported: list[tuple[str, tuple[int, ...]]] = []
    job = Job(rank)
    with (
        Injector(corrupted(1), rank, job.net, job.optimizer),
        job.attach(run_dir, on_incident=lambda each: reported.append((each.manifestation.value, each.ranks))),
    ):
        job.train(STEPS)
        torch.distributed.barrier()
    return reported


def test_the_users_callback_is_called_for_corruption_on_every_rank(tmp_path: Path):
    assert run_ranks(job_with_callback, 3, tmp_path, timeout=90) == [[("sdc", (1,))]] * 3


def arbitrary_names_job(rank: int, names: Sequence[str], run_dir: Path) -> tuple[list[Incident], set[str]]:
    """Modules under any name, batches of each rank's own size and length."""
    torch.manual_seed(0)
    words, blocks, out = names
    net = nn.ModuleDict(
        {words: nn.Embedding(24, WIDTH), blocks: nn.ModuleList([Block(), Block()]), out: nn.Linear(WIDTH, 24)}
    )
    job = Job(rank, Spelled(net, names))
    with job.attach(run_dir, ReplayConfig(interval=1, variants=(0.1, 1.0))) as session:
        for step in range(1, 6):
            tokens = torch.randint(24, (1 + (rank + step) % 3, 3 + (2 * rank + step) % 5))
            job.optimizer.zero_grad()
            job.model(tokens).square().mean().backward()
            job.optimizer.step()
        assert session.failures == []
        return session.incidents, {each.status for each in records(run_dir, rank)}


class Spelled(nn.Module):
    def __init__(self, parts: nn.ModuleDict, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words, blocks, out = (getattr(self, name) for name in self.names)
        x = words(tokens)
        for block in blocks:
            x = block(x)
        return out(x)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("a", "b", "c"), marks=pytest.mark.slow),
        ("output", "embedding", "layers"),
        ("module_", "état", "x/y z"),
    ],
)
def test_batches_and_names_of_any_kind_are_no_corruption(tmp_path: Path, names: tuple[str, str, str]):
    for incidents, statuses in run_ranks(arbitrary_names_job, 3, names, tmp_path, timeout=90):
        assert incidents == []
        assert statuses == {"agree"}


def clean_jobs(rank: int, run_dir: Path) -> list[tuple[int, list[Incident], list[str], set[str]]]:
    """Networks, batches and numbers of different sizes, on inputs times three factors."""
    found = []
    for seed in range(30):
        width, layers, size = 8 * (1 + seed % 4), 1 + seed % 3, 1 + seed % 5
        torch.manual_seed(seed)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers + 1)))
        job, folder = Job(rank, net), run_dir / str(seed)
        with job.attach(folder, ReplayConfig(interval=1, variants=(0.1, 1.0, 10.0))) as session:
            for _ in range(6):
                job.optimizer.zero_grad()
                inputs = torch.randn(size + rank, width) * 10.0 ** (seed % 7 - 3)
                job.model(inputs).square().mean().backward()
                job.optimizer.step()
            statuses = {each.status for each in records(folder, rank)}
            found.append((seed, session.incidents, session.failures, statuses))
    return found


@pytest.mark.slow
def test_thirty_jobs_without_a_fault_are_silent(tmp_path: Path):
    for found in run_ranks(clean_jobs, 3, tmp_path, timeout=300):
        assert found == [(seed, [], [], {"agree"}) for seed in range(30)]
