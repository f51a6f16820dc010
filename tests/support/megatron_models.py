"""Small GPT models that the real Megatron-Core trains, in each kind of parallelism.

On CPU ranks with the stand-ins of ``megatron_cpu``, on CUDA ranks without any.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchscout.collectives.call import SCOUT_GROUP
from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import preload

preload(
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "torchscout.adapters.megatron.adapter",
)
VOCABULARY, LENGTH, ROWS = 64, 16, 2


@dataclass(frozen=True)
class Trial:
    """How to train."""

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
    overlap: bool = False
    fsdp: bool = False
    """Whether parameters are sharded: Megatron-FSDP."""
    dtype: str = "float32"
    scale: float = 2.0**10
    """The first loss scale, where losses are scaled."""
    fused: bool = False
    """Whether backward adds to ``main_grad`` by itself."""
    layers: int = 2
    steps: int = 6
    microbatches: int = 2
    dropout: float = 0.1
    recomputed: str | None = None
    """``full`` or ``selective``."""
    tied: bool = False
    faults: FaultPlan = field(default_factory=FaultPlan)
    replay: ReplayConfig = field(default_factory=lambda: ReplayConfig(interval=1))
    observer: ObserverConfig | None = None
    directory: Path | None = None
    """Of checkpoints."""
    instances: int = 1
    """Of the distributed optimizer: each shards its state for itself."""
    spoiled: tuple[int, int] | None = None
    """A rank whose optimizer has a wrong bit in a slot that it alone holds, after the check of this step."""
    overwritten: tuple[int, int] | None = None
    """A rank with a parameter of which a bit changes in this step."""
    when: str = "before forward"
    """Or ``before the second batch``."""
    which: int | None = 0
    """Of the rank's parameters; None: in what this rank gives to others when they are gathered."""
    killed: int | None = None
    """The step after which all ranks are killed."""
    log: Path | None = None
    """A file for what fired, where ranks may not live to tell."""
    device: str = "cpu"
    """``cpu``, or ``cuda``: the rank's current device."""

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Job:
    """Megatron's objects of one rank."""

    chunks: list[Any]
    optimizer: Any
    trial: Trial
    schedule: Any
    loader: Loader


class Loader:
    """Every replica's own batches, from a position on that is part of the state."""

    def __init__(self, trial: Trial, replica: int) -> None:
        self._trial, self._replica, self.position = trial, replica, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield _batch(self._trial, 1000 * self._replica + self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def build(trial: Trial) -> Job:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # On a CPU without bfloat16, PyTorch turns oneDNN off for the rest of the process at the first bfloat16
    # product, and float32 products round differently from then on. Every trial begins as in a new process.
    torch.backends.mkldnn.set_flags(True)
    if trial.device == "cpu":
        from tests.support import megatron_cpu

        megatron_cpu.work_around()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        trial.tensor,
        trial.pipeline,
        trial.virtual,
        context_parallel_size=trial.context,
        expert_model_parallel_size=trial.expert,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=trial.instances,
    )
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    config = _config(trial)
    # As Megatron's ``get_model`` moves it; on CPU ranks this and every other ``cuda()`` changes nothing.
    models = [_model(trial, config, stage).cuda() for stage in range(trial.virtual or 1)]
    if trial.dtype != "float32":
        from megatron.core.transformer.module import Float16Module

        models = [Float16Module(config, each) for each in models]
    setup = DistributedDataParallelConfig(
        use_distributed_optimizer=trial.sharded,
        overlap_grad_reduce=trial.overlap,
        overlap_param_gather=trial.overlap and trial.sharded,
        num_distributed_optimizer_instances=trial.instances,
        grad_reduce_in_fp32=True,
        bucket_size=4000,
    )
    if trial.fsdp:
        chunks = [_fully_sharded(config, setup, each) for each in models]
    else:
        chunks = [
            DistributedDataParallel(config, setup, each, disable_bucketing=place > 0)
            for place, each in enumerate(models)
        ]
    if trial.overlap:
        config.no_sync_func = [each.no_sync for each in chunks] if len(chunks) > 1 else chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-4,
            weight_decay=0.01,
            bf16=trial.dtype == "bfloat16",
            fp16=trial.dtype == "float16",
            initial_loss_scale=trial.scale,
            loss_scale_window=3,
            hysteresis=1,
            params_dtype=trial.kind,
            use_distributed_optimizer=trial.sharded,
            overlap_param_gather=trial.overlap and trial.sharded,
            clip_grad=1.0,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    loader = Loader(trial, parallel_state.get_data_parallel_rank())
    return Job(chunks, optimizer, trial, _schedule(optimizer), loader)


