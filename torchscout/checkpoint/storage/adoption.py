"""Lets a job take over the checkpoints that another job has written to a folder (paper, section 9).

Every shard and ledger names its job, so each is written again. If this is killed, run it again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

from torchscout.checkpoint.storage import job_file, lock, shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import Blob, decode, encode
from torchscout.checkpoint.trust import ledger
from torchscout.errors import CheckpointError, DamagedError

__all__ = ["Adopted", "adopt"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """What ``adopt`` has done."""

    shards: int
    ledgers: int
    damaged: tuple[str, ...]
    """Files that are damaged and were left unchanged, in words."""


def adopt(folder: Path, job: str) -> Adopted:
    """Make this folder and all shards and ledgers in it belong to ``job``.

    Raises ``CheckpointError`` if there is no such folder, or while a job uses it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    with lock.claim(folder, "scout checkpoint adopt"):
        shard_problems = [_rewrite_shard(each.path, job) for each in shard_files(folder)]
        ledger_problems = [_rewrite_ledger(folder, rank, job) for rank in ledger.ranks_in(folder)]
        job_file.write(folder, job)
    damaged = tuple(filter(None, (*shard_problems, *ledger_problems)))
    return Adopted(shard_problems.count(None), ledger_problems.count(None), damaged)


def _rewrite_shard(path: Path, job: str) -> str | None:
    """Returns how the shard is damaged, or None once it is the job's."""
    try:
        if shards.inspect(path).identity.job == job:
            return None
        with path.open("rb") as file:
            header, tensors = decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        blobs = [Blob(each.name, each.dtype, each.shape, tensors[each.name]) for each in header.entries]
        identity = replace(header.identity, job=job)
        shards.replace(path, encode(identity, header.role, header.document, blobs))
    except DamagedError as error:
        text = str(error)
        return text if text.startswith(str(path)) else f"{path}: {text}"
    return None


def _rewrite_ledger(folder: Path, rank: int, job: str) -> str | None:
    try:
        found = ledger.inspect(folder, rank)
    except DamagedError as error:
        return str(error)
    if found is not None and found.job != job:
        size, coverage = found.world_size, found.coverage
        ledger.write(folder, rank, found.gate, job=job, world_size=size, coverage=coverage)
    return None
