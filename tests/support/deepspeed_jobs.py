"""Small DeepSpeed jobs on Gloo ranks, trained with a check at every step, killed, and going on."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer

from tests.support.all_records import all_records
from tests.support.checkpoint_jobs import Loader, kill
from tests.support.deepspeed_models import ACCUMULATED, KINDS, Work, quiet
from tests.support.deepspeed_places import Places, ours, theirs, tidy_up
from tests.support.findings import Findings
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.decision.records.record import EvidenceRecord
from torchscout.decision.records.recorder import read
from torchscout.errors import ScoutError
from torchscout.faults.effects import FlipBit
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.log import log
from torchscout.mesh import Mesh
from torchscout.session.checkpoints.resumption import Resumption
from torchscout.session.session import Session
from torchscout.testing.local_ranks import preload

preload("deepspeed")


@dataclass(frozen=True)
class Plan:
    """How to train."""

    stage: int = 0
    kind: str = "plain"
    bf16: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else DeepSpeed's configuration has."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """What else its part for ZeRO has."""
    steps: int = 6
    run_dir: Path | None = None
    """None trains without SCOUT."""
    replay: ReplayConfig | None = field(default_factory=lambda: ReplayConfig(interval=1))
    observer: ObserverConfig | None = None
    mesh: Mesh | None = None
    """With pretended machines; None is what the engine says."""
    directory: Path | None = None
    """Of checkpoints."""
    killed: int | None = None
    """The step in whose middle all ranks end."""
    at_rest: int | None = None
    """A rank whose part of the optimizer's state changes by itself in the middle of a step."""
    overwritten: int | None = None
    """A rank with a parameter that changes by itself in the middle of a step, before the next update."""
    decays: int = 3
    """That step."""
    miscalculating: int | None = None
    """A rank whose optimizer gets one number of its part wrong in the third step, before others get it."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    log: Path | None = None
    """Gets a line for each fault that happened: a rank may not live to tell."""


@dataclass(frozen=True)
class Result(Findings):
    """The result of one rank."""

    bits: dict[int, str]
    """All that training leaves behind on it, after each step."""
    resumed: Resumption | None = None
    attaching: float = 0.0
    """Seconds."""
    places: Places = field(default_factory=dict)
    """Who SCOUT thinks is along which axis."""
    groups: Places = field(default_factory=dict)
    """Who DeepSpeed has there."""
    scales: dict[int, float] = field(default_factory=dict)
    """Of the loss, after each step."""
    routed: list[int] = field(default_factory=list)
    """How many rows each expert of the first layer got at last."""

    @property
    def named(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Manifestation, scope, ranks and step of each incident."""
        return [(e.manifestation.value, e.scope.value, e.ranks, e.step) for e in self.incidents]


def work_of(plan: Plan, rank: int) -> Work:
    quiet()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": plan.stage, **plan.zero},
        "bf16": {"enabled": plan.bf16},
        **plan.settings,
    }
    return KINDS[plan.kind](rank, config)


