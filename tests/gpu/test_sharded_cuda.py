"""FSDP2, HSDP, and tensor parallelism with FSDP2, over NCCL: replayed, certified, and a flipped bit found."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.nccl_ranks import UNEVEN
from tests.support.ranks import run_ranks
from tests.support.sharded_jobs import Failing
from torchscout.attach import enable_resiliency
from torchscout.faults.effects import FlipBit

# Ranks that share a device do not share it evenly: one of them may really be slower for a while.
REPLAY = replace(UNEVEN, interval=1)
pytestmark = [pytest.mark.gpu, pytest.mark.nccl(4)]
STEPS, FLIPPED_AT, VOCABULARY, WIDTH = 12, 5, 96, 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Which axes the ranks of a job have."""

    name: str
    axes: dict[str, int]
    scope: str
    """Of the incident about a flipped bit in a shard of rank 1's weights."""
    named: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def ranks(self) -> int:
        return torch.Size(self.axes.values()).numel()


LAYOUTS = [
    Layout("FSDP2", {"dp_shard": 3}, "rank", (1,)),
    # Of two copies of a shard none is the majority: the pair that holds them is named.
    Layout("HSDP", {"dp_replicate": 2, "dp_shard": 2}, "peer_group", (1, 3)),
    Layout("TP x FSDP2", {"dp_shard": 2, "tp": 2}, "rank", (1,)),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = block(x)
        return self.head(x)


def sharded(layout: Layout, device: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net().to(device)
    names = tuple(layout.axes)
    mesh = init_device_mesh(device, tuple(layout.axes.values()), mesh_dim_names=names)
    if "tp" in names:
        for block in net.stack:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.stack:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def train(
    rank: int,
    layout: Layout,
    run_dir: Path | None,
    has_fault: bool = False,
    failing: Failing = Failing(),  # noqa: B008  frozen
    device: str = "cuda",
) -> dict[str, Any]:
    """Train with a check at each step; without ``run_dir`` nothing is attached."""
    warnings.filterwarnings("ignore", message=".*(view tensor|deterministic).*")
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared at all
    net = sharded(layout, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    session = run_dir and enable_resiliency(net, optimizer, replay=REPLAY, observer=None, run_dir=run_dir)
    if rank in failing.ranks:
        failing.apply(net.stack[0])
    flipped = 0
    for step in range(1, STEPS + 1):
        if has_fault and step == FLIPPED_AT and rank == 1:
            flipped += flip(net.stack[0].up.weight)
        copy = rank // layout.axes.get("tp", 1)
        generator = torch.Generator().manual_seed(100 * step + copy)
        tokens = torch.randint(VOCABULARY, (4, 33), generator=generator).to(device)
        logits = net(tokens[:, :-1]).float()
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    found: dict[str, Any] = {"bits": bits_of(net, optimizer), "flipped": flipped}
    if session:
        dist.barrier()  # the rank that reports has done so
        incidents = [(each.scope.value, each.ranks, each.step) for each in session.incidents]
        found |= {"incidents": incidents, "sentences": [each.sentence for each in session.incidents]}
        found |= {"failures": list(session.failures), "replay": session.status()["replay"]}
        session.close()
    return found


def flip(weight: torch.Tensor) -> int:
    """One bit of this rank's shard changes in memory, and PyTorch does not know of it."""
    local = weight.to_local().detach()
    before = local.clone()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(local):
        FlipBit(20).corrupt(local)
    return int((before != local).sum())


def bits_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    tensors = [*net.parameters(), *(each.grad for each in net.parameters()), *slots, torch.get_rng_state()]
    if torch.cuda.is_available():
        tensors.append(torch.cuda.get_rng_state())
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return b"".join(each.detach().cpu().contiguous().numpy().tobytes() for each in local)


def with_and_without(rank: int, layout: Layout, run_dir: Path, device: str = "cuda") -> dict[str, Any]:
    alone = train(rank, layout, None, device=device)
    checked = train(rank, layout, run_dir, device=device)
    return {**checked, "same": alone["bits"] == checked["bits"]}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_bitwise_the_same_replayed_and_certified(layout: Layout, tmp_path: Path):
    for found in run_ranks(with_and_without, layout.ranks, layout, tmp_path, timeout=240, backend="nccl"):
        assert found["same"]
        assert (found["failures"], found["incidents"]) == ([], []), found["sentences"]
        replay = found["replay"]
        assert replay["not_checked"] == {}
        assert replay["last"].keys() >= {"tokens", "stack.0", "stack.1", "head"}
        assert all(each["clean"] for each in replay["last"].values())
        assert (replay["checks"], replay["certified"]) == (STEPS, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_flipped_bit_in_a_shard_is_named(layout: Layout, tmp_path: Path):
    found = run_ranks(train, layout.ranks, layout, tmp_path, True, timeout=240, backend="nccl")
    assert [each["flipped"] for each in found] == [int(rank == 1) for rank in range(layout.ranks)]
    first, *_ = found[0]["incidents"]
    assert first == (layout.scope, layout.named, FLIPPED_AT), found[0]["sentences"]
    assert {ranks for _, ranks, _ in found[0]["incidents"]} == {layout.named}, found[0]["sentences"]
    for each in found:
        assert each["replay"]["certified"] < FLIPPED_AT, "no state after the flip is certified"


FAILURES = [Failing((1,), within) for within in ("entry", "forward", "backward")]


def failing(rank: int, layout: Layout, run_dir: Path, device: str = "cuda") -> list[dict[str, Any]]:
    """For each failure what was found, and whether training was the same as without it."""
    alone = train(rank, layout, None, device=device)
    found = [train(rank, layout, run_dir / each.within, failing=each, device=device) for each in FAILURES]
    return [{**each, "same": alone["bits"] == each["bits"]} for each in found]


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_replayed_pass_that_fails_on_one_rank_leaves_training_as_it_was(layout: Layout, tmp_path: Path):
    for results in run_ranks(failing, layout.ranks, layout, tmp_path, timeout=300, backend="nccl"):
        for fault, found in zip(FAILURES, results, strict=True):
            assert found["same"], fault
            assert (found["failures"], found["incidents"]) == ([], []), found["sentences"]
            unchecked = found["replay"]["not_checked"]
            assert unchecked, fault
            assert all(surface.startswith("stack.0") for surface in unchecked)
            assert all("replay failed on rank 1" in reason for reason in unchecked.values())
