"""Small jobs that keep checkpoints, are killed, and go on; jobs of all kinds are in ``evaluation.jobs``.

Both kinds accumulate gradients, have dropout, frozen parameters, AMSGrad, a learning-rate schedule, a scaler
and a loader with a position, so that a state that is not put back whole shows in the bits.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.replay_results import local_of
from tests.support.replayed_job import Net, batch
from tests.support.small_job import until
from torchscout.attach import enable_resiliency
from torchscout.checkpoint.gate import TrustLevel
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.faults.storage import block_ledger, fill_file_system, lose_folder
from torchscout.session.checkpoints.resumption import Resumption
from torchscout.session.session import Session

ACCUMULATED = 2
"""Batches of a step."""


@dataclass(frozen=True)
class KillPlan:
    """Which ranks are killed, and when."""

    ranks: tuple[int, ...]
    seconds: float
    """After training has begun."""
    during: str | None = None
    """What must be under way: ``capture`` or ``persist``; None is whatever is."""
    delay: float = 0.0
    """How long after that has begun."""
    when: Path | None = None
    """Not before there is this file."""
    step: int | None = None
    """Not before the first rank has done this one."""
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Plan:
    """How to train."""

    kind: str = "ddp"
    steps: int = 12
    interval: int = 2
    """Steps from one check to the next."""
    directory: Path | None = None
    """Of checkpoints; None trains without SCOUT."""
    run_dir: Path = Path()
    persist_every: int = 2
    keep: int = 1
    killed: Mapping[int, int] = field(default_factory=dict)
    """Ranks that kill themselves in the middle of a step, with that step."""
    after_update: bool = False
    """They do so after the step's update, before its end."""
    when_copied: bool = False
    """They wait until another machine has a copy of the latest checkpoint."""
    copied_until: int = 0
    """Up to this step, whoever is in the middle of one waits for that, too."""
    candidates_written: bool = False
    """Whoever is in the middle of a step waits until the candidate, if there is one, is in files."""
    files_written: bool = False
    """Each rank waits in the middle of a step for all ranks' files of the step before, if they are due."""
    resumes: bool = True
    start_over: bool = False
    recipes: int | None = None
    sweep: bool = True
    hangs: Mapping[int, int] = field(default_factory=dict)
    """Ranks that never come out of this step's forward pass."""
    lost_folder: int | None = None
    """In this step something else takes the place of the checkpoints' folder."""
    blocked_ledger: int | None = None
    """From this step on a folder lies where each rank's ledger in memory is to be put."""
    filled_memory: int | None = None
    """In this step something else takes all that is free in the file system of the memory folder."""
    largest_file: int | None = None
    """No rank may write a larger one."""
    job: str | None = None
    """Its name; None leaves that to the folder."""
    burden: Mapping[int, int] = field(default_factory=dict)
    """Ranks with that many bytes more to keep."""
    late_burden: bool = False
    """They have them from the first step on."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    after_checks: bool = False
    """What befalls parameters does so after the check of their step, when it is due to be captured."""
    timeout_seconds: float = 30.0
    memory: Path | None = None
    """Where this job's memory is; None is where it always is."""


@dataclass(frozen=True)
class Result:
    """The result of one rank."""

    bits: dict[int, str]
    """The state after each step that it did."""
    roles: dict[int, tuple[int | None, ...]]
    """Which steps were latest, candidate and verified then."""
    resumed: Resumption | None
    status: dict[str, Any]
    failures: list[str]
    incidents: list[tuple[str, int]]
    """Manifestation and step of each."""
    named: list[tuple[int, ...]]
    """The ranks of each."""
    unfired: int
    certified: int | None = None
    """Up to which step the job could trust checkpoints of its own."""


@dataclass
class Work:
    """A model on this rank, and how to make a step's gradients."""

    model: nn.Module
    replica: int
    """Which batches are its own."""
    accumulate: Callable[[list[Any], float], None]


def ddp(rank: int) -> Work:
    model = DistributedDataParallel(_frozen(Net()))

    def accumulate(batches: list[Any], scale: float) -> None:
        with model.no_sync():
            for each in batches[:-1]:
                _backward(model, each, scale)
        _backward(model, batches[-1], scale)

    return Work(model, rank, accumulate)


def fsdp(rank: int) -> Work:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    net = _frozen(Net())
    for block in net.stack:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def accumulate(batches: list[Any], scale: float) -> None:
        for place, each in enumerate(batches, 1):
            net.set_requires_gradient_sync(place == len(batches))
            _backward(net, each, scale)

    return Work(net, rank, accumulate)


KINDS: dict[str, Callable[[int], Work]] = {"ddp": ddp, "fsdp": fsdp}


class Scaler:
    """Like a gradient scaler; its factor is no power of two, so that a wrong one shows in the bits."""

    def __init__(self) -> None:
        self.scale, self._since = 3.0, 0

    def update(self) -> None:
        self._since += 1
        if self._since == 5:
            self.scale, self._since = 1.7 * self.scale, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._since = state["scale"], state["since"]


