"""Small GPT models that the real Megatron-Core trains, in each of its kinds of parallelism.

On CPU ranks with the stand-ins of ``megatron_cpu``, on CUDA ranks without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job, forget_groups
from evaluation.jobs.models import LENGTH, VOCABULARY, text
from torchscout.testing.local_ranks import preload

ROWS = 4
if (
    torch.version.cuda is None
):  # importing Megatron-Core asks CUDA for its devices; then nothing can be forked
    preload(
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "torchscout.adapters.megatron.adapter",
    )


@dataclass(frozen=True)
class Setup:
    """What a user chooses of Megatron-Core."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    experts: int | None = None
    dispatcher: str = "alltoall"
    sequence: bool = False
    sharded: bool = False
    """Whether the optimizer's state is: Megatron's distributed optimizer."""
    instances: int = 1
    """Of the distributed optimizer: each shards its state for itself."""
    overlap: bool = False
    fsdp: bool = False
    """Whether parameters are sharded: Megatron-FSDP."""
    dtype: str = "float32"
    fused: bool = False
    """Whether backward adds to ``main_grad`` by itself."""
    layers: int = 2
    microbatches: int = 2
    recomputed: str | None = None
    """``full`` or ``selective``."""
    tied: bool = False

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def is_gathered_late(self) -> bool:
        """Whether others' shards of parameters arrive only when they are needed."""
        return self.fsdp or (self.overlap and self.sharded)


@dataclass
class Built:
    """Megatron's objects of one rank."""

    setup: Setup
    chunks: list[Any]
    optimizer: Any
    schedule: Any
    replica: int

    @property
    def model(self) -> Any:
        """What a user gives to ``enable_resiliency``."""
        return self.chunks if len(self.chunks) > 1 else self.chunks[0]

    @property
    def called(self) -> Any:
        """The model itself, or what Megatron-FSDP calls in its place; a list of a model's chunks."""
        found = []
        for chunk in self.chunks:
            each = chunk.module
            while hasattr(each, "module") and not self.setup.fsdp:
                each = each.module
            found.append(each)
        return found[0] if len(found) == 1 else torch.nn.ModuleList(found)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of PyTorch, inside of Megatron's."""
        chained = getattr(self.optimizer, "chained_optimizers", None) or [self.optimizer]
        return [each.optimizer for each in chained]


def train(
    job: Job,
    setup: Setup = Setup(),  # noqa: B008  frozen
    *,
    flips: Callable[[Built], torch.Tensor] | None = None,
    middle: Callable[[Built, int], None] = lambda *_: None,
    apart: bool = False,
) -> None:
    """``flips`` says what a flip of the job changes if not a weight; ``middle`` is called before the second
    batch of each step; ``apart`` pretends that each rank is on a machine of its own."""
    from torchscout.adapters.registry import adapter_for

    built = build(setup, job.device)
    machines = [f"machine-{rank}" for rank in range(job.world)]
    job.attach(
        built.model,
        built.optimizer,
        parts=([] if setup.is_gathered_late else built.chunks, []),
        states={"schedule": built.schedule},
        also=lambda: left_behind(built),
        weight=partial(flips or (slot if setup.fsdp else _weight), built),
        slow=(built.called, built.optimizers[0]),
        layers=_slow_layers(setup),
        parallelism=adapter_for(built.chunks, built.optimizer, None).mesh(machines) if apart else None,
    )
    for step in job.steps():
        one_step(built, step, middle)


def one_step(built: Built, step: int, middle: Callable[[Built, int], None] = lambda *_: None) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    built.optimizer.zero_grad()
    loaders = [_batches(built, step, middle) for _ in built.chunks]
    get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=loaders if len(loaders) > 1 else loaders[0],
        model=built.model,
        num_microbatches=built.setup.microbatches,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    built.optimizer.step()
    built.schedule.step(1)


