"""Small jobs on pipeline schedules of PyTorch, each trained with a check at every step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from tests.support.findings import evidence_of
from tests.support.pipeline_stages import SCHEDULES, Layout, stages_of
from tests.support.replay_results import bits_of
from tests.support.replayed_job import batch
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.records.record import EvidenceRecord, Manifestation
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

MICROBATCHES = 4
REPLAY = range(MICROBATCHES, MICROBATCHES + 200)
"""The passes of a place within a step that are not training's own, from the second step on."""
EVERY_STEP = ReplayConfig(interval=1, records="all")


@dataclass(frozen=True, slots=True)
class Piped:
    """The result of one rank."""

    bits: bytes
    """All that training leaves behind on it."""
    settings: list[Any]
    """How FSDP and DDP stand after each step."""
    records: list[EvidenceRecord]
    incidents: list[tuple[str, tuple[int, ...], str, int]]
    """Scope, ranks, surface and step of each that is about wrong numbers."""
    sentences: list[str]
    unfired: int
    failures: list[str]
    status: dict[str, Any]


class _Carrier(nn.Module):
    """The stages under the names they have for replay; called once a step, to mark its beginning."""

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
    faults: FaultPlan = FaultPlan(),  # noqa: B008  frozen
    steps: int = 12,
    mended: Mapping[int, int] = MappingProxyType({}),
) -> Piped:
    """Train through the schedule, with a check at every step if there is a folder for its records.

    After the steps in ``mended`` every replica gets what the given one holds.
    """
    warnings.filterwarnings("ignore", message=".*(view tensor|full backward hook).*")
    axes, stages = stages_of(layout)
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
            parallelism=axes if layout.parallelism_from == "mesh" else layout.degrees(),
            run_dir=run_dir,
        )
        for step in range(1, steps + 1):
            carrier()
            optimizer.zero_grad()
            _pass(schedule, stages, batch(step, layout.copy_of(rank)))
            if layout.is_replicated_by_hand:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=axes["dp"].get_group())
            optimizer.step()
            settings.append(_settings(modules))
            if step in mended:
                _mend(model, optimizer, axes["dp"].get_group(), mended[step])
    bits = bits_of(model, optimizer)
    if not session:
        return Piped(bits, settings, [], [], [], len(injector.unfired), [], {})
    incidents = [each for each in session.incidents if each.manifestation is Manifestation.SDC]
    status = session.status()["replay"]
    session.close()
    records = [each for each in evidence_of(run_dir, rank) if each.manifestation is Manifestation.SDC]
    found = [(each.scope.value, each.ranks, each.records[0].surface, each.step) for each in incidents]
    sentences = [each.sentence for each in incidents]
    return Piped(
        bits, settings, records, found, sentences, len(injector.unfired), list(session.failures), status
    )


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
    """Return what a schedule, FSDP and DDP set during a step."""
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
