"""What replays of compiled models cost, and what is left out; healthy and faulty jobs are in the catalog."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.job import Job, Report, Trial
from evaluation.jobs.models import GPT, train_on_text
from tests.support.ranks import run_ranks
from torchscout.log import show_by_default
from torchscout.utils.reentrancy import in_own_work

STEPS = 6


def train(rank: int, train_it: Callable[[Job], None], trial: Trial) -> Report:
    job = Job(rank, trial)
    train_it(job)
    return job.finish()


class CountingJob(Job):
    """Counts the eager passes of the whole model."""

    passes = 0

    def attach(self, model: Any, *args: Any, **settings: Any) -> None:
        super().attach(model, *args, **settings)
        next(each for name, each in model.named_modules() if name.endswith("norm")).register_forward_hook(
            self._count
        )

    def _count(self, *_: object) -> None:
        self.passes += in_own_work()


def passes_of(rank: int, run_dir: Path) -> int:
    job = CountingJob(rank, Trial(steps=STEPS, interval=1, run_dir=run_dir))
    CATALOG["compiled"].train(job)
    assert job.finish().certified == STEPS
    return job.passes


def frames_compiled(rank: int, name: str, run_dir: Path) -> tuple[list[int], list[str]]:
    """Return how many frames Dynamo has seen in a job without torchscout and in one with it.

    Then what Dynamo has warned of.
    """
    counts = []
    show_by_default()  # to set a level makes all loggers look theirs up once more, PyTorch's too
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for place in (None, None, run_dir):  # the first time Dynamo finds out what it cannot compile
            counters.clear()
            train(rank, CATALOG[name].train, Trial(steps=STEPS, interval=1, run_dir=place))
            counts.append(counters["frames"]["total"])
    return counts[1:], [str(each.message) for each in warned if "Dynamo" in str(each.message)]


class Branching(GPT):
    """What is called depends on numbers, which a pass over shapes does not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x) if x.sum().item() < 1e9 else x
        return self.head(self.norm(x))


def branching(job: Job) -> None:
    net = Branching()
    for part in (*net.blocks, net):
        fully_shard(part)
    model = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    train_on_text(job, model, optimizer, job.rank)


@pytest.mark.long
def test_one_pass_of_the_whole_model_saves_the_input_of_every_target(tmp_path: Path):
    assert run_ranks(passes_of, 3, tmp_path, timeout=240) == [1] * 3


@pytest.mark.slow_cases("compiled-around-ddp")
@pytest.mark.long_cases("compiled")
@pytest.mark.parametrize("name", ["compiled", "compiled-around-ddp"])
def test_torchscouts_own_code_is_not_compiled(name: str, tmp_path: Path):
    for (without, attached), warned in run_ranks(frames_compiled, 2, name, tmp_path, timeout=240):
        assert attached == without > 0
        assert warned == []


@pytest.mark.slow
def test_a_sharded_model_that_branches_on_numbers_is_checked_without_its_layers(tmp_path: Path):
    trial = Trial(steps=STEPS, interval=1, run_dir=tmp_path, keeps_records=True)
    for found in run_ranks(train, 3, branching, trial, timeout=150):
        assert (found.incidents, found.failures) == ([], [])
        assert "shapes inside compiled code are unknown" in str(found.unchecked["blocks.1/layer"])
        assert "state/owned" in found.agreed
        assert found.certified == STEPS
