"""Small mixtures of experts on expert-parallel ranks, each trained with a check at every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchscout.cli.moe_model import MoeTransformer, batch, expert_names, share_gradients
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.decision.record import EvidenceRecord, Incident
from torchscout.decision.recorder import read
from torchscout.faults.fault import Faults
from torchscout.faults.injector import Injector
from torchscout.integration.attach import enable_resiliency
from torchscout.mesh import Mesh, Role

EXPERTS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    ranks: int
    spread: int
    """Ranks that share the experts of one replica."""
    uneven: float = 0.0
    steps: int = 6
    faults: Faults = field(default_factory=Faults)
    replay: ReplayConfig = field(default_factory=lambda: ReplayConfig(interval=1))
    rows: int = 4
    """Sequences of a batch."""

    @property
    def mesh(self) -> Mesh:
        """Every rank is on a machine of its own."""
        machines = [f"machine-{rank}" for rank in range(self.ranks)]
        return Mesh.grid(replica=self.ranks, hosts=machines).carve_experts(self.spread)


@dataclass(frozen=True, slots=True)
class Told:
    bits: bytes
    records: list[EvidenceRecord]
    incidents: list[Incident]
    failures: list[str]
    fired: int
    status: dict[str, Any]
    routed: list[list[int]]
    """Rows that each of this rank's experts got, call by call."""

    @property
    def agreed(self) -> set[str]:
        return {each.surface for each in self.records if each.verdict is not None and each.verdict.agrees}

    @property
    def unchecked(self) -> dict[str, str | None]:
        return {each.surface: each.reason for each in self.records if each.verdict is None}


def group_of(mesh: Mesh, axis: str, rank: int) -> dist.ProcessGroup:
    """This rank's; every rank makes all of them."""
    own = None
    for ranks in mesh.groups_along(axis, Role.EXPERT):
        group = dist.new_group(list(ranks), group_desc=f"mesh_{axis}")
        own = group if rank in ranks else own
    assert own is not None
    return own


def build(trial: Trial, rank: int) -> tuple[DistributedDataParallel, dist.ProcessGroup]:
    """The model, and the group of those who hold the same experts."""
    partition, holders = (group_of(trial.mesh, axis, rank) for axis in ("expert", "replica"))
    torch.manual_seed(0)
    model = MoeTransformer(EXPERTS, partition, uneven=trial.uneven)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, expert_names(model))
    return DistributedDataParallel(model), holders


def train(rank: int, trial: Trial, run_dir: Path | None, checkpoint: CheckpointConfig | None = None) -> Told:
    model, holders = build(trial, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    routed: list[list[int]] = []
    for layer in model.module.layer:
        layer.mixture.experts.register_forward_pre_hook(lambda _, args: routed.append(args[1].tolist()))
    session = None
    with Injector(trial.faults, rank, model.module, optimizer) as injector:
        if run_dir is not None:
            session = enable_resiliency(
                model,
                optimizer,
                replay=trial.replay,
                observer=None,
                checkpoint=checkpoint,
                parallelism=trial.mesh,
                run_dir=run_dir,
            )
            if checkpoint is not None:
                session.resume()
        for step in range(1, trial.steps + 1):
            tokens, targets = batch(step, rank, trial.rows)
            optimizer.zero_grad()
            logits = model(tokens)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            share_gradients(model.module, holders)
            optimizer.step()
    state = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    bits = b"".join(each.detach().numpy().tobytes() for each in state)
    if session is None or run_dir is None:
        return Told(bits, [], [], [], len(injector.fired), {}, routed)
    incidents, failures, status = session.incidents, list(session.failures), dict(session.status())
    session.close()
    records = [line.item for line in read(run_dir / "records" / f"rank-{rank}.jsonl")]
    return Told(bits, records, list(incidents), failures, len(injector.fired), status, routed)
