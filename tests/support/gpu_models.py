"""A small GPT for jobs on CUDA devices, with the attention kernel and the extras that a test asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

__all__ = ["Gpt", "Variant", "batch", "parallel"]

WIDTH, HEADS, TOKENS, WORDS, LAYERS = 256, 4, 128, 512, 4
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Variant:
    """The combination of features that a job has."""

    wrapper: str = "ddp"
    """``ddp``, ``fsdp2``, or ``hsdp`` of two replicas."""
    attention: str = "flash"
    dropout: float = 0.1
    recompute: bool = False
    """Activation checkpointing."""
    batch_norm: bool = False
    atomics: bool = False
    """A Triton kernel that adds up a gradient with atomics, in whatever order."""
    compiled: bool = False
    """Every layer by itself."""


class Block(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.n1 = nn.LayerNorm(WIDTH)
        self.n2 = nn.BatchNorm1d(WIDTH) if variant.batch_norm else nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.shift: nn.Module = nn.Identity()
        if variant.atomics:
            from tests.support.atomic_sum import AtomicBias  # with it comes Triton

            self.shift = AtomicBias(WIDTH)
        self.drop = nn.Dropout(variant.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant.recompute and self.training:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        parts = self.qkv(self.n1(x)).view(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(ATTENTION[self.variant.attention]):
            mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.drop(self.mix(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH)))
        y = self.n2(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.shift(self.down(nn.functional.gelu(self.up(y)))))


class Gpt(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(variant) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallel(variant: Variant) -> nn.Module:
    """Return the model on this rank's device, wrapped."""
    model = Gpt(variant).cuda()
    if variant.compiled:
        for layer in model.layers:
            layer.compile()
    if variant.wrapper == "ddp":
        return DistributedDataParallel(model)
    world = dist.get_world_size()
    if variant.wrapper == "hsdp":
        mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (4, TOKENS + 1), generator=generator).cuda()
