"""``enable_resiliency``: the only place where the parts are put together (paper, section 9)."""

from __future__ import annotations

import functools
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.base import Adapter
from torchscout.adapters.modules import stages_of
from torchscout.adapters.pytorch import NoModelAdapter
from torchscout.adapters.recipe_builder import (
    RecipeBuilder,
    device_of_job,
    keep_common,
    table_of,
)
from torchscout.adapters.registry import adapter_for
from torchscout.adapters.structure import Part, Structure, surface_of
from torchscout.communicators import Communicators, Job, PeerCommunicator
from torchscout.config import (
    RUN_DIR,
    CheckpointConfig,
    ObserverConfig,
    Parallelism,
    RecoveryConfig,
    ReplayConfig,
    StragglerConfig,
    require_folder,
)
from torchscout.decision.progress import Phase
from torchscout.decision.types import Incident
from torchscout.errors import CatalogError, ObserverError, ScoutError
from torchscout.experts.coverage import Rows
from torchscout.log import set_rank, show_by_default
from torchscout.mesh import LayerKind, Mesh
from torchscout.observer.device import device_of
from torchscout.observer.monitor import HangMonitor, start_monitor
from torchscout.observer.phase_hooks import mark_phases
from torchscout.observer.record.directory import news_of
from torchscout.run.folder import Identity, RankEntry, Unwatched
from torchscout.run.notify import Webhook
from torchscout.run.writer import RunWriter
from torchscout.session.announcement import ALONE, announce
from torchscout.session.boundary import Boundary
from torchscout.session.checkpoints.certifier import CertifiedSteps, Certifier
from torchscout.session.ending import add_run
from torchscout.session.incidents import Incidents
from torchscout.session.off import Off, is_off
from torchscout.session.recovery import Recovery
from torchscout.session.replay.coverage import NO_CATALOG, RecipeCycle, shapes_in
from torchscout.session.replay.driver import ReplayDriver, ReplayParts
from torchscout.session.replay.pace import EXPERTS
from torchscout.session.replay.recovery import RecoveringReplay
from torchscout.session.session import Parts, Session
from torchscout.state.table import StateTable
from torchscout.utils._torch import missing_names
from torchscout.utils.cuda_graphs import before_replays, is_capturing
from torchscout.utils.identity import device_name, host_name, job_name, launcher_job
from torchscout.utils.network import interface_of_job
from torchscout.utils.private_files import first_text, make_folders
from torchscout.utils.reentrancy import in_own_work
from torchscout.utils.text import listed

if TYPE_CHECKING:
    from torchscout.session.checkpoints.manager import CheckpointManager

__all__ = ["enable_resiliency", "is_attached", "make_replaceable"]

OnIncident = Callable[[Incident], None] | Webhook | Sequence[Callable[[Incident], None] | Webhook] | None
_attached: weakref.WeakSet[Any] = weakref.WeakSet()
_replaceable: list[Session] = []
"""Sessions whose place the next one takes."""


