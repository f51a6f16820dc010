"""Lets a job take over the checkpoints in a folder that another one has written (paper, section 9).

Every shard and ledger says whose it is, so each is written again. One that was begun and killed is run again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

from torchscout.checkpoint import ledger
from torchscout.checkpoint.storage import job_file, lock, shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import Blob, decode, encode
from torchscout.errors import CheckpointError, DamagedError

__all__ = ["Adopted", "adopt"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """What has become of a folder."""

    shards: int
    ledgers: int
    damaged: tuple[str, ...]
    """Files that are not whole and were left as they are, in words."""


def adopt(folder: Path, job: str) -> Adopted:
    """Let all that lies in this folder be of that job; ``CheckpointError`` while a job uses the folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    with lock.claim(folder, "scout checkpoint adopt"):
        found = [_shard_written(each.path, job) for each in shard_files(folder)]
        found_ledgers = [_ledger_written(folder, rank, job) for rank in ledger.ranks_in(folder)]
        job_file.write(folder, job)
    damaged = tuple(each for each in (*found, *found_ledgers) if each is not None)
    return Adopted(found.count(None), found_ledgers.count(None), damaged)


def _shard_written(path: Path, job: str) -> str | None:
    """Write it again, unless it is that job's; how it is damaged, if it is."""
    try:
        if shards.inspect(path).identity.job == job:
            return None
        with path.open("rb") as file:
            header, tensors = decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        blobs = [Blob(each.name, each.dtype, each.shape, tensors[each.name]) for each in header.entries]
        identity = replace(header.identity, job=job)
        shards.replace(path, encode(identity, header.role, header.document, blobs))
    except DamagedError as error:
        return str(error)
    return None


def _ledger_written(folder: Path, rank: int, job: str) -> str | None:
    try:
        found = ledger.inspect(folder, rank)
    except DamagedError as error:
        return str(error)
    if found is not None and found.job != job:
        size, coverage = found.world_size, found.coverage
        ledger.write(folder, rank, found.gate, job=job, world_size=size, coverage=coverage)
    return None
