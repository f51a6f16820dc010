"""``enable_resiliency``: the only place where the parts are put together (paper, section 9)."""

from __future__ import annotations

import logging
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.base import Adapter
from torchscout.adapters.modules import stages_of
from torchscout.adapters.recipe_builder import (
    are_experts_spread,
    device_of_job,
    expert_parameters,
    recipes_for,
)
from torchscout.adapters.registry import adapter_for
from torchscout.adapters.structure import Part, Structure, surface_of
from torchscout.communicators import Communicators, Job, PeerCommunicator
from torchscout.config import CheckpointConfig, ObserverConfig, Parallelism, RecoveryConfig, ReplayConfig
from torchscout.decision.progress import Phase
from torchscout.decision.record import Incident
from torchscout.decision.recorder import JsonlRecorder
from torchscout.errors import CatalogError, ScoutError
from torchscout.experts.coverage import Rows
from torchscout.log import log, show_by_default
from torchscout.mesh import LayerKind, Mesh
from torchscout.observer.device import device_of
from torchscout.observer.monitor import HangMonitor, start_monitor
from torchscout.observer.record.directory import RankEntry, news_of
from torchscout.session.boundary import Boundary
from torchscout.session.certifier import CertifiedSteps, Certifier
from torchscout.session.coverage import NO_CATALOG, RecipeCycle, shapes_in
from torchscout.session.ending import add_run
from torchscout.session.incident_callback import IncidentCallback
from torchscout.session.off import Off, is_off
from torchscout.session.recovery import Recovery
from torchscout.session.replay_driver import EXPERTS, ReplayDriver, ReplayParts
from torchscout.session.session import Parts, Session
from torchscout.utils._torch import missing_names
from torchscout.utils.text import listed

if TYPE_CHECKING:
    from torchscout.session.checkpoint_manager import CheckpointManager

__all__ = ["enable_resiliency"]

_ALONE = (
    "No two ranks of this job do the same work, so wrong results of layers and updates cannot be found; "
    "state that changes between updates is found, and so are transfers that arrive damaged"
)

_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def enable_resiliency(  # noqa: PLR0913  a keyword for each subsystem
    model: Any,
    optimizer: Any = None,
    *,
    replay: ReplayConfig | None = ReplayConfig(),  # noqa: B008  frozen
    observer: ObserverConfig | None = ObserverConfig(),  # noqa: B008  frozen
    checkpoint: CheckpointConfig | None = None,
    parallelism: Mesh | DeviceMesh | Parallelism | None = None,
    run_dir: Path | str | None = None,
    on_incident: Callable[[Incident], None] | None = None,
    recovery: RecoveryConfig = RecoveryConfig(),  # noqa: B008  frozen
) -> Session:
    """Attach to a training job. Every rank calls it once, after model and optimizer have been created. The
    training loop stays as it is.

    ``model`` is a ``torch.nn.Module``, or what a framework uses in its place: Megatron-Core's model chunks, a
    TorchTitan ``Trainer``, a DeepSpeed engine. ``optimizer`` is PyTorch's, a list of such, or Megatron's.
    ``replay=None`` turns off the checks for corrupted numbers and slow ranks, ``observer=None`` hang
    localization. With ``checkpoint`` the session keeps the state that checks certify, and
    ``session.resume()`` loads it. ``parallelism`` says which ranks do the same work, where the model does not
    show that. Incidents are written to ``run_dir``, by default a new folder ``scout-run-...`` where rank 0
    was started. ``on_incident`` is called once for each incident on every rank, from its own thread.
    ``recovery`` says what SCOUT does about incidents by itself; by default it only logs its decisions.

    Raises ``ValueError`` for invalid arguments, and ``ScoutError`` if checkpoints cannot be kept. With the
    environment variable ``TORCHSCOUT=off`` nothing is attached, and the session does nothing.
    """
    show_by_default()
    if is_off():
        return Off()
    adapter = _adapter(model, optimizer, parallelism)
    structure, experts = _require_valid(adapter, replay, checkpoint)
    with ExitStack() as undo:
        communicators = Communicators() if replay is None else Communicators(replay.timeout_seconds)
        undo.callback(communicators.close)
        job = _agree(adapter, communicators, run_dir, "*" if observer is None else observer.address)
        base = _Base(adapter, structure, experts, communicators, job, Boundary(job.rank))
        checkpoints = None if checkpoint is None else _checkpoints(base, checkpoint)
        plan_folder = run_dir if checkpoint is None else checkpoint.directory
        decisions = Recovery.agree(communicators, job, recovery, plan_folder, checkpoints)
        monitor = None if observer is None else _monitor(base, observer, undo, decisions)
        incidents, entry = _incidents(base, monitor, [on_incident, decisions.handle], undo)
        driver, why_not = _replay(base, replay, checkpoints or CertifiedSteps(), monitor, incidents)
        parts = Parts(
            run_dir=job.run_dir,
            boundary=base.boundary,
            incidents=incidents,
            entry=entry,
            monitor=monitor,
            replay=driver,
            replay_off=why_not,
            checkpoints=checkpoints,
            recovery=decisions,
            undo=undo.pop_all(),
        )
    session = Session(parts)
    _hook(session, parts, adapter)
    if job.rank == 0:
        _announce(parts, job, observer, replay, checkpoint)
    return session