def enable_resiliency(  # noqa: PLR0913  a keyword for each subsystem
    model: Any,
    optimizer: Any = None,
    *,
    replay: ReplayConfig | None = ReplayConfig(),  # noqa: B008  frozen
    observer: ObserverConfig | None = ObserverConfig(),  # noqa: B008  frozen
    checkpoint: CheckpointConfig | None = None,
    parallelism: Mesh | DeviceMesh | Parallelism | None = None,
    run_dir: Path | str | None = None,
    on_incident: OnIncident = None,
    recovery: RecoveryConfig = RecoveryConfig(),  # noqa: B008  frozen
) -> Session:
    """Attach to a training job. Every rank calls it once, after model and optimizer have been created. The
    training loop stays as it is.

    ``model`` is a ``torch.nn.Module``, or what a framework uses in its place: Megatron-Core's model chunks, a
    TorchTitan ``Trainer``, a DeepSpeed engine. With None, only hangs are localized, in any program.
    ``optimizer`` is PyTorch's, a list of such, or Megatron's. ``replay=None`` turns off the checks for
    corrupted numbers and slow ranks, ``observer=None`` hang localization. With ``checkpoint`` the session
    keeps the state that checks certify, and ``session.resume()`` loads it. ``parallelism`` says which ranks
    do the same work, where the model does not show that. Incidents are written to ``run_dir``, by default a
    new folder ``scout-run-...`` where rank 0 was started. ``on_incident`` is a function, called on every rank
    from its own thread, a ``Webhook``, or a list of both. ``recovery`` says what is done about incidents.

    Raises ``ValueError`` for invalid arguments, and ``ScoutError`` if checkpoints cannot be kept. With the
    environment variable ``TORCHSCOUT=off`` nothing is attached, and the session does nothing.
    """
    show_by_default()
    if is_off():
        return Off()
    webhook, callbacks = _receivers(on_incident)
    run_dir = _take_over(run_dir)
    adapter = _adapter(model, optimizer, parallelism)
    structure, experts = _require_valid(adapter, replay, checkpoint)
    with ExitStack() as undo:
        communicators = Communicators() if replay is None else Communicators(replay.timeout_seconds)
        undo.callback(communicators.close)
        job = _agree(adapter, communicators, run_dir, "*" if observer is None else observer.address)
        base = _Base(adapter, structure, experts, communicators, job, Boundary(job.rank))
        checkpoints = None if checkpoint is None else _checkpoints(base, checkpoint, undo)
        folder = run_dir if checkpoint is None else checkpoint.directory
        decisions = Recovery.agree(communicators, job, recovery, folder, checkpoints)
        monitor = None if observer is None else _monitor(base, observer, replay, decisions, webhook, undo)
        incidents, decisions.entry = _incidents(base, monitor, [*callbacks, decisions.handle], webhook, undo)
        driver, why_not = _replay(base, replay, checkpoints or CertifiedSteps(), monitor, incidents)
        parts = Parts(
            run_dir=job.run_dir,
            boundary=base.boundary,
            incidents=incidents,
            entry=decisions.entry,
            monitor=monitor,
            replay=driver,
            replay_off=why_not,
            checkpoints=checkpoints,
            recovery=decisions,
            undo=undo.pop_all(),
        )
    session = _hooked(parts, adapter)
    announce(parts, job, observer, replay, checkpoint, has_model=model is not None)
    return session


def is_attached() -> bool:
    """Whether a session of this process is attached to a model."""
    return any(next(each.parameters(), None) is not None for each in _attached)


def make_replaceable(session: Session) -> None:
    """Let the next call of ``enable_resiliency`` replace this session, on every rank."""
    _replaceable.append(session)


def _receivers(on_incident: OnIncident) -> tuple[Webhook | None, list[Callable[[Incident], None]]]:
    """Return where incidents are posted, and the functions that are called."""
    wanted = on_incident if isinstance(on_incident, Sequence) else [on_incident]
    webhooks = [each for each in wanted if isinstance(each, Webhook)]
    if len(webhooks) > 1:
        raise ValueError(f"on_incident has {len(webhooks)} webhooks; give one, and call others yourself")
    return webhooks[0] if webhooks else None, [each for each in wanted if callable(each)]


def _take_over(run_dir: Path | str | None) -> Path | str | None:
    """End a session that is replaced. Return the run directory, or the one that the environment names."""
    if run_dir:
        require_folder(run_dir, "run_dir")
    while _replaceable:
        _replaceable.pop().give_way()
    return run_dir or os.environ.get(RUN_DIR)


def _require_private_names() -> None:
    if missing := missing_names():
        raise ScoutError(
            f"torchscout does not support PyTorch {torch.__version__}, which has no {listed(missing)}. "
            "Install PyTorch 2.10 to 2.13, or set TORCHSCOUT=off to train without torchscout."
        )


@dataclass(frozen=True)
class _Base:
    """What the parts of a session are built from."""

    adapter: Adapter
    structure: Structure | None
    """None if nothing is replayed."""
    experts: Sequence[Part]
    communicators: Communicators
    job: Job
    boundary: Boundary

    @functools.cached_property
    def table(self) -> StateTable:
        """The state of this rank; there is none if the adapter has an obstacle."""
        return table_of(self.adapter)


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
        raise ValueError(f"checkpoint= keeps the state of training, but {obstacle}")
    if replay is None or obstacle is not None:
        return None, ()
    structure = adapter.structure(embedding=replay.embedding, layers=replay.layers, output=replay.output)
    return structure, adapter.experts(replay.experts)


