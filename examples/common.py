"""Shared by the examples: a small Transformer that learns to count, its batches, and a final report."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    import torchscout

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 64, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:  # under tensor parallelism, this rank's
            return projected.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        y = self.attention_norm(x)
        query, key, value = heads(self.query(y)), heads(self.key(y)), heads(self.value(y))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """The whole model, or one pipeline stage: the first has the embedding, the last has the head."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS // stages))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def batch(step: int, replica: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counting sequences with a random start and stride, the same whenever a step is trained."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    start = torch.randint(VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    tokens = ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def average_gradients(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Average gradients over replicas, for examples in which nothing else does."""
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=replicas)


def arguments(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--checkpoint", default=f"checkpoints/{name}", help="folder for checkpoints, and to resume from"
    )
    if name == "huggingface":
        parser.add_argument("--gradient-checkpointing", action="store_true")
    return parser.parse_args()


def own_device() -> torch.device:
    """Return this rank's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def what_was_seen(session: torchscout.Session) -> str:
    """Summarize ``session.status()`` and ``session.incidents`` in a few lines."""
    status = session.status()
    replay, checkpoint = status["replay"], status["checkpoint"]
    kept = checkpoint["capturing"] or checkpoint["verified"]
    lines = [f"checks     {replay['checks']}" if "checks" in replay else f"unchecked  {replay['off']}"]
    lines += [f"unchecked  {what}: {why}" for what, why in replay.get("not_checked", {}).items()]
    lines += ["kept       nothing yet" if kept is None else f"kept       step {kept}, certified by replay"]
    lines += [f"found      {incident.sentence}" for incident in session.incidents] or ["found      nothing"]
    lines += [f"failed     {each}" for each in status["failures"]]
    return "\n".join([*lines, f"records    {session.run_dir}"])
