"""Kernels that do not repeat their numbers: nobody is named for them, and the rest is certified."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job, bytes_of, records
from tests.support.replayed_job import REPLAY, Block, Net, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

STEPS = 16
EVERY_STEP = ReplayConfig(interval=1, records="all")
SLOW = pytest.mark.slow


def _drawn() -> float:
    """Draw from 0 to 1 with a source that no seed controls."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


class _Noise(torch.autograd.Function):
    """Change the last bits of the gradient now and then, as a sum in uncontrolled order does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.rate = rate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient * (1 + 1e-5 * _drawn()) if _drawn() < ctx.rate else gradient), None


class _Put(torch.autograd.Function):
    """Use ``put_``, which has no deterministic version on any device; its result here repeats anyway."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: str) -> torch.Tensor:
        ctx.passed = passed
        return _put(x) if passed == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (_put(gradient) if ctx.passed == "backward" else gradient), None


def _put(x: torch.Tensor) -> torch.Tensor:
    attempts.append(torch.is_deterministic_algorithms_warn_only_enabled())
    return torch.zeros_like(x).put_(torch.arange(x.numel(), device=x.device), x)


attempts: list[bool] = []
"""Every call of ``put_`` in this process, and whether it may only have warned."""


class RestlessBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(KINDS[self.kind](x))


KINDS = {
    "always": lambda x: _Noise.apply(x, 1.0),
    "often": lambda x: _Noise.apply(x, 0.3),
    "rarely": lambda x: _Noise.apply(x, 0.03),
    "put_forward": lambda x: _Put.apply(x, "forward"),
    "put_backward": lambda x: _Put.apply(x, "backward"),
}


def net_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    net.stack = nn.ModuleList([RestlessBlock(kind), RestlessBlock(kind)])
    return net


@dataclass(frozen=True)
class Found:
    incidents: list[tuple[tuple[int, ...], str]]
    """Of wrong numbers; who is slow depends on the machine of the day."""
    records: list[EvidenceRecord]
    status: dict[str, Any]
    certified: int | None
    state: bytes
    attempts: list[bool]
    switches: tuple[bool, bool]

    def statuses(self, surface: str) -> list[str]:
        """At each step at which it was due; without those of further replays."""
        first: dict[int, str] = {}
        for each in self.records:
            if each.surface == surface:
                first.setdefault(each.step, each.status)
        return [*first.values()]


def trained(
    rank: int, kind: str, run_dir: Path, config: ReplayConfig | None, faults: FaultPlan, steps: int
) -> Found:
    attempts.clear()
    job = Job(rank, net_of(kind))
    with Injector(faults, rank, job.net, job.optimizer) as injector, job.attach(run_dir, config) as session:
        job.train(steps)
        torch.distributed.barrier()  # an incident is in the file before anybody reads it
        assert (session.failures, injector.unfired) == ([], [])
        return Found(
            [
                (each.ranks, each.sentence)
                for each in session.incidents
                if each.manifestation is Manifestation.SDC
            ],
            [] if config is None else records(run_dir, rank),
            dict(session.status()["replay"]),
            session.certified_step,
            bytes_of(job.net.parameters()),
            list(attempts),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
        )


def run(
    kind: str,
    run_dir: Path,
    config: ReplayConfig | None = EVERY_STEP,
    faults: FaultPlan = FaultPlan(),  # noqa: B008  frozen
    *,
    steps: int = STEPS,
) -> list[Found]:
    found = run_ranks(trained, 3, kind, run_dir, config, faults, steps, timeout=240)
    for result in found:
        assert result.certified == found[0].certified
        assert result.status["not_repeating"].keys() == found[0].status["not_repeating"].keys()
        assert result.switches == (False, False)
    return found


@pytest.mark.parametrize("kind", ["always", pytest.param("often", marks=SLOW)])
def test_a_backward_that_does_not_repeat_names_nobody_and_the_rest_is_certified(kind: str, tmp_path: Path):
    for found in run(kind, tmp_path):
        assert found.incidents == []
        assert found.certified == STEPS
        assert {*found.status["not_repeating"]} == {"stack.0/grad_input", "stack.1/grad_input"}
        reason = found.status["not_repeating"]["stack.0/grad_input"]
        assert reason.startswith("nondeterministic kernel: replayed")
        assert found.status["not_checked"].keys() == found.status["not_repeating"].keys()
        assert found.status["held_up"] == {}
        assert set(found.statuses("stack.0/output")) == {"agree"}
        assert set(found.statuses("stack.0.up/weight.grad")) == {"agree"}
        assert found.statuses("stack.0/grad_input")[-1] == "not_checked"


