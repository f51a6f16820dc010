"""Snapshots of state on a CUDA device: copied during training, and of one step whatever follows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.states import identity
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot.device_copy import Copies, Pinning, TensorCopy
from torchscout.checkpoint.snapshot.snapshots import Snapshots
from torchscout.checkpoint.state.restore import restore
from torchscout.checkpoint.state.training_state import StateParts, collect
from torchscout.checkpoint.storage import shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchscout-test-", dir="/dev/shm") as name:
        yield Path(name)


def job(capturable: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.Dropout(0.1), nn.Linear(2048, 2048))
    model = model.cuda()
    lr = torch.tensor(1e-3, device="cuda") if capturable else 1e-3
    return model, torch.optim.AdamW(model.parameters(), lr=lr, amsgrad=True, capturable=capturable)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    tensors = [*model.parameters(), *model.buffers(), *slots, torch.cuda.get_rng_state()]
    return [each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]


@pytest.mark.parametrize("capturable", [False, True])
def test_an_interrupted_job_is_bitwise_the_uninterrupted_one(folder: Path, capturable: bool):
    torch.manual_seed(0)
    model, optimizer = job(capturable)
    snapshots = Snapshots(folder, 0)
    optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    train(model, optimizer, range(3))
    capture = snapshots.capture(identity(3), TrustLevel.LATEST, collect(StateParts(model, [optimizer], {})))
    train(model, optimizer, range(3, 6))
    assert capture.wait(60), capture.problem
    assert shards.verify(capture.path).whole
    expected = bits(model, optimizer)
    torch.manual_seed(9)
    other, its = job(capturable)
    restore(StateParts(other, [its], {}), shards.load(capture.path).tree)
    steps = {slots["step"].device.type for slots in its.state.values()}
    assert steps == {"cuda" if capturable else "cpu"}
    train(other, its, range(3, 6))
    assert bits(other, its) == expected
    snapshots.close()


def test_device_work_after_the_fence_does_not_change_the_snapshot(folder: Path):
    """The device waits, not the host."""
    big = nn.ParameterList(nn.Parameter(torch.zeros(64 << 20, device="cuda")) for _ in range(4))
    big.register_buffer("seen", torch.zeros(1 << 20, device="cuda"))
    snapshots = Snapshots(folder, 0)
    for step in range(1, 6):
        with torch.no_grad():
            for tensor in [*big.parameters(), *big.buffers()]:
                tensor.fill_(float(step))
        capture = snapshots.capture(identity(step), TrustLevel.LATEST, collect(StateParts(big, [], {})))
        big.seen.fill_(-1)
        snapshots.fence()
        with torch.no_grad():
            for tensor in big.parameters():
                tensor.fill_(-1)
        assert capture.wait(60), capture.problem
        found = shards.load(capture.path).tree
        tensors = [*found["parameters"].values(), *found["buffers"].values()]
        assert all((tensor == float(step)).all() for tensor in tensors)
    snapshots.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_arrive_with_and_without_pinned_memory(pinned: bool):
    sources = [
        torch.randn(3000, 5000, device="cuda"),
        torch.randn(70, 50, device="cuda").T,
        torch.zeros(0, 3, device="cuda"),
        torch.tensor(2.5, device="cuda", dtype=torch.bfloat16),
        torch.randn(9),
        torch.randn(12 << 20, device="cuda"),
    ]
    room = torch.empty(256 << 20, dtype=torch.uint8)
    pinning = Pinning(room) if pinned else None
    assert pinning is None or pinning.done
    wanted = [
        TensorCopy(each, room, index * (64 << 20))
        for index, each in enumerate((sources[0], sources[5], sources[4]))
    ]
    wanted += [TensorCopy(each, room, (192 << 20) + index * 65536) for index, each in enumerate(sources[1:4])]
    copies = Copies(sources)
    copies.issue(wanted, pinned)
    copies.fence()
    copies.wait()
    assert all(torch.equal(each.source.cpu(), each.place) for each in wanted)
    if pinning is not None:
        pinning.undo()


def test_memory_that_cannot_be_pinned_is_used_unpinned():
    place = torch.empty(1 << 20, dtype=torch.uint8)
    first = Pinning(place)
    again = Pinning(place)
    assert (first.done, again.done) == (True, False)
    torch.ones(5, device="cuda").sum().item()  # the refusal does not come back as this one's failure
    first.undo()
