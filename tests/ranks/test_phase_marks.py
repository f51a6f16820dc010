"""Real jobs that announce no phases: batches and checkpoints are recognized (paper, section 9)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.support.hangs import QUICK, STALL, STEPS, Net, incidents, wait_for_incident
from tests.support.ranks import may_have_children, run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig, StragglerConfig
from torchscout.decision.records.record import Action, Incident, Manifestation, Scope

SOON = replace(QUICK, min_silence_seconds=5.0, repeat_seconds=0.5)
"""Surveys follow each other quickly, and no step is long enough for a hang."""
SLOW, BATCHES = 0.3, 20
EPOCHS = 4
"""Until a slow rank is reported: on a busy machine, observers may not look at it often enough in one."""
DEFAULTS = ReplayConfig()


class Samples(Dataset[torch.Tensor]):
    """Random samples of 16 numbers, which may take some time."""

    def __init__(self, seconds: float, count: int = BATCHES) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((16,), float(index)) / self.count


class Sleepy:
    """An object that takes long to pickle, to unpickle, or to give its state."""

    def __init__(self, *, write: float = 0.0, read: float = 0.0) -> None:
        self.write, self.read = write, read

    def __getstate__(self) -> dict[str, float]:
        time.sleep(self.write)
        return {"write": 0.0, "read": self.read}

    def __setstate__(self, state: dict[str, float]) -> None:
        time.sleep(state["read"])
        self.write, self.read = 0.0, 0.0

    def state_dict(self) -> dict[str, torch.Tensor]:
        time.sleep(self.write)
        return {"nothing": torch.zeros(1)}

    def load_state_dict(self, _: Any) -> None:
        time.sleep(self.read)


def train(
    rank: int,
    run_dir: Path,
    slow: tuple[int, ...],
    workers: int,
    attached: bool,
    replay: ReplayConfig | None = DEFAULTS,
) -> dict[str, Any]:
    """Train on batches of a DataLoader; returns the session's status and all state."""
    may_have_children()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(
        Samples(SLOW if rank in slow else 0.0),
        num_workers=workers,
        shuffle=True,
        multiprocessing_context="fork" if workers else None,  # others import torch again
    )
    session = None
    if attached:
        session = enable_resiliency(model, optimizer, replay=replay, observer=SOON, run_dir=run_dir)
    for _ in range(EPOCHS if slow and replay == DEFAULTS else 1):
        for batch in loader:
            time.sleep(0.02)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        is_found = torch.tensor([bool(incidents(run_dir))])
        dist.broadcast(is_found, 0)
        if is_found:
            break
    dist.barrier()
    status = {} if session is None else session.status()
    dist.barrier()  # who leaves says goodbye, and that is a message
    if session is not None:
        session.close()
    return {"status": status, "state": [*model.state_dict().values(), torch.get_rng_state()]}


with_each_loader = pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.long_cases("0")
@with_each_loader
def test_a_rank_whose_dataset_is_slow_is_named_in_its_input(tmp_path: Path, workers: int):
    run_ranks(train, 4, tmp_path, (1,), workers, True, timeout=120)
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.action) == (Manifestation.STRAGGLER, Action.INSPECT)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))
    assert "to fetch a batch where its peers take" in incident.sentence


@pytest.mark.slow
def test_the_settings_for_stragglers_apply_to_input(tmp_path: Path):
    patient = ReplayConfig(straggler=StragglerConfig(confirmations=1000))
    seen = run_ranks(train, 4, tmp_path, (1,), 0, True, patient, timeout=120)
    assert seen[1]["status"]["observer"]["rounds"] > 1, "its input was compared"
    assert incidents(tmp_path) == []


@with_each_loader
def test_two_ranks_of_which_one_is_slow_are_named_together(tmp_path: Path, workers: int):
    run_ranks(train, 2, tmp_path, (1,), workers, True, timeout=120)
    (incident,) = incidents(tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1))


