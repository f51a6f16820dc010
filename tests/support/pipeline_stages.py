"""How small pipeline jobs are laid out: schedules, stages, what stages are wrapped in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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

from tests.support.replayed_job import VOCABULARY, WIDTH, Block
from torchscout.config import Parallelism

STAGES, LAYERS = 2, 5
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


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is laid out on its ranks: replicas or shards, times two pipeline ranks."""

    schedule: str
    copies: int
    """Ranks that hold the same stages, or shards of them."""
    inside: str = "nothing"
    """What a stage is wrapped in, or its blocks are: a key of WRAPPERS."""
    pipeline_first: bool = False
    """Whether the mesh is ("pp", "dp") rather than ("dp", "pp")."""
    parallelism_from: str = "mesh"
    """How the parallelism is passed: as the ``mesh`` itself, or by ``degrees``."""

    def __str__(self) -> str:
        return f"{self.schedule} of {self.ranks} ranks with {self.inside} inside"

    @property
    def obstacle(self) -> str | None:
        """Return why PyTorch itself cannot train so, or None."""
        if self.schedule in _V_SHAPED and not _CAN_FOLD:
            return "before PyTorch 2.12 a V-shaped schedule sends to its own rank, which Gloo refuses"
        return None

    @property
    def ranks(self) -> int:
        return STAGES * self.copies

    @property
    def is_sharded(self) -> bool:
        """Return whether no other rank holds a copy of a rank's state."""
        return "fsdp" in self.inside

    @property
    def is_replicated_by_hand(self) -> bool:
        """Return whether the job itself must average the gradients of the replicas."""
        return not self.is_sharded and self.inside not in ("ddp", "hsdp")

    @property
    def data_axes(self) -> tuple[str, ...]:
        return ("dp_replicate", "dp_shard") if self.inside == "hsdp" else ("dp",)

    def mesh(self) -> DeviceMesh:
        copies = (2, self.copies // 2) if self.inside == "hsdp" else (self.copies,)
        shape, names = (*copies, STAGES), (*self.data_axes, "pp")
        if self.pipeline_first:
            shape, names = (STAGES, *copies), ("pp", *self.data_axes)
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def degrees(self) -> Parallelism:
        axis = "shard" if self.is_sharded else "replica"
        return Parallelism(**{axis: self.copies, "pipeline": STAGES})

    def copy_of(self, rank: int) -> int:
        """Return the index of a rank among those with the same stages."""
        return rank % self.copies if self.pipeline_first else rank // STAGES

    def position_of(self, rank: int) -> int:
        """Return the position of a rank in its pipeline."""
        return rank // self.copies if self.pipeline_first else rank % STAGES

    @property
    def chunks(self) -> int:
        """Return the number of stages on each rank."""
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    def stages_on(self, position: int) -> list[int]:
        """Return which stages a pipeline rank runs."""
        if self.chunks == 1:
            return [position]
        last = 2 * STAGES - 1
        return [position, last - position if self.schedule in _V_SHAPED else position + STAGES]


class Stage(nn.Module):
    """A part of a model that is cut by setting to None what other stages have; blocks keep their numbers."""

    def __init__(self, place: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, last = place == 0, place == stages - 1
        tokens, blocks = nn.Embedding(VOCABULARY, WIDTH), [Block() for _ in range(LAYERS)]
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.tok_embeddings = tokens if first else None
        self.layers = nn.ModuleDict({str(n): blocks[n] for n in _layers(place, stages)})
        self.norm = norm if last else None
        self.output = head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def surfaces_on(layout: Layout, rank: int) -> set[str]:
    """Return what must be compared on a rank: every part of its stages, its state, its updates."""
    wanted = {"optimizer/param", "optimizer/reproduced"}
    wanted |= {"state/owned"} if layout.is_sharded else {"state/parameters", "state/optimizer"}
    for chunk, place in enumerate(layout.stages_on(layout.position_of(rank))):
        prefix = "" if layout.chunks == 1 else f"{chunk}."
        stage = Stage(place, layout.chunks * STAGES)
        parts = [f"layers.{n}" for n in stage.layers] + ["output"] * (stage.output is not None)
        wanted |= {f"{prefix}{part}/grad_input" for part in parts}
        parts += ["tok_embeddings"] * (stage.tok_embeddings is not None)
        wanted |= {f"{prefix}{part}/{what}" for part in parts for what in ("input", "parameters", "output")}
        names = [name for name, _ in stage.named_parameters() if not name.startswith("norm.")]
        wanted |= {prefix + "/".join(name.rsplit(".", 1)) + ".grad" for name in names}
    return wanted


def _layers(place: int, stages: int) -> range:
    """Divide layers unevenly: the first stages get the remainder."""
    each, more = divmod(LAYERS, stages)
    start = place * each + min(place, more)
    return range(start, start + each + (place < more))


def stages_of(layout: Layout) -> tuple[DeviceMesh, list[PipelineStage]]:
    """Return the job's mesh, and the stages of this rank."""
    axes = layout.mesh()
    data = axes[layout.data_axes]
    stages = [
        PipelineStage(
            WRAPPERS[layout.inside](Stage(place, layout.chunks * STAGES), data),
            place,
            layout.chunks * STAGES,
            torch.device("cpu"),
            group=axes["pp"].get_group(),
        )
        for place in layout.stages_on(axes["pp"].get_local_rank())
    ]
    return axes, stages


def _with_ddp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(stage, process_group=mesh.get_group())


def _with_fsdp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


def _with_gathered_fsdp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    """Keep a stage gathered, as a split backward needs it to find gradients."""
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(stage, mesh=mesh, reshard_after_forward=False)


def _with_checkpoints(stage: Stage, _: DeviceMesh) -> nn.Module:
    for name, block in stage.layers.items():
        stage.layers[name] = checkpoint_wrapper(block)
    return stage


def _with_compiled_blocks(stage: Stage, _: DeviceMesh) -> nn.Module:
    torch._functorch.config.donated_buffer = False  # a backward in two parts runs over its graph twice
    for block in stage.layers.values():
        block.compile(backend="aot_eager")
    return stage


WRAPPERS: dict[str, Callable[[Stage, DeviceMesh], nn.Module]] = {
    "nothing": lambda stage, _: stage,
    "checkpoints": _with_checkpoints,
    "compiled blocks": _with_compiled_blocks,
    "ddp": _with_ddp,
    "fsdp": _with_fsdp,
    "hsdp": _with_fsdp,
    "gathered fsdp": _with_gathered_fsdp,
}
