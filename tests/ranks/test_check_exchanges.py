"""How often ranks have to wait for each other in one check: for all recipes together, not for each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job
from tests.support.replayed_job import Block, Net
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import ReplayConfig

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


def counted(rank: int, recipes: tuple[str, ...] | None, depth: int, run_dir: Path) -> dict[str, float]:
    """Operations of one check, on average over some of them."""
    net = Net()
    for _ in range(depth):
        net.stack.append(Block())
    job = Job(rank, net)
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


def test_a_larger_model_needs_no_more_exchanges(tmp_path):
    """All its state is compared by two digests; the signatures of its tensors would not fit one exchange."""
    assert run_ranks(counted, 3, ("replicated_state", "layer"), 60, tmp_path) == [ONE_CHECK] * 3