def _agree(adapter: Adapter, communicators: Communicators, run_dir: Path | str | None, address: str) -> Job:
    """Exchange what all ranks must agree on. Token and run directory are rank 0's."""
    default = f"scout-run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    device = device_of(stages_of(adapter.model))
    name = "" if device is None else device_name(torch.cuda.get_device_properties(device))
    set_rank(dist.get_rank())
    fact: dict[str, Any] = {"host": host_name(), "device": name}
    if dist.get_rank() == 0:  # what ranks send alike travels once
        folder = str(Path(run_dir or default).absolute())
        run = Identity(folder, secrets.token_hex(6), job_name(), launcher_job())
        fact |= {"token": secrets.token_hex(32), "run": asdict(run)}
    facts = communicators.exchange(fact)
    hosts = [fact["host"] for fact in facts]
    token, agreed = facts[0]["token"], Identity(**facts[0]["run"])
    devices = [fact["device"] for fact in facts]
    directories = communicators.exchange(_directory(Path(agreed.run_dir)))
    return Job(dist.get_rank(), adapter.mesh(hosts), hosts, token, agreed, address, devices, directories)


def _directory(run_dir: Path) -> str | None:
    """What identifies the run directory: machines that do not share it have different ones of this name."""
    try:
        make_folders(run_dir)
        return first_text(run_dir / "directory", secrets.token_hex(16))
    except OSError:  # what is written there later fails as well, and says so
        return None


def _checkpoints(base: _Base, config: CheckpointConfig, undo: ExitStack) -> CheckpointManager:
    """Open the checkpoints. What the user must change (folder, budget) is a ``ScoutError`` on every rank."""
    from torchscout.session.checkpoints.manager import CheckpointManager  # imports ZeroMQ

    adapter, job = base.adapter, base.job
    model, optimizers = adapter.model, adapter.optimizers()
    names = {surface_of(name): name for name, _ in model.named_parameters()}
    # Optimizers show most of the owned state themselves; adapters may name the same memory more than once.
    shown = {each.data_ptr() for of in optimizers for group in of.param_groups for each in group["params"]}
    every = adapter.owned_state()
    owned = {
        names.get(surface, surface.replace("/", ".")): each
        for surface, each in every.items()
        if each.data_ptr() not in shown
    }
    manager = CheckpointManager(job, config, base.communicators, model, optimizers, base.table, owned)
    undo.callback(manager.close)
    if job.rank == 0:
        base.boundary.guarded(lambda: add_run(Path(config.directory).absolute(), job.run_dir))
    for name, stateful in adapter.extra_state().items():
        manager.register(name, stateful)
    return manager


def _monitor(
    base: _Base,
    config: ObserverConfig,
    replay: ReplayConfig | None,
    recovery: Recovery,
    webhook: Webhook | None,
    undo: ExitStack,
) -> HangMonitor | None:
    """Start to publish progress and to observe it; if that fails, the job runs without hang detection."""
    settings = {
        "straggler": StragglerConfig() if replay is None else replay.straggler,
        "recovery": recovery.config,
        "plan": recovery.plan,
        "began": recovery.began,
        "plan_folders": tuple(map(str, recovery.plan_folders)),
        "directory": str(Path.cwd()),
        "webhook": webhook,
    }

    def lost(error: ObserverError) -> None:
        base.boundary.failed(error)
        if (entry := recovery.entry) is not None:
            base.boundary.guarded(lambda: Unwatched(entry.rank, entry.record).write(base.job.run_dir))

    try:
        monitor = start_monitor(base.job, config, base.communicators, lost, **settings)
    except ScoutError as error:
        base.boundary.failed(error, is_shared=True)
        return None
    undo.callback(monitor.close)
    recovery.tell_observer = monitor.writer.restarting
    layers, stages = base.adapter.layers(), [*stages_of(base.adapter.model)]
    monitor.publisher.watch_layers(layers)
    undo.callback(
        mark_phases(
            monitor.publisher,
            base.adapter.checkpoint_functions(),
            lambda: any(each.training for each in stages),
        )
    )
    if base.adapter.optimizers():
        monitor.publisher.watch_device(device_of(layers))
    return monitor