def _require_private_names() -> None:
    if missing := missing_names():
        raise ScoutError(
            f"torchscout does not support PyTorch {torch.__version__}, which has no {listed(missing)}. "
            "Install PyTorch 2.10 to 2.13, or set TORCHSCOUT=off to train without torchscout."
        )


@dataclass(frozen=True, slots=True)
class _Base:
    """What the parts of a session are built from."""

    adapter: Adapter
    structure: Structure | None
    """None if nothing is replayed."""
    experts: Sequence[Part]
    communicators: Communicators
    job: Job
    boundary: Boundary


def _adapter(model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None) -> Adapter:
    _require_private_names()
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group() before enable_resiliency()")
    adapter = adapter_for(model, optimizer, parallelism)
    if any(each in _attached for each in stages_of(adapter.model)):
        raise ValueError("torchscout is attached to this model already; close that session first")
    return adapter


def _require_valid(
    adapter: Adapter, replay: ReplayConfig | None, checkpoint: CheckpointConfig | None
) -> tuple[Structure | None, Sequence[Part]]:
    """Reject invalid arguments before attaching; return the parts of the model that are to be replayed."""
    obstacle = adapter.obstacle
    if checkpoint is not None and (replay is None or not adapter.optimizers()):
        raise ValueError("checkpoint= needs an optimizer and replay=, which certifies what is kept")
    if checkpoint is not None and obstacle is not None:
        raise ValueError(f"checkpoint= needs replay, which certifies what is kept, but {obstacle}")
    if replay is None or obstacle is not None:
        return None, ()
    structure = adapter.structure(embedding=replay.embedding, layers=replay.layers, output=replay.output)
    return structure, adapter.experts(replay.experts)


def _agree(adapter: Adapter, communicators: Communicators, run_dir: Path | str | None, address: str) -> Job:
    """Exchange what all ranks must agree on. Token and run directory are rank 0's."""
    default = f"scout-run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    facts = communicators.exchange(
        {
            "host": socket.gethostname(),
            "token": secrets.token_hex(32),
            "run_dir": str(Path(run_dir or default).absolute()),
        }
    )
    hosts = [fact["host"] for fact in facts]
    token, agreed_dir = facts[0]["token"], Path(facts[0]["run_dir"])
    return Job(dist.get_rank(), adapter.mesh(hosts), hosts, token, agreed_dir, address)


def _checkpoints(base: _Base, config: CheckpointConfig) -> CheckpointManager:
    """Open the checkpoints. What the user must change (folder, budget) is a ``ScoutError`` on every rank."""
    from torchscout.checkpoint.state.training_state import StateParts
    from torchscout.session.checkpoint_manager import CheckpointManager  # imports ZeroMQ

    adapter, job = base.adapter, base.job
    model, optimizers = adapter.model, adapter.optimizers()
    differing = set(adapter.unreplicated_parameters())
    if are_experts_spread(job.mesh):  # ranks with the same experts hold copies of them
        differing -= expert_parameters(adapter, base.experts).keys()
    names = {surface_of(name): name for name, _ in model.named_parameters()}
    unreplicated = [name for surface, name in names.items() if surface in differing]
    # Optimizers show most of the owned state themselves; adapters may name the same memory more than once.
    shown = {each.data_ptr() for of in optimizers for group in of.param_groups for each in group["params"]}
    every = adapter.owned_state()
    owned = {
        names.get(surface, surface.replace("/", ".")): each
        for surface, each in every.items()
        if each.data_ptr() not in shown
    }
    if every:
        unreplicated += StateParts(model, optimizers, {}, owned).masters
    manager = CheckpointManager(job, config, base.communicators, model, optimizers, unreplicated, owned)
    if job.rank == 0:
        base.boundary.guarded(lambda: add_run(Path(config.directory).absolute(), job.run_dir))
    for name, stateful in adapter.extra_state().items():
        manager.register(name, stateful)
    return manager


