"""Small jobs on pipeline schedules of PyTorch, each trained with a check at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.replayed_job import VOCABULARY, WIDTH, Block, batch
from torchscout.config import Parallelism, ReplayConfig
from torchscout.decision.record import EvidenceRecord, Manifestation
from torchscout.decision.recorder import read
from torchscout.faults.fault import Faults
from torchscout.faults.injector import Injector
from torchscout.integration.attach import enable_resiliency

__all__ = ["REPLAY", "SCHEDULES", "Layout", "Piped", "surfaces_on", "train"]

STAGES, MICROBATCHES, LAYERS = 2, 4, 5
REPLAY = range(MICROBATCHES, MICROBATCHES + 8)
"""The passes of a place within a step that are not training's own, from the second step on."""
EVERY_STEP = ReplayConfig(interval=1)
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe": ScheduleDualPipeV,
}
_V_SHAPED = ("zbv", "dualpipe")


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
    told: str = "mesh"
    """How the parallelism is told: as the ``mesh`` itself, or by ``degrees``."""

    @property
    def ranks(self) -> int:
        return STAGES * self.copies

    @property
    def is_sharded(self) -> bool:
        return "fsdp" in self.inside

    @property
    def is_replicated_by_hand(self) -> bool:
        """Whether nobody else averages the gradients of the replicas."""
        return not self.is_sharded and self.inside != "ddp"

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    def stages_on(self, position: int) -> list[int]:
        """Which stages a pipeline rank runs."""
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
    """What must be compared on a rank: every part of every stage it has, its state, its updates."""
    position = rank // layout.copies if layout.pipeline_first else rank % STAGES
    wrapper = "module." if layout.inside == "ddp" else ""
    wanted = {"optimizer/param", "optimizer/reproduced"}
    wanted |= {"state/at_rest"} if layout.is_sharded else {"state/parameters", "state/optimizer"}
    for chunk, place in enumerate(layout.stages_on(position)):
        prefix = wrapper if layout.chunks == 1 else f"{chunk}.{wrapper}"
        prefix = "" if prefix == "module." else prefix
        stage = Stage(place, layout.chunks * STAGES)
        parts = [f"layers.{n}" for n in stage.layers] + ["output"] * (stage.output is not None)
        wanted |= {f"{prefix}{part}/grad_input" for part in parts}
        parts += ["tok_embeddings"] * (stage.tok_embeddings is not None)
        wanted |= {f"{prefix}{part}/{what}" for part in parts for what in ("input", "parameters", "output")}
        names = [name for name, _ in stage.named_parameters() if not name.startswith("norm.")]
        wanted |= {prefix + "/".join(name.rsplit(".", 1)) + ".grad" for name in names}
    return wanted


def _layers(place: int, stages: int) -> range:
    """Not as many on every stage: the first ones get what is left over."""
    each, more = divmod(LAYERS, stages)
    start = place * each + min(place, more)
    return range(start, start + each + (place < more))


@dataclass(frozen=True, slots=True)
class Piped:
    """What one rank has to tell."""

    bits: bytes
    """All that training leaves behind on it."""
    settings: list[Any]
    """How FSDP stands after each step."""
    records: list[EvidenceRecord]
    incidents: list[tuple[str, tuple[int, ...], str, int]]
    """Scope, ranks, surface and step of each that is about wrong numbers."""
    sentences: list[str]
    unfired: int
    failures: list[str]
    status: dict[str, Any]


