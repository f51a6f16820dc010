"""Infinity that all replicas agree on is not certified, and what holds it is told.

NaN, and what may be infinite by design, are in ``scenarios/test_checks``.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchscout import CheckpointConfig, ReplayConfig, enable_resiliency
from torchscout.log import log
from torchscout.replay.finite import FINITE
from torchscout.report.document import documented

STEPS, BAD_STEP = 6, 4
LAST_GOOD = {BAD_STEP - 1, BAD_STEP - 2}
"""The last step that is certified: the earlier one if it was still being copied at the later one."""


class Masked(nn.Module):
    """A layer with infinity in a buffer and in a frozen parameter, by design."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8,), -math.inf))
        self.frozen = nn.Parameter(torch.full((8,), math.inf), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values) + torch.exp(self.mask) + torch.exp(-self.frozen)


class NotTrained(Masked):
    """A layer with a trained parameter of which one element is NaN by design, and is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([1.0] * 7 + [math.nan]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) * torch.where(self.table.isnan(), 1.0, self.table)


class KeepsLowest(torch.optim.SGD):
    """Keeps the lowest value of each weight so far, of which there is none at first."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        _, weight, *_ = self.param_groups[0]["params"]
        self.state[weight]["lowest"] = torch.full_like(weight, math.inf)


class Messages(logging.Handler):
    """Keeps what torchscout logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("for the largest element")


def train(rank: int, folder: Path, kind: str) -> tuple[dict[str, Any], list[Any], list[str]]:
    messages = Messages()
    torch.manual_seed(0)
    layer = NotTrained if kind == "parameter" else Masked
    model = DistributedDataParallel(nn.Sequential(*(layer() for _ in range(2))))
    optimizer = (KeepsLowest if kind == "slot" else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    with enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1),
        observer=None,
        checkpoint=CheckpointConfig(folder / "checkpoints"),
        run_dir=folder / "run",
    ) as session:
        session.resume()
        for step in range(1, STEPS + 1):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if kind == "inf" and step == BAD_STEP:  # in a slot of the optimizer alone
                slots = optimizer.state[model.module[0].inner.weight]
                slots["exp_avg_sq"].view(-1)[0] = math.inf
            if kind == "blind" and step == BAD_STEP and rank == 1:
                torch.aminmax = out_of_memory
            optimizer.step()
        status = session.status()
        dist.barrier()
        return status, session.incidents, messages.texts


def test_infinity_in_a_slot_on_all_replicas_is_not_certified(tmp_path: Path):
    answers = run_ranks(train, 2, tmp_path, "inf")
    for status, incidents, _ in answers:
        assert status["replay"]["certified"] == status["checkpoint"]["verified"]
        assert status["checkpoint"]["verified"] in LAST_GOOD
        assert "NaN or infinity in" in status["replay"]["held_up"]["state/finite"]
        assert status["failures"] == []
        assert incidents == [], "no rank is at fault"
    said = [[each for each in texts if "NaN or infinity in" in each] for _, _, texts in answers]
    assert [len(each) for each in said] == [1, 0], "once in the job"
    assert f"rank 0: step {BAD_STEP}: NaN or infinity in" in said[0][0]
    shown = [each for each in documented(tmp_path / "run")["not_checked"] if each["surfaces"] == [FINITE]]
    assert [(each["first"], each["last"], each["ranks"]) for each in shown] == [(BAD_STEP, STEPS, [[0, 1]])]


@pytest.mark.parametrize(
    ("kind", "tensors"), [("parameter", "0/table and 1/table"), ("slot", "0.inner/weight.lowest")]
)
def test_what_is_not_finite_by_design_is_named_with_what_to_do(kind: str, tensors: str, tmp_path: Path):
    for rank, (status, incidents, texts) in enumerate(run_ranks(train, 2, tmp_path, kind)):
        assert (status["checkpoint"]["verified"], status["failures"], incidents) == (None, [], [])
        why = status["replay"]["held_up"][FINITE]
        assert f"NaN or infinity in {tensors}: " in why
        assert "make it a buffer or set requires_grad=False" in why
        said = [each.partition("step 1: ")[2] for each in texts if "NaN" in each]
        assert said == [why][rank:], "once in the job"


def test_state_that_could_not_be_looked_at_is_not_certified(tmp_path: Path):
    (status, _, _), (blind, _, texts) = run_ranks(train, 2, tmp_path, "blind")
    for each in (status, blind):
        assert each["replay"]["certified"] == each["checkpoint"]["verified"]
        assert each["checkpoint"]["verified"] in LAST_GOOD
    why = blind["replay"]["held_up"][FINITE]
    assert "could not look for NaN" in why
    assert 'session.status()["failures"] says why' in why
    assert any(why in each for each in texts)
    assert any("for the largest element" in each for each in blind["failures"])
