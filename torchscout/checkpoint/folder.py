"""A checkpoint folder: the job that it belongs to, and the lock by which one run at a time uses it (paper,
section 9).

The name of the job is in the file ``job``, so that it does not depend on the folder's path. It is also the
name of the job's folder in memory, and part of every shard and ledger.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchscout.checkpoint import ledger
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import Blob, decode, encode
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError, DamagedError
from torchscout.log import log
from torchscout.utils.private_files import NoLocksError, open_file, open_to_read, try_lock

if TYPE_CHECKING:
    from torchscout.communicators import Communicators  # imports torch

__all__ = [
    "LOCK",
    "Adopted",
    "Lock",
    "Owner",
    "adopt",
    "agree_on_name",
    "agreed_name",
    "claim",
    "name_in",
    "owner_of",
    "put_name",
]

LOCK = "lock"
_JOB = "job"
_MAX_NAME_BYTES = 1024
_MAX_OWNER_BYTES = 1 << 16
_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.01
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds a folder; if all processes of a run hold it, the first of them."""

    job: str
    host: str
    pid: int
    since: str
    """Wall-clock time."""
    run: str
    """Distinguishes runs of one job: a digest, because the run's identifier may be secret."""

    def __str__(self) -> str:
        return f"job {self.job!r}, pid {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def own(cls, job: str, run: str) -> Owner:
        digest = hashlib.sha256(f"torchscout lock {run}".encode()).hexdigest()
        return cls(job, socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"), digest)

    @property
    def is_this_process(self) -> bool:
        return (self.host, self.pid) == (socket.gethostname(), os.getpid())

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Owner | None:
        """The owner, or None if the bytes are incomplete."""
        try:
            document: Any = json.loads(data)
            found = cls(**{field.name: document[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts = (found.job, found.host, found.since, found.run)
        return found if type(found.pid) is int and all(isinstance(each, str) for each in texts) else None


# [Note: one run, many processes]
#
# The kernel keeps a lock while any process of the run lives, also a stopped one, and releases it with the
# last: nothing has to be cleaned up after a crash. Every process of a run holds the lock, shared. The first
# takes it exclusively, writes the owner into the file, and then downgrades to shared. A process that gets it
# shared reads the owner and stays if that is its own run. While a process holds it exclusively, the owner is
# unknown for a moment. Downgrading is not atomic: a process that loses the lock there starts again.
#
# A lock on a deleted file has no effect, and ``memory.forget`` deletes the file that it has locked. So a
# process that has acquired the lock checks that the file still exists, and starts again if it does not.
#
# The file is opened for writing, because NFS emulates flock by locks on byte ranges, which need that.


class Lock:
    """A claim on a folder until ``release``, the end of the ``with`` block, or the end of the process."""

    def __init__(self, folder: Path, owner: Owner, file: int | None) -> None:
        self.folder, self.owner = folder, owner
        self._file = file
        if file is not None:
            _held.add(self)

    @property
    def problem(self) -> str | None:
        """Why the claim does not exclude other runs, in a sentence; None if it does."""
        return _without_locks(self.folder) if self._file is None else None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock; the last process of a run clears the owner. Idempotent."""
        if self not in _held:
            return
        _held.remove(self)
        assert self._file is not None
        try:
            if try_lock(self._file, fcntl.LOCK_EX):
                os.ftruncate(self._file, 0)
        finally:
            os.close(self._file)

    def leave(self) -> None:
        """Close the lock's file in a forked child, which must not hold the folder."""
        assert self._file is not None
        os.close(self._file)


_held: set[Lock] = set()
"""Keeps claims alive that the program does not refer to."""


def _leave_all() -> None:
    for lock in _held:
        lock.leave()
    _held.clear()


# A forked child, such as a data loader's worker, may outlive the trainer for a while.
os.register_at_fork(after_in_child=_leave_all)


def claim(folder: Path | str, job: str, run: str | None = None) -> Lock:
    """Lock this folder, creating it if missing; raises ``CheckpointError``, with the owner, if it is in use.

    All processes of a run pass the same ``run``, a string unique to it, and hold the folder together; without
    one this process holds it alone. It may be secret: only a digest is stored. Where the file system has no
    locks, other runs are not excluded, and ``Lock.problem`` says so.
    """
    folder, owner = Path(folder), Owner.own(job, run or secrets.token_hex(16))
    try:
        file, holder = _acquired(folder, owner)
    except NoLocksError:
        return Lock(folder, owner, None)
    except OSError as error:
        raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
    if holder is None or holder.run != owner.run:
        os.close(file)
        who = "an unidentified process" if holder is None else holder
        raise CheckpointError(f"{folder} is in use by {who}; wait for it, end it, or use another folder")
    return Lock(folder, owner, file)


def owner_of(folder: Path | str) -> Owner | None:
    """The process that holds this folder now, or None. Writes nothing.

    Raises ``CheckpointError`` if that cannot be known.
    """
    folder = Path(folder)
    try:
        file = _opened(folder / LOCK)
        try:
            if try_lock(file, fcntl.LOCK_EX):
                return None
            return _read_owner(file) or Owner("unknown", "an unknown host", 0, "an unknown time", "")
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except NoLocksError as error:
        raise CheckpointError(_without_locks(folder)) from error
    except OSError as error:
        raise CheckpointError(f"cannot read the lock of {folder}: {error.strerror}") from error


def _acquired(folder: Path, owner: Owner) -> tuple[int, Owner | None]:
    """The lock's file, open, and the owner with whom it is shared; None if it cannot be acquired."""
    while True:
        file = _lock_file(folder)
        try:
            holder = _shared(file, owner)
            if os.fstat(file).st_nlink:
                return file, holder
        except OSError:
            os.close(file)
            raise
        os.close(file)


def _lock_file(folder: Path, attempts: int = 100) -> int:
    """Open the lock's file, and create it and its folder if missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open_file(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except (FileExistsError, FileNotFoundError):  # perhaps ``forget`` has just deleted the folder
        if not attempts:
            raise
        return _lock_file(folder, attempts - 1)


def _shared(file: int, owner: Owner) -> Owner | None:
    """Acquire the lock, shared, and return its owner; None if that fails, or if the file is deleted."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline and os.fstat(file).st_nlink:
        if try_lock(file, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
            os.pwrite(file, owner.to_bytes(), 0)
        if try_lock(file, fcntl.LOCK_SH):
            if (holder := _read_owner(file)) is not None:
                return holder
            fcntl.flock(file, fcntl.LOCK_UN)  # the owner has just released it
        time.sleep(_PAUSE_SECONDS)
    return None


def _opened(path: Path) -> int:
    try:
        return open_file(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return open_file(path, os.O_RDONLY)  # enough for locks on a local disk


def _read_owner(file: int) -> Owner | None:
    return Owner.from_bytes(os.pread(file, _MAX_OWNER_BYTES, 0))


def _without_locks(folder: Path) -> str:
    return (
        f"the file system of {folder} has no locks, so it is not noticed if two runs of a job use it at "
        "the same time, and their checkpoints are lost; make sure that the last run has ended"
    )


def name_in(folder: Path) -> str | None:
    """The job that this folder belongs to; None if it belongs to none yet, or does not exist."""
    try:
        with open_to_read(folder / _JOB) as file:
            text = file.read(_MAX_NAME_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / _JOB}: {error.strerror}") from error
    if not JOB_NAME.fullmatch(text):
        raise CheckpointError(f"{folder / _JOB} does not hold the name of a job, but {text!r:.80}")
    return text


def put_name(folder: Path, name: str) -> None:
    """Make this folder belong to a job; raises ``CheckpointError`` if it belongs to another one already."""
    try:
        shards.write(folder / _JOB, _as_text(name))  # of several jobs, only the first can
    except CheckpointError:
        if (found := name_in(folder)) is None:
            raise
        agreed_name(name, folder, [found])


def agree_on_name(wanted: str | None, folder: Path, communicators: Communicators) -> str:
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


def _as_text(name: str) -> list[bytes]:
    return [f"{name}\n".encode()]


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
    with claim(folder, "scout checkpoint adopt") as lock:
        if lock.problem is not None:
            log.warning("%s", lock.problem)
        shard_problems = [_rewrite_shard(each.path, job) for each in shard_files(folder)]
        ledger_problems = [_rewrite_ledger(folder, rank, job) for rank in ledger.ranks_in(folder)]
        shards.replace(folder / _JOB, _as_text(job))
    damaged = tuple(filter(None, (*shard_problems, *ledger_problems)))
    return Adopted(shard_problems.count(None), ledger_problems.count(None), damaged)


def _rewrite_shard(path: Path, job: str) -> str | None:
    """Returns how the shard is damaged, or None once it is the job's."""
    try:
        if shards.inspect(path).identity.job == job:
            return None
        with open_to_read(path) as file:
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
    if found is not None:
        for _ in range(2):  # the second one makes the previous ledger the job's, too
            size, coverage = found.world_size, found.coverage
            ledger.write(folder, rank, found.gate, job=job, world_size=size, coverage=coverage)
    return None
