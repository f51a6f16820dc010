"""What each of the demo's eight ranks runs: training, and after every step a vote on all weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchscout.cli.demo.model import Transformer, batch, parallelize
from torchscout.config import StragglerConfig
from torchscout.decision import c3
from torchscout.decision.channel import ProcessGroupChannel
from torchscout.decision.record import EvidenceRecord, Incident, Manifestation
from torchscout.decision.recorder import JsonlRecorder
from torchscout.decision.replay_diagnosis import ReplayDiagnosis
from torchscout.decision.signature import signatures
from torchscout.faults.fault import Faults
from torchscout.faults.injector import Firing, Injector
from torchscout.mesh import Mesh

__all__ = ["RANKS", "REPLICAS", "SHARDS", "STEPS", "Outcome", "surfaces", "train"]

REPLICAS, SHARDS, STEPS = 4, 2, 10
RANKS = REPLICAS * SHARDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank has to tell."""

    losses: list[float]
    compared: int
    """Tensors put to the vote after every step."""
    fired: list[Firing]
    incidents: list[Incident]
    """Those this rank reports."""


def train(rank: int, faults: Faults, run_dir: Path) -> Outcome:
    """Train ``STEPS`` steps and let the replicas vote after each."""
    torch.manual_seed(0)
    axes = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "tensor"))
    model = Transformer()
    parallelize(model, axes["tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    census = Census(rank, model, run_dir)
    losses = []
    with Injector(faults, rank, model, optimizer) as injector:
        for step in range(1, STEPS + 1):
            losses.append(train_step(model, optimizer, axes["replica"], step))
            census.take(step)
    census.close()
    return Outcome(losses, len(census.surfaces), injector.fired, census.incidents)


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, replicas: DeviceMesh, step: int
) -> float:
    tokens, targets = batch(step, replicas.get_local_rank())
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=replicas.get_group())
    say(f"step {step:2}   loss {mean.item():.4f}", only_on=0)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    average_gradients(model, replicas)
    optimizer.step()
    return mean.item()


def average_gradients(model: Transformer, replicas: DeviceMesh) -> None:
    """Data parallelism by hand: one all-reduce over all gradients of this rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    flat = torch.cat([each.flatten() for each in local])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=replicas.get_group())
    for each, averaged in zip(local, torch.split(flat, [each.numel() for each in local]), strict=True):
        each.copy_(averaged.view_as(each))


class Census:
    """Signatures of all parameters, compared among the replicas of this rank's shard."""

    def __init__(self, rank: int, model: Transformer, run_dir: Path) -> None:
        mesh = Mesh.grid(replica=REPLICAS, tensor=SHARDS)
        self._peers = mesh.peers_of(rank)
        self._channel = ProcessGroupChannel(
            self._peers, dist.new_group(self._peers.ranks, use_local_synchronization=True)
        )
        self._diagnosis = ReplayDiagnosis(mesh, StragglerConfig())
        self._recorder = JsonlRecorder(run_dir, rank)
        self._rank = rank
        self._tensors = dict(model.named_parameters())
        self.surfaces = [surface_of(name) for name in self._tensors]
        self.incidents: list[Incident] = []

    def take(self, step: int) -> None:
        evidence = dict(zip(self.surfaces, signatures(list(self._tensors.values())), strict=True))
        verdicts = c3.compare(self._channel, exact=evidence)
        records = [
            EvidenceRecord(
                step=step,
                surface=surface,
                manifestation=Manifestation.SDC,
                peers=self._peers.ranks,
                verdict=verdict,
            )
            for surface, verdict in verdicts.items()
        ]
        for record in records:
            self._recorder.record(record)
        for incident in self._diagnosis.observe(records):
            self._report(incident)

    def _report(self, incident: Incident) -> None:
        if (
            incident.reporter == self._rank and not self.incidents
        ):  # a wrong weight stays wrong; once is enough
            self._recorder.record(incident)
            self.incidents.append(incident)
            say(f"          {incident.sentence}", only_on=self._rank)

    def close(self) -> None:
        self._recorder.close()


def surfaces() -> list[str]:
    """Every weight the replicas vote on."""
    return [surface_of(name) for name, _ in Transformer().named_parameters()]


def surface_of(parameter: str) -> str:
    """``layer.2.up.weight`` is the surface ``layer.2.up/weight``."""
    module, _, name = parameter.rpartition(".")
    return f"{module}/{name}"


def say(line: str, *, only_on: int) -> None:
    if dist.get_rank() == only_on:
        print(line, file=sys.stderr, flush=True)
