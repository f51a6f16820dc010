"""What each rank of the demo trains."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchscout.adapters.structure import surface_of
from torchscout.attach import enable_resiliency
from torchscout.cli.demo.scenario import STEPS, Scenario
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.testing.moe_model import MoeTraining, MoeTransformer

__all__ = [
    "Began",
    "Ended",
    "Stepped",
    "Transformer",
    "batch",
    "parallelize",
    "surfaces",
    "train",
    "train_alone",
]

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 64, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:  # this rank's heads only
            return projected.view(*projected.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), is_causal=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(LENGTH))
        for layer in self.layer:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def parallelize(model: Transformer, tensor: DeviceMesh) -> None:
    """Split heads and hidden units over the tensor-parallel ranks, as Megatron does."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        "attention.query": columns,
        "attention.key": columns,
        "attention.value": columns,
        "attention.out": rows,
        "up": columns,
        "down": rows,
    }
    for layer in model.layer:
        parallelize_module(layer, tensor, plan)


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting sequences with a random start and stride; every replica gets its own."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    start = torch.randint(VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


OBSERVER = ObserverConfig(min_silence_seconds=3.0, startup_seconds=120.0, grace_seconds=3.0)


@dataclass(frozen=True, slots=True)
class Began:
    """Where training goes on from, and who watches it."""

    resumed: dict[str, Any]
    observer: int | None
    """Its process."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One training step."""

    step: int
    loss: float
    poisoned: bool
    """Whether the numbers were found wrong: nothing that is computed from here on can be trusted."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left when training is over."""

    state: str
    """A digest of all that training leaves behind on this rank."""
    status: dict[str, Any]
    failures: list[str]


def train(
    rank: int, questions: Iterator[str], stage: Scenario, faults: FaultPlan, run_dir: Path
) -> Iterator[Began | Stepped | Ended]:
    """Train while asked for steps; torchscout checks after each, and keeps what it certifies."""
    _be_quiet(run_dir)
    training = _training(stage)
    log = run_dir / f"injected-{rank}.jsonl"
    with (
        Injector(faults, rank, training.model, training.optimizer, log=log) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=ReplayConfig(interval=1),
            observer=OBSERVER,
            checkpoint=CheckpointConfig(run_dir / "checkpoints"),
            parallelism=training.parallelism,
            run_dir=run_dir,
        ) as session,
    ):
        for question in questions:
            if question == "begin":
                resumed = session.resume(start_over=True)
                injector.step = session.step + 1
                observer = session.status()["observer"]
                yield Began(asdict(resumed), None if observer is None else observer["pid"])
            elif question == "step":
                loss = training.step(session.step + 1)
                poisoned = session.status()["checkpoint"]["poisoned"] is not None
                yield Stepped(session.step, loss, poisoned)
            else:
                yield Ended(training.digest(), session.status(), session.failures)


def train_alone(rank: int, stage: Scenario) -> str:  # noqa: ARG001  as all ranks are started
    """The same training, uninterrupted and without torchscout."""
    training = _training(stage)
    for step in range(1, STEPS + 1):
        training.step(step)
    return training.digest()


def surfaces(stage: Scenario) -> list[str]:
    """Every weight the replicas vote on."""
    model = MoeTransformer() if stage.has_experts else Transformer()
    return [surface_of(name) for name, _ in model.named_parameters()]


def _training(stage: Scenario) -> _Training | MoeTraining:
    return MoeTraining(stage.mesh()) if stage.has_experts else _Training(stage)


class _Training:
    """Ordinary PyTorch, and nothing in it knows of torchscout."""

    def __init__(self, stage: Scenario) -> None:
        names = ("replica", "tensor")
        self.parallelism = init_device_mesh("cpu", (stage.replica, stage.tensor), mesh_dim_names=names)
        torch.manual_seed(0)
        self.model = Transformer()
        parallelize(self.model, self.parallelism["tensor"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, step: int) -> float:
        replicas = self.parallelism["replica"]
        tokens, targets = batch(step, replicas.get_local_rank())
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=replicas.get_group())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        _average_gradients(self.model, replicas)
        self.optimizer.step()
        return mean.item()

    def digest(self) -> str:
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        whole = hashlib.blake2b(digest_size=8)
        for each in [*self.model.parameters(), *slots]:
            local = each.to_local() if isinstance(each, DTensor) else each
            whole.update(local.detach().numpy().tobytes())
        return whole.hexdigest()


def _average_gradients(model: Transformer, replicas: DeviceMesh) -> None:
    """Data parallelism by hand: one all-reduce over all gradients of this rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    flat = torch.cat([each.flatten() for each in local])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=replicas.get_group())
    for each, averaged in zip(local, torch.split(flat, [each.numel() for each in local]), strict=True):
        each.copy_(averaged.view_as(each))


def _be_quiet(run_dir: Path) -> None:
    """Whoever watches the demo is told what happens once, by the demo; the rest goes to a file."""
    logging.basicConfig(format="%(message)s")
    with (run_dir / "ranks.log").open("a") as log:
        os.dup2(log.fileno(), 2)
