"""One rank of a job: its own training loop, with torchscout attached to it or not, and what happens to it.

A training program of the catalog is a function that trains as its author wrote it. It knows three things of
this file: it calls ``attach`` once, where a user would call ``enable_resiliency``, goes over ``steps``, and
takes its rank from here. Whether torchscout is attached at all, and which fault comes when, is said by the
``Trial``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchscout.attach import enable_resiliency
from torchscout.collectives.call import SCOUT_GROUP
from torchscout.config import (
    BaselineConfig,
    CheckpointConfig,
    ObserverConfig,
    ReplayConfig,
    StragglerConfig,
)
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import Stamped, read
from torchscout.session.checkpoints.resumption import Resumption
from torchscout.session.session import Session

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_UNEVEN: dict[str, Any] = {
    "straggler": StragglerConfig(min_slowdown_ms=100.0),
    "baseline": BaselineConfig(min_slowdown_ms=100.0),
}
"""Ranks that share a device do not share it evenly: one of them may really be slower for a while."""
SLEEP_SECONDS = 8.0
"""How long a late rank sleeps: longer than ``min_silence_seconds`` of a trial with a late rank."""
SLOW_SECONDS = 0.3
"""What a slow rank needs more for each of its layers; on a CPU less than 0.1 s is not an incident."""


@dataclass(frozen=True)
class Trial:
    """How a job is trained. Faults are a rank and a step; nothing happens where they are None."""

    steps: int = 60
    run_dir: Path | None = None
    """None trains without torchscout."""
    interval: int = 5
    min_silence_seconds: float = 30.0
    """No healthy step of these jobs takes as long, whatever else the machine does."""
    address: str = "127.0.0.1"
    """Where this machine is reached, as ``ObserverConfig`` has it."""
    replay: Mapping[str, Any] = field(default_factory=dict)
    """More settings of replay."""
    keeps_records: bool = False
    """Whether every comparison is recorded and returned, agreements as well."""
    attach_after: int = 0
    """Steps that are trained before torchscout is attached."""
    close_after: int | None = None
    """The step after which the session is closed, and training goes on."""
    flip: tuple[int, int] | None = None
    """A bit of a weight changes between the update before this step and the step."""
    slow: tuple[int, range] | None = None
    """Every layer of a rank takes longer in these steps, and when it is replayed."""
    faults: FaultPlan = FaultPlan()  # noqa: RUF009  frozen
    """Faults at places of the model, of the optimizer or of collectives."""
    sleep: tuple[int, int] | None = None
    """The rank sleeps before this step, and goes on."""
    diverge: tuple[int, int] | None = None
    """The rank enters a collective before this step that no other rank enters."""
    kill: tuple[int, int] | None = None
    """The rank is killed before this step."""
    end: int | None = None
    """All ranks are killed before this step."""
    checkpoints: Path | None = None
    """Where checkpoints are kept; training goes on from the newest."""


@dataclass
class Report:
    """The result of one rank."""

    bits: dict[int, str] = field(default_factory=dict)
    """A digest of all that training leaves on this rank, after each step."""
    incidents: list[Incident] = field(default_factory=list)
    records: list[EvidenceRecord] = field(default_factory=list)
    """All comparisons of this rank, where the trial keeps them."""
    log: list[str] = field(default_factory=list)
    """Warnings and errors that torchscout has logged."""
    failures: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    certified: int | None = None
    certified_at: dict[int, int] = field(default_factory=dict)
    """The certified step, after the steps that changed it."""
    changed: int = 0
    """Bits that a flip has changed."""
    fired: int = 0
    """How often a fault of the plan, or a slow layer, was seen to happen."""
    left: list[str] = field(default_factory=list)
    """Hooks, threads and processes that are there after ``close`` and were not before."""
    resumed: int = 0
    """The step of the checkpoint that training went on from."""

    @property
    def numbers(self) -> list[EvidenceRecord]:
        """The records of comparisons of numbers, without those of times."""
        return [each for each in self.records if each.manifestation is Manifestation.SDC]

    @property
    def agreed(self) -> set[str]:
        return {each.surface for each in self.numbers if each.verdict is not None and each.verdict.agrees}

    @property
    def unchecked(self) -> dict[str, str | None]:
        return {each.surface: each.reason for each in self.numbers if each.verdict is None}


class Position:
    """How far a loop is. An optimizer may leave updates out, so that its steps are not those of the loop."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Job:
    """The functions that a training loop calls."""

    def __init__(self, rank: int, trial: Trial) -> None:
        warnings.filterwarnings("ignore")
        self.rank, self.world, self._trial = rank, dist.get_world_size(), trial
        self.device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        torch.set_default_device(self.device)  # as a program may do
        if self.device == "cuda":
            _repeat_yourself()
        self.report = Report()
        self.session: Session | None = None
        self.resumption: Resumption | None = None
        self._model: Any = None
        self._optimizer: Any = None
        self._modules: Sequence[nn.Module] = ()
        self._optimizers: Sequence[Any] = ()
        self._states: Mapping[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._also: Callable[[], Iterable[Any]] = tuple
        self._weight: Callable[[], torch.Tensor] | None = None
        self._injector: Injector | None = None
        self._before: set[str] = set()
        self._log = _Log(self.report.log)
        self._position = Position()
        torch.manual_seed(0)

    def attach(
        self,
        model: Any,
        optimizer: Any,
        *,
        states: Mapping[str, Any] | None = None,
        also: Callable[[], Iterable[Any]] = tuple,
        weight: Callable[[], torch.Tensor] | None = None,
        slow: tuple[Any, Any] | None = None,
        layers: Sequence[str] = (),
        parts: tuple[Sequence[nn.Module], Sequence[Any]] | None = None,
        **settings: Any,
    ) -> None:
        """Where a user calls ``enable_resiliency(model, optimizer, **settings)``.

        ``states`` is what a user registers for checkpoints, ``also`` what else training leaves behind (it is
        compared bit for bit), ``weight`` what a flip changes if not the first matrix that is trained.
        ``slow`` is the model and the optimizer as an injector wants them, if not those that are attached;
        ``layers`` is what a slow rank is slow in, if not the members of the model's first list of modules.
        ``parts`` are the models and the optimizers that a framework's object has, if that is attached.
        """
        self._model, self._optimizer, self._settings = model, optimizer, settings
        self._modules, optimizers = parts or (_listed(model), _listed(optimizer))
        self._optimizers = [each for each in optimizers if isinstance(each, torch.optim.Optimizer)]
        self._states, self._also, self._weight = states or {}, also, weight
        torch.manual_seed(1000 + self.rank)  # dropout is each rank's own
        bare, updates = slow if slow else (_bare(self._modules[0]), self._optimizers[-1])
        faults = self._trial.faults + self._slowness(layers or _layer_names(bare))
        self._injector = Injector(faults, self.rank, bare, updates)
        if self._trial.attach_after == 0:
            self._attach()

    def steps(self) -> Iterator[int]:
        """The steps to train, counted from 1, or from the checkpoint on."""
        for step in range(self.first_step, self._trial.steps + 1):
            self.begin(step)
            yield step
            self.end(step)

    def fetched(self, batch: Any) -> Any:
        """The batch, as a loader returns it that a user passes through ``watch_input``."""
        return batch if self.session is None else next(iter(self.session.watch_input([batch])))

    @property
    def first_step(self) -> int:
        return self._position.step + 1

    @property
    def last_step(self) -> int:
        return self._trial.steps

    def begin(self, step: int) -> None:
        """Run before each step."""
        trial = self._trial
        if self.session is None and trial.attach_after and step == trial.attach_after + 1:
            self._attach()
        if trial.flip == (self.rank, step):
            self.report.changed = _flip(local_of(self._weight() if self._weight else self._first_matrix()))
        if trial.sleep == (self.rank, step):
            time.sleep(SLEEP_SECONDS)
        if trial.diverge == (self.rank, step):
            dist.all_reduce(torch.zeros(3))
        if trial.end == step:
            dist.barrier()
        if trial.kill == (self.rank, step) or trial.end == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, step: int) -> None:
        """Run after the step's update."""
        self._position.step = step
        self.report.bits[step] = self._digest()
        if self.session is None:
            return
        if (certified := self.session.certified_step) is not None and certified != self.report.certified:
            self.report.certified = self.report.certified_at[step] = certified
        if step == self._trial.close_after:
            self._close()

    def finish(self) -> Report:
        """Run after the program's own end."""
        if self.session is not None:
            dist.barrier()  # an incident that any rank had to write is written
            self._close()
        assert self._injector is not None
        self.report.fired = len(self._injector.fired)
        self._injector.disarm()
        self._log.close()
        return self.report

    def _attach(self) -> None:
        trial = self._trial
        if trial.run_dir is None:
            return
        kept = None
        if trial.checkpoints is not None:
            os.environ["TORCHSCOUT_MEMORY"] = str(trial.checkpoints / "memory")
            kept = CheckpointConfig(trial.checkpoints / "files", persist_every=1)
        self._before = self._present()  # with what training has started in its first steps
        self.session = session = enable_resiliency(
            self._model,
            self._optimizer,
            replay=ReplayConfig(
                interval=trial.interval,
                records="all" if trial.keeps_records else "summary",
                **{**(_UNEVEN if self.device == "cuda" else {}), **trial.replay},
            ),
            observer=ObserverConfig(min_silence_seconds=trial.min_silence_seconds, address=trial.address),
            checkpoint=kept,
            run_dir=trial.run_dir,
            **self._settings,
        )
        if kept is not None:
            for name, state in {**self._states, "position": self._position}.items():
                session.register_state(name, state)
            self.resumption = session.resume()
            self.report.resumed = self.resumption.step
        elif trial.attach_after:
            session.start_from(trial.attach_after)

    def _close(self) -> None:
        session, self.session = self.session, None
        assert session is not None
        report = self.report
        report.incidents, report.status = session.incidents, dict(session.status())
        report.certified = session.certified_step
        session.close()
        report.failures = list(session.failures)
        report.left = self._left()
        if self._trial.keeps_records:
            report.records = _records_of(session.run_dir, self.rank)

    def _slowness(self, layers: Sequence[str]) -> FaultPlan:
        if self._trial.slow is None:
            return FaultPlan()
        rank, steps = self._trial.slow
        faults = FaultPlan()
        for name in layers:
            faults = faults.delay(
                rank=rank, at=f"{name}/forward", step=steps, seconds=SLOW_SECONDS, calls=None
            )
        return faults

    def _first_matrix(self) -> torch.Tensor:
        each_one = (p for model in self._modules for p in model.parameters())
        return next(p for p in each_one if p.requires_grad and p.ndim > 1 and local_of(p).numel())

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for model in self._modules:
            # Megatron's wrapper has a list of its own under this name.
            for each in (*model.parameters(), *nn.Module.buffers(model)):
                _add(digest, each)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                _add(digest, [group["lr"], *(optimizer.state.get(each, {}) for each in group["params"])])
        _add(digest, [*self._also()])
        _add(digest, torch.get_rng_state())
        if self.device == "cuda":
            _add(digest, torch.cuda.get_rng_state())
        return digest.hexdigest()

    def _left(self) -> list[str]:
        """What is there that was not there before; an observer may take a moment to end."""
        deadline = time.monotonic() + 10.0
        while (left := self._present() - self._before) and time.monotonic() < deadline:
            time.sleep(0.05)
        return sorted(left)

    def _present(self) -> set[str]:
        """The hooks, threads and child processes that are there."""
        modules = {f"model {n}": model for n, model in enumerate(self._modules)}
        named = [
            (f"{of} {name}", each) for of, model in modules.items() for name, each in model.named_modules()
        ]
        named += [(f"optimizer {n}", each) for n, each in enumerate(self._optimizers)]
        hooks = {
            f"{len(held)} in {name}.{kind}"
            for name, each in named
            for kind in _HOOKS
            if (held := getattr(each, kind, ()))
        }
        threads = {f"thread {each.name}" for each in threading.enumerate()}
        return hooks | threads | _children()


