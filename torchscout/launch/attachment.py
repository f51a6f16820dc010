"""What `scout run` does inside a worker, from ``init_process_group`` to ``destroy_process_group``.

First a session without a model is started, which localizes hangs. After the first update of all optimizers,
a session with the model and these optimizers takes its place, if all ranks find one model. Whatever fails
here, the script goes on.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchscout.adapters.registry import adapter_for
from torchscout.attach import enable_resiliency, is_attached, make_replaceable
from torchscout.errors import ScoutError
from torchscout.launch.agreement import Agreement, agree
from torchscout.launch.discovery import describe, model_of, optimizer_count, parameters_of
from torchscout.launch.settings import VARIABLE, Settings
from torchscout.log import log, set_rank, show_by_default
from torchscout.metrics.export import export_metrics
from torchscout.run.notify import Webhook
from torchscout.session.boundary import Boundary
from torchscout.session.off import is_off
from torchscout.session.session import Session
from torchscout.utils._torch import default_store, missing_names
from torchscout.utils.reentrancy import is_nested_step
from torchscout.utils.text import listed

__all__ = ["joined", "leaving"]

_PORTS = 8
"""The ports of an observer's hubs; see ``ObserverConfig.port``."""

_attachments: list[Attachment] = []
"""One for each time that this process has joined a job."""


def joined() -> None:
    """Called when ``init_process_group`` has returned. Ends the process if an earlier run decided so."""
    document = os.environ.get(VARIABLE)
    if document is None or is_off() or dist.get_backend() == "fake":
        return
    show_by_default()
    if not _attachments:
        # For ever: a hook cannot be removed while hooks run.
        register_optimizer_step_post_hook(lambda optimizer, *_: _stepped(optimizer))
    attachment = Attachment(len(_attachments))
    _attachments.append(attachment)
    attachment.boundary.guarded(lambda: attachment.watch_hangs(json.loads(document)))


def leaving(group: Any = None) -> None:
    """Called before ``destroy_process_group``."""
    if _attachments and group in (None, dist.group.WORLD):
        _attachments[-1].close()


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    # ``is_compiling`` is a constant to Dynamo, so the rest is not traced into the user's graph.
    if not torch.compiler.is_compiling() and not is_nested_step(optimizer):
        attachment = _attachments[-1]
        attachment.boundary.guarded(lambda: attachment.stepped(optimizer))


class Attachment:
    """To one job."""

    def __init__(self, number: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        set_rank(self.rank)
        self.boundary = Boundary(self.rank)
        self.session: Session | None = None
        self._name = f"torchscout/{number}"
        self._settings: Settings | None = None
        """Rank 0's; None if nothing is attached."""
        self._pid = os.getpid()
        self._is_decided = self._has_model = False
        """Whether a model has been looked for, and whether the session has one."""
        self._cycle: dict[frozenset[int], torch.optim.Optimizer] = {}
        """The optimizers that have stepped until that is decided, in this order."""
        self._first: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._expected = 0

    def watch_hangs(self, document: dict[str, Any]) -> None:
        """Attach without a model, if all ranks of the job are here."""
        settings = Settings.from_document(document)
        missing = listed(missing_names())
        problem = f"torchscout does not support PyTorch {torch.__version__}, which has no {missing}"
        agreed = self._agree("join", settings, problem if missing else None, document)
        if agreed.problem is not None:
            if agreed.is_logged_here:
                log.warning("scout run attached nothing, and the script runs without: %s", agreed.problem)
            return
        self._settings = settings = Settings.from_document(agreed.document)
        if settings.observer is None:
            return
        port = settings.observer.port
        try:
            self.session = enable_resiliency(
                None,
                replay=None,
                # The session with a model starts before the hubs of this one have ended.
                observer=replace(settings.observer, port=port + _PORTS if port else 0),
                run_dir=settings.run_dir,
                on_incident=_webhook(settings),
                recovery=settings.recovery,
            )
            _export(self.session, settings)
        except ScoutError as error:
            if type(error) is ScoutError and settings.recovery.act:  # an earlier run decided to stop the job
                raise SystemExit(f"torchscout: {error}") from error
            raise

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each optimizer step."""
        if self._settings is None or self._has_model or os.getpid() != self._pid:
            return
        if not self._is_decided and not self._cycle:
            self._first, self._expected = weakref.ref(optimizer), optimizer_count()
        if optimizer is self._first():
            self.boundary.step += 1
            if self.session is not None:
                self.session.step_finished()
        if not self._is_decided:
            key = parameters_of(optimizer)
            is_again = key in self._cycle
            self._cycle.setdefault(key, optimizer)
            if is_again or len(self._cycle) >= self._expected:
                self._is_decided = True
                self._attach_to_model([*self._cycle.values()], self._settings)
                self._cycle.clear()

    def close(self) -> None:
        """End the session, since the job ends."""
        session, self.session, self._settings = self.session, None, None
        if session is not None:
            self.boundary.guarded(session.close)

    def _attach_to_model(self, optimizers: list[torch.optim.Optimizer], settings: Settings) -> None:
        """Attach to the model that these optimizers train, if all ranks find one."""
        model, problem = None, None
        try:
            if is_attached():  # by the script itself
                self._has_model = True
                return
            model = model_of(optimizers)
            self._require_valid(model, optimizers, settings)
        except (ValueError, ScoutError) as error:
            problem = str(error)
        agreed = self._agree("attach", settings, problem)
        if agreed.problem is not None or model is None:
            if agreed.is_logged_here:
                log.warning("scout run does not look for wrong numbers and slow ranks: %s", agreed.problem)
            return
        self._has_model = True
        self.session = session = enable_resiliency(
            model,
            optimizers,
            replay=settings.replay,
            observer=settings.observer,
            checkpoint=settings.checkpoint,
            parallelism=settings.parallelism,
            run_dir=settings.run_dir,
            on_incident=_webhook(settings),
            recovery=settings.recovery,
        )
        _export(session, settings)
        make_replaceable(session)  # by one of the script itself
        session.start_from(self.boundary.step)
        if self.rank == 0:
            names = listed([type(each).__name__ for each in optimizers])
            log.info("scout run attached to %s and %s after step %d", describe(model), names, session.step)

    def _require_valid(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], settings: Settings
    ) -> None:
        """Raise what attaching would raise, before any rank attaches."""
        adapter = adapter_for(model, optimizers, settings.parallelism)
        adapter.mesh([socket.gethostname()] * self.size)
        if (replay := settings.replay) is not None and adapter.obstacle is None:
            adapter.structure(embedding=replay.embedding, layers=replay.layers, output=replay.output)
            adapter.experts(replay.experts)

    def _agree(self, topic: str, settings: Settings, problem: str | None, document: Any = None) -> Agreement:
        store = PrefixStore(f"{self._name}/{topic}", default_store())
        seconds = settings.attach_seconds
        return agree(store, self.rank, self.size, seconds, problem=problem, document=document)


def _webhook(settings: Settings) -> Webhook | None:
    return None if settings.webhook is None else Webhook(settings.webhook)


def _export(session: Session, settings: Settings) -> None:
    if settings.metrics is not None:
        export_metrics(session, settings.metrics)