class Burden:
    """Bytes that take their time to be kept."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.zeros(size, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        if len(self._bytes) < size:
            self._bytes = torch.zeros(size, dtype=torch.uint8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"bytes": self._bytes}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._bytes = state["bytes"]


class Loader:
    """Every replica's own batches, from a position on that is part of the state."""

    def __init__(self, replica: int) -> None:
        self._replica, self.position = replica, 0

    def __iter__(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        while True:
            self.position += 1
            yield [batch(ACCUMULATED * self.position + part, self._replica) for part in range(ACCUMULATED)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train(rank: int, plan: Plan) -> Result:
    """Train to the end, from the last checkpoint if there is one."""
    warnings.filterwarnings("ignore", message=".*(view tensor|full backward hook|complete support).*")
    if plan.memory is not None:
        os.environ["TORCHSCOUT_MEMORY"] = str(plan.memory)
    if plan.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.largest_file, plan.largest_file))
    torch.manual_seed(0)
    work = KINDS[plan.kind](rank)
    trained = [each for each in work.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    scaler, loader = Scaler(), Loader(work.replica)
    torch.manual_seed(rank)  # dropout is each rank's own
    bits: dict[int, str] = {}
    roles: dict[int, tuple[int | None, ...]] = {}
    with ExitStack() as armed:

        def arm() -> Injector:
            return armed.enter_context(Injector(plan.faults, rank, _bare(work.model), optimizer))

        injector = None if plan.after_checks else arm()
        session = _attached(plan, work, optimizer)
        injector = injector or arm()
        size = plan.burden.get(rank, 0)
        burden = Burden(0 if plan.late_burden else size)
        _register(session, {"schedule": schedule, "scaler": scaler, "loader": loader, "burden": burden})
        resumed = session.resume(start_over=plan.start_over) if session is not None and plan.resumes else None
        done = session.step if session is not None else 0
        _log(plan, rank, done, _bits(work.model, optimizer, schedule, scaler, loader))
        _write_pid(plan, rank)
        burden.grow(size)
        for step, batches in zip(range(done + 1, plan.steps + 1), loader, strict=False):
            optimizer.zero_grad()
            _suffer(plan, rank, step, work.model)
            work.accumulate(batches, scaler.scale)
            for parameter in trained:
                parameter.grad.div_(scaler.scale)
            # The hook of the session comes first, which completes the capture.
            before = optimizer.register_step_pre_hook(
                lambda *_, step=step: _middle(plan, rank, step, session)
            )
            optimizer.step()
            before.remove()
            if plan.killed.get(rank) == step:
                kill()
            schedule.step()
            scaler.update()
            bits[step] = _bits(work.model, optimizer, schedule, scaler, loader)
            _log(plan, rank, step, bits[step])
            roles[step] = _roles(session)
    if session is None:
        return Result(bits, roles, None, {}, [], [], [], len(injector.unfired))
    status, incidents, certified = session.status()["checkpoint"], session.incidents, session.certified_step
    session.close()
    found = [(each.manifestation.value, each.step) for each in incidents]
    named = [each.ranks for each in incidents]
    unfired = len(injector.unfired)
    return Result(bits, roles, resumed, status, session.failures, found, named, unfired, certified)


def _register(session: Session | None, known: Mapping[str, Any]) -> None:
    for name, stateful in known.items() if session is not None else ():
        session.register_state(name, stateful)


def kill() -> None:
    """End this process as nothing can prevent or notice."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def killed_from_outside(plan: Plan, kills: KillPlan) -> Iterator[None]:
    """Kill ranks of the job that runs in this block, from another thread."""
    killer = threading.Thread(target=_kill, args=(plan, kills), daemon=True)
    killer.start()
    yield
    killer.join()


def _kill(plan: Plan, kills: KillPlan) -> None:
    assert plan.memory is not None
    assert plan.directory is not None
    paths = [plan.run_dir / f"pid-{rank}" for rank in kills.ranks]
    pids = until(
        lambda: all(map(Path.exists, paths)) and [path.read_text() for path in paths], "it trains", 60
    )
    if kills.when is not None:
        until(kills.when.exists, "it is time", 60)
    if kills.step is not None:
        first = kills.step
        until(lambda: max(reached(plan, 0), default=0) >= first, f"step {first} is done", 60)
    time.sleep(kills.seconds)
    ledgers = [*plan.memory.glob("*/rank-*.ledger")]
    before = [path.stat().st_mtime_ns for path in ledgers]
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        is_noted = [path.stat().st_mtime_ns for path in ledgers] != before  # just before it is captured
        # Unlike Path.glob, glob does not raise when a folder that it reads is removed meanwhile.
        is_written = kills.during == "persist" and glob(f"{plan.directory}/step-*/.rank-*.writing")  # noqa: PTH207
        if kills.during is None or (kills.during == "capture" and is_noted) or is_written:
            break
        time.sleep(0.0002)
    time.sleep(kills.delay)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(int(pid), kills.signal)


def reached(plan: Plan, rank: int) -> dict[int, str]:
    """The steps that a rank did, killed or not, and the state after each; first what it began with."""
    path = plan.run_dir / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): bits for step, bits in map(str.split, lines)}


def _log(plan: Plan, rank: int, step: int, bits: str) -> None:
    if plan.directory is not None:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        with (plan.run_dir / f"steps-{rank}").open("a") as file:
            file.write(f"{step} {bits}\n")


def _write_pid(plan: Plan, rank: int) -> None:
    if plan.directory is not None:
        path = plan.run_dir / f"pid-{rank}"
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").replace(path)


def _suffer(plan: Plan, rank: int, step: int, model: nn.Module) -> None:
    if plan.hangs.get(rank) == step:
        (plan.run_dir / "hangs").touch()
        model.register_forward_hook(lambda *_: time.sleep(3600))
    if plan.lost_folder == step and rank == 0:
        assert plan.directory is not None
        lose_folder(plan.directory)
    if plan.blocked_ledger == step:
        assert plan.memory is not None
        block_ledger(plan.memory, rank)
    if plan.filled_memory == step and rank == 0:
        assert plan.memory is not None
        fill_file_system(plan.memory)


def _middle(plan: Plan, rank: int, step: int, session: Session | None) -> None:
    """Right before the update."""
    if session is not None:
        _wait(plan, rank, step, session)
    if plan.killed.get(rank) == step and not plan.after_update:
        if session is not None:
            _wait_for_capture(plan, rank, session)
        kill()


def _wait_for_capture(plan: Plan, rank: int, session: Session) -> None:
    """For a while: some captures fail."""
    step, deadline = session.status()["checkpoint"]["capturing"], time.monotonic() + 10
    pattern = f"*/step-{step or 0:010d}.lineage-*/rank-{rank}-of-*.held-by-{rank}.shard"
    while step is not None and plan.memory is not None and time.monotonic() < deadline:
        if [*plan.memory.glob(pattern)]:
            return
        time.sleep(0.01)


def _wait(plan: Plan, rank: int, step: int, session: Session) -> None:
    """For what is done in the background, in the middle of a step."""
    if step <= plan.copied_until or (plan.when_copied and plan.killed.get(rank) == step):
        _wait_for_copies(session)
    if plan.files_written and step > 1 and (step - 1) % plan.persist_every == 1 % plan.persist_every:
        assert plan.directory is not None
        shards = f"step-{step - 1:010d}.lineage-*/*.shard"
        until(
            lambda: len([*plan.directory.glob(shards)]) >= dist.get_world_size(),
            f"the files of step {step - 1} are written",
        )
    _, candidate, _ = _roles(session)
    if plan.candidates_written and candidate is not None:
        assert plan.directory is not None
        name = f"step-{candidate:010d}.lineage-*/rank-{rank}-of-*.held-by-{rank}.shard"
        until(lambda: [*plan.directory.glob(name)], "the candidate is written")


def _wait_for_copies(session: Session) -> None:
    """On all ranks, so that none is killed before."""

    def is_copied() -> bool:
        status = session.status()["checkpoint"]
        return status["copied"] == (status["capturing"] or status["latest"])

    until(is_copied, "the latest checkpoint is copied")
    dist.barrier()


def _roles(session: Session | None) -> tuple[int | None, ...]:
    status = {} if session is None else session.status()["checkpoint"]
    return tuple(
        status.get(role.value) for role in (TrustLevel.LATEST, TrustLevel.CANDIDATE, TrustLevel.VERIFIED)
    )


def _attached(plan: Plan, work: Work, optimizer: torch.optim.Optimizer) -> Session | None:
    if plan.directory is None:
        return None
    checkpoint = CheckpointConfig(
        plan.directory,
        persist_every=plan.persist_every,
        keep_verified=plan.keep,
        checks_per_cycle=plan.recipes,
        verify_on_resume=plan.sweep,
        timeout_seconds=plan.timeout_seconds,
        **({} if plan.job is None else {"job": plan.job}),
    )
    return enable_resiliency(
        work.model,
        optimizer,
        replay=ReplayConfig(interval=plan.interval, timeout_seconds=plan.timeout_seconds),
        observer=None,
        checkpoint=checkpoint,
        run_dir=plan.run_dir,
    )


def _frozen(net: nn.Module) -> nn.Module:
    """One parameter of every block is not trained."""
    for name, parameter in net.named_parameters():
        if name.endswith("norm.weight"):
            parameter.requires_grad_(False)
    return net


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _backward(model: nn.Module, samples: tuple[torch.Tensor, torch.Tensor], scale: float) -> None:
    tokens, targets = samples
    logits = model(tokens).flatten(0, 1)
    (scale * nn.functional.cross_entropy(logits, targets.flatten())).backward()


def _bits(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, scaler: Scaler, loader: Loader
) -> str:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    tensors = [*model.parameters(), *model.buffers(), *slots, torch.get_rng_state()]
    digest = hashlib.blake2b(digest_size=16)
    for each in tensors:
        digest.update(local_of(each).detach().contiguous().numpy().tobytes())
    # ``_step_count`` and the like are PyTorch's own; what a schedule decides is the rate.
    plain = [schedule.last_epoch, optimizer.param_groups[0]["lr"], scaler.state_dict(), loader.state_dict()]
    digest.update(repr(plain).encode())
    return digest.hexdigest()