def _monitor(base: _Base, config: ObserverConfig, undo: ExitStack, recovery: Recovery) -> HangMonitor | None:
    """Start to publish progress and to observe it; if that fails, the job runs without hang detection."""
    ends_trainers = recovery.config if recovery.can_act else None
    try:
        monitor = start_monitor(base.job, config, base.communicators, ends_trainers, recovery.plan.restarts)
    except ScoutError as error:
        base.boundary.failed(error, is_shared=True)
        return None
    undo.callback(monitor.close)
    layers = base.adapter.layers()
    monitor.publisher.watch_layers(layers)
    if base.adapter.optimizers():
        monitor.publisher.watch_device(device_of(layers))
    return monitor


def _incidents(
    base: _Base,
    monitor: HangMonitor | None,
    callbacks: Sequence[Callable[[Incident], None] | None],
    undo: ExitStack,
) -> tuple[IncidentCallback, RankEntry]:
    """Start to follow incidents, and add this rank to the run directory."""
    job, record = base.job, None if monitor is None else monitor.writer.path
    path = None if record is None else news_of(record)
    present = [each for each in callbacks if each is not None]
    incidents = IncidentCallback(job.rank, present, base.boundary.failed, path=path)
    undo.callback(incidents.close)
    entry = RankEntry.own(job.rank, record, len(job.mesh))
    base.boundary.guarded(lambda: entry.write(job.run_dir))
    return incidents, entry


def _replay(
    base: _Base,
    config: ReplayConfig | None,
    certifier: Certifier,
    monitor: HangMonitor | None,
    incidents: IncidentCallback,
) -> tuple[ReplayDriver | None, str]:
    """Build the replay driver, on every rank or on none; where there is none, the reason is returned."""
    if config is None:
        return None, "replay=None"
    adapter, job, communicators = base.adapter, base.job, base.communicators

    def build() -> tuple[ReplayDriver | None, str]:
        can_compare = job.mesh.peers_of(job.rank, LayerKind.DENSE).can_compare
        if (obstacle := _obstacle(adapter, communicators)) is not None:
            return None, obstacle
        is_alone = not any(communicators.highest([can_compare]))
        unpaired = None if is_alone or can_compare else "no other rank does the same work"
        if (agreed := communicators.first_problems([unpaired])[0]) is not None:
            return None, unpaired or agreed
        shapes, lacking = (None, _ALONE) if is_alone else _shapes(base, config)
        structure = None if is_alone else base.structure
        recipes = recipes_for(
            adapter, config, job.mesh, job.rank, structure, base.experts, shapes, communicators
        )
        turns = [len(each.targets) for each in recipes if each.kind == EXPERTS]
        (most,) = communicators.highest([max(turns, default=0)])
        parts = ReplayParts(
            config=config,
            recipes=recipes,
            cycle=RecipeCycle(most if shapes is not None and most else None, lacking),
            parameters=adapter.parameters().values(),
            mesh=job.mesh,
            communicators=communicators,
            peers=_peers(job, communicators, device_of_job(adapter)),
            recorder=JsonlRecorder(job.run_dir, job.rank),
            certifier=certifier,
            boundary=base.boundary,
            finish_update=adapter.finish_update,
            on_incidents=incidents.add,
            still_alive=lambda: None if monitor is None else monitor.writer.advance(Phase.IDLE),
        )
        return ReplayDriver(parts), ""

    built: tuple[ReplayDriver | None, str] | None = base.boundary.guarded(build)
    return built or (None, "it could not be attached")


