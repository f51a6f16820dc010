"""Small models that DeepSpeed trains, as it is shipped: plain, pipelined, with experts, with sequences or
layers in parts.

It runs on CPUs as it is; only its shared-memory operators, which it would compile, are left out.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job, forget_groups
from evaluation.jobs.models import GPT, LENGTH, VOCABULARY, WIDTH, Block, Product, next_token_loss, text
from torchscout.testing.local_ranks import preload

ACCUMULATED = 2
"""Batches of a step, and calls of ``engine.step()``."""
if torch.version.cuda is None:  # importing DeepSpeed may ask CUDA for its devices; then nothing can be forked
    preload("deepspeed")
_LINEAR = nn.functional.linear
_engines: list[Any] = []
"""That of the training before."""


@dataclass(frozen=True)
class Setup:
    """What a user chooses of DeepSpeed."""

    stage: int = 0
    """Of ZeRO."""
    kind: str = "plain"
    bf16: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)
    """What else the configuration says of ZeRO."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else the configuration has."""
    parts: int = 2
    """Stages of a pipeline, and ranks that share experts, a sequence or each layer."""

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": ACCUMULATED,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "bf16": {"enabled": self.bf16},
            **self.settings,
        }


@dataclass
class Built:
    """An engine on this rank, and how it trains for one step."""

    engine: Any
    step: Callable[[int], None]


def train(
    job: Job,
    setup: Setup,
    *,
    prepare: Callable[[Any], None] = lambda _: None,
    flips: Callable[[Any], torch.Tensor] | None = None,
    apart: bool = False,
) -> None:
    """``prepare`` gets the engine before torchscout; ``flips`` says what of it a flip changes, if not a
    weight; ``apart`` pretends that each rank is on a machine of its own."""
    from torchscout.adapters.registry import adapter_for

    built = build(setup, job.rank, job.device)
    engine, machines = built.engine, [f"machine-{rank}" for rank in range(job.world)]
    prepare(engine)
    job.attach(
        engine,
        None,
        also=lambda: left_behind(engine),
        weight=partial(flips or _held, engine),
        slow=(engine.module, Boundary(engine)),
        layers=_DENSE if setup.kind in _MIXTURES else (),
        parallelism=adapter_for(engine, None, None).mesh(machines) if apart else None,
    )
    for step in job.steps():
        built.step(step)


def left_behind(engine: Any) -> list[Any]:
    """Shards, what optimizers update and keep, the scale of losses, counters, and streams by name."""
    import deepspeed

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    shards = [getattr(each, "ds_tensor", None) for each in engine.module.parameters()]
    streams = deepspeed.checkpointing.get_cuda_rng_tracker().get_states()
    scale = getattr(engine.optimizer, "cur_scale", getattr(engine.optimizer, "loss_scale", 1.0))
    counters = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.get_lr(), float(scale)]
    return [shards, [*inner.state], [*inner.state.values()], streams, counters]


def master(engine: Any) -> torch.Tensor:
    """What an optimizer updates, of a part that one rank alone has with ZeRO."""
    return next(iter(getattr(engine.optimizer, "optimizer", engine.optimizer).state))


def _held(engine: Any) -> torch.Tensor:
    """Return a weight, or this rank's part of it."""
    each_one = (getattr(each, "ds_tensor", each) for each in engine.module.parameters())
    return next(each for each in each_one if each.numel() > 16)


class Boundary:
    """The engine's optimizer as an injector wants one: its hooks stand around all of an update."""

    def __init__(self, engine: Any) -> None:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.state, self.param_groups = inner.state, inner.param_groups
        before: dict[int, Callable[..., Any]] = OrderedDict()
        after: dict[int, Callable[..., Any]] = OrderedDict()
        self.register_step_pre_hook = partial(_registered, before)
        self.register_step_post_hook = partial(_registered, after)
        step = engine.optimizer.step

        def stepping(*args: Any, **kwargs: Any) -> Any:
            for each in before.values():
                each(inner, args, kwargs)
            result = step(*args, **kwargs)
            for each in after.values():
                each(inner, args, kwargs)
            return result

        engine.optimizer.step = stepping