def left_behind(built: Built) -> list[Any]:
    """Gradients, master copies and slots of optimizers, losses' scale, and where random streams stand."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    found: list[Any] = [get_cuda_rng_tracker().get_states(), built.optimizer.get_loss_scale()]
    found += [each["values"] for each in get_moe_layer_wise_logging_tracker().values()]
    if not built.setup.is_gathered_late:
        found += [each.main_grad for chunk in built.chunks for each in chunk.parameters()]
    for optimizer in built.optimizers:
        for group in optimizer.param_groups:
            found += [
                group["lr"],
                group["params"],
                [optimizer.state.get(each, {}) for each in group["params"]],
            ]
    return found


def build(setup: Setup, device: str = "cpu") -> Built:
    # On a CPU without bfloat16, PyTorch turns oneDNN off for the rest of the process at the first bfloat16
    # product, and float32 products round differently from then on. Each training begins as in a new process.
    torch.backends.mkldnn.set_flags(True)
    if device == "cpu":
        from evaluation.jobs import megatron_cpu

        megatron_cpu.work_around()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    _forget()
    parallel_state.initialize_model_parallel(
        setup.tensor,
        setup.pipeline,
        setup.virtual,
        context_parallel_size=setup.context,
        expert_model_parallel_size=setup.expert,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=setup.instances,
    )
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    config = _config(setup)
    # As Megatron's ``get_model`` moves it; on CPU ranks this and every other ``cuda()`` changes nothing.
    models = [_model(setup, config, stage).cuda() for stage in range(setup.virtual or 1)]
    if setup.dtype != "float32":
        models = [Float16Module(config, each) for each in models]
    gathers_late = setup.overlap and setup.sharded
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=setup.sharded,
        overlap_grad_reduce=setup.overlap,
        overlap_param_gather=gathers_late,
        num_distributed_optimizer_instances=setup.instances,
        grad_reduce_in_fp32=True,
        bucket_size=4000,
    )
    if setup.fsdp:
        chunks = [_fully_sharded(config, wrapping, each) for each in models]
    else:
        chunks = [
            DistributedDataParallel(config, wrapping, each, disable_bucketing=place > 0)
            for place, each in enumerate(models)
        ]
    if setup.overlap:
        config.no_sync_func = [each.no_sync for each in chunks] if len(chunks) > 1 else chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-4,
            weight_decay=0.01,
            bf16=setup.dtype == "bfloat16",
            fp16=setup.dtype == "float16",
            initial_loss_scale=2.0**19,  # the first two updates are skipped: gradients are not finite
            loss_scale_window=3,
            hysteresis=1,
            params_dtype=setup.kind,
            use_distributed_optimizer=setup.sharded,
            overlap_param_gather=gathers_late,
            clip_grad=1.0,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    replica = parallel_state.get_data_parallel_rank()
    return Built(setup, chunks, optimizer, _schedule(optimizer), replica)


def _forget() -> None:
    """Leave an earlier training on these ranks behind."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()
    _clear_sharding_prop_cache()  # it keeps meshes, whose groups are destroyed here
    parallel_state.destroy_model_parallel()
    forget_groups()


def _fully_sharded(config: Any, wrapping: Any, model: Any) -> Any:
    from megatron.core.distributed import FullyShardedDataParallel

    wrapping.use_megatron_fsdp, wrapping.data_parallel_sharding_strategy = True, "optim_grads_params"
    wrapping.average_in_collective = True  # Gloo cannot scale while it adds up
    return FullyShardedDataParallel(config, wrapping, model, device=torch.device("cpu"))


def _schedule(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=20,
        wd_incr_style="linear",
    )


def _config(setup: Setup) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    if setup.experts:
        more |= {
            "num_moe_experts": setup.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": setup.dispatcher,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "add_bias_linear": False,
        }
    if setup.recomputed:
        more |= {"recompute_granularity": setup.recomputed}
    if setup.recomputed == "full":
        more |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if setup.virtual:
        more |= {"overlap_p2p_comm": setup.pipeline == 2, "batch_p2p_comm": setup.pipeline != 2}
    return TransformerConfig(
        num_layers=setup.layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        tensor_model_parallel_size=setup.tensor,
        pipeline_model_parallel_size=setup.pipeline,
        virtual_pipeline_model_parallel_size=setup.virtual,
        context_parallel_size=setup.context,
        expert_model_parallel_size=setup.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=setup.sequence,
        params_dtype=setup.kind,
        pipeline_dtype=setup.kind,
        bf16=setup.dtype == "bfloat16",
        fp16=setup.dtype == "float16",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=setup.fused,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        **more,
    )


