"""Parameters that each update overwrites are watched until it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.findings import Findings, findings_of
from tests.support.ranks import LiveRanks
from tests.support.replayed_job import Net, flip_in_memory, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig

WEIGHT = "stack.1.up/weight"
REASON = "not watched between updates: a collective writes to it between updates"


class MasterAdamW(torch.optim.AdamW):
    """AdamW with float32 masters of bfloat16 parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self._parameters = list(parameters)
        masters = [nn.Parameter(each.detach().float()) for each in self._parameters]
        super().__init__(masters, lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        (group,) = self.param_groups
        pairs = list(zip(self._parameters, group["params"], strict=True))
        for parameter, master in pairs:
            master.grad = parameter.grad.float() if parameter.grad is not None else None
        super().step()
        for parameter, master in pairs:
            parameter.data.copy_(master)


@dataclass(frozen=True, slots=True)
class Copying:
    """One job of 20 steps."""

    run_dir: Path
    flip: tuple[int, int] | None = None
    """A rank, and the step before whose forward pass one bit of its working copies changes."""
    receives: str = ""
    """When rank 1 receives other weights from rank 0, before a forward pass: ``once`` or ``always``."""


def copying(rank: int, jobs: Iterator[Copying]) -> Iterator[Findings]:
    for job in jobs:
        yield _train(rank, job)


def _train(rank: int, job: Copying) -> Findings:
    torch.manual_seed(0)
    net = Net().bfloat16()
    optimizer = MasterAdamW([*net.parameters()], lr=1e-3)
    session = enable_resiliency(
        net,
        optimizer,
        replay=ReplayConfig(interval=5),
        observer=None,
        parallelism=Parallelism(replica=dist.get_world_size()),
        run_dir=job.run_dir,
    )
    fired, weight = 0, net.stack[1].up.weight
    for step in range(1, 21):
        if job.flip == (rank, step):
            fired += flip_in_memory(weight, 9)
        if job.receives == "always" or (job.receives == "once" and step == 7):
            _receive(rank, weight.data)
        optimizer.zero_grad()
        net.zero_grad()
        loss_of(net, step, rank).backward()
        for each in net.parameters():
            dist.all_reduce(each.grad)
        optimizer.step()
    return Findings(fired=fired, **findings_of(session))


def _receive(rank: int, weight: torch.Tensor) -> None:
    """Send other weights from rank 0 to rank 1, which computes with them until the next update."""
    if rank == 0:
        dist.send(2 * weight, 1)
    elif rank == 1:
        dist.recv(weight, 0)


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(copying, 3) as ranks:
        yield ranks


@pytest.mark.parametrize("step", [11, 13, 15])
def test_a_flip_that_the_next_update_overwrites_names_its_rank_and_is_not_certified(
    three: LiveRanks, step: int, tmp_path: Path
):
    found = three.ask(Copying(tmp_path, flip=(2, step)), 120)
    assert [each.fired for each in found] == [0, 0, 1]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert {each.surface for each in incident.records} == {"state/owned"}
    for each in found:
        assert each.failures == []
        # Before step 11 the flip may have come before what was captured after step 10 was copied.
        assert each.replay["certified"] == (5 if step == 11 else 10)


def test_unchanged_copies_are_certified(three: LiveRanks, tmp_path: Path):
    for each in three.ask(Copying(tmp_path), 120):
        assert (each.incidents, each.failures) == ([], [])
        assert (each.replay["certified"], each.replay["watched"]) == (20, 1.0)
        assert each.replay["covered"]["watched"] == 1.0
        assert REASON not in each.replay["covered"]["missing"]


def test_a_write_by_a_collective_is_no_fault_though_one_rank_alone_sees_it(three: LiveRanks, tmp_path: Path):
    for each in three.ask(Copying(tmp_path, receives="once"), 120):
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == 20
        assert each.replay["covered"]["watched"] == 1.0


def test_copies_that_collectives_write_are_named_as_not_covered_and_the_rest_is_certified(
    three: LiveRanks, tmp_path: Path
):
    found = three.ask(Copying(tmp_path, receives="always"), 120)
    for each in found:
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == 20
    missing = [each.replay["covered"]["missing"] for each in found]
    assert [each.get(REASON) for each in missing] == [None, [WEIGHT], None]
    assert found[0].replay["covered"]["watched"] == 1.0
    assert 0.5 < found[1].replay["covered"]["watched"] < 1.0
