"""``enable_resiliency``: the only place where the parts are put together (paper, section 9)."""

from __future__ import annotations

import logging
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
from torchscout.adapters.structure import surface_of
from torchscout.communicators import Communicators, Job, PeerCommunicator
from torchscout.config import CheckpointConfig, ObserverConfig, Parallelism, ReplayConfig
from torchscout.decision.progress import Phase
from torchscout.decision.record import Incident, Surface
from torchscout.decision.recorder import JsonlRecorder
from torchscout.errors import CatalogError, ScoutError
from torchscout.experts.coverage import Rows
from torchscout.log import log, show_by_default
from torchscout.mesh import LayerKind, Mesh
from torchscout.observer.device import device_of
from torchscout.observer.monitor import start_monitor
from torchscout.observer.record.directory import RankEntry, news_of
from torchscout.session.coverage import NO_CATALOG, shapes_in
from torchscout.session.ending import add_run
from torchscout.session.incident_callback import IncidentCallback
from torchscout.session.off import Off, is_off
from torchscout.session.replay_driver import ReplayDriver
from torchscout.session.session import Session
from torchscout.utils._torch import missing_names
from torchscout.utils.text import listed

__all__ = ["enable_resiliency"]

_ALONE = (
    "No two ranks of this job do the same work, so that wrong results of layers and updates cannot be found; "
    "state that changes between updates is found, and so are transfers that arrive damaged"
)

_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def enable_resiliency(
    model: Any,
    optimizer: Any = None,
    *,
    replay: ReplayConfig | None = ReplayConfig(),  # noqa: B008  frozen
    observer: ObserverConfig | None = ObserverConfig(),  # noqa: B008  frozen
    checkpoint: CheckpointConfig | None = None,
    parallelism: Mesh | DeviceMesh | Parallelism | None = None,
    run_dir: Path | str | None = None,
    on_incident: Callable[[Incident], None] | None = None,
) -> Session:
    """Attach to a training job. Every rank calls it once, when model and optimizer exist.

    ``model`` is a ``torch.nn.Module``, or what a framework has in its place: Megatron-Core's model chunks, a
    TorchTitan ``Trainer``, a DeepSpeed engine. ``optimizer``: one of PyTorch's, several, or Megatron-Core's.
    ``replay=None`` leaves out the checks for corrupted numbers, ``observer=None`` hang localization;
    with ``checkpoint`` the session keeps what checks certify, and ``session.resume()`` goes back to it.
    ``parallelism`` says which ranks do the same
    work, where the model does not show it by itself. Incidents are written to ``run_dir``, by default
    a new folder ``scout-run-...`` where rank 0 was started, and given to ``on_incident``, which is called
    once for each on every rank, from a thread of its own. The training loop stays as it is.

    With the environment variable ``TORCHSCOUT=off`` nothing is attached, and the session does nothing.
    """
    show_by_default()
    if is_off():
        return Off()
    _require_private_names()
    adapter = _adapter(model, optimizer, parallelism)
    _refuse_mistakes(adapter, replay, checkpoint)
    with ExitStack() as undo:
        communicators = Communicators() if replay is None else Communicators(replay.timeout_seconds)
        undo.callback(communicators.close)
        job = _agree(adapter, communicators, run_dir, "*" if observer is None else observer.address)
        session = Session(job.run_dir, undo.pop_all(), job.rank)
    if checkpoint is not None:
        _keep(session, job, checkpoint, adapter, _differing(adapter, replay, job.mesh), communicators)
    if observer is not None:
        _watch(session, job, observer, adapter, communicators)
    _enter(session, job, on_incident)
    if adapter.optimizers():
        session.undo.callback(adapter.hook_updates(session.before_update, session.step_finished))
    if replay is not None:
        session.guarded(lambda: _replay(session, job, replay, adapter, communicators))
    if job.rank == 0:
        _announce(session, job, observer, replay, checkpoint)
    for each in stages_of(adapter.model):
        _attached.add(each)
        session.undo.callback(_attached.discard, each)
    return session


def _require_private_names() -> None:
    if missing := missing_names():
        raise ScoutError(
            f"torchscout does not support PyTorch {torch.__version__}, which has no {listed(missing)}. "
            "Install PyTorch 2.10 to 2.13, or set TORCHSCOUT=off to train without torchscout."
        )


def _adapter(model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None) -> Adapter:
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group() before enable_resiliency()")
    adapter = adapter_for(model, optimizer, parallelism)
    if any(each in _attached for each in stages_of(adapter.model)):
        raise ValueError("torchscout is attached to this model already; close that session first")
    return adapter


