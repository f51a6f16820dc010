"""Programs on pipeline schedules of PyTorch: plain stages, and stages in FSDP2 or DDP, recomputed, compiled.

A model is cut as its author would do it, by setting to None what other stages have. The schedule calls each
stage once for each part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, next_token_loss, surfaces_of, text
from evaluation.jobs.tensor import average
from torchscout.config import Parallelism

STAGES, MICROBATCHES = 2, 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe": ScheduleDualPipeV,
}
_V_SHAPED = ("zbv", "dualpipe")
_CAN_FOLD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Before, a V-shaped schedule sends to its own rank, which Gloo refuses."""


@dataclass(frozen=True)
class Layout:
    """How a job is laid out on its ranks: replicas or shards, times two pipeline ranks."""

    schedule: str
    copies: int = 3
    """Ranks that hold the same stages, or shards of them."""
    inside: str = "nothing"
    """What a stage is wrapped in, or its blocks are: a key of WRAPPERS."""
    pipeline_first: bool = False
    """Whether the mesh is ("pp", "dp") rather than ("dp", "pp")."""
    by_degrees: bool = False
    """Whether the parallelism is passed by its degrees, not as the mesh itself."""

    @property
    def is_sharded(self) -> bool:
        """Whether no other rank holds a copy of a rank's state."""
        return "fsdp" in self.inside

    @property
    def is_averaged_by_hand(self) -> bool:
        return not self.is_sharded and self.inside not in ("ddp", "hsdp")

    @property
    def data_axes(self) -> tuple[str, ...]:
        return ("dp_replicate", "dp_shard") if self.inside == "hsdp" else ("dp",)

    def mesh(self, device: str = "cpu") -> DeviceMesh:
        copies = (2, self.copies // 2) if self.inside == "hsdp" else (self.copies,)
        shape, names = (*copies, STAGES), (*self.data_axes, "pp")
        if self.pipeline_first:
            shape, names = (STAGES, *copies), ("pp", *self.data_axes)
        return init_device_mesh(device, shape, mesh_dim_names=names)

    def parallelism(self, axes: DeviceMesh) -> DeviceMesh | Parallelism:
        if not self.by_degrees:
            return axes
        return Parallelism(**{"shard" if self.is_sharded else "replica": self.copies, "pipeline": STAGES})

    def copy_of(self, rank: int) -> int:
        """The index of a rank among those with the same stages."""
        return rank % self.copies if self.pipeline_first else rank // STAGES

    @property
    def chunks(self) -> int:
        """The number of stages on each rank."""
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    def stages_on(self, position: int) -> list[int]:
        """Which stages a pipeline rank runs."""
        if self.chunks == 1:
            return [position]
        last = 2 * STAGES - 1
        return [position, last - position if self.schedule in _V_SHAPED else position + STAGES]

    def surfaces_on(self, rank: int) -> set[str]:
        """What must be compared on a rank: every part of its stages, its state, its updates."""
        position = rank // self.copies if self.pipeline_first else rank % STAGES
        found = {"optimizer/param", "optimizer/reproduced"}
        found |= {"state/owned"} if self.is_sharded else {"state/parameters", "state/optimizer"}
        for chunk, place in enumerate(self.stages_on(position)):
            prefix = "" if self.chunks == 1 else f"{chunk}."
            found |= surfaces_of(Stage(place, self.chunks * STAGES), prefix)
        return found


class Stage(GPT):
    """A part of a model. Its blocks have the numbers that they have in the whole."""

    def __init__(self, place: int, stages: int) -> None:
        torch.manual_seed(0)
        layers = 2 * stages + 1
        super().__init__(layers)
        each, more = divmod(layers, stages)  # the first stage gets the remainder
        start = place * each + min(place, more)
        own = range(start, start + each + (place < more))
        self.blocks = nn.ModuleDict({str(n): self.blocks[n] for n in own})
        if place > 0:
            self.tokens = self.positions = None
        if place < stages - 1:
            self.norm = self.head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def _with_ddp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(stage, process_group=mesh.get_group())


def _with_fsdp(stage: Stage, mesh: DeviceMesh, *, reshard: bool | None = None) -> nn.Module:
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(stage, mesh=mesh, reshard_after_forward=reshard)


def _with_checkpoints(stage: Stage, _: DeviceMesh) -> nn.Module:
    for name, block in stage.blocks.items():
        stage.blocks[name] = checkpoint_wrapper(block)
    return stage


def _with_compiled_blocks(stage: Stage, _: DeviceMesh) -> nn.Module:
    torch._functorch.config.donated_buffer = False  # a backward in two parts runs over its graph twice
    for block in stage.blocks.values():
        block.compile(backend="aot_eager")
    return stage


WRAPPERS: dict[str, Callable[[Stage, DeviceMesh], nn.Module]] = {
    "nothing": lambda stage, _: stage,
    "checkpoints": _with_checkpoints,
    "compiled blocks": _with_compiled_blocks,
    "ddp": _with_ddp,
    "fsdp": _with_fsdp,
    "hsdp": _with_fsdp,
    # As a split backward needs it to find gradients.
    "gathered fsdp": partial(_with_fsdp, reshard=False),
}


def stages_of(layout: Layout, device: str = "cpu") -> tuple[DeviceMesh, list[PipelineStage]]:
    """Return the job's mesh, and the stages of this rank."""
    axes, count = layout.mesh(device), layout.chunks * STAGES
    wrap, data = WRAPPERS[layout.inside], axes[layout.data_axes]
    stages = [
        PipelineStage(
            wrap(Stage(place, count), data),
            place,
            count,
            torch.device(device),
            group=axes["pp"].get_group(),
        )
        for place in layout.stages_on(axes["pp"].get_local_rank())
    ]
    return axes, stages


class _Carrier(nn.Module):
    """The stages under the names they have for replay; called once a step, to mark its beginning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)

    def forward(self) -> None:
        pass


def train(job: Job, layout: Layout) -> None:
    axes, stages = stages_of(layout, job.device)
    modules = [stage.submod for stage in stages]
    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = SCHEDULES[layout.schedule](
        stages[0] if layout.chunks == 1 else stages, MICROBATCHES, loss_fn=next_token_loss
    )
    carrier = _Carrier(model)
    job.attach(
        model,
        optimizer,
        parallelism=layout.parallelism(axes),
        also=lambda: _settings(modules),
        slow=(carrier, optimizer),
    )
    for step in job.steps():
        carrier()
        optimizer.zero_grad()
        run(schedule, stages, text(step, layout.copy_of(job.rank)))
        if layout.is_averaged_by_hand:
            average(model, axes["dp"].get_group())
        optimizer.step()


def run(schedule: Any, stages: Sequence[PipelineStage], samples: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One pass of the schedule: the first stage gets the tokens, the last one the targets."""
    tokens, targets = samples
    given = [tokens] if any(stage.is_first for stage in stages) else []
    last = {"target": targets, "losses": []} if any(stage.is_last for stage in stages) else {}
    schedule.step(*given, **last)


def _settings(modules: Sequence[nn.Module]) -> list[Any]:
    """What a schedule, FSDP and DDP set during a step."""
    every = [each for stage in modules for each in stage.modules()]
    synchronized = [
        each.require_backward_grad_sync for each in every if isinstance(each, DistributedDataParallel)
    ]
    return synchronized + [_fsdp_settings(each) for each in every if isinstance(each, FSDPModule)]


def _fsdp_settings(module: FSDPModule) -> list[Any]:
    state = fully_shard.state(module)
    several = hasattr(state, "_fsdp_param_groups")  # from PyTorch 2.12 on
    groups = [
        (
            group._training_state,
            group._sharded_state,
            group.reduce_grads,
            group.reshard_after_backward,
            group.unshard_async_op,
            [(each.sharded_state, each.unsharded_accumulated_grad is None) for each in group.fsdp_params],
        )
        for group in (state._fsdp_param_groups if several else filter(None, [state._fsdp_param_group]))
    ]
    common = state._state_ctx
    return [
        state._training_state,
        common.is_last_backward,
        common.post_backward_final_callback_queued,
        common.iter_forward_root is None,
        len(state._comm_ctx.post_forward_order),
        *groups,
    ]


def entry(layout: Layout, **more: Any) -> Entry:
    return Entry(
        partial(train, layout=layout),
        ranks=STAGES * layout.copies,
        compared=layout.surfaces_on,
        unchecked=(),
        **more,
    )


REPLAYED = range(MICROBATCHES, 400)
"""The calls of a place in a step that are not training's own."""
_PAIR = "not tried: of two that do the same work, none is named"
JOBS: dict[str, Entry] = {
    "pipeline-1f1b": entry(
        Layout("1f1b"),
        in_ci=("wrong_number:output", "wrong_number:gradient", "wrong_number:weight"),
        wrong={
            "output": Wrong("blocks.1/output", 2, step=2, bit=3, calls=REPLAYED),
            "later-output": Wrong("blocks.3/output", 5, step=3, bit=3, calls=REPLAYED),
            "grad_input": Wrong("blocks.0/grad_input", 4, step=4, bit=3, calls=REPLAYED),
            "gradient": Wrong(
                "blocks.3.up/weight.gradient", 3, "blocks.3.up/weight.grad", step=7, bit=3, calls=REPLAYED
            ),
            "weight": Wrong("head/weight", 3, step=4, bit=3, calls=range(1)),
            "slot": Wrong("blocks.0.up/weight.exp_avg", 4, step=4, bit=3, calls=range(1)),
        },
    ),
    "pipeline-interleaved": entry(
        Layout("interleaved", by_degrees=True),
        wrong={
            "output": Wrong("1.blocks.5/output", 2, step=4, bit=3, calls=REPLAYED),
        },
    ),
    "pipeline-1f1b-ddp": entry(
        Layout("1f1b", 2, "ddp"),
        flip="reported",
        in_ci=("wrong_number:output",),
        not_slowed=_PAIR,
        wrong={
            # Two replicas have no majority.
            "output": Wrong(
                "module.blocks.1/output",
                2,
                "blocks.1/output",
                bit=3,
                calls=REPLAYED,
                scope="peer_group",
                named=(0, 2),
            )
        },
    ),
    "pipeline-1f1b-fsdp2": entry(
        Layout("1f1b", 3, "fsdp", pipeline_first=True),
        flip="reported",
        wrong={"output": Wrong("blocks.1/output", 2, step=2, bit=3, calls=REPLAYED)},
    ),
    "pipeline-1f1b-hsdp": entry(Layout("1f1b", 4, "hsdp"), flip="reported", not_slowed=_PAIR),
    "pipeline-gpipe": entry(Layout("gpipe", 2), flip="reported", not_slowed=_PAIR),
    "pipeline-zero-bubble-checkpointing": entry(Layout("zero bubble", 3, "checkpoints")),
    "pipeline-interleaved-compiled": entry(
        Layout("interleaved", 2, "compiled blocks"), flip="reported", patience=3, not_slowed=_PAIR
    ),
}
if _CAN_FOLD:
    JOBS |= {
        "pipeline-zbv-fsdp2": entry(
            Layout("zbv", 2, "gathered fsdp", by_degrees=True), flip="reported", not_slowed=_PAIR
        ),
        "pipeline-dualpipe": entry(Layout("dualpipe")),
    }