class Boundary:
    """The engine's optimizer as an injector wants one: its hooks stand around all of an update."""

    def __init__(self, engine: Any) -> None:
        self._outermost = engine.optimizer
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.state, self.param_groups = inner.state, inner.param_groups
        self._before: list[Callable[..., Any]] = []
        self._after: list[Callable[..., Any]] = []
        step = self._outermost.step

        def stepping(*args: Any, **kwargs: Any) -> Any:
            for each in self._before:
                each(inner, args, kwargs)
            result = step(*args, **kwargs)
            for each in self._after:
                each(inner, args, kwargs)
            return result

        self._outermost.step = stepping

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> _Handle:
        self._before.append(hook)
        return _Handle(self._before, hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> _Handle:
        self._after.append(hook)
        return _Handle(self._after, hook)


@dataclass
class _Handle:
    hooks: list[Callable[..., Any]]
    hook: Callable[..., Any]

    def remove(self) -> None:
        self.hooks.remove(self.hook)


def answering(rank: int, questions: Iterator[Plan | Callable[[int], Any]]) -> Iterator[Any]:
    """Train as planned, or call what was sent with this rank."""
    for asked in questions:
        yield train(rank, asked) if isinstance(asked, Plan) else asked(rank)


def train(rank: int, plan: Plan) -> Result:
    """Train to the end, from the last checkpoint if there is one."""
    work, session = work_of(plan, rank), None
    engine, loader = work.engine, Loader(work.replica)
    found = Result({}, places=ours(plan.kind, engine), groups=theirs(plan.kind, engine))
    torch.manual_seed(rank)  # dropout is each rank's own
    if plan.miscalculating == rank:
        _miscalculate(engine)
    try:
        with Injector(plan.faults, rank, engine.module, Boundary(engine), log=plan.log) as injector:
            began = time.monotonic()
            session = attached(plan, engine)
            found = replace(found, attaching=time.monotonic() - began)
            if session is not None and plan.directory is not None:
                session.register_state("loader", loader)
                found = replace(found, resumed=session.resume())
            done = 0 if found.resumed is None else found.resumed.step
            assert engine.global_steps == done
            for step, batches in zip(range(done + 1, plan.steps + 1), loader, strict=False):
                work.step(batches, lambda now=step: _suffer(plan, rank, now, engine))
                found.bits[step] = bits_of(engine, loader)
                found.scales[step] = scale_of(engine)
            assert engine.global_steps == plan.steps
            found.routed.extend(routed_in(engine.module))
        return with_findings(plan, rank, session, replace(found, fired=len(injector.fired)))
    finally:
        if session is not None:
            session.close()
        engine.destroy()
        tidy_up()


def attach_to_another_version(rank: int, run_dir: Path, removed: str | None = None) -> str:
    """What is logged or raised if DeepSpeed is newer than it is and its engine lacks a method."""
    engine = work_of(Plan(), rank).engine
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as written:
        patch.setattr(deepspeed, "__version__", "0.20.0")
        if removed is not None:
            patch.delattr(deepspeed.DeepSpeedEngine, removed)
        handler = logging.StreamHandler(written)
        log.addHandler(handler)
        try:
            with enable_resiliency(engine, observer=None, run_dir=run_dir) as session:
                assert "off" not in session.status()["replay"]
        except ScoutError as error:
            return str(error)
        finally:
            log.removeHandler(handler)
            patch.undo()  # DeepSpeed's own ending may use it
            engine.destroy()
            tidy_up()
        return next((line for line in written.getvalue().splitlines() if "tried with" in line), "")


def _suffer(plan: Plan, rank: int, step: int, engine: Any) -> None:
    if plan.killed == step:
        dist.barrier()
        kill()
    if (plan.at_rest, plan.decays) == (rank, step):
        decay(masters_of(engine)[0])
    if (plan.overwritten, plan.decays) == (rank, step):
        decay(next(each for each in engine.module.parameters() if each.numel()))


def attached(plan: Plan, engine: Any) -> Session | None:
    if plan.run_dir is None:
        return None
    kept = None
    if plan.directory is not None:
        os.environ["TORCHSCOUT_MEMORY"] = str(plan.directory / "memory")
        kept = CheckpointConfig(plan.directory / "files")
    return enable_resiliency(
        engine,
        replay=all_records(plan.replay),
        observer=plan.observer,
        checkpoint=kept,
        parallelism=plan.mesh,
        run_dir=plan.run_dir,
    )


def with_findings(plan: Plan, rank: int, session: Session | None, so_far: Result) -> Result:
    if session is None or plan.run_dir is None:
        return so_far
    dist.barrier()  # whoever is to write an incident down has done so
    incidents, status = session.incidents, dict(session.status())
    session.close()
    path = plan.run_dir / "records" / f"rank-{rank}.jsonl"
    lines = [line.item for line in read(path)] if path.exists() else []
    return replace(
        so_far,
        records=[each for each in lines if isinstance(each, EvidenceRecord)],
        incidents=list(incidents),
        failures=list(session.failures),
        status=status,
    )


def masters_of(engine: Any) -> list[torch.Tensor]:
    """What optimizers update, as far as they have done so."""
    return list(getattr(engine.optimizer, "optimizer", engine.optimizer).state)


def _miscalculate(engine: Any) -> None:
    inner = engine.optimizer.optimizer

    def after(*_: Any) -> None:
        for group in inner.param_groups:
            for part in group["params"]:
                if engine.global_steps == 2:
                    decay(part)

    inner.register_step_post_hook(after)


def decay(tensor: torch.Tensor) -> None:
    """One bit of memory changes, and PyTorch does not know of it."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        FlipBit(3).corrupt(tensor.detach())


def bits_of(engine: Any, loader: Loader) -> str:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    slots = [slot for slots in inner.state.values() for slot in slots.values()]
    masters = list(inner.state)
    held = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    tensors = [*held, *engine.module.buffers(), *masters, *slots]
    digest = hashlib.blake2b(digest_size=16)
    streams = deepspeed.checkpointing.get_cuda_rng_tracker().get_states().values()
    for each in [*tensors, torch.get_rng_state(), *streams]:
        digest.update(each.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    counters = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.get_lr()]
    counters += [loader.state_dict(), getattr(engine.lr_scheduler, "last_epoch", None), scale_of(engine)]
    digest.update(repr(counters).encode())
    return digest.hexdigest()


def scale_of(engine: Any) -> float:
    return float(getattr(engine.optimizer, "cur_scale", getattr(engine.optimizer, "loss_scale", 1.0)))


def routed_in(model: torch.nn.Module) -> list[int]:
    mixtures = [each for each in model.modules() if isinstance(each, MOELayer)]
    return mixtures[0].exp_counts.tolist() if mixtures else []
