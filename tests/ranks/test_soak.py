"""A healthy job of many steps with observer, replay, checkpoints and permission to restart and replace:
nothing is reported, nothing is done, and nothing grows.

``SCOUT_SOAK`` names another number of steps; ``make soak`` has twenty thousand.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.replayed_job import Net, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, RecoveryConfig, ReplayConfig
from torchscout.decision.types import Agreements, Incident
from torchscout.run.reader import Stamped, read
from torchscout.run.restart import RestartPlan
from torchscout.session.session import Session

INTERVAL = 10
PARTS = 10
"""In which a run is divided; figures of one part are compared with those of another."""
_SAMPLES = 10
"""In each part."""


STEPS = int(os.environ.get("SCOUT_SOAK", "2000"))
RANKS = 3
WARM = PARTS // 5
"""The first parts are not looked at: buffers, pools and histories fill."""
MOST_KIB = 6 << 10
"""More resident memory is growth; an allocator alone moves it by a mebibyte or two."""
MOST_SLOWER = 1.5
MOST_BYTES = 1 << 20
"""Of any file in the run directory."""
pytestmark = pytest.mark.slow


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


def train(rank: int, folder: Path, steps: int) -> Soaked:
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
    soaked, every = Soaked(), steps // (PARTS * _SAMPLES)
    usages: list[tuple[Usage, Usage]] = []
    seconds: list[float] = []
    used = time.process_time()
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
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


def grown(parts: Sequence[Part]) -> set[str]:
    """What the last part has more of than the first one that is warm."""
    first, last = parts[WARM], parts[-1]
    found = set()
    for before, after in ((first.trainer, last.trainer), (first.observer, last.observer)):
        found |= {"descriptors"} if after.descriptors > before.descriptors else set()
        found |= {"threads"} if after.threads > before.threads else set()
        found |= {"resident"} if after.resident > before.resident + MOST_KIB else set()
    found |= {"step time"} if last.cpu_ms > MOST_SLOWER * first.cpu_ms else set()
    return found | ({"checkpoints"} if last.checkpoints > 1.5 * first.checkpoints else set())


def compared(path: Path) -> int:
    """How often parameters were, by the counts that were written down."""
    lines = [each.item for each in read(path) if isinstance(each, Stamped)]
    surfaces = [each for line in lines if isinstance(line, Agreements) for each in line.surfaces]
    return sum(each.count for each in surfaces if each.surface == "state/parameters")


def shown(found: Sequence[Soaked], folder: Path) -> str:
    """The figures, for a person."""
    rows = ["rank part  trainer KiB/fds/threads  observer KiB/fds/threads  step ms  CPU ms  checkpoint bytes"]
    for rank, each in enumerate(found):
        for number, part in enumerate(each.parts):
            held = [
                f"{one.resident} {one.descriptors} {one.threads}" for one in (part.trainer, part.observer)
            ]
            times = f"{part.step_ms:.2f}  {part.cpu_ms:.2f}"
            rows.append(f"{rank} {number}  {'  '.join(held)}  {times}  {part.checkpoints}")
    sizes = sizes_in(folder / "run")
    return "\n".join([*rows, *(f"{size} {name}" for name, size in sorted(sizes.items()))])


def test_a_healthy_job_reports_nothing_and_does_not_grow(tmp_path: Path):
    found = run_ranks(train, RANKS, tmp_path, STEPS, timeout=120 + 0.5 * STEPS)
    print(shown(found, tmp_path))
    for rank, each in enumerate(found):
        assert (each.incidents, each.failures) == ([], [])
        assert each.status["replay"]["checks"] == STEPS // INTERVAL
        assert each.status["replay"]["certified"] == STEPS // INTERVAL * INTERVAL
        assert each.status["checkpoint"]["verified"] is not None
        assert each.status["checkpoint"]["problems"] == []
        assert each.status["observer"]["restarts"] == 0
        assert grown(each.parts) == set()
        assert compared(tmp_path / "run" / "records" / f"rank-{rank}.jsonl") == STEPS // INTERVAL
    sizes = sizes_in(tmp_path / "run")
    assert not any("incidents" in each for each in sizes), "no incident, and nothing was decided"
    assert not RestartPlan.path(tmp_path / "files").exists()
    assert max(sizes.values()) < MOST_BYTES, sizes
