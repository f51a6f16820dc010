"""How often ranks have to wait for each other: in a check for all recipes together, and not for each; in a
sweep for all small targets of a recipe."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job
from tests.support.replayed_job import Block, Net
from torchscout.checkpoint.gate import SweepResult
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import CheckpointConfig, ReplayConfig

STEPS = 4
ONE_CHECK = {
    "all_gather": 3,  # descriptions, evidence, times and votes
    "all_reduce": 1,  # which ranks are ready, and have news of training's groups
    "broadcast": 1,  # what the source has captured
}


class Counted:
    """SCOUT's own collectives."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()

    def before(self, call: Call) -> None:
        if call.group.is_scouts:
            self.operations[call.operation] += 1

    def issued(self, call: Call, token: object, pending: Pending | None) -> None:
        """Counted already."""


def job_of(rank: int, depth: int) -> Job:
    """A job whose model has this many layers more."""
    net = Net()
    for _ in range(depth):
        net.stack.append(Block())
    return Job(rank, net)


def counted(rank: int, recipes: tuple[str, ...] | None, depth: int, run_dir: Path) -> dict[str, float]:
    """Operations of one check, on average over some of them."""
    job = job_of(rank, depth)
    config = ReplayConfig(interval=1) if recipes is None else ReplayConfig(interval=1, recipes=recipes)
    with job.attach(run_dir, config) as session:
        job.train(2)  # in the first, ranks find out on which groups training communicates
        counted = Counted()
        with listen(counted):
            job.train(STEPS)
        assert not session.failures
        assert session.status()["replay"]["checks"] == 2 + STEPS
    return {operation: count / STEPS for operation, count in counted.operations.items()}


def test_all_recipes_of_a_check_share_their_exchanges(tmp_path):
    assert run_ranks(counted, 3, None, 0, tmp_path) == [ONE_CHECK] * 3


def test_a_single_recipe_needs_as_many_exchanges(tmp_path):
    assert run_ranks(counted, 3, ("layer",), 0, tmp_path) == [ONE_CHECK] * 3


@pytest.mark.slow
def test_a_larger_model_needs_no_more_exchanges(tmp_path):
    """All its state is compared by two digests; the signatures of its tensors would not fit one exchange."""
    assert run_ranks(counted, 3, ("replicated_state", "layer"), 60, tmp_path) == [ONE_CHECK] * 3


def swept(rank: int, depth: int, folder: Path) -> Counter[str]:
    """Operations of ``resume`` in a job that has replayed each of its targets before."""
    job, checkpoint = job_of(rank, depth), CheckpointConfig(folder / "checkpoints")
    targets = len([*job.model.parameters()])
    with job.attach(folder / "run", ReplayConfig(interval=1), checkpoint=checkpoint):
        job.train(targets)
    counted = Counted()
    with job.attach(folder / "run", ReplayConfig(interval=1), checkpoint=checkpoint) as session:
        with listen(counted):
            resumed = session.resume()
        assert (resumed.step, resumed.swept, resumed.unswept) == (targets, SweepResult.CLEAN, None)
        assert not session.failures
    return counted.operations


@pytest.mark.long
def test_a_sweep_of_a_larger_model_needs_no_more_exchanges(tmp_path):
    small, large = (run_ranks(swept, 3, depth, tmp_path / str(depth)) for depth in (0, 3))
    for of_small, of_large in zip(small, large, strict=True):
        of_large["broadcast"] = of_small["broadcast"]  # one for each peer that has saved calls, at most
        assert of_small == of_large