def _refuse_mistakes(
    adapter: Adapter, replay: ReplayConfig | None, checkpoint: CheckpointConfig | None
) -> None:
    """Reject invalid arguments before attaching."""
    obstacle = adapter.obstacle
    if checkpoint is not None and (replay is None or not adapter.optimizers()):
        raise ValueError("checkpoint= needs an optimizer, and replay=, which certifies what is kept")
    if checkpoint is not None and obstacle is not None:
        raise ValueError(f"checkpoint= needs replay, which certifies what is kept, and {obstacle}")
    if replay is not None and obstacle is None:
        recipes_for(adapter, replay)


def _agree(adapter: Adapter, communicators: Communicators, run_dir: Path | str | None, address: str) -> Job:
    """What must be the same everywhere is rank 0's to say; who runs where, each rank's own."""
    default = f"scout-run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    facts = communicators.exchange(
        {
            "host": socket.gethostname(),
            "token": secrets.token_hex(32),
            "run_dir": str(Path(run_dir or default).absolute()),
        }
    )
    hosts = [fact["host"] for fact in facts]
    return Job(
        rank=dist.get_rank(),
        mesh=adapter.mesh(hosts),
        hosts=hosts,
        token=facts[0]["token"],
        run_dir=Path(facts[0]["run_dir"]),
        address=address,
    )


def _watch(
    session: Session, job: Job, config: ObserverConfig, adapter: Adapter, communicators: Communicators
) -> None:
    """Put hang localization into the session; a job without it is better than none."""
    try:
        watching = start_monitor(job, config, communicators)
    except ScoutError as error:
        session.failed(error, is_shared=True)
        return
    session.hang_monitor = watching
    layers = adapter.layers()
    watching.publisher.watch_layers(layers)
    if adapter.optimizers():
        watching.publisher.watch_updates(adapter.hook_updates, device_of(layers))
    elif layers:
        watching.publisher.watch_steps(layers[0], session.step_finished)


def _enter(session: Session, job: Job, on_incident: Callable[[Incident], None] | None) -> None:
    """Let the session be seen in the run directory, and hear of incidents."""
    record = None if session.hang_monitor is None else session.hang_monitor.writer.path
    session.news = IncidentCallback(
        job.rank, on_incident, session.failed, path=None if record is None else news_of(record)
    )
    session.undo.callback(session.news.close)
    entry = RankEntry.own(job.rank, record, len(job.mesh))
    session.entry = entry
    session.guarded(lambda: entry.write(job.run_dir))


def _announce(
    session: Session,
    job: Job,
    observer: ObserverConfig | None,
    replay: ReplayConfig | None,
    checkpoint: CheckpointConfig | None,
) -> None:
    """Say once where the run directory is, what is watched and replayed, and what is not."""
    ranks, hosts = len(job.mesh), len(set(job.hosts))
    size = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} machine{'s' * (hosts > 1)}"
    log.info("attached to %s; run directory: %s", size, job.run_dir)
    if session.hang_monitor is None or observer is None:
        why = "observer=None" if observer is None else session.failures[-1]
        log.warning("hangs are not watched: %s", why)
    else:
        limits = observer.min_silence_seconds, observer.silence_multiple
        log.info(
            "hangs are watched: silence counts after %g s, or %g times a step if that is longer", *limits
        )
    replaying = session.replay_driver
    if replaying is None or replay is None:
        why = "replay=None" if replay is None else session.not_replaying
        log.warning("wrong numbers and slow ranks are not looked for: %s", why)
    else:
        lacking, covered = replaying.lacking, replaying.covered().sentence()
        level = logging.WARNING if lacking == _ALONE else logging.INFO
        interval = min(replay.intervals.values())
        often = "step" if interval == 1 else f"{interval} steps"
        log.log(level, "checks every %s: %s%s", often, covered, f" {lacking}." if lacking else "")
    if checkpoint is None:
        log.info("no checkpoints are kept: checkpoint=None")
    else:
        log.info("certified state is kept in memory and, from time to time, in %s", checkpoint.directory)


def _keep(
    session: Session,
    job: Job,
    config: CheckpointConfig,
    adapter: Adapter,
    differing: Collection[Surface],
    communicators: Communicators,
) -> None:
    """Put checkpoints into the session; what a user must change (folder, budget) fails on every rank."""
    from torchscout.checkpoint.state.training_state import StateParts
    from torchscout.session.checkpoint_manager import CheckpointManager  # with it comes ZeroMQ

    model = adapter.model
    optimizers = adapter.optimizers()
    names = {surface_of(name): name for name, _ in model.named_parameters()}
    besides = [name for surface, name in names.items() if surface in differing]
    # Most of what is owned, optimizers show themselves; some adapters name the same memory more than once.
    shown = {each.data_ptr() for of in optimizers for group in of.param_groups for each in group["params"]}
    owned = {
        names.get(surface, surface.replace("/", ".")): each
        for surface, each in adapter.owned().items()
        if each.data_ptr() not in shown
    }
    if adapter.owned():
        besides += StateParts(model, optimizers, {}, owned).masters
    try:
        session.checkpoint_manager = CheckpointManager(
            job, config, communicators, model, optimizers, besides, owned
        )
    except ScoutError:
        session.close()
        raise
    if job.rank == 0:
        session.guarded(lambda: add_run(Path(config.directory).absolute(), job.run_dir))
    for name, stateful in adapter.state().items():
        session.register_state(name, stateful)
    for stage in stages_of(model):
        # First in: FSDP's own hook gathers what is to be kept as shards.
        hook = stage.register_forward_pre_hook(_training_begins(session), prepend=True)
        session.undo.callback(hook.remove)


