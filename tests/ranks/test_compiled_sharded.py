"""``torch.compile`` around a model that FSDP2 shards: layers are replayed, and nothing is compiled again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.compiled_jobs import Compilations
from tests.support.findings import Findings, all_records, findings_of
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import EVERY_STEP, bytes_of
from tests.support.replay_results import local_of
from tests.support.replayed_job import Net, loss_of
from torchscout.attach import enable_resiliency
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

STEPS, LAYERS = 6, ("tokens", "stack.0", "stack.1", "head")


@dataclass(frozen=True)
class Result(Findings):
    bits: bytes = b""
    compilations: int = 0


@dataclass(frozen=True)
class Trial:
    run_dir: Path | None = None
    dtype: torch.dtype | None = None
    is_in_place: bool = False
    net: type[Net] = Net
    faults: FaultPlan = field(default_factory=FaultPlan)


class Branching(Net):
    """What is called depends on numbers, which a pass over shapes does not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = block(x) if x.sum().item() < 1e9 else x
        return self.head(self.final(x))


def train(rank: int, trial: Trial) -> Result:
    torch.manual_seed(0)
    net, compilations = trial.net(), Compilations()
    policy = MixedPrecisionPolicy(param_dtype=trial.dtype)
    for part in (*net.stack, net):
        fully_shard(part, mp_policy=policy)
    model: Any = net
    if trial.is_in_place:
        net.compile(backend=compilations)
    else:
        model = torch.compile(net, backend=compilations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Injector(trial.faults, rank, net, optimizer) as injector:
        session = trial.run_dir and enable_resiliency(
            model, optimizer, replay=all_records(EVERY_STEP), observer=None, run_dir=trial.run_dir
        )
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        slots = [local_of(slot) for of in optimizer.state.values() for slot in of.values()]
        bits = bytes_of([*map(local_of, net.parameters()), *slots, torch.get_rng_state()])
        found = findings_of(session) if session else {}
    return Result(**found, fired=len(injector.fired), bits=bits, compilations=compilations.count)


@pytest.mark.long_cases("around")
@pytest.mark.parametrize(
    "trial",
    [
        Trial(),
        pytest.param(Trial(dtype=torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(Trial(is_in_place=True), marks=pytest.mark.slow),
    ],
    ids=["around", "bfloat16", "in place"],
)
def test_a_clean_job_is_certified_and_trains_bitwise_the_same(trial: Trial, tmp_path: Path):
    alone = run_ranks(train, 3, trial, timeout=150)
    watched = Trial(tmp_path, trial.dtype, trial.is_in_place)
    for plain, found in zip(alone, run_ranks(train, 3, watched, timeout=150), strict=True):
        assert (found.incidents, found.failures, found.unchecked) == ([], [], {})
        assert found.bits == plain.bits
        assert found.compilations == plain.compilations
        assert {f"{layer}/output" for layer in LAYERS} <= found.agreed
        assert {"stack.0/grad_input", "stack.1.up/weight.grad", "state/owned"} <= found.agreed
        assert found.replay["certified"] == STEPS


@pytest.mark.long
def test_a_wrong_output_of_a_layer_names_its_rank(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at="stack.1/output", step=4, bit=20, index=3, calls=None)
    for found in run_ranks(train, 3, Trial(tmp_path, faults=faults), timeout=150):
        (incident,) = found.incidents
        assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (2,), 4)


@pytest.mark.slow
def test_a_model_that_branches_on_numbers_is_checked_without_its_layers(tmp_path: Path):
    for found in run_ranks(train, 3, Trial(tmp_path, net=Branching), timeout=150):
        assert (found.incidents, found.failures) == ([], [])
        assert "the shapes inside compiled code are unknown" in str(found.unchecked["stack.1/layer"])
        assert "state/owned" in found.agreed
        assert found.replay["certified"] == STEPS