@SLOW
def test_a_backward_that_differs_rarely_names_nobody(tmp_path: Path):
    for found in run("rarely", tmp_path, steps=3 * STEPS):
        assert found.incidents == []
        assert found.certified is not None
        assert found.certified >= 2 * STEPS
        assert {*found.status["not_checked"]} <= {"stack.0/grad_input", "stack.1/grad_input"}


@pytest.mark.slow_cases("stack.0/output-stack.0/output")
@pytest.mark.parametrize(
    ("at", "surface"), [("stack.0/output", "stack.0/output"), ("stack.0.up/weight", "stack.0.up/weight")]
)
def test_a_rank_that_is_wrong_is_found_by_what_repeats(at: str, surface: str, tmp_path: Path):
    calls = REPLAY if at.endswith("output") else range(1)
    faults = FaultPlan().flip_bit(rank=2, at=at, step=5, bit=20, calls=calls)
    for found in run("always", tmp_path, faults=faults, steps=6):
        ((ranks, sentence),) = found.incidents
        assert ranks == (2,)
        assert surface in sentence
        assert "(persistent)" in sentence
        assert found.certified == 4


@pytest.mark.slow_cases("stack.*/grad_input")
@pytest.mark.parametrize("require", ["backward", "stack.*/grad_input"])
def test_a_required_nondeterministic_surface_prevents_certification_and_is_reported(
    require: str, tmp_path: Path
):
    for found in run("always", tmp_path, ReplayConfig(interval=1, require=(require,)), steps=4):
        assert found.incidents == []
        assert found.certified is None
        assert {*found.status["held_up"]} == {"stack.1/grad_input"}, "of the last check"
        assert "did not repeat the same numbers" in found.status["held_up"]["stack.1/grad_input"]


@pytest.mark.parametrize("passed", [pytest.param("forward", marks=SLOW), "backward"])
def test_an_operator_that_strict_mode_refuses_is_replayed_without_and_marked(passed: str, tmp_path: Path):
    steps = 6
    alone = run_ranks(trained, 3, f"put_{passed}", tmp_path / "alone", None, FaultPlan(), steps, timeout=240)
    for found, bare in zip(run(f"put_{passed}", tmp_path, steps=steps), alone, strict=True):
        assert found.incidents == []
        assert found.state == bare.state
        assert found.certified == steps
        reason = found.status["not_repeating"]["stack.0/grad_input"]
        assert reason == "nondeterministic kernel: put_ does not have a deterministic implementation"
        expected = "agree" if passed == "backward" else "not_checked"
        assert set(found.statuses("stack.0/output")) == {expected}
        assert set(found.statuses("stack.0.up/weight.grad")) == {"not_checked"}
        assert set(found.statuses("stack.0/input")) == {"agree"}
        # Two calls in each step are training's own. Each layer is refused once, and then only warned.
        assert len(found.attempts) == 2 * steps + steps + 2
        assert found.attempts.count(True) == steps


def test_a_rank_that_is_wrong_is_found_though_an_operator_is_refused(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=1, at="stack.0/output", step=3, bit=20, calls=REPLAY)
    for found in run("put_backward", tmp_path, faults=faults, steps=4):
        ((ranks, sentence),) = found.incidents
        assert ranks == (1,)
        assert "stack.0/output" in sentence


def sharded(rank: int, kind: str, run_dir: Path) -> Found:
    """FSDP2: a refused pass has gathered parameters before, and all ranks gather them again."""
    net = net_of(kind)
    for block in net.stack:
        fully_shard(block)
    fully_shard(net)
    attempts.clear()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with enable_resiliency(net, optimizer, replay=EVERY_STEP, observer=None, run_dir=run_dir) as session:
        for step in range(1, 7):
            optimizer.zero_grad()
            loss_of(net, step, rank).backward()
            optimizer.step()
        torch.distributed.barrier()
        assert session.failures == []
        incidents = [each for each in session.incidents if each.manifestation is Manifestation.SDC]
        return Found(
            [(each.ranks, each.sentence) for each in incidents],
            records(run_dir, rank),
            dict(session.status()["replay"]),
            session.certified_step,
            b"",
            list(attempts),
            (False, False),
        )


@SLOW
@pytest.mark.parametrize("kind", ["put_forward", "put_backward", "always"])
def test_sharded_layers_are_replayed_without_what_does_not_repeat(kind: str, tmp_path: Path):
    for found in run_ranks(sharded, 4, kind, tmp_path, timeout=240):
        assert found.incidents == []
        assert found.certified == 6
        assert {"stack.0/grad_input", "stack.1/grad_input"} <= found.status["not_repeating"].keys()
        assert set(found.statuses("stack.0/output")) == {"not_checked" if kind == "put_forward" else "agree"}
        assert set(found.statuses("stack.0/parameters")) == {"agree"}