def _children() -> set[str]:
    found = set()
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found.add(f"process {' '.join(each.cmdline()[:4])}")
    return found


class _Log(logging.Handler):
    """Keeps the warnings and errors of torchscout, which are then not printed."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines, self._logger = lines, logging.getLogger("torchscout")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()


def forget_groups() -> None:
    """Destroy the groups of an earlier training on these ranks.

    PyTorch names a group that only its members make after the number of groups they are in already: ranks
    that were of different stages would not find each other in the next training.
    """
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group.group_desc != SCOUT_GROUP:
            dist.destroy_process_group(group)


def _records_of(run_dir: Path, rank: int) -> list[EvidenceRecord]:
    lines = read(run_dir / "records" / f"rank-{rank}.jsonl")
    items = [line.item for line in lines if isinstance(line, Stamped)]
    return [each for each in items if isinstance(each, EvidenceRecord)]


def _repeat_yourself() -> None:
    """Use deterministic kernels, so that two trainings can be compared."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(False)  # their backward passes obey strict mode only


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flip(tensor: torch.Tensor) -> int:
    """Change a bit in the upper half of the mantissa of one element; return how many bits differ.

    Through the memory itself, as a fault does: what PyTorch counts as a write is the program's own.
    """
    before = _bytes(tensor)
    memory = tensor.detach().view(-1)  # fails where that would be a copy
    index, width = int(memory.abs().argmax()), memory.element_size()
    words = memory.view({2: torch.int16, 4: torch.int32}[width])
    with torch.autograd._unsafe_preserve_version_counter(words):
        words[index] ^= 1 << {2: 6, 4: 20}[width]
    return sum((a ^ b).bit_count() for a, b in zip(before, _bytes(tensor), strict=True))


def _layer_names(model: nn.Module) -> list[str]:
    """Return the members of the first list of modules, or else the children of the model."""
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(module)
        # A stage of a pipeline may be a list of models.
        if is_list and not (module is model and isinstance(module, nn.ModuleList)):
            return [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    return [name for name, _ in model.named_children()]


def _bare(model: nn.Module) -> nn.Module:
    """Return the model inside of its wrappers, in whatever order."""
    while inside := [
        each for name in ("_orig_mod", "module") if isinstance(each := getattr(model, name, None), nn.Module)
    ]:
        model = inside[0]
    return model


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = local_of(tensor).detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(repr((value.dtype, tuple(value.shape))).encode() + _bytes(value))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):  # a state that was loaded may be in another order
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            _add(digest, each)
    else:
        digest.update(repr(value).encode())