def _obstacle(adapter: Adapter, communicators: Communicators) -> str | None:
    """Why no rank replays, if some rank cannot."""
    obstacle = adapter.obstacle
    if obstacle is None and not adapter.optimizers():
        obstacle = "there is no optimizer whose update would end a step"
    agreed = communicators.first_problems([obstacle])[0]
    return obstacle or agreed


def _shapes(base: _Base, config: ReplayConfig) -> tuple[Mapping[str, Sequence[Rows]] | None, str | None]:
    """The shapes at which experts are replayed, from a catalog on all ranks or on none; what checks lack."""
    communicators, job = base.communicators, base.job
    if not any(communicators.highest([len(base.experts)])):
        return None, None
    if config.expert_catalog is None:
        return None, NO_CATALOG
    shapes, problem = None, None
    position = job.mesh.address_of(job.rank, LayerKind.EXPERT).expert
    try:
        shapes = shapes_in(config.expert_catalog, base.experts, position, device_of_job(base.adapter))
    except CatalogError as error:
        problem = str(error)
    if (agreed := communicators.first_problems([problem])[0]) is not None:
        return None, f"the catalog of expert shapes was refused: {agreed}"
    return shapes, None


def _peers(
    job: Job, communicators: Communicators, device: torch.device
) -> Callable[[LayerKind, bool], PeerCommunicator]:
    """Connect this rank to the ranks that hold the same state, and to those that compute the same layers."""
    groups = {
        (role, is_gathered): (job.mesh.layer_peers_of if is_gathered else job.mesh.peers_of)(job.rank, role)
        for role in LayerKind
        for is_gathered in (False, True)
    }
    links = {group: communicators.links(group, device) for group in dict.fromkeys(groups.values())}
    return lambda role, is_gathered: links[groups[role, is_gathered]]


def _hook(session: Session, parts: Parts, adapter: Adapter) -> None:
    """Let training call the session."""
    if adapter.optimizers():
        parts.undo.callback(adapter.hook_updates(session.before_update, session.step_finished))
    elif parts.monitor is not None and (layers := adapter.layers()):
        parts.monitor.publisher.watch_steps(layers[0], session.step_finished)

    def before_forward(module: torch.nn.Module, _: Any) -> None:
        # A validation between two steps belongs to the first: a schedule may depend on its result.
        if module.training and torch.is_grad_enabled():
            session.step_begins()

    for stage in stages_of(adapter.model):
        if parts.checkpoints is not None:
            # Prepended, because FSDP's own hook gathers parameters, and checkpoints keep shards.
            hook = stage.register_forward_pre_hook(before_forward, prepend=True)
            parts.undo.callback(hook.remove)
        _attached.add(stage)
        parts.undo.callback(_attached.discard, stage)


def _announce(
    parts: Parts,
    job: Job,
    observer: ObserverConfig | None,
    replay: ReplayConfig | None,
    checkpoint: CheckpointConfig | None,
) -> None:
    """Log once where the run directory is and which subsystems are on."""
    ranks, hosts = len(job.mesh), len(set(job.hosts))
    size = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} machine{'s' * (hosts > 1)}"
    log.info("attached to %s; run directory: %s", size, job.run_dir)
    if parts.monitor is None or observer is None:
        why = "observer=None" if observer is None else parts.boundary.failures[-1]
        log.warning("hang detection is off: %s", why)
    else:
        limits = observer.min_silence_seconds, observer.silence_multiple
        log.info(
            "hang detection is on: a rank may be silent for %g s, or %g steps if that is longer", *limits
        )
    if parts.replay is None or replay is None:
        log.warning("corrupted numbers and slow ranks are not detected: %s", parts.replay_off)
    else:
        lacking, covered = parts.replay.lacking, parts.replay.covered().sentence()
        level = logging.WARNING if lacking == _ALONE else logging.INFO
        interval = min(replay.intervals.values())
        often = "step" if interval == 1 else f"{interval} steps"
        log.log(level, "checks every %s: %s%s", often, covered, f" {lacking}." if lacking else "")
    if checkpoint is None:
        log.info("checkpoints are off: checkpoint=None")
    else:
        log.info(
            "certified state is kept in memory and written to %s from time to time", checkpoint.directory
        )
