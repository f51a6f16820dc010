"""Small DeepSpeed jobs on Gloo ranks, trained with a check at every step, killed, and going on."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from tests.support.checkpoint_jobs import Loader, kill
from tests.support.deepspeed_models import ACCUMULATED, KINDS, Work, quiet
from tests.support.findings import Findings, all_records, findings_of
from torchscout.adapters.deepspeed import DeepSpeedAdapter
from torchscout.attach import enable_resiliency
from torchscout.collectives.call import SCOUT_GROUP
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.errors import ScoutError
from torchscout.faults.effects import FlipBit
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.log import log
from torchscout.mesh import LayerKind, Mesh
from torchscout.session.checkpoints.resumption import Resumption
from torchscout.session.session import Session
from torchscout.testing.local_ranks import preload

_SPREADS = {"mixture": 2, "uneven": 2, "one_each": 4}
"""Over how many ranks experts are, by kind."""
_LINEAR = torch.nn.functional.linear
Places = dict[str, list[int]]
"""Who is along which axis of this rank's; ``holders`` have the same experts."""


def theirs(kind: str, engine: Any) -> Places:
    """Of process groups that DeepSpeed communicates in."""
    found = {"replica": engine.seq_data_parallel_group}
    if kind == "pipeline":
        found = {
            "replica": engine.grid.get_data_parallel_group(),
            "pipeline": engine.grid.get_pipe_parallel_group(),
        }
    if kind == "ulysses":
        found = {
            "replica": groups._get_data_parallel_group(),
            "context": groups._get_sequence_parallel_group(),
        }
    if kind == "tensor":
        found = {
            "replica": groups.get_data_parallel_group(),
            "tensor": groups.get_tensor_model_parallel_group(),
        }
    if kind in _SPREADS:
        name = f"ep_size_{_SPREADS[kind]}"
        found |= {
            "expert": groups._get_expert_parallel_group(name),
            "holders": groups._get_expert_data_parallel_group(name),
        }
    return {axis: sorted(dist.get_process_group_ranks(group)) for axis, group in found.items()}


def ours(kind: str, engine: Any) -> Places:
    rank, mesh = dist.get_rank(), DeepSpeedAdapter(engine, None).mesh(["here"] * dist.get_world_size())
    data = "shard" if engine.zero_optimization_stage() == 3 else "replica"
    axes = {"pipeline": ["pipeline"], "ulysses": ["context"], "tensor": ["tensor"]}.get(kind, [])
    found = {"replica": mesh.ranks_along(data, rank, LayerKind.DENSE)}
    found |= {axis: mesh.ranks_along(axis, rank, LayerKind.DENSE) for axis in axes}
    if kind in _SPREADS:
        found["expert"] = mesh.ranks_along("expert", rank, LayerKind.EXPERT)
        found["holders"] = mesh.ranks_along("replica", rank, LayerKind.EXPERT)
    return {axis: sorted(ranks) for axis, ranks in found.items()}


def tidy_up() -> None:
    """Let another engine begin as if it were the first of this process."""
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()
    set_autotp_mode(training=False)
    torch.nn.functional.linear = _LINEAR  # in whose place ZeRO 3 leaves one that adds up in another order
    groups._release_process_group_references()
    # PyTorch names a group that only its members make after the number of groups they are in already: ranks
    # that were of different stages would not find each other in the next trial.
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group.group_desc != SCOUT_GROUP:
            dist.destroy_process_group(group)


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
            session = attached(plan, engine)
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
        found = replace(found, fired=len(injector.fired))
        return found if session is None else replace(found, **findings_of(session))
    finally:
        if session is not None:
            session.close()
        engine.destroy()
        tidy_up()


def train_deterministically(rank: int, plan: Plan) -> Result:
    """Train while PyTorch fills the memory that it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return train(rank, plan)
    finally:
        torch.use_deterministic_algorithms(False)


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
