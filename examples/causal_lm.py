"""A small decoder in the form that Hugging Face gives its models, without their library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.utils.checkpoint import checkpoint

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Config:
    vocab_size: int = 64
    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    rope_theta: float = 10_000.0


@dataclass
class CausalLMOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.head_dim = width // config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, False) for _ in range(4)
        )
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings: Rotary) -> torch.Tensor:
        x = self.input_layernorm(hidden_states)
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        mixed = F.scaled_dot_product_attention(
            rotated(query, position_embeddings), rotated(key, position_embeddings), value, is_causal=True
        )
        hidden_states = hidden_states + self.o_proj(mixed.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.gradient_checkpointing = config, False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        angles = self.angles(input_ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(
                    layer, hidden_states, position_embeddings=angles, use_reentrant=False
                )
            else:
                hidden_states = layer(hidden_states, position_embeddings=angles)
        return self.norm(hidden_states)

    def angles(self, input_ids: torch.Tensor) -> Rotary:
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        exponents = torch.arange(half, device=input_ids.device) / half
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = torch.outer(positions, self.config.rope_theta**-exponents).repeat(1, 2)
        return angles.cos(), angles.sin()


class CausalLM(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        self.lm_head.weight = self.model.embed_tokens.weight  # tied

    def gradient_checkpointing_enable(self) -> None:
        self.model.gradient_checkpointing = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return CausalLMOutput(None, logits)
        return CausalLMOutput(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def rotated(x: torch.Tensor, position_embeddings: Rotary) -> torch.Tensor:
    cos, sin = position_embeddings
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
