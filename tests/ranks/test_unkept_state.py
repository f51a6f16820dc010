"""State that cannot be kept at one check, on one rank: that generation is nobody's, and the job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.replayed_job import Net, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ReplayConfig


class Moody:
    """Raises when its state is asked for at one step; iterable ones are asked right after the update."""

    def __init__(self, moment: int) -> None:
        self.step, self.moment = 0, moment

    def state_dict(self) -> dict[str, Any]:
        if self.step == self.moment:
            raise RuntimeError("not now")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class MoodyLoader(Moody):
    def __iter__(self) -> Any:
        return iter(())


def train(rank: int, kind: type[Moody], steps: int, run_dir: Path) -> tuple[int, int, list[str]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1, recipes=("replicated_state",)),
        observer=None,
        checkpoint=CheckpointConfig(run_dir / "checkpoints", persist_every=100),
        run_dir=run_dir,
    )
    moody = kind(4 if rank == 1 and steps == 4 else -1)
    session.register_state("moody", moody)
    resumed = session.resume().step
    for step in range(session.step + 1, steps + 1):
        if kind is MoodyLoader:
            moody.step = step
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        moody.step = step
    session.close()
    return resumed, moody.step, session.failures


@pytest.mark.parametrize("kind", [Moody, MoodyLoader])
def test_a_generation_that_one_rank_could_not_capture_is_not_loaded(
    kind: type[Moody], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "memory"))
    first = run_ranks(train, 2, kind, 4, tmp_path, timeout=60)
    assert [bool(failures) for _, _, failures in first] == [False, True]
    assert "not now" in first[1][2][0]
    again = run_ranks(train, 2, kind, 3, tmp_path, timeout=60)
    assert [(resumed, step) for resumed, step, _ in again] == [(3, 3), (3, 3)]