def _registered(hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def build(setup: Setup, rank: int, device: str = "cpu") -> Built:
    os.environ["DS_ACCELERATOR"] = device
    if device == "cuda":  # DeepSpeed makes the device of this number the current one; ranks may share one
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    _forget()
    deepspeed.utils.logger.setLevel("ERROR")
    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a processor without instructions for it; PyTorch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    torch.manual_seed(0)
    built = KINDS[setup.kind](setup, rank)
    _engines.append(built.engine)
    return built


def _forget() -> None:
    """Let another engine begin as if it were the first of this process."""
    import deepspeed
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.utils import groups

    while _engines:
        _engines.pop().destroy()
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()
    set_autotp_mode(training=False)
    nn.functional.linear = _LINEAR  # in whose place ZeRO 3 leaves one that adds up in another order
    groups._release_process_group_references()
    forget_groups()


def plain(setup: Setup, rank: int) -> Built:
    return _built(_engine(GPT(), setup.config), rank)


def born_sharded(setup: Setup, rank: int) -> Built:
    """No rank has ever had the whole model."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=setup.config):
        net = GPT()
    return _built(_engine(net, setup.config), rank)


class StreamBlock(Block):
    """Draws from a random stream that DeepSpeed keeps by its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import deepspeed

        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return super().forward(x)


def streams(setup: Setup, rank: int) -> Built:
    import deepspeed

    deepspeed.checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 100 + rank)
    net = GPT()
    net.blocks = nn.ModuleList(StreamBlock() for _ in range(2))
    return _built(_engine(net, setup.config), rank)


def pipeline(setup: Setup, rank: int) -> Built:
    del rank
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *(LayerSpec(Block) for _ in range(4))]
    layers.append(LayerSpec(nn.Linear, WIDTH, VOCABULARY))
    net = PipelineModule(layers=layers, num_stages=setup.parts, loss_fn=_loss, partition_method="uniform")
    engine = _engine(net, setup.config)
    replica = engine.grid.get_data_parallel_rank()

    def train_step(step: int) -> None:
        engine.train_batch(data_iter=iter([text(step, replica, part) for part in range(ACCUMULATED)]))

    return Built(engine, train_step)


class MixtureBlock(Block):
    """One of four experts goes over each row, besides."""

    def __init__(self, spread: int, *, keeps_all: bool) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        sizes: dict[str, Any] = {"num_experts": 4, "ep_size": spread, "k": 1, "capacity_factor": 2.0}
        self.moe = MoE(WIDTH, expert=expert, drop_tokens=not keeps_all, **sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.moe(x)[0]


def mixture(setup: Setup, rank: int, *, is_uneven: bool = False) -> Built:
    """Four experts, spread over some ranks."""
    net = GPT()
    net.blocks = nn.ModuleList(MixtureBlock(setup.parts, keeps_all=is_uneven) for _ in range(2))
    if is_uneven:
        with torch.no_grad():
            net.tokens.weight += 0.5
            for block in net.blocks:
                block.moe.deepspeed_moe.gate.wg.weight[0] += 1.0
    return _built(_engine(net, setup.config), rank)


def uneven(setup: Setup, rank: int) -> Built:
    """One expert gets most rows, and none of them is dropped."""
    return mixture(setup, rank, is_uneven=True)


class _Core(Product):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        return super().forward(*heads).permute(2, 0, 1, 3).contiguous()


class Spread(nn.Module):
    """Attention of ranks that have some of the positions each: for all of them, and some of the heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        self.attention = DistributedAttention(_Core(), group, scatter_idx=2, gather_idx=0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (each.permute(2, 0, 1, 3).contiguous() for each in (q, k, v))
        return self.attention(*heads, 0).permute(1, 2, 0, 3)


def ulysses(setup: Setup, rank: int) -> Built:
    """Some ranks share a sequence."""
    parts, copies = setup.parts, dist.get_world_size() // setup.parts
    names = ("data_parallel", "sequence_parallel")
    axes = dist.init_device_mesh(torch.get_default_device().type, (copies, parts), mesh_dim_names=names)
    net = GPT(dropout=0.1)
    for block in net.blocks:
        block.attention.product = Spread(axes.get_group("sequence_parallel"))
    sizes = {"sequence_parallel_size": parts, "data_parallel_size": copies}
    engine = _engine(net, {**setup.config, **sizes}, mesh_param=(copies, parts))
    return _built(engine, rank // parts, lambda each: each.chunk(parts, 1)[rank % parts])


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def tensor(setup: Setup, rank: int) -> Built:
    """Ranks share each layer of a Llama, which DeepSpeed splits by itself (AutoTP)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(**_SIZES, attention_dropout=0.1))
    engine = _made_for(net, {**setup.config, "tensor_parallel": {"autotp_size": setup.parts}})
    return _built(engine, rank // setup.parts)


def autoep(setup: Setup, rank: int) -> Built:
    """DeepSpeed finds the experts of a Mixtral, and spreads them by itself."""
    from transformers import MixtralConfig, MixtralForCausalLM

    spread = {"enabled": True, "autoep_size": setup.parts, "preset_model": "mixtral"}
    net = MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))
    engine = _made_for(net, {**setup.config, "expert_parallel": spread})
    return _built(engine, rank)


