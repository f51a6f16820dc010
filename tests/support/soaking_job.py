"""A tiny healthy job with all parts on, which measures its own processes while it trains."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.replayed_job import Net, batch
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, RecoveryConfig, ReplayConfig
from torchscout.decision.records.record import Incident
from torchscout.session.session import Session

__all__ = ["INTERVAL", "PARTS", "Part", "Soaked", "sizes_in", "train"]

INTERVAL = 10
PARTS = 10
"""In which a run is divided; figures of one part are compared with those of another."""
_SAMPLES = 10
"""In each part."""


@dataclass(frozen=True)
class Usage:
    """The resources that a process holds."""

    resident: int
    """KiB."""
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = Path("/proc") / str(pid)
        lines = (line.split() for line in (process / "status").read_text().splitlines())
        resident = next(int(words[1]) for words in lines if words[0] == "VmRSS:")
        return cls(resident, len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()]))

    @classmethod
    def usual(cls, samples: Sequence[Usage]) -> Usage:
        """Return what is held all the time: a file or thread may be there at one moment by chance."""
        return cls(
            int(statistics.median(each.resident for each in samples)),
            min(each.descriptors for each in samples),
            min(each.threads for each in samples),
        )


@dataclass(frozen=True)
class Part:
    """One part of a run."""

    trainer: Usage
    observer: Usage
    step_ms: float
    """That nine of ten steps take longer than; other jobs on the machine make it longer."""
    cpu_ms: float
    """Processor time of the trainer, all threads and checks included, for each step."""
    checkpoints: int
    """Bytes of checkpoints, in files and in memory."""


@dataclass(frozen=True)
class Soaked:
    parts: list[Part] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


def train(rank: int, folder: Path, steps: int, leak: str | None = None) -> Soaked:
    """Train; ``leak`` names what every tenth step of rank 1 never releases."""
    os.environ["TORCHSCOUT_MEMORY"] = str(folder / "memory")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=INTERVAL),
        observer=ObserverConfig(),
        checkpoint=CheckpointConfig(folder / "files"),
        run_dir=folder / "run",
        recovery=RecoveryConfig(act=["restart", "replace"]),
    )
    session.resume()
    soaked, every, kept = Soaked(), steps // (PARTS * _SAMPLES), []
    usages: list[tuple[Usage, Usage]] = []
    seconds: list[float] = []
    used = time.process_time()
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        tokens, targets = batch(step, rank)
        optimizer.zero_grad()
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        if leak is not None and rank == 1 and step % 10 == 0:
            kept.append(_LEAKS[leak]())
        if step % every == 0:
            usages.append((Usage.of(os.getpid()), Usage.of(session._monitor.observer.pid)))
        if step % (every * _SAMPLES) == 0:
            cpu, used = time.process_time() - used, time.process_time()
            soaked.parts.append(_part(usages, seconds, cpu, folder))
            usages, seconds = [], []
    return _ended(soaked, session)


def _ended(soaked: Soaked, session: Session) -> Soaked:
    torch.distributed.barrier()  # the rank that writes an incident down has done so
    soaked.incidents.extend(session.incidents)
    soaked.status.update(session.status())
    session.close()
    soaked.failures.extend(session.failures)
    return soaked


def _part(usages: Sequence[tuple[Usage, Usage]], seconds: list[float], cpu: float, folder: Path) -> Part:
    trainer, observer = zip(*usages, strict=True)
    checkpoints = sum(sizes_in(folder / "files").values()) + sum(sizes_in(folder / "memory").values())
    tenth = statistics.quantiles(seconds, n=10)[0]
    cpu_ms = 1e3 * cpu / len(seconds)
    return Part(Usage.usual(trainer), Usage.usual(observer), 1e3 * tenth, cpu_ms, checkpoints)


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the size of each file in a folder; files and folders may be removed meanwhile."""
    found: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            with suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = path.lstat().st_size
    return found


def _waiting_thread() -> threading.Event:
    event = threading.Event()
    threading.Thread(target=event.wait, daemon=True).start()
    return event


_LEAKS: dict[str, Callable[[], object]] = {
    "descriptors": lambda: os.open("/dev/null", os.O_RDONLY),
    "threads": _waiting_thread,
    "resident": lambda: bytearray(os.urandom(1 << 20)),
}
