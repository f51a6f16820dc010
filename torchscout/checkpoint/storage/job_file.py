"""The file ``job``, which names the job that a checkpoint folder belongs to (paper, section 9).

The name is stored in the folder, so that it does not depend on the folder's path. It is also the name of the
job's folder in memory, and part of every shard and ledger.
"""

from __future__ import annotations

import mmap
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchscout.checkpoint import ledger
from torchscout.checkpoint.storage import lock, shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import Blob, decode, encode
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from torchscout.communicators import Communicators  # imports torch

__all__ = ["Adopted", "adopt", "agree", "agreed_name", "name_in", "write"]

_FILE = "job"
_MAX_BYTES = 1024


def name_in(folder: Path) -> str | None:
    """The job that this folder belongs to; None if it belongs to none yet, or does not exist.

    Folders of earlier versions have no such file; there the ledgers name the job.
    """
    try:
        with (folder / _FILE).open("rb") as file:
            text = file.read(_MAX_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return _name_in_ledgers(folder)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / _FILE}: {error.strerror}") from error
    if not JOB_NAME.fullmatch(text):
        raise CheckpointError(f"{folder / _FILE} does not hold the name of a job, but {text!r:.80}")
    return text


def write(folder: Path, name: str) -> None:
    """Make this folder belong to a job."""
    shards.replace(folder / _FILE, [f"{name}\n".encode()])


def agree(wanted: str | None, folder: Path, communicators: Communicators) -> str:
    """The job's name, which all ranks agree on. Every rank makes this call; see ``agreed_name``."""
    found, name, problem = None, None, None
    try:
        found = name_in(folder)
    except CheckpointError as error:
        problem = str(error)
    names = communicators.exchange(found)
    try:
        name = agreed_name(wanted, folder, names)
    except CheckpointError as error:
        problem = problem or str(error)
    communicators.together(problem, CheckpointError)
    said: str = communicators.from_rank_0(name)
    return said


def agreed_name(wanted: str | None, folder: Path, found: Sequence[str | None]) -> str:
    """The job's name, given the configured one and those that ranks have found in their folders.

    Makes up a new name if there is neither; all ranks then use rank 0's. Raises ``CheckpointError`` if the
    names differ.
    """
    names = list(dict.fromkeys(each for each in found if each is not None))
    if wanted is not None and names and names != [wanted]:
        raise CheckpointError(
            f"{folder} belongs to job {names[0]!r}, not to {wanted!r}. Leave CheckpointConfig(job=) out, run "
            f"`scout checkpoint adopt {folder} --as {wanted}`, or use another directory"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"ranks find checkpoints of different jobs in {folder}: {', '.join(map(repr, names))}. Use "
            "another directory, or run `scout checkpoint adopt DIR --as NAME` on each machine"
        )
    return wanted or (names[0] if names else _new_name(folder))


def _new_name(folder: Path) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name)[:64].lstrip("-.")
    return f"{readable or 'job'}-{secrets.token_hex(6)}"


def _name_in_ledgers(folder: Path) -> str | None:
    try:
        ranks = ledger.ranks_in(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    for rank in ranks:
        with suppress(CheckpointError):  # resuming reports damaged ledgers
            if (found := ledger.inspect(folder, rank)) is not None:
                return found.job
    return None


@dataclass(frozen=True, slots=True)
class Adopted:
    """What ``adopt`` has done."""

    shards: int
    ledgers: int
    damaged: tuple[str, ...]
    """Files that are damaged and were left unchanged, in words."""


def adopt(folder: Path, job: str) -> Adopted:
    """Make this folder and all shards and ledgers in it belong to ``job``. If this is killed, run it again.

    Raises ``CheckpointError`` if there is no such folder, or while a job uses it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    with lock.claim(folder, "scout checkpoint adopt"):
        shard_problems = [_rewrite_shard(each.path, job) for each in shard_files(folder)]
        ledger_problems = [_rewrite_ledger(folder, rank, job) for rank in ledger.ranks_in(folder)]
        write(folder, job)
    damaged = tuple(filter(None, (*shard_problems, *ledger_problems)))
    return Adopted(shard_problems.count(None), ledger_problems.count(None), damaged)


def _rewrite_shard(path: Path, job: str) -> str | None:
    """Returns how the shard is damaged, or None once it is the job's."""
    try:
        if shards.inspect(path).identity.job == job:
            return None
        with path.open("rb") as file:
            header, tensors = decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        blobs = [
            Blob(each.name, each.dtype, each.shape, tensors[each.name], signature=each.signature)
            for each in header.entries
        ]
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