def _model(setup: Setup, config: Any, stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from evaluation.jobs.megatron_parts import spec_of

    virtual = stage if setup.virtual else None
    ends = {"ignore_virtual": virtual is None, "vp_stage": virtual}
    return GPTModel(
        config=config,
        transformer_layer_spec=spec_of(setup, config, virtual),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=setup.tied,
        vp_stage=virtual,
    )


def _batches(built: Built, step: int, middle: Callable[[Built, int], None]) -> Iterator[Any]:
    from megatron.core.utils import get_batch_on_this_cp_rank

    for part in range(built.setup.microbatches):
        if part == 1:
            middle(built, step)
        tokens, targets = text(step, built.replica, part)
        places = torch.arange(LENGTH).unsqueeze(0).expand(ROWS, -1).contiguous()
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        batch = {"tokens": tokens.contiguous(), "labels": targets.contiguous(), "places": places}
        if built.setup.context > 1:
            batch, mask = get_batch_on_this_cp_rank(batch), None
        yield *batch.values(), mask


def _forward(batches: Iterator[Any], model: Any) -> Any:
    tokens, targets, places, mask = next(batches)
    return model(tokens, places, mask, labels=targets), lambda losses: (losses.float().mean(), {})


def _weight(built: Built) -> torch.Tensor:
    return next(each for chunk in built.chunks for each in chunk.parameters() if each.ndim > 1)


def slot(built: Built) -> torch.Tensor:
    """What an optimizer keeps, of a part that one rank alone has if it is divided among ranks."""
    return next(iter(built.optimizers[0].state.values()))["exp_avg"]


def _slow_layers(setup: Setup) -> list[str]:
    """What is replayed as a whole, if that is not the members of the first list of modules."""
    if setup.virtual:
        return [f"{chunk}.decoder.layers.0" for chunk in range(setup.virtual)]
    parts = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp.router")
    layers = range(setup.layers // setup.pipeline)
    return [f"decoder.layers.{layer}.{part}" for layer in layers for part in parts if setup.experts]


EXPERTS = Setup(experts=4, expert=2)
FSDP = Setup(sharded=True, fsdp=True)
VIRTUAL = Setup(pipeline=2, virtual=2, layers=4, microbatches=4)
MIXED = Setup(tensor=2, sequence=True, experts=4, expert=2)
"""Experts are whole on each rank, all else is in parts."""
EXPERT = "decoder.layers.0.mlp.experts.local_experts.1"
_HELD = range(1)
_ALL_TO_ALL = ("all_to_all/captured.received",)


def _entry(
    setup: Setup, layers: tuple[str, ...] = ("decoder.layers.0", "decoder.layers.1"), **more: Any
) -> Entry:
    """Of ``layers`` outputs and parameters must be compared."""
    state = () if setup.fsdp else ("state/parameters",)
    if setup.sharded or setup.dtype != "float32":
        state += ("state/owned",)
    compared = [f"{layer}/{what}" for layer in layers for what in ("output", "parameters")]
    compared += ["optimizer/reproduced", "optimizer/update", *state, *more.pop("compared", ())]
    # An embedding that the output layer is given, and experts that nobody asked.
    unchecked = ["output_layer/weight.grad", "*experts*", *more.pop("unchecked", ())]
    settings = {"ranks": 4, "flip": "reported", "patience": 2, "needs": ("megatron",)} | more
    return Entry(partial(train, setup=setup), compared=compared, unchecked=tuple(unchecked), **settings)


def _pair(at: str, rank: int, other: int, **more: Any) -> Wrong:
    """Of two that do the same work, both are named: nothing says which is as it should be."""
    return Wrong(at, rank, scope="peer_group", named=tuple(sorted((rank, other))), **more)


def _expert(rank: int, other: int) -> dict[str, Wrong]:
    at = f"{EXPERT}.linear_fc1/weight"
    return {"expert": _pair(at, rank, other, surface=f"{EXPERT}/parameters", calls=_HELD)}


_PARTS = tuple(
    f"decoder.layers.0.{each}"
    for each in ("self_attention", "mlp.router", "mlp.experts.local_experts.1", "pre_mlp_layernorm")
)
_OUTPUT = "decoder.layers.1/output"
JOBS: dict[str, Entry] = {
    "megatron": _entry(
        Setup(recomputed="selective"),
        ranks=3,
        flip="named",
        wrong={
            "output": Wrong(_OUTPUT, 2),
            "weight": Wrong("decoder.layers.0.mlp.linear_fc1/weight", 1, calls=_HELD),
        },
    ),
    "megatron-recomputed": _entry(
        Setup(recomputed="full"),
        (),
        ranks=3,
        flip="named",
        unchecked=("decoder.layers.*",),
        not_slowed="layers that Megatron recomputes as a whole are not replayed",
    ),
    "megatron-fp16": _entry(
        Setup(dtype="float16", fused=True),
        ranks=3,
        flip="named",
        unchecked=("*/optimizer",),  # where an update was skipped
    ),
    "megatron-bf16": _entry(Setup(dtype="bfloat16"), ranks=3, flip="named"),
    "megatron-tensor": _entry(
        Setup(tensor=2, sequence=True),
        slow=(1, 3),
        wrong={"output": _pair(_OUTPUT, 3, 1)},
        on_cuda=("healthy", "late"),
    ),
    "megatron-context": _entry(Setup(context=2), ranks=6, flip="named", wrong={"output": Wrong(_OUTPUT, 2)}),
    "megatron-pipeline": _entry(
        Setup(pipeline=2, tied=True),
        ("decoder.layers.0",),
        slow=(0, 1),
        wrong={"weight": _pair("decoder.layers.0.mlp.linear_fc1/weight", 2, 3, calls=_HELD)},
    ),
    "megatron-virtual-pipeline": _entry(
        VIRTUAL,
        ("0.module.decoder.layers.0", "1.module.decoder.layers.0"),
        slow=(0, 1),
        wrong={
            "weight": _pair(
                "0.decoder.layers.0.mlp.linear_fc1/weight",
                1,
                0,
                surface="0.module.decoder.layers.0.mlp.linear_fc1/weight",
                calls=_HELD,
            )
        },
        in_ci=("healthy",),
    ),
    "megatron-distributed-optimizer": _entry(
        Setup(sharded=True, dtype="bfloat16"),
        ranks=3,
        flip="named",
        wrong={"output": Wrong(_OUTPUT, 2, bit=5)},
        in_ci=("healthy", "slow_then_flipped", "late", "resumed", "wrong_number:output"),
        on_cuda=("healthy", "late", "wrong_number:output"),
    ),
    "megatron-two-instances": _entry(Setup(sharded=True, instances=2)),
    "megatron-fsdp": _entry(
        FSDP,
        ranks=3,
        flip="named",
        wrong={"output": Wrong(f"module.{_OUTPUT}", 2, _OUTPUT)},
        in_ci=("healthy",),
    ),
    "megatron-experts": _entry(
        replace(EXPERTS, sharded=True),
        _PARTS,
        compared=_ALL_TO_ALL,
        in_ci=("resumed",),
    ),
    "megatron-experts-gathered": _entry(
        replace(EXPERTS, dispatcher="allgather"),
        _PARTS,
        unchecked=("all_to_all*",),  # what they do not use is not asked of them
        wrong=_expert(3, 1),
    ),
    "megatron-experts-tensor": _entry(MIXED, _PARTS, compared=_ALL_TO_ALL, slow=(1, 3), wrong=_expert(3, 1)),
    "megatron-tensor-pipeline-experts": _entry(
        replace(MIXED, pipeline=2, sharded=True),
        _PARTS,
        ranks=8,
        compared=_ALL_TO_ALL,
        slow=(1, 3),
    ),
}