def _differing(adapter: Adapter, config: ReplayConfig | None, mesh: Mesh) -> set[Surface]:
    """The parameters that no other rank keeps equal. Those of experts, holders of the same ones do."""
    differing = set(adapter.unreplicated())
    if config is not None and are_experts_spread(mesh):
        differing -= expert_parameters(adapter, adapter.experts(config.experts)).keys()
    return differing


def _training_begins(session: Session) -> Callable[..., None]:
    def begins(module: torch.nn.Module, _: Any) -> None:
        # A validation in between belongs to the step before: a schedule may depend on it.
        if module.training and torch.is_grad_enabled():
            session.step_begins()

    return begins


def _replay(
    session: Session, job: Job, config: ReplayConfig, adapter: Adapter, communicators: Communicators
) -> None:
    """Put replay into the session: on every rank, or where one has no part in it, on none."""
    peers = job.mesh.peers_of(job.rank, LayerKind.DENSE)
    obstacle = adapter.obstacle
    if obstacle is None and not adapter.optimizers():
        obstacle = "there is no optimizer at whose update a step would end"
    session.not_replaying = obstacle or "it could not be attached"
    if (agreed := communicators.first_problems([obstacle])[0]) is not None:
        session.not_replaying = obstacle or agreed
        return
    is_alone = not any(communicators.highest([peers.can_compare]))
    if not is_alone:
        unpaired = None if peers.can_compare else "no other rank does the same work"
        if (agreed := communicators.first_problems([unpaired])[0]) is not None:
            session.not_replaying = unpaired or agreed
            return
    device = device_of_job(adapter)
    shapes, lacking = (None, _ALONE) if is_alone else _shapes(job, config, adapter, communicators)
    replaying = ReplayDriver(
        config,
        recipes_for(adapter, config, job.mesh, job.rank, shapes, communicators, is_alone=is_alone),
        job.mesh,
        communicators,
        _links(job, communicators, device),
        JsonlRecorder(job.run_dir, job.rank),
        session.guarded,
        adapter.finish_update,
    )
    parameters = adapter.parameters().values()
    replaying.cover(lacking, has_catalog=shapes is not None, parameters=parameters)
    if session.checkpoint_manager is not None:
        replaying.serve(session.checkpoint_manager)
    if (watching := session.hang_monitor) is not None:
        replaying.tell(lambda: watching.writer.advance(Phase.IDLE))
    if session.news is not None:
        replaying.report_to(session.news.add)
    replaying.look_before_training()
    replaying.begin(1)
    session.replay_driver = replaying


def _shapes(
    job: Job, config: ReplayConfig, adapter: Adapter, communicators: Communicators
) -> tuple[Mapping[str, Sequence[Rows]] | None, str | None]:
    """At which shapes experts are replayed, and what checks lack; from a catalog on all ranks or on none."""
    experts = adapter.experts(config.experts)
    if not any(communicators.highest([len(experts)])):
        return None, None
    if config.catalog is None:
        return None, NO_CATALOG
    shapes, problem = None, None
    position = job.mesh.address_of(job.rank, LayerKind.EXPERT).expert
    try:
        shapes = shapes_in(config.catalog, experts, position, device_of_job(adapter))
    except CatalogError as error:
        problem = str(error)
    if (agreed := communicators.first_problems([problem])[0]) is not None:
        return None, f"the catalog of expert shapes was refused: {agreed}"
    return shapes, None


def _links(
    job: Job, communicators: Communicators, device: torch.device
) -> Callable[[LayerKind, bool], PeerCommunicator]:
    """The connections of this rank: to the holders of what it holds, and to whom it computes the same as."""
    groups = {
        (role, is_gathered): (job.mesh.layer_peers_of if is_gathered else job.mesh.peers_of)(job.rank, role)
        for role in LayerKind
        for is_gathered in (False, True)
    }
    links = {group: communicators.links(group, device) for group in dict.fromkeys(groups.values())}
    return lambda role, is_gathered: links[groups[role, is_gathered]]
