"""A small job whose every step is checked by replay, one planned fault after the other.

Each fault has three steps of its own: a clean one, the one it happens in, a clean one. What a fault leaves
behind in a rank's state is mended from a healthy peer before the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.findings import all_records, evidence_of
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.repeatability import MAX_REPLAYS
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.faults.effects import FlipBit
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan

VOCABULARY, WIDTH, LAYERS = 24, 16, 2
REPLAY = range(1, 1 + 2 * MAX_REPLAYS)
"""The passes of a place within a step that are not training's own, however often a target is replayed."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = block(x)
        return self.head(self.final(x))


def device() -> str:
    """Return the device type on which the ranks of this job train."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def batch(step: int, rank: int, *, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a rank at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (4, length + 1), generator=generator).to(device())
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int, *, length: int = 8) -> torch.Tensor:
    """Return the loss of a rank's batch at a step."""
    tokens, targets = batch(step, rank, length=length)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def due_layer(step: int) -> str:
    """Return the hidden layer that is due after a step, with a check at every step."""
    return f"stack.{(step - 1) % LAYERS}"


def due_parameter(step: int) -> str:
    """Return the parameter whose update is due after a step, with a check at every step."""
    names = [name for name, _ in Net().named_parameters()]
    owner, _, name = names[(step - 1) % len(names)].rpartition(".")
    return f"{owner}/{name}"


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one rank."""

    records: list[EvidenceRecord]
    """Comparisons of numbers."""
    times: list[EvidenceRecord]
    """Comparisons of times."""
    incidents: list[Incident]
    fired: list[Firing]
    unfired: int
    failures: list[str]


def checked_training(
    rank: int,
    faults: FaultPlan,
    steps: int,
    mended_after: Sequence[tuple[int, int]],
    run_dir: Path,
    config: ReplayConfig = ReplayConfig(interval=1),  # noqa: B008  frozen
) -> Found:
    """Train with a check at every step. ``mended_after`` has steps, each with a rank healthy in it."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    healthy = dict(mended_after)
    with Injector(faults, rank, net, optimizer) as injector:
        session = enable_resiliency(
            model, optimizer, replay=all_records(config), observer=None, run_dir=run_dir
        )
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            if step in healthy:
                mend(net, optimizer, healthy[step])
    incidents, failures = session.incidents, list(session.failures)
    session.close()
    records = evidence_of(run_dir, rank)
    numbers = [each for each in records if each.manifestation is Manifestation.SDC]
    times = [each for each in records if each.manifestation is Manifestation.STRAGGLER]
    return Found(numbers, times, incidents, injector.fired, len(injector.unfired), failures)


def mend(model: nn.Module, optimizer: torch.optim.Optimizer, source: int) -> None:
    """Copy the parameters and slots of a healthy rank to every rank, as a recovery would."""
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    with torch.no_grad():
        for tensor in [*model.parameters(), *slots]:
            dist.broadcast(tensor, source)


def flip_in_memory(tensor: torch.Tensor, bit: int) -> bool:
    """Flip a bit of the local part without PyTorch counting it as a write; return whether it has changed."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    before, version = local.clone(), local._version
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(local):
        FlipBit(bit).corrupt(local)
    assert local._version == version
    return not torch.equal(before, local)