def accelerated(setup: Setup, rank: int) -> Built:
    """Accelerate makes the engine, and calls it; it has no schedule."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    for each in (AcceleratorState, GradientState):  # which are the process's, and another job's
        each._reset_state()
    # As its launcher sets it; no connection is made, since there is a process group already.
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    plugin = DeepSpeedPlugin(hf_ds_config=setup.config)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATED)
    net = GPT()
    engine, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        for part in range(ACCUMULATED):
            tokens, targets = text(step, rank, part)
            with accelerator.accumulate(engine):
                accelerator.backward(_loss(engine(tokens), targets))
                optimizer.step()
                optimizer.zero_grad()

    return Built(engine, train_step)


KINDS: dict[str, Callable[[Setup, int], Built]] = {
    each.__name__: each
    for each in (
        plain,
        born_sharded,
        streams,
        pipeline,
        mixture,
        uneven,
        ulysses,
        tensor,
        autoep,
        accelerated,
    )
}


def _engine(net: nn.Module, config: Mapping[str, Any], **settings: Any) -> Any:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    dimensions = {each: len(getattr(each, "ds_shape", each.shape)) for each in net.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [each for each, number in dimensions.items() if number > 1], "name": "decayed"},
        {
            "params": [each for each, number in dimensions.items() if number == 1],
            "weight_decay": 0.0,
            "name": "others",
        },
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
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=[*net.parameters()],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        config=dict(config),
    )
    return engine


def _built(
    engine: Any, replica: int, own: Callable[[torch.Tensor], torch.Tensor] = lambda each: each
) -> Built:
    def train_step(step: int) -> None:
        for part in range(ACCUMULATED):
            tokens, targets = (own(each).to(engine.device) for each in text(step, replica, part))
            engine.backward(_loss(engine(tokens), targets))
            engine.step()

    return Built(engine, train_step)


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return next_token_loss(getattr(output, "logits", output).float(), targets)


BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With it, DeepSpeed takes its optimizer for bfloat16."""
SOME_SMALL = {"stage3_param_persistence_threshold": 30}
"""Norms and biases are small enough to stay gathered."""
WITHIN_PAIRS = {**SOME_SMALL, "zero_hpz_partition_size": 2}
"""Two ranks hold all parameters between them, besides."""
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
"""Optimizers step on the host."""
ALL_ON_HOST = {**ON_HOST, **SOME_SMALL, "offload_param": {"device": "cpu", "pin_memory": False}}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}
"""Otherwise DeepSpeed compiles an optimizer of its own for the host."""