def _incidents(
    base: _Base,
    monitor: HangMonitor | None,
    callbacks: Sequence[Callable[[Incident], None]],
    webhook: Webhook | None,
    undo: ExitStack,
) -> tuple[Incidents, RankEntry]:
    """Start to follow incidents, and add this rank to the run directory."""
    job, record = base.job, None if monitor is None else monitor.writer.path
    path = None if record is None else news_of(record)
    incidents = Incidents(job, callbacks, base.boundary.failed, path, webhook)
    undo.callback(incidents.close)
    entry = replace(
        RankEntry.own(job.rank, record, len(job.mesh)),
        address=astuple(job.mesh.address_of(job.rank, LayerKind.DENSE)),
        device=job.devices[job.rank],
        interface=interface_of_job(),
    )
    base.boundary.guarded(lambda: entry.write(job.run_dir))
    return incidents, entry


def _replay(
    base: _Base,
    config: ReplayConfig | None,
    certifier: Certifier,
    monitor: HangMonitor | None,
    incidents: Incidents,
) -> tuple[RecoveringReplay | None, str]:
    """Build replay, on every rank or on none; where there is none, the reason is returned."""
    if config is None:
        return None, "replay=None"
    adapter, job, communicators = base.adapter, base.job, base.communicators

    def build() -> tuple[RecoveringReplay | None, str]:
        can_compare = job.mesh.peers_of(job.rank, LayerKind.DENSE).can_compare
        if (obstacle := _obstacle(adapter, communicators)) is not None:
            return None, obstacle
        is_alone = not any(communicators.highest([can_compare]))
        unpaired = None if is_alone or can_compare else "no other rank does the same work"
        if (agreed := communicators.first_problems([unpaired])[0]) is not None:
            return None, unpaired or agreed
        shapes, lacking = (None, ALONE) if is_alone else _shapes(base, config)
        structure = None if is_alone else base.structure
        builder = RecipeBuilder(adapter, base.table, config, job.mesh, job.rank, communicators)
        recipes = builder.recipes(structure, base.experts, shapes)
        turns = [each.order.cycle for each in recipes if each.kind == EXPERTS]
        (most,) = communicators.highest([max(turns, default=0)])
        peers = _peers(job, communicators, device_of_job(adapter))
        keep_common(recipes, peers)
        parts = ReplayParts(
            config=config,
            recipes=recipes,
            cycle=RecipeCycle(most if shapes is not None and most else None, lacking),
            parameters=adapter.parameters().values(),
            table=base.table,
            mesh=job.mesh,
            communicators=communicators,
            peers=peers,
            recorder=RunWriter(job.run_dir, job.rank),
            certifier=certifier,
            boundary=base.boundary,
            finish_update=adapter.finish_update,
            on_incidents=incidents.publish,
            keeps_history=job.rank == 0 or job.copies_from(0),
            still_alive=lambda: None if monitor is None else monitor.writer.advance(Phase.IDLE),
        )
        return RecoveringReplay(ReplayDriver(parts), parts, job.run_dir), ""

    built: tuple[RecoveringReplay | None, str] | None = base.boundary.guarded(build)
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


def _hooked(parts: Parts, adapter: Adapter) -> Session:
    """Return the session, which training calls from now on."""
    stages = [*stages_of(adapter.model)]
    session = Session(replace(parts, is_training=lambda: any(each.training for each in stages)))
    if adapter.optimizers():
        parts.undo.callback(adapter.hook_updates(session.before_update, session.step_finished))
    elif parts.monitor is not None and (layers := adapter.layers()):
        parts.monitor.publisher.watch_steps(layers[0], session.step_finished)
    if isinstance(adapter, NoModelAdapter):
        make_replaceable(session)
    for stage in stages:
        _attached.add(stage)
        parts.undo.callback(_attached.discard, stage)
    if parts.checkpoints is not None:
        _hook_forward(session, parts, stages)
    return session


def _hook_forward(session: Session, parts: Parts, stages: Sequence[torch.nn.Module]) -> None:
    """Let the session know when a step begins, so that it can copy the state at rest."""

    def before_forward(module: torch.nn.Module, _: Any) -> None:
        # A validation between two steps belongs to the first: a schedule may depend on its result.
        if module.training and torch.is_grad_enabled() and not is_capturing():
            session.step_begins()

    def before_graph() -> None:
        if any(each.training for each in stages) and not in_own_work():
            session.step_begins()

    if torch.cuda.is_available():
        parts.undo.callback(before_replays(before_graph))
    for stage in stages:
        # Prepended, because FSDP's own hook gathers parameters, and checkpoints keep shards.
        hook = stage.register_forward_pre_hook(before_forward, prepend=True)
        parts.undo.callback(hook.remove)
