"""How long it takes to have a rank's state again, from memory and from disk, against PyTorch's own ways.

Ours finds the shard, verifies every bit and puts all of it back; theirs verify nothing. Files on the disk are
put out of the page cache before each reading; ``TMPDIR`` says on which disk they are.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from checkpoint_parts.job import MEMBER, Figures, Job, alone, identity, in_memory, made, ms, synchronize
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.resume.fetch import fetch
from torchscout.checkpoint.resume.transfer import Links
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.communicators import Communicators
from torchscout.state.collect import StateParts
from torchscout.state.restore import restore as restore_state

ROUNDS, WARM = 5, 1


class Way(NamedTuple):
    """One way to have a state again."""

    load: Callable[[], Any]
    put_back: Callable[[Any], object]
    """What was loaded, into model and optimizer."""


def restore(megabytes: int) -> Figures:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = Job(megabytes)
    job.step()
    figures: Figures = {"state": {"megabytes": round(job.state().bytes / 2**20, 1)}}
    with in_memory() as memory, tempfile.TemporaryDirectory() as disk, alone(memory):
        communicators = Communicators()
        links = Links(communicators.exchange, communicators.group)
        kept, empty = made(memory / "kept"), made(memory / "empty")
        _keep(job, kept)
        figures |= _compared(job, kept, _fetched(job, (kept, empty), links), "memory")
        _copy(kept, Path(disk))
        figures |= _compared(job, Path(disk), _fetched(job, (empty, Path(disk)), links), "disk")
        communicators.close()
    return figures


def _keep(job: Job, folder: Path) -> None:
    """The same state, three times."""
    snapshots, state = Snapshots(folder, 0, copies=2), job.state()
    snapshots.prepare(state.bytes, state.tensors.values())
    assert snapshots.wait_until_ready(60.0)
    capture = snapshots.capture(identity(1), TrustLevel.VERIFIED, state)
    snapshots.fence()
    assert capture.wait(), capture.problem
    snapshots.close()
    torch.save(job.state_dict(), folder / "saved.pt")
    dcp.save(job.state_dict(), checkpoint_id=str(folder / "dcp"))


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    os.sync()


def _fetched(job: Job, folders: tuple[Path, Path], links: Links) -> Way:
    """As ``session.resume`` does."""
    return Way(
        lambda: fetch(MEMBER, [identity(1).generation], folders, links, shards.load).value.tree,
        lambda tree: restore_state(StateParts(job.model, [job.optimizer], {}), tree),
    )


def _compared(job: Job, folder: Path, ours: Way, tier: str) -> Figures:
    def put_back(loaded: dict[str, Any]) -> None:
        job.model.load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optimizer"])

    def loaded_in_place() -> dict[str, Any]:
        found = job.state_dict()
        dcp.load(found, checkpoint_id=str(folder / "dcp"))
        return found

    ways = {
        "resume": ours,
        "torch.load": Way(lambda: torch.load(folder / "saved.pt"), put_back),
        "DCP load": Way(loaded_in_place, put_back),
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS + WARM):
        for name, way in ways.items():
            _put_out_of_cache(folder)
            rows[name].append(_once(job, way))
    middle = {
        name: [statistics.median(column) for column in zip(*rows[name][WARM:], strict=True)] for name in rows
    }
    resumed = sum(middle["resume"])
    return {
        f"{name}, {tier}": {
            "ms": ms(load + back),
            "load_ms": ms(load),
            "put_back_ms": ms(back),
            "gb_s": round(job.state().bytes / 1e9 / (load + back), 2),
            "to_resume": round((load + back) / resumed, 2),
        }
        for name, (load, back) in middle.items()
    }


def _once(job: Job, way: Way) -> tuple[float, float]:
    """The seconds to load and to put back; the state is spoiled before, and must be right afterwards."""
    sample = next(job.model.parameters())
    expected = sample.detach().clone()
    with torch.no_grad():
        sample.zero_()
    synchronize()
    start = time.perf_counter()
    found = way.load()
    loaded = time.perf_counter()
    way.put_back(found)
    synchronize()
    done = time.perf_counter()
    assert torch.equal(next(job.model.parameters()), expected)
    return loaded - start, done - loaded


def _put_out_of_cache(folder: Path) -> None:
    """A matter of disks: what lies in memory stays."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            with suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