class _Carrier(nn.Module):
    """The stages under the names they have for replay; called once a step, to tell that it begins."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)

    def forward(self) -> None:
        pass


def train(
    rank: int,
    layout: Layout,
    run_dir: Path | None,
    faults: Faults = Faults(),  # noqa: B008  frozen
    steps: int = 12,
    mended: Mapping[int, int] = MappingProxyType({}),
) -> Piped:
    """Train through the schedule, with a check at every step if there is a folder for its records.

    After the steps in ``mended`` every replica gets what the given one holds.
    """
    warnings.filterwarnings("ignore", message=".*(view tensor|full backward hook).*")
    axes, stages = _axes(layout)
    modules = [stage.submod for stage in stages]
    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    schedule = SCHEDULES[layout.schedule](
        stages[0] if layout.chunks == 1 else stages, MICROBATCHES, loss_fn=_loss
    )
    carrier, settings = _Carrier(model), []
    with Injector(faults, rank, carrier, optimizer) as injector:
        session = run_dir and enable_resiliency(
            model,
            optimizer,
            replay=EVERY_STEP,
            observer=None,
            parallelism=axes if layout.told == "mesh" else _degrees(layout),
            run_dir=run_dir,
        )
        for step in range(1, steps + 1):
            carrier()
            optimizer.zero_grad()
            _pass(schedule, stages, batch(step, axes["dp"].get_local_rank()))
            if layout.is_replicated_by_hand:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=axes["dp"].get_group())
            optimizer.step()
            settings.append(_settings(modules))
            if step in mended:
                _mend(model, optimizer, axes["dp"].get_group(), mended[step])
    bits = _bits(model, optimizer)
    if not session:
        return Piped(bits, settings, [], [], [], len(injector.unfired), [], {})
    incidents = [each for each in session.incidents if each.manifestation is Manifestation.SDC]
    status = session.status()["replay"]
    session.close()
    lines = [line.item for line in read(run_dir / "records" / f"rank-{rank}.jsonl")]
    records = [item for item in lines if item.manifestation is Manifestation.SDC]
    told = [(each.scope.value, each.ranks, each.records[0].surface, each.step) for each in incidents]
    sentences = [each.sentence for each in incidents]
    return Piped(
        bits, settings, records, told, sentences, len(injector.unfired), list(session.failures), status
    )


def _axes(layout: Layout) -> tuple[DeviceMesh, list[PipelineStage]]:
    shape, names = (layout.copies, STAGES), ("dp", "pp")
    if layout.pipeline_first:
        shape, names = shape[::-1], names[::-1]
    axes = init_device_mesh("cpu", shape, mesh_dim_names=names)
    pipeline = axes["pp"].get_group()
    stages = [
        PipelineStage(
            WRAPPERS[layout.inside](Stage(place, layout.chunks * STAGES), axes["dp"]),
            place,
            layout.chunks * STAGES,
            torch.device("cpu"),
            group=pipeline,
        )
        for place in layout.stages_on(axes["pp"].get_local_rank())
    ]
    return axes, stages


def _degrees(layout: Layout) -> Parallelism:
    axis = "shard" if layout.is_sharded else "replica"
    return Parallelism(**{axis: layout.copies, "pipeline": STAGES})


def _with_ddp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(stage, process_group=mesh.get_group())


def _with_fsdp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


def _with_gathered_fsdp(stage: Stage, mesh: DeviceMesh) -> nn.Module:
    """As schedules that keep a stage gathered want it: a split backward finds no gradients otherwise."""
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
    "gathered fsdp": _with_gathered_fsdp,
}


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _pass(schedule: Any, stages: Sequence[PipelineStage], samples: tuple[torch.Tensor, torch.Tensor]) -> None:
    tokens, targets = samples
    given = [tokens] if any(stage.is_first for stage in stages) else []
    last = {"target": targets, "losses": []} if any(stage.is_last for stage in stages) else {}
    schedule.step(*given, **last)


def _mend(
    model: nn.Module, optimizer: torch.optim.Optimizer, replicas: dist.ProcessGroup, healthy: int
) -> None:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    with torch.no_grad():
        for tensor in [*model.parameters(), *slots]:
            dist.broadcast(tensor, group=replicas, group_src=healthy)


def _settings(modules: Sequence[nn.Module]) -> list[Any]:
    """What a schedule, and FSDP itself, set on their way through a step."""
    found = []
    for stage in modules:
        for each in stage.modules():
            if not isinstance(each, FSDPModule):
                continue
            state = fully_shard.state(each)
            context = state._state_ctx
            found.append(
                [
                    state._training_state.name,
                    context.is_last_backward,
                    context.post_backward_final_callback_queued,
                    len(state._comm_ctx.post_forward_order),
                    *(
                        [
                            group._training_state.name,
                            group._sharded_state.name,
                            group.reduce_grads,
                            group.reshard_after_backward,
                            group.unshard_async_op,
                            len(group.post_forward_order) if hasattr(group, "post_forward_order") else 0,
                            [parameter.sharded_state.name for parameter in group.fsdp_params],
                            [parameter.unsharded_accumulated_grad is None for parameter in group.fsdp_params],
                        ]
                        for group in state._fsdp_param_groups
                    ),
                ]
            )
    return found


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *slots, torch.get_rng_state()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return b"".join(each.detach().float().numpy().tobytes() for each in local)
