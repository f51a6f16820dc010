"""Jobs whose passes run as CUDA graphs after some eager steps; on a CPU, behind the hooks of their layers.

A replayed graph calls no module. On a CPU nothing does that, so there the model is called and its parts are
not: what hooks on layers see is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.checkpoint_jobs import kill
from tests.support.findings import Findings, all_records, findings_of
from tests.support.nccl_ranks import UNEVEN
from tests.support.replay_jobs import bytes_of
from tests.support.replayed_job import Net, batch, device
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, Parallelism, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.session.session import Session

STEPS, WARM, LONG = 8, 2, 500
"""Steps, how many of them are eager, and the steps of a long job."""


class Graphed(Net):
    """A model whose parts are called only in eager steps."""

    is_bypassed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = (
            (lambda each, x: each.forward(x)) if self.is_bypassed else (lambda each, x: each(x))
        )
        x = call(self.tokens, tokens)
        for block in self.stack:
            x = call(block, x)
        return call(self.head, self.final(x))


@dataclass(frozen=True)
class Trial:
    """How to train."""

    run_dir: Path | None = None
    """None trains without torchscout."""
    replay: ReplayConfig = field(default_factory=lambda: replace(UNEVEN, interval=1))
    observer: ObserverConfig | None = None
    directory: Path | None = None
    """Of checkpoints."""
    killed: int | None = None
    """The step in whose middle all ranks end."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    steps: int = STEPS
    warm: int = WARM
    build: Callable[[], nn.Module] = Graphed
    whole_step: bool = False
    """Whether the optimizer's step is part of the graph."""
    callables: bool = False
    """Whether ``torch.cuda.make_graphed_callables`` makes the graphs."""


@dataclass(frozen=True)
class Result(Findings):
    bits: bytes = b""
    resumed: int = 0


class GraphedJob:
    """Replicas whose gradients are averaged outside of the graph."""

    def __init__(self, rank: int, trial: Trial) -> None:
        torch.manual_seed(0)
        self.rank, self.trial, self.step = rank, trial, 0
        self.net: Any = trial.build().to(device())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, capturable=device() == "cuda")
        self._tokens, self._targets = (each.clone() for each in batch(0, rank))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side = torch.cuda.Stream() if device() == "cuda" else None
        if trial.callables:
            torch.cuda.make_graphed_callables(self.net, (self._tokens,))

    def train(self, last: int) -> None:
        while self.step < last:
            self.step += 1
            tokens, targets = batch(self.step, self.rank)
            self._tokens.copy_(tokens)
            self._targets.copy_(targets)
            if self.trial.killed == self.step:
                dist.barrier()
                kill()
            self._run(self.step - self._began <= self.trial.warm)
            if not self.trial.whole_step:
                self._update()

    def attach(self) -> Session | None:
        trial, self._began = self.trial, 0
        if trial.run_dir is None:
            return None
        kept = None
        if trial.directory is not None:
            os.environ["TORCHSCOUT_MEMORY"] = str(trial.directory / "memory")
            kept = CheckpointConfig(trial.directory / "files")
        session = enable_resiliency(
            self.net,
            self.optimizer,
            replay=all_records(trial.replay),
            observer=trial.observer,
            checkpoint=kept,
            parallelism=Parallelism(replica=dist.get_world_size()),
            run_dir=trial.run_dir,
        )
        if kept is not None:
            self.step = self._began = session.resume().step
        return session

    def _run(self, is_warming: bool) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        if self._side is None or self.trial.callables:
            self.net.is_bypassed = not is_warming and not self.trial.callables
            self._passes()
        elif is_warming:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._passes()
            torch.cuda.current_stream().wait_stream(self._side)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self._side):
                    torch.cuda.current_blas_handle()  # it cannot be created during a capture
                # Only this thread captures, and NCCL's watchdog must be allowed to look at its events.
                with torch.cuda.graph(self._graph, stream=self._side, capture_error_mode="thread_local"):
                    self._passes()
                    if self.trial.whole_step:
                        self.optimizer.step()
            self._graph.replay()

    def _passes(self) -> None:
        logits = self.net(self._tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), self._targets.flatten()).backward()

    def _update(self) -> None:
        for parameter in self.net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()


def train(rank: int, trial: Trial) -> Result:
    """Train to the end, from the last checkpoint if there is one."""
    if device() == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared at all
    job = GraphedJob(rank, trial)
    with Injector(trial.faults, rank, job.net, job.optimizer) as injector:
        session = job.attach()
        resumed = job.step
        job.train(trial.steps)
        slots = [slot for of in job.optimizer.state.values() for slot in of.values()]
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device() == "cuda" else [])]
        more = getattr(job.net, "extra_bits", list)()
        bits = bytes_of([*job.net.parameters(), *job.net.buffers(), *slots, *states, *more])
        found = {} if session is None else findings_of(session)
    return Result(**found, fired=len(injector.fired), bits=bits, resumed=resumed)
