"""Snapshots of state on a CUDA device: copied during training, and of one step whatever follows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.states import identity
from torchscout.checkpoint.buffers import Buffer
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.state.collect import State, StateParts, collect
from torchscout.state.restore import restore

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


def begun(snapshots: Snapshots, step: int, state: State, *, pinned: bool = True) -> Capture:
    """Begin a capture when there is memory for it, which is pinned before the first one or not."""
    snapshots.prepare(state.bytes, state.tensors.values() if pinned else ())
    assert snapshots.wait_until_ready(60)
    return snapshots.capture(identity(step), TrustLevel.LATEST, state)


@pytest.mark.parametrize("capturable", [False, True])
def test_an_interrupted_job_is_bitwise_the_uninterrupted_one(folder: Path, capturable: bool):
    torch.manual_seed(0)
    model, optimizer = job(capturable)
    snapshots = Snapshots(folder, 0)
    optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    train(model, optimizer, range(3))
    capture = begun(snapshots, 3, collect(StateParts(model, [optimizer], {})))
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


@pytest.fixture
def big() -> nn.Module:
    """A gigabyte: the host is far ahead while it is copied."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(64 << 20, device="cuda")) for _ in range(4))
    module.register_buffer("seen", torch.zeros(1 << 20, device="cuda"))
    return module


@pytest.mark.parametrize("pinned", [True, False])
def test_device_work_after_the_fence_does_not_change_the_snapshot(folder: Path, big: nn.Module, pinned: bool):
    """With pinned memory the device waits, and otherwise the host."""
    snapshots = Snapshots(folder, 0)
    for step in range(1, 6):
        with torch.no_grad():
            for tensor in [*big.parameters(), *big.buffers()]:
                tensor.fill_(float(step))
        capture = begun(snapshots, step, collect(StateParts(big, [], {})), pinned=pinned)
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


def test_the_host_waits_for_no_copy(folder: Path, big: nn.Module):
    """The device is busy for longer than the host takes to capture, to fence and to issue an update."""
    snapshots = Snapshots(folder, 0)
    state = collect(StateParts(big, [], {}))
    for step in range(1, 4):  # kernels are compiled, and each buffer is used once
        begun(snapshots, step, state)
        snapshots.fence()
        assert snapshots.wait_until_ready(60)
    torch.cuda._sleep(4_000_000_000)
    capture = snapshots.capture(identity(4), TrustLevel.LATEST, state)
    snapshots.fence()
    with torch.no_grad():
        big[0].add_(1)
    issued = torch.cuda.Event()
    issued.record()
    assert not issued.query(), "the device has not come so far"
    assert capture.wait(60), capture.problem
    assert not shards.load(capture.path).tree["parameters"]["0"].any()
    snapshots.close()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("ends", ["with an update", "without an update"])
def test_a_write_that_is_queued_before_the_update_is_found(
    folder: Path, big: nn.Module, pinned: bool, ends: str
):
    snapshots = Snapshots(folder, 0)
    capture = begun(snapshots, 1, collect(StateParts(big, [], {})), pinned=pinned)
    big[3].data[-1] = 1.0
    (snapshots.fence if ends == "with an update" else snapshots.settle)()
    assert not capture.wait(60)
    assert capture.problem == "3 was changed while it was captured, and not by an update"
    snapshots.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_tensors_of_every_kind_arrive(folder: Path, pinned: bool):
    sources = [
        torch.randn(3000, 5000, device="cuda"),
        torch.randn(70, 50, device="cuda").T,
        torch.zeros(0, 3, device="cuda"),
        torch.tensor(2.5, device="cuda", dtype=torch.bfloat16),
        torch.randn(9),
        torch.randn(12 << 20, device="cuda"),
    ]
    state = State(None, {f"parameters/{index}": each for index, each in enumerate(sources)}, {})
    snapshots = Snapshots(folder, 0)
    capture = begun(snapshots, 1, state, pinned=pinned)
    snapshots.fence()
    assert capture.wait(60), capture.problem
    entries = {each.name: each for each in shards.inspect(capture.path).entries}
    for name, each in state.live.items():
        assert torch.equal(shards.read_tensor(capture.path, entries[name]), each.cpu())
    snapshots.close()


def test_a_state_that_grows_within_the_head_room_is_not_pinned_again(folder: Path):
    """Memory is pinned where it is mapped, and unpinned when it is unmapped."""
    snapshots, addresses = Snapshots(folder, 0), []
    for step in range(1, 9):
        state = State(None, {"parameters/0": torch.zeros((16 << 20) + step * 1000, device="cuda")}, {})
        capture = begun(snapshots, step, state)
        snapshots.fence()
        assert capture.wait(60), capture.problem
        lines = Path("/proc/self/maps").read_text().splitlines()
        addresses.append([line.split()[0] for line in lines if str(capture.path) in line])
    assert addresses[3:6] == addresses[:3]
    snapshots.close()


def test_memory_that_cannot_be_pinned_is_used_unpinned(folder: Path):
    device = torch.device("cuda", torch.cuda.current_device())
    first, again = Buffer.create(folder / ".a.writing"), Buffer.create(folder / ".b.writing")
    first.prepare(1 << 20, None, device)
    again.prepare(1 << 20, None, None)
    again.memory = first.memory  # registered already
    again.prepare(1 << 20, None, device)
    assert (first.is_pinned, again.is_pinned) == (True, False)
    torch.ones(5, device="cuda").sum().item()  # the refusal does not come back as this one's failure
    first.close()
    again.close()