def _fully_sharded(config: Any, setup: Any, model: Any) -> Any:
    from megatron.core.distributed import FullyShardedDataParallel

    setup.use_megatron_fsdp, setup.data_parallel_sharding_strategy = True, "optim_grads_params"
    setup.average_in_collective = True  # Gloo cannot scale while it adds up
    return FullyShardedDataParallel(config, setup, model, device=torch.device("cpu"))


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


def called(job: Job) -> Any:
    """The model itself, or what Megatron-FSDP calls in its place; a list of a model's chunks."""
    found = []
    for chunk in job.chunks:
        each = chunk.module
        while hasattr(each, "module") and not job.trial.fsdp:
            each = each.module
        found.append(each)
    return found[0] if len(found) == 1 else torch.nn.ModuleList(found)


def inner(job: Job) -> list[torch.optim.Optimizer]:
    chained = getattr(job.optimizer, "chained_optimizers", None) or [job.optimizer]
    return [each.optimizer for each in chained]


def one_step(job: Job, before_second: Callable[[], None] = lambda: None) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trial = job.trial
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    batches = [batch for _, batch in zip(range(trial.microbatches), job.loader, strict=False)]
    loaders, several = [_calling(batches, before_second) for _ in job.chunks], len(job.chunks) > 1
    get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=loaders if several else loaders[0],
        model=job.chunks if several else job.chunks[0],
        num_microbatches=trial.microbatches,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    job.optimizer.step()
    job.schedule.step(1)


def _calling(batches: list[Any], before_second: Callable[[], None]) -> Iterator[Any]:
    for place, batch in enumerate(batches):
        if place == 1:
            before_second()
        yield batch


def _config(trial: Trial) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    if trial.experts:
        more |= {
            "num_moe_experts": trial.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": trial.dispatcher,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "add_bias_linear": False,
        }
    if trial.recomputed:
        more |= {"recompute_granularity": trial.recomputed}
    if trial.recomputed == "full":
        more |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if trial.virtual:
        more |= {"overlap_p2p_comm": trial.pipeline == 2, "batch_p2p_comm": trial.pipeline != 2}
    return TransformerConfig(
        num_layers=trial.layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        tensor_model_parallel_size=trial.tensor,
        pipeline_model_parallel_size=trial.pipeline,
        virtual_pipeline_model_parallel_size=trial.virtual,
        context_parallel_size=trial.context,
        expert_model_parallel_size=trial.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=trial.sequence,
        params_dtype=trial.kind,
        pipeline_dtype=trial.kind,
        bf16=trial.dtype == "bfloat16",
        fp16=trial.dtype == "float16",
        hidden_dropout=trial.dropout,
        attention_dropout=trial.dropout,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=trial.fused,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        **more,
    )


def _model(trial: Trial, config: Any, stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from tests.support.megatron_parts import spec_of

    virtual = stage if trial.virtual else None
    ends = {"ignore_virtual": virtual is None, "vp_stage": virtual}
    return GPTModel(
        config=config,
        transformer_layer_spec=spec_of(trial, config, virtual),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=trial.tied,
        vp_stage=virtual,
    )


def _batch(trial: Trial, seed: int) -> Any:
    from megatron.core.utils import get_batch_on_this_cp_rank

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    places = torch.arange(LENGTH).unsqueeze(0).expand(ROWS, -1).contiguous()
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    batch = {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous(), "places": places}
    if trial.context > 1:
        batch, mask = get_batch_on_this_cp_rank(batch), None
    given = (batch["tokens"], batch["labels"], batch["places"], mask)
    return tuple(None if each is None else each.cuda() for each in given)


def _forward(loader: Iterator[Any], model: Any) -> Any:
    tokens, targets, places, mask = next(loader)
    output = model(tokens, places, mask, labels=targets)

    def loss(losses: torch.Tensor) -> Any:
        return losses.float().mean(), {}

    return output, loss


def leave() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()
    _clear_sharding_prop_cache()  # it keeps meshes, whose groups are destroyed here
    parallel_state.destroy_model_parallel()
    # PyTorch names a group that only its members make after the number of groups they are in already: ranks
    # that were of different stages would not find each other in the next trial.
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group.group_desc != SCOUT_GROUP:
            dist.destroy_process_group(group)
