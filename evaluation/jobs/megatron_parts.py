"""Parts of a Megatron layer that otherwise need Transformer Engine. Imports Megatron-Core."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class Norm:
    """A plain norm whose parameters say that sequence parallelism leaves them parts of gradients."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class _Gathered(torch.autograd.Function):
    """Everybody's keys or values, over Megatron's own context-parallel group."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class ContextAttention(MegatronModule):
    """Attention of this rank's part of the sequence over all of it; ranks have a part from both ends."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self._group = parallel_state.get_context_parallel_group()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        length, group = query.shape[0], self._group
        places = [_places(rank, group.size(), length // 2) for rank in range(group.size())]
        mask = places[group.rank()][:, None] >= torch.cat(places)[None, :]
        keys, values = _Gathered.apply(key, group), _Gathered.apply(value, group)
        heads = [each.permute(1, 2, 0, 3) for each in (query, keys, values)]
        output = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return output.permute(2, 0, 1, 3).reshape(length, query.shape[1], -1)


def _places(rank: int, ranks: int, half: int) -> torch.Tensor:
    first, last = rank * half, (2 * ranks - 1 - rank) * half
    return torch.cat([torch.arange(first, first + half), torch.arange(last, last + half)])


def spec_of(setup: Any, config: Any, virtual: int | None) -> Any:
    """As Megatron's own local layer, with parts of ours where that cannot do it."""
    spec = get_gpt_layer_local_spec(num_experts=setup.experts, moe_grouped_gemm=False)
    if setup.context > 1:
        spec.submodules.self_attention.submodules.core_attention = ContextAttention
    if not setup.sequence:
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    layers = [spec] * get_num_layers_to_build(config, vp_stage=virtual)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