@with_each_loader
def test_without_a_fault_training_is_bitwise_the_same_and_nothing_is_said(tmp_path: Path, workers: int):
    with_it = run_ranks(train, 2, tmp_path, (), workers, True, timeout=120)
    without = run_ranks(train, 2, tmp_path, (), workers, False, timeout=120)
    for one, other in zip(with_it, without, strict=True):
        assert one["status"]["failures"] == []
        assert all(torch.equal(a, b) for a, b in zip(one["state"], other["state"], strict=True))
    assert incidents(tmp_path) == []


def save(run_dir: Path, rank: int, asleep: float) -> None:
    torch.save(Sleepy(write=asleep), run_dir / f"{rank}.pt")


def load(run_dir: Path, rank: int, asleep: float) -> None:
    torch.save(Sleepy(read=asleep), run_dir / f"{rank}.pt")
    torch.load(run_dir / f"{rank}.pt", weights_only=False)


def save_together(run_dir: Path, rank: int, asleep: float) -> None:
    dcp.save({"sleepy": Sleepy(write=asleep)}, checkpoint_id=run_dir / "dcp")


def load_together(run_dir: Path, rank: int, asleep: float) -> None:
    dcp.save({"sleepy": Sleepy()}, checkpoint_id=run_dir / "dcp")
    dcp.load({"sleepy": Sleepy(read=asleep)}, checkpoint_id=run_dir / "dcp")


def save_beside(run_dir: Path, rank: int, asleep: float) -> None:
    # Asleep in what training waits for, and not in the thread that writes.
    group = dist.new_group()
    state = {"sleepy": Sleepy(write=asleep)}
    PENDING.append(dcp.async_save(state, checkpoint_id=run_dir / f"dcp-{len(PENDING)}", process_group=group))


PENDING: list[Any] = []
KINDS = {
    "save": (save, "in checkpoint write"),
    "load": (load, "in checkpoint read"),
    "dcp.save": (save_together, "in checkpoint write"),
    "dcp.load": (load_together, "in checkpoint read"),
    "dcp.async_save": (save_beside, "in checkpoint write"),
}


def checkpoint(rank: int, run_dir: Path, kind: str, asleep: float) -> list[str]:
    """Write or read a checkpoint after each step; rank 1 is asleep there in step 5."""
    config = replace(QUICK, checkpoint_read_seconds=1.0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=config, run_dir=run_dir) as session:
        for step in range(1, STEPS + 1):
            time.sleep(0.02)
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            if step >= 5:
                KINDS[kind][0](run_dir, rank, asleep if (rank, step) == (1, 5) else 0.0)
        for each in PENDING:
            each.result()
        if asleep:
            wait_for_incident(run_dir)
        dist.barrier()
    return session.failures


def hang(run_dir: Path) -> Incident:
    """The hang that was reported. On a busy machine an observer may answer too late for the first round,
    which then names nobody."""
    found = [each for each in incidents(run_dir) if each.manifestation is Manifestation.HANG]
    (incident,) = [
        each for each in found if each.scope is Scope.RANK or "did not answer" not in each.sentence
    ]
    return incident


OFTEN = ("save", "dcp.save")
with_each_kind = pytest.mark.parametrize(
    "kind", [*OFTEN, *(pytest.param(each, marks=pytest.mark.slow) for each in KINDS if each not in OFTEN)]
)


@with_each_kind
def test_a_rank_asleep_in_a_checkpoint_is_named_there(tmp_path: Path, kind: str):
    assert run_ranks(checkpoint, 3, tmp_path, kind, STALL, timeout=120) == [[]] * 3
    incident = hang(tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))
    assert f"it has been {KINDS[kind][1]} for" in incident.sentence


@with_each_kind
def test_ranks_that_only_write_and_read_checkpoints_are_not_reported(tmp_path: Path, kind: str):
    assert run_ranks(checkpoint, 3, tmp_path, kind, 0.0, timeout=120) == [[]] * 3
    assert incidents(tmp_path) == []
