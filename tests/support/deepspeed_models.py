"""Engines for small DeepSpeed jobs: plain, pipelined, with experts, with sequences or layers in parts.

DeepSpeed runs on CPUs as it is; only its shared-memory operators, which it would compile, are left out.
A rank that sets ``DS_ACCELERATOR=cuda`` before it imports this trains on its current CUDA device over NCCL.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tests.support.replayed_job import VOCABULARY, WIDTH, Block, Net

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.sequence.layer import DistributedAttention

ACCUMULATED = 2
"""Batches of a step, and calls of ``engine.step()``."""
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Work:
    """An engine on this rank, and how to train it."""

    engine: Any
    replica: int
    """Which batches are its own."""
    step: Callable[[Batches, Callable[[], None]], None]
    """Train for one step; what is given besides is called in the middle of it."""


def quiet() -> None:
    warnings.filterwarnings("ignore")
    deepspeed.utils.logger.setLevel("ERROR")
    if os.environ["DS_ACCELERATOR"] == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def plain(rank: int, config: Mapping[str, Any]) -> Work:
    engine = _engine(Net(), config)
    return Work(engine, rank, _micro_steps(engine))


def born_sharded(rank: int, config: Mapping[str, Any]) -> Work:
    """No rank has ever had the whole model."""
    _begin()
    with deepspeed.zero.Init(config_dict_or_path=dict(config)):
        net = Net()
    engine = _engine(net, config)
    return Work(engine, rank, _micro_steps(engine))


class StreamBlock(Block):
    """Draws from a random stream that DeepSpeed keeps by its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return super().forward(x)


def streams(rank: int, config: Mapping[str, Any]) -> Work:
    deepspeed.checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 100 + rank)
    net = Net()
    net.stack = nn.ModuleList(StreamBlock() for _ in range(2))
    engine = _engine(net, config)
    return Work(engine, rank, _micro_steps(engine))


def pipeline(rank: int, config: Mapping[str, Any], stages: int = 2) -> Work:
    del rank
    _begin()
    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *(LayerSpec(Block) for _ in range(4))]
    layers.append(LayerSpec(nn.Linear, WIDTH, VOCABULARY))
    net = PipelineModule(layers=layers, num_stages=stages, loss_fn=_loss, partition_method="uniform")
    engine = _engine(net, config)

    def step(batches: Batches, middle: Callable[[], None]) -> None:
        middle()
        engine.train_batch(data_iter=iter(batches))

    return Work(engine, engine.grid.get_data_parallel_rank(), step)


def three_stages(rank: int, config: Mapping[str, Any]) -> Work:
    return pipeline(rank, config, stages=3)