def scaled(power: int) -> dict[str, Any]:
    """Losses are scaled; gradients overflow in some steps, whose updates are skipped."""
    return {"fp16": {"enabled": True, "initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1}}


_MIXTURES = ("mixture", "uneven")
_DENSE = [f"blocks.{block}.{part}" for block in (0, 1) for part in ("attention", "up", "down")]
"""What is replayed of blocks with experts, besides these."""
EXPERTS = tuple(
    f"blocks.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{each}"
    for layer in (0, 1)
    for each in (0, 1)
)
GPT_PARTS = ("tokens", "blocks.0", "blocks.1", "head")
LLAMA_PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")
_STATE = {0: ("state/parameters", "state/optimizer"), 3: ("state/owned",)}
"""What has copies is compared; what has one owner must not change by itself."""


def _entry(setup: Setup, parts: tuple[str, ...] = GPT_PARTS, **more: Any) -> Entry:
    """Of ``parts`` outputs and parameters must be compared."""
    compared = [f"{part}/{what}" for part in parts for what in ("output", "parameters")]
    compared += ["optimizer/param", "optimizer/reproduced"]
    compared += _STATE.get(setup.stage, ("state/parameters", "state/owned"))
    unchecked = ("*/optimizer",) if "fp16" in setup.settings else ()  # where an update was skipped
    settings = {"compared": compared, "unchecked": unchecked, "patience": 2, "needs": ("deepspeed",)} | more
    return Entry(partial(train, setup=setup), **settings)


def _pair(at: str, rank: int, other: int, **more: Any) -> dict[str, Wrong]:
    """Of two that do the same work, both are named: nothing says which is as it should be."""
    return {"pair": Wrong(at, rank, scope="peer_group", named=tuple(sorted((rank, other))), bit=2, **more)}


def _stages(rank: int) -> set[str]:
    layers = range(3) if rank < 2 else range(3, 6)
    return {f"{layer}/{what}" for layer in layers for what in ("output", "parameters")} | {"state/owned"}


_OUTPUT = {"output": Wrong("blocks.1/output", 1, bit=2)}
_WEIGHT = {"weight": Wrong("blocks.0.up/weight", 2, calls=range(1), bit=2)}
_GRADIENT = {"gradient": Wrong("blocks.1/grad_input", 0, bit=2)}
_SHARED = {"ranks": 4, "flip": "reported"}
_ON_CUDA = ("healthy", "late", "wrong_number:weight")
JOBS: dict[str, Entry] = {
    "deepspeed": _entry(Setup(), wrong=_WEIGHT | _GRADIENT),
    "deepspeed-fp16": _entry(Setup(settings=scaled(26))),
    "deepspeed-zero1": _entry(Setup(1, "streams"), wrong=_WEIGHT, on_cuda=_ON_CUDA),
    "deepspeed-bf16": _entry(Setup(1, bf16=True, settings=BF16_OPTIMIZER)),
    "deepspeed-zero2": _entry(
        Setup(2, bf16=True),
        wrong=_WEIGHT | _OUTPUT | _GRADIENT,
        in_ci=("resumed", "wrong_number:weight"),
        on_cuda=_ON_CUDA,
    ),
    "deepspeed-zero2-fp16": _entry(Setup(2, settings=scaled(20))),
    "deepspeed-zero2-offload": _entry(Setup(2, bf16=True, zero=ON_HOST, settings=TORCH_ADAM)),
    "deepspeed-zero3": _entry(
        Setup(3, "born_sharded", bf16=True, zero=SOME_SMALL),
        ranks=4,
        wrong=_OUTPUT,
        in_ci=("resumed", "wrong_number:output"),
        on_cuda=("healthy", "late", "wrong_number:output"),
    ),
    "deepspeed-zero3-offload": _entry(
        Setup(3, bf16=True, zero=ALL_ON_HOST, settings=TORCH_ADAM), ranks=4, wrong=_OUTPUT
    ),
    "deepspeed-zero3-pairs": _entry(Setup(3, zero=WITHIN_PAIRS), **_SHARED, wrong=_OUTPUT),
    "deepspeed-pipeline": _entry(
        Setup(1, "pipeline", bf16=True),
        compared=_stages,
        slow=(0, 1),
        **_SHARED,
        wrong=_pair("3.up/weight", 3, 2, calls=range(1)),
    ),
    "deepspeed-experts": _entry(
        Setup(2, "mixture", bf16=True),
        ("tokens", "blocks.0.up", *EXPERTS, "head"),
        **_SHARED,
        wrong=_WEIGHT
        | _pair(f"{EXPERTS[1]}.0/weight", 3, 1, surface=f"{EXPERTS[1]}/parameters", calls=range(1)),
        in_ci=("healthy", "wrong_number:pair"),
    ),
    "deepspeed-experts-uneven": _entry(
        Setup(0, "uneven"), ("tokens", "blocks.0.up", *EXPERTS, "head"), **_SHARED
    ),
    "deepspeed-ulysses": _entry(
        Setup(1, "ulysses", bf16=True),
        slow=(1, 3),
        **_SHARED,
        wrong=_pair("blocks.0.attention.qkv/weight", 3, 1, calls=range(1)),
    ),
    "deepspeed-autotp": _entry(
        Setup(1, "tensor", bf16=True),
        LLAMA_PARTS,
        slow=(1, 3),
        **_SHARED,
        wrong=_pair("model.layers.0.mlp.down_proj/weight", 2, 0, calls=range(1)),
        in_ci=("healthy",),
    ),
    "deepspeed-autotp-zero3": _entry(
        Setup(3, "tensor", bf16=True, zero=SOME_SMALL),
        LLAMA_PARTS,
        slow=(1, 3),
        **_SHARED,
        wrong=_pair("model.layers.1/output", 2, 0),
    ),
    "deepspeed-accelerate": _entry(
        Setup(2, "accelerated", bf16=True), needs=("deepspeed", "accelerate"), wrong=_WEIGHT
    ),
}
