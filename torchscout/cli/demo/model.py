"""The job the demo trains: a small Transformer, tensor-parallel, on a task it can learn.

Ordinary PyTorch, and nothing in it knows of torchscout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["Transformer", "batch", "parallelize"]

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
