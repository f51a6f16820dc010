"""What the contracts of ``tests/contracts`` do not say of tensor, context and pipeline parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.contracts import Attempt, Ranks
from evaluation.jobs.job import Job, Trial, local_of
from evaluation.jobs.pipeline import REPLAYED
from tests.support.ranks import run_ranks
from torchscout.faults.plan import FaultPlan
from torchscout.utils.reentrancy import in_own_work


class EchoingJob(Job):
    """Learns nothing, and compares each replayed pass of a block with training's own before it."""

    def attach(self, model: nn.Module, optimizer: Any, **settings: Any) -> None:
        self.training: dict[str, bytes] = {}
        self.is_repeated: dict[str, list[bool]] = {"output": [], "gradient": []}
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        block = model.blocks[0]
        block.register_forward_hook(lambda _, __, output: self._heard("output", output))
        block.up.weight.register_hook(lambda gradient: self._heard("gradient", gradient))
        super().attach(model, optimizer, **settings)

    def _heard(self, what: str, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            found = local_of(tensor).detach().contiguous().numpy().tobytes()
        if in_own_work():
            self.is_repeated[what].append(found == self.training[what])
        else:
            self.training[what] = found


def echoed(rank: int, name: str, run_dir: Path) -> dict[str, list[bool]]:
    job = EchoingJob(rank, Trial(steps=3, interval=1, run_dir=run_dir, keeps_records=True))
    CATALOG[name].train(job)
    assert job.finish().unchecked == {}
    return job.is_repeated


@pytest.mark.long_cases("tensor-dtensor", "context-ulysses")
@pytest.mark.slow_cases(
    "tensor-plain", "tensor-sequence", "context-block", "context-module", "context-gathered"
)
@pytest.mark.parametrize(
    "name",
    [
        "tensor-plain",
        "tensor-sequence",
        "tensor-dtensor",
        "context-block",
        "context-module",
        "context-gathered",
        "context-ulysses",
    ],
)
def test_the_source_computes_again_what_it_computed_in_training(name: str, tmp_path: Path):
    """Not, for example, its own tokens' attention to each other, which peers would agree about as well."""
    for rank, is_repeated in enumerate(run_ranks(echoed, 6, name, tmp_path, timeout=300)):
        again = [rank < 2, rank >= 4]  # whose replica's input it was: the first's, then the third's
        assert is_repeated == {"output": again, "gradient": again}


@pytest.mark.long
def test_stages_of_one_replica_that_are_wrong_at_once_are_separate_incidents(tmp_path: Path):
    faults = FaultPlan()
    for rank, at in ((2, "blocks.1/output"), (3, "blocks.4/output")):
        faults = faults.flip_bit(rank=rank, at=at, step=2, bit=3, calls=REPLAYED)
    with Ranks(Attempt("pipeline-1f1b", tmp_path, tmp_path)) as ranks:
        found = ranks.train(Trial(steps=2, interval=1, run_dir=tmp_path / "run", faults=faults)).incidents
    wrong = sorted((each.scope.value, each.ranks, each.records[0].surface, each.step) for each in found)
    assert wrong == [("rank", (2,), "blocks.1/output", 2), ("rank", (3,), "blocks.4/output", 2)]
