"""CUDA graphs over NCCL that are unlike the one of the catalog: torchscout leaves them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evaluation.jobs.compiled import Graphed, graphed
from evaluation.jobs.job import Job, Report, Trial
from evaluation.jobs.models import GPT, LAYERS, text, train_on_text
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3)]
STEPS = 8


def with_and_without(
    rank: int, train: Callable[[Job], None], run_dir: Path, is_checked: bool
) -> tuple[bool, Report]:
    """Return whether training is bitwise the same with a check at each step, and what was found."""
    found = []
    for place in (None, run_dir):
        job = Job(rank, Trial(steps=STEPS, interval=1, run_dir=place, keeps_records=is_checked))
        train(job)
        found.append(job.finish())
    alone, watched = found
    return alone.bits == watched.bits, watched


def trained(train: Callable[[Job], None], run_dir: Path, *, is_checked: bool = True) -> list[Report]:
    """Healthy reports of all ranks."""
    every = run_ranks(with_and_without, 3, train, run_dir, is_checked, timeout=400, backend="nccl")
    assert [same for same, _ in every] == [True] * 3
    reports = [found for _, found in every]
    assert [(each.incidents, each.failures) for each in reports] == [([], [])] * 3
    return reports


def callables(job: Job) -> None:
    """``torch.cuda.make_graphed_callables`` makes the graphs."""
    net = Graphed()
    torch.cuda.make_graphed_callables(net, (text(0, job.rank)[0].clone(),))
    graphed(job, net, warm=STEPS)


def reduced_overhead(job: Job) -> None:
    torch._dynamo.reset()
    model = DistributedDataParallel(torch.compile(GPT(), mode="reduce-overhead"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    train_on_text(job, model, optimizer, job.rank)


def at_once(job: Job) -> None:
    graphed(job, Graphed(), warm=0)


def whole_step(job: Job) -> None:
    graphed(job, Graphed(), whole_step=True)


@pytest.mark.parametrize("train", [at_once, reduced_overhead])
def test_layers_are_replayed_from_the_form_of_the_captured_call(train: Callable, tmp_path: Path):
    for found in trained(train, tmp_path):
        assert {f"{layer}/output" for layer in LAYERS} <= found.agreed, found.unchecked


def test_an_optimizer_inside_of_the_graph_is_left_alone(tmp_path: Path):
    for found in trained(whole_step, tmp_path, is_checked=False):
        assert found.status["step"] == 0


def test_a_model_that_was_graphed_as_a_whole_before_is_checked_without_its_layers(tmp_path: Path):
    for found in trained(callables, tmp_path):
        assert "state/parameters" in found.agreed
        assert "must be captured after torchscout is attached" in str(found.unchecked["blocks.0/layer"])
        assert found.certified == STEPS
