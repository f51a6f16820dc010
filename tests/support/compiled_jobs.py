"""Jobs whose model is compiled as a whole, in every usual way; compilations are counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from tests.support.replay_jobs import Job, bytes_of, in_replay, records
from tests.support.replayed_job import Net, device
from torchscout.config import ReplayConfig
from torchscout.decision.records.record import EvidenceRecord, Incident
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.log import show_by_default


class Compilations:
    """A backend that counts how often it is used, for graphs of forward passes."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.count += 1
        return aot_eager(graph, inputs)


Compile = Callable[[Net, Mapping[str, Any]], nn.Module]


def _inside_ddp(net: Net, options: Mapping[str, Any]) -> nn.Module:
    return DistributedDataParallel(torch.compile(net, **options))


def _around_ddp(net: Net, options: Mapping[str, Any]) -> nn.Module:
    return torch.compile(DistributedDataParallel(net), **options)


def _in_place(net: Net, options: Mapping[str, Any]) -> nn.Module:
    net.compile(**options)
    return DistributedDataParallel(net)


def _ddp_in_place(net: Net, options: Mapping[str, Any]) -> nn.Module:
    model = DistributedDataParallel(net)
    model.compile(**options)
    return model


def _forward_alone(net: Net, options: Mapping[str, Any]) -> nn.Module:
    net.forward = torch.compile(net.forward, **options)
    return DistributedDataParallel(net)


def _blocks_too(net: Net, options: Mapping[str, Any]) -> nn.Module:
    for place, block in enumerate(net.stack):
        net.stack[place] = torch.compile(block, **options)
    return _inside_ddp(net, options)


class Broken(Net):
    """A module that cannot be compiled in one piece."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.final(x))


class Buffered(Net):
    """A module with a buffer, which DDP broadcasts in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.shift.mul_(0.5)
        return super().forward(tokens) + self.shift


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compile a model."""

    compile: Compile = _inside_ddp
    net: Callable[[], Net] = Net
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (8,)
    """Of the sequences, from step to step."""


WAYS: dict[str, Way] = {
    "inside DDP": Way(),
    "around DDP": Way(_around_ddp),
    "around DDP, with a buffer": Way(_around_ddp, Buffered),
    "in place": Way(_in_place),
    "DDP in place": Way(_ddp_in_place),
    "forward alone": Way(_forward_alone),
    "blocks too": Way(_blocks_too),
    "in one piece": Way(options={"fullgraph": True}),
    "with graph breaks": Way(net=Broken),
    "with dynamic shapes": Way(options={"dynamic": True}, lengths=(8, 8, 5, 8, 11)),
    "with static shapes that change": Way(options={"dynamic": False}, lengths=(8, 8, 5)),
}
STEPS, WARM = 6, 2
"""Steps with torchscout, after some without it."""


class CompiledJob(Job):
    """A DDP job, trained for some steps so that its model is compiled."""

    def __init__(self, rank: int, way: Way, backend: Any = None) -> None:
        self.compilations = Compilations()
        torch.manual_seed(0)
        self.rank, self.step, self._lengths = rank, 0, way.lengths
        self.net = way.net().to(device())
        options = {"backend": backend or self.compilations, **way.options}
        self.model = way.compile(self.net, options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def length(self) -> int:
        return self._lengths[self.step % len(self._lengths)]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one rank."""

    status: Mapping[str, Any]
    incidents: list[Incident]
    records: list[EvidenceRecord]
    failures: list[str]
    unfired: int
    passes: int
    """Eager calls of the whole model."""
    compilations: int
    weights: list[bytes]
    """After every step."""


def compiled_job(rank: int, way: Way, faults: FaultPlan, run_dir: Path, backend: Any = None) -> Found:
    """Train with a check at every step. Faults happen in eager code only: they come after compilation."""
    job = CompiledJob(rank, way, backend)
    weights = _train(job, WARM)
    parts = nn.ModuleDict(dict(job.net.named_children()))  # a hook on the net itself would be compiled
    passes: list[None] = []
    counting = in_replay(job.net.final, lambda: passes.append(None))
    with (
        Injector(faults, rank, parts, job.optimizer) as injector,
        job.attach(run_dir, ReplayConfig(interval=1, variants=(1.0, 0.1))) as session,
    ):
        weights += _train(job, STEPS)
        status, incidents, failures = session.status()["replay"], session.incidents, list(session.failures)
    counting.remove()
    return Found(
        status,
        incidents,
        records(run_dir, rank),
        failures,
        len(injector.unfired),
        len(passes),
        job.compilations.count,
        weights,
    )


def with_and_without(
    rank: int, way: Way, run_dir: Path, backend: Any = None
) -> tuple[Found, int, list[bytes]]:
    """Return the result of a clean job, and compilations and weights of training without torchscout."""
    found = compiled_job(rank, way, FaultPlan(), run_dir, backend)
    torch._dynamo.reset()
    job = CompiledJob(rank, way, backend)
    weights = _train(job, WARM + STEPS)
    return found, job.compilations.count, weights


def frames_compiled(rank: int, way: Way, run_dir: Path) -> tuple[list[int], list[str]]:
    """Return how many frames Dynamo has seen in a job without torchscout and in one with it.

    Then what Dynamo has warned of.
    """
    counts = []
    show_by_default()  # to set a level makes all loggers look theirs up once more, PyTorch's too
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for is_attached in (False, False, True):  # the first time Dynamo finds out what it cannot compile
            torch._dynamo.reset()
            counters.clear()
            job = CompiledJob(rank, way)
            with job.attach(run_dir) if is_attached else nullcontext():
                job.train(STEPS)
            counts.append(counters["frames"]["total"])
    return counts[1:], [str(each.message) for each in warned if "Dynamo" in str(each.message)]


def _train(job: CompiledJob, steps: int) -> list[bytes]:
    weights = []
    for _ in range(steps):
        job.train()
        weights.append(bytes_of([*job.net.state_dict().values(), torch.get_rng_state()]))
    return weights
