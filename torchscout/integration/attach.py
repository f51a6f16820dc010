"""``enable_resiliency``: the only place where the parts are put together (paper, section 9)."""

from __future__ import annotations

import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchscout.config import ObserverConfig, Parallelism
from torchscout.decision.record import Incident
from torchscout.errors import ScoutError
from torchscout.evidence.observer.device import device_of
from torchscout.integration.adapter import Adapter
from torchscout.integration.communicators import Communicators
from torchscout.integration.news import News
from torchscout.integration.registry import adapter_for
from torchscout.integration.session import Session
from torchscout.integration.watching import Job, watch
from torchscout.mesh import Mesh

__all__ = ["enable_resiliency"]

_attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def enable_resiliency(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    observer: ObserverConfig | None = ObserverConfig(),  # noqa: B008  frozen
    parallelism: Mesh | DeviceMesh | Parallelism | None = None,
    run_dir: Path | str | None = None,
    on_incident: Callable[[Incident], None] | None = None,
) -> Session:
    """Attach to a training job. Every rank calls it once, when model and optimizer exist.

    ``observer=None`` leaves hang localization out. ``parallelism`` says which ranks do the same
    work, where the model does not show it by itself. Incidents are written to ``run_dir``, by default
    a new folder ``scout-run-...`` where rank 0 was started, and given to ``on_incident``, which is called
    from a thread of its own. The training loop stays as it is.
    """
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group() before enable_resiliency()")
    if model in _attached:
        raise ValueError("torchscout is attached to this model already; close that session first")
    adapter = adapter_for(model, optimizer, parallelism)
    with ExitStack() as undo:
        communicators = Communicators()
        undo.callback(communicators.close)
        job = _agree(adapter, communicators, run_dir)
        session = Session(job.run_dir, undo.pop_all())
    if observer is not None:
        _watch(session, job, observer, adapter, communicators)
    if on_incident is not None:
        session.undo.callback(News(job.run_dir, on_incident, session.failed).close)
    _attached.add(model)
    session.undo.callback(_attached.discard, model)
    return session


def _agree(adapter: Adapter, communicators: Communicators, run_dir: Path | str | None) -> Job:
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
    )


def _watch(
    session: Session, job: Job, config: ObserverConfig, adapter: Adapter, communicators: Communicators
) -> None:
    """Put hang localization into the session; a job without it is better than none."""
    try:
        watching = watch(job, config, communicators)
    except ScoutError as error:
        session.failed(error)
        return
    session.watching = watching
    layers = adapter.layers()
    watching.publisher.watch_layers(layers)
    if optimizers := adapter.optimizers():
        watching.publisher.watch_optimizer(optimizers[-1], session.step_finished, device_of(layers))