class Routed(nn.Module):
    def __init__(self, *, keeps_all: bool, spread: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        sizes: dict[str, Any] = {"num_experts": 4, "ep_size": spread, "k": 1, "capacity_factor": 2.0}
        self.moe = MoE(WIDTH, expert=expert, drop_tokens=not keeps_all, **sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _, _ = self.moe(x)
        return output


class MixtureBlock(Block):
    def __init__(self, *, keeps_all: bool = False, spread: int = 2) -> None:
        super().__init__()
        self.routed = Routed(keeps_all=keeps_all, spread=spread)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.routed(x)


def mixture(rank: int, config: Mapping[str, Any], spread: int = 2) -> Work:
    """Two experts on each rank, of four."""
    _begin()
    net = Net()
    net.stack = nn.ModuleList(MixtureBlock(spread=spread) for _ in range(2))
    engine = _engine(net, config)
    return Work(engine, rank, _micro_steps(engine))


def one_each(rank: int, config: Mapping[str, Any]) -> Work:
    """One expert on each rank, of four."""
    return mixture(rank, config, spread=4)


def uneven(rank: int, config: Mapping[str, Any]) -> Work:
    """One expert gets most rows, and none of them is dropped."""
    _begin()
    net = Net()
    net.stack = nn.ModuleList(MixtureBlock(keeps_all=True) for _ in range(2))
    with torch.no_grad():
        net.tokens.weight += 0.5
        for block in net.stack:
            block.routed.moe.deepspeed_moe.gate.wg.weight[0] += 1.0
    engine = _engine(net, config)
    return Work(engine, rank, _micro_steps(engine))


class Core(nn.Module):
    """Attention of all positions, for some of the heads."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        return scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).contiguous()


class SequenceBlock(Block):
    """Each rank has some of the positions."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistributedAttention(Core(), group, scatter_idx=2, gather_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, positions, width = x.shape
        split = self.qkv(x).view(rows, positions, 3, 4, width // 4).unbind(2)
        q, k, v = (each.transpose(0, 1).contiguous() for each in split)
        return super().forward(x + self.attention(q, k, v, 0).transpose(0, 1).reshape(x.shape))


def ulysses(rank: int, config: Mapping[str, Any]) -> Work:
    """Two ranks share a sequence, or as many as the configuration says."""
    _begin()
    parts = config.get("sequence_parallel_size", 2)
    copies = dist.get_world_size() // parts
    axes = dist.init_device_mesh(
        "cpu", (copies, parts), mesh_dim_names=("data_parallel", "sequence_parallel")
    )
    net = Net()
    net.stack = nn.ModuleList(SequenceBlock(axes.get_group("sequence_parallel")) for _ in range(2))
    sizes = {"sequence_parallel_size": parts, "data_parallel_size": copies}
    engine = _engine(net, {**config, **sizes}, mesh_param=(copies, parts))
    return Work(engine, rank // parts, _micro_steps(engine, lambda each: each.chunk(parts, 1)[rank % parts]))


def tensor(rank: int, config: Mapping[str, Any]) -> Work:
    """Ranks share each layer of a Llama, which DeepSpeed splits by itself (AutoTP): two of them, or as many
    as the configuration says."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _begin()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_dropout": 0.1}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, max_position_embeddings=16))
    sharing = config.get("tensor_parallel", {"autotp_size": 2})
    engine = _made_for(net, {**config, "tensor_parallel": sharing})
    return Work(engine, rank // sharing["autotp_size"], _micro_steps(engine))


def autoep(rank: int, config: Mapping[str, Any]) -> Work:
    """DeepSpeed finds the experts of a Mixtral, and spreads them by itself."""
    from transformers import MixtralConfig, MixtralForCausalLM

    _begin()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
    spread = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    net = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))
    engine = _made_for(net, {**config, "expert_parallel": spread})
    return Work(engine, rank, _micro_steps(engine))


def accelerated(rank: int, config: Mapping[str, Any]) -> Work:
    """Accelerate makes the engine, and calls it; it has no schedule."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    for each in (AcceleratorState, GradientState):  # which are the process's, and another job's
        each._reset_state()
    # As its launcher sets it; no connection is made, since there is a process group already.
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    plugin = DeepSpeedPlugin(hf_ds_config=dict(config))
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATED)
    net = Net()
    engine, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def step(batches: Batches, middle: Callable[[], None]) -> None:
        for place, (tokens, targets) in enumerate(batches):
            with accelerator.accumulate(engine):
                loss = _loss(engine(tokens), targets)
                if place:
                    middle()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return Work(engine, rank, step)


KINDS: dict[str, Callable[[int, Mapping[str, Any]], Work]] = {
    each.__name__: each
    for each in (
        plain,
        born_sharded,
        streams,
        pipeline,
        three_stages,
        mixture,
        one_each,
        uneven,
        ulysses,
        tensor,
        autoep,
        accelerated,
    )
}


def _begin() -> None:
    # DeepSpeed refuses fp16 on a processor without instructions for it; PyTorch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


def _engine(net: nn.Module, config: Mapping[str, Any], **settings: Any) -> Any:
    _begin()
    dimensions = {each: len(getattr(each, "ds_shape", each.shape)) for each in net.parameters()}
    decayed = [each for each, number in dimensions.items() if number > 1]
    others = [each for each, number in dimensions.items() if number == 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "name": "decayed"},
        {"params": others, "weight_decay": 0.0, "name": "others"},
    ]
    if any(isinstance(each, MoE) for each in net.modules()):
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=dict(config), **settings
    )
    return engine


def _made_for(net: nn.Module, config: Mapping[str, Any]) -> Any:
    """The optimizer is made once DeepSpeed has put other layers into the model."""
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=[*net.parameters()],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        config=dict(config),
    )
    return engine


def _micro_steps(
    engine: Any, own: Callable[[torch.Tensor], torch.Tensor] = lambda each: each
) -> Callable[[Batches, Callable[[], None]], None]:
    def step(batches: Batches, middle: Callable[[], None]) -> None:
        for place, pair in enumerate(batches):
            tokens, targets = (own(each).to(engine.device) for each in pair)
            engine.backward(_loss(engine(tokens), targets))
            if place:
                middle()
            engine.step()

    return step


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())
