"""Trains the synthetic workload for a bounded time, with SCOUT attached as to any job.

A check follows every step: replicas replay layers, updates and transfers, and vote (``replay`` and
``decision``); observers name a rank that stops (``observer``). Nothing here decides who is at fault.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchscout.attach import enable_resiliency
from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.decision.types import Incident
from torchscout.mesh import Mesh
from torchscout.preflight.groups import Links
from torchscout.preflight.report import Coverage, Device, Report, conclude
from torchscout.preflight.workload import Workload
from torchscout.session.session import Session
from torchscout.utils.text import listed

__all__ = ["OBSERVER", "SECONDS", "Preflight"]

SECONDS = 120.0
OBSERVER = ObserverConfig(min_silence_seconds=15.0, startup_seconds=120.0)
"""Patient: a false alarm would end the preflight."""
_RECIPES = ("layer", "optimizer", "replicated_state", "process_groups")
_ENDING_SECONDS = 30.0
"""How long the last check and the end of the session may take."""


class Preflight:
    """The preflight of one rank. Every rank of the job makes and runs one, over the same process group."""

    def __init__(
        self,
        work: Workload,
        *,
        seconds: float = SECONDS,
        hosts: Sequence[str] | None = None,
        run_dir: Path | None = None,
        replay: ReplayConfig = ReplayConfig(),  # noqa: B008  frozen
        observer: ObserverConfig = OBSERVER,
        on_hang: Callable[[Report], None] = lambda _: None,
    ) -> None:
        """``hosts`` are the machines of all ranks, by default what the system calls them. ``replay`` gives
        the thresholds. ``on_hang`` is called in another thread if a rank stops, or if the preflight does not
        end in time; the calling thread may be blocked then.
        """
        self._work, self._seconds, self._hosts, self._run_dir = work, seconds, hosts, run_dir
        self._replay = replace(replay, interval=1, recipes=_RECIPES, layers=work.layers)
        self._observer, self._on_hang = observer, on_hang
        self._began = time.monotonic()
        self._devices: tuple[Device, ...] = ()
        self._links: Links | None = None
        self._session: Session | None = None
        self._incidents: dict[Hashable, Incident] = {}
        """Each finding once, however often it comes back."""
        self._status: dict[str, Any] = {}
        self._finished = threading.Lock()
        """Acquired once: by the end of the preflight, or by what prevents it."""

    def run(self) -> Report:
        """Return the report, which is the same on every rank."""
        limit = self._observer.startup_seconds + self._seconds + _ENDING_SECONDS
        watchdog = threading.Timer(limit, self._expire, [limit])
        watchdog.daemon = True
        watchdog.start()
        try:
            self._devices = self._exchange_devices()
            if (obstacle := self._obstacle()) is not None:
                return self._report([obstacle])
            self._train()
            self._finished.acquire()
            return self._report(self._problems())
        finally:
            watchdog.cancel()

    def _train(self) -> None:
        hosts = [each.host for each in self._devices]
        self._links = Links(hosts, self._work.device)
        session = enable_resiliency(
            self._work.model,
            self._work.optimizer,
            replay=self._replay,
            observer=self._observer,
            parallelism=Mesh.grid(replica=len(hosts), hosts=hosts),
            run_dir=self._run_dir,
            on_incident=self._noticed,
        )
        self._session = session
        with session:
            began, step, is_over = time.monotonic(), 0, False
            while not is_over:
                step += 1
                self._work.backward(step)
                self._links.use()
                is_over = self._links.is_over(time.monotonic() - began >= self._seconds)
                self._work.optimizer.step()
            self._status = session.status()

    def _noticed(self, incident: Incident) -> None:
        self._incidents.setdefault((incident.manifestation, incident.scope, incident.ranks), incident)
        if incident.manifestation.stops_job:
            self._abandon([])

    def _expire(self, limit: float) -> None:
        self._abandon([f"the preflight did not end within {limit:.0f} s"])

    def _abandon(self, problems: Sequence[str]) -> None:
        """Report what is known so far. The thread that trains may be blocked forever."""
        if self._finished.acquire(blocking=False):
            if self._session is not None:
                self._status = self._session.status()
            self._on_hang(self._report(problems))

    def _exchange_devices(self) -> tuple[Device, ...]:
        rank, device = dist.get_rank(), self._work.device
        host = socket.gethostname() if self._hosts is None else self._hosts[rank]
        own = Device(rank, host, "cpu")
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            own = replace(own, name=properties.name, uuid=str(getattr(properties, "uuid", "")) or None)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return tuple(every)

    def _obstacle(self) -> str | None:
        """Why these ranks cannot be compared."""
        if len(self._devices) < 2:
            return "a preflight compares ranks with each other, and there is only one"
        if len(models := dict.fromkeys(each.name for each in self._devices)) > 1:
            return f"the ranks have different devices, whose results may differ: {listed(models)}"
        return None

    def _problems(self) -> list[str]:
        """What the session itself could not do."""
        off = self._status["replay"].get("off")
        return [*self._status["failures"], *([f"nothing was compared: {off}"] if off else [])]

    def _report(self, problems: Sequence[str]) -> Report:
        coverage, incidents = self._coverage(), tuple(self._incidents.values())
        conclusion, reasons = conclude(incidents, len(self._devices), coverage, problems)
        return Report(
            conclusion,
            reasons,
            incidents,
            self._devices,
            coverage,
            time.monotonic() - self._began,
            (self._status.get("replay") or {}).get("checks", 0),
            None if self._session is None else str(self._session.run_dir),
        )

    def _coverage(self) -> Coverage:
        replay = self._status.get("replay") or {}
        recipes = {
            kind: {name: counts[name] for name in ("targets", "visited", "cycles")}
            for kind, counts in replay.get("coverage", {}).items()
        }
        turns = replay.get("checks", 0)
        layers, compared = self._work.layers, replay.get("last", {})
        return Coverage(
            # One layer after the other, one in each check.
            layers={
                name: (turns + len(layers) - 1 - place) // len(layers) if name in compared else 0
                for place, name in enumerate(layers)
            },
            recipes=recipes,
            links={} if self._links is None else dict(Counter(each.kind for each in self._links.every)),
            not_checked=replay.get("not_checked", {}),
        )
