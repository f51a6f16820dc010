"""Batches and checkpoints of the real frameworks are phases, without a change to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hangs import QUICK
from tests.support.ranks import may_have_children, run_ranks
from torchscout.attach import enable_resiliency
from torchscout.decision.progress import Phase
from torchscout.observer.record.reader import ProgressReader

WRITES, READS = Phase.CHECKPOINT_WRITE, Phase.CHECKPOINT_READ


def attached(*job: Any, run_dir: Path) -> tuple[Any, Callable[[], Phase], ProgressReader]:
    """A session, what its rank does now, and all that its observer reads."""
    session = enable_resiliency(*job, replay=None, observer=QUICK, run_dir=run_dir)
    reader = ProgressReader(session._monitor.writer.path)

    def phase() -> Phase:
        progress = reader.read()
        assert progress is not None
        return progress.phase

    return session, phase, reader


class Schedule:
    """A learning rate schedule that notes the phase in which its state is asked for or given back."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase, self.phases = phase, list[Phase]()

    def state_dict(self) -> dict[str, int]:
        self.phases.append(self._phase())
        return {"step": 0}

    def load_state_dict(self, _: Any) -> None:
        self.phases.append(self._phase())


def save_and_load_with_deepspeed(rank: int, folder: Path) -> list[Phase]:
    import deepspeed

    from evaluation.jobs.deepspeed import Setup, build

    original = deepspeed.DeepSpeedEngine.save_checkpoint
    engine = build(Setup(), rank).engine
    session, phase, _ = attached(engine, run_dir=folder / "run")
    engine.lr_scheduler = schedule = Schedule(phase)
    engine.save_checkpoint(str(folder / "files"))
    engine.load_checkpoint(str(folder / "files"))
    schedule.state_dict()
    session.close()
    assert deepspeed.DeepSpeedEngine.save_checkpoint is original
    return schedule.phases


@pytest.mark.slow
def test_deepspeed_saves_and_loads_in_their_phases(tmp_path: Path):
    for phases in run_ranks(save_and_load_with_deepspeed, 2, tmp_path, timeout=200):
        assert set(phases[:-1]) == {WRITES, READS}
        assert (phases[0], phases[-2], phases[-1]) == (WRITES, READS, Phase.IDLE)


def save_and_load_with_megatron(_rank: int, folder: Path) -> list[Phase]:
    from evaluation.jobs.megatron import Setup, build

    may_have_children()  # Megatron's writer
    job = build(Setup())
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    original = dist_checkpointing.save, dist_checkpointing.load
    session, phase, _ = attached(job.chunks[0], job.optimizer, run_dir=folder / "run")
    phases: list[Phase] = []

    def part(key: str, tensor: torch.Tensor, *_: Any) -> dict[str, ShardedTensor]:
        phases.append(phase())
        return {"part": ShardedTensor.from_rank_offsets(key, tensor)}

    def state() -> dict[str, Any]:
        return {"w": ShardedTensorFactory("w", torch.ones(3), part, lambda parts: parts["part"])}

    (folder / "files").mkdir()
    dist_checkpointing.save(state(), folder / "files")
    phases.append(phase())
    dist_checkpointing.load(state(), folder / "files")
    session.close()
    assert (dist_checkpointing.save, dist_checkpointing.load) == original
    return phases


@pytest.mark.slow
def test_megatron_saves_and_loads_in_their_phases(tmp_path: Path):
    (phases,) = run_ranks(save_and_load_with_megatron, 1, tmp_path, timeout=200)
    assert [*dict.fromkeys(phases)] == [WRITES, Phase.IDLE, READS]


def fetch_with_torchtitan(_rank: int, folder: Path) -> tuple[int, int]:
    from evaluation.jobs.titan import Setup, config_of, prepare

    prepare()
    trainer = config_of(Setup()).build()
    session, _, reader = attached(trainer, run_dir=folder / "run")
    batches = iter(trainer.dataloader)
    for _ in range(3):
        next(batches)
    fetched = len(reader.phase_seconds(Phase.INPUT))
    session.close()
    next(batches)
    return fetched, len(reader.phase_seconds(Phase.INPUT))


def test_torchtitan_fetches_in_a_phase_until_the_session_is_closed(tmp_path: Path):
    assert run_ranks(fetch_with_torchtitan, 1, tmp_path, timeout=200) == [(3, 3)]


def save_and_load_with_fabric(_rank: int, folder: Path) -> list[Phase]:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    session, phase, _ = attached(model, optimizer, run_dir=folder / "run")
    schedule = Schedule(phase)
    fabric.save(folder / "file", {"schedule": schedule})
    fabric.load(folder / "file", {"schedule": schedule}, weights_only=False)
    session.close()
    return schedule.phases


def test_fabric_saves_and_loads_in_their_phases(tmp_path: Path):
    assert run_ranks(save_and_load_with_fabric, 1, tmp_path, timeout=100) == [[WRITES, READS]]
