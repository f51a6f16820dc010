"""Snapshots of state on a CUDA device: copied during training, complete in memory, restored bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.state.collect import StateParts, collect
from torchscout.state.restore import restore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Dropout(0.1), nn.Linear(2048, 512))
    model = model.cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, snapshots: Snapshots | None = None) -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    if snapshots is not None:
        snapshots.fence()
    optimizer.step()


def identity(number: int) -> ShardIdentity:
    return ShardIdentity(job="gpu", mesh="one rank", world_size=1, rank=0, generation=Generation(number))


def begun(
    snapshots: Snapshots, number: int, role: TrustLevel, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Capture:
    """Begin a capture when there is memory for it."""
    state = collect(StateParts(model, [optimizer], {}))
    snapshots.prepare(state.bytes, state.tensors.values())
    assert snapshots.wait_until_ready(60)
    return snapshots.capture(identity(number), role, state)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    rng = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    return [each.detach().cpu().clone() for each in [*model.state_dict().values(), *slots, *rng]]


def test_training_goes_on_while_the_device_is_copied_and_changes_nothing(tmp_path: Path):
    model, optimizer = job()
    snapshots = Snapshots(tmp_path, 0)
    wanted = {}
    for number in range(1, 7):
        step(model, optimizer, snapshots)
        wanted[number] = bits(model, optimizer)
        capture = begun(snapshots, number, TrustLevel.LATEST, model, optimizer)
        assert capture.problem is None
    step(model, optimizer, snapshots)  # right after the last fence
    assert capture.wait(60), capture.problem
    for number in (5, 6):
        path = shards.path_of(tmp_path, identity(number), 0)
        assert shards.verify(path).whole
        other, its_optimizer = job()
        restore(StateParts(other, [its_optimizer], {}), shards.load(path).tree)
        for before, after in zip(wanted[number], bits(other, its_optimizer), strict=True):
            assert torch.equal(before, after)
    snapshots.close()


def test_resuming_from_a_snapshot_is_bitwise_the_uninterrupted_training(tmp_path: Path):
    model, optimizer = job()
    snapshots = Snapshots(tmp_path, 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            step(model, optimizer)
        capture = begun(snapshots, 3, TrustLevel.VERIFIED, model, optimizer)
        for _ in range(3):
            step(model, optimizer, snapshots)
        assert capture.wait(60), capture.problem
        other, its_optimizer = job()
        restore(StateParts(other, [its_optimizer], {}), shards.load(capture.path).tree)
        for _ in range(3):
            step(other, its_optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, another in zip(bits(model, optimizer), bits(other, its_optimizer), strict=True):
        assert torch.equal(one, another)
    snapshots.close()
