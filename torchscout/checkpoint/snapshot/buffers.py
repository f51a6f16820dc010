"""A pool of files in memory that snapshots are written to in turn (paper, section 8).

[Note: sealed or not]

A file has a shard's name only while it is whole: it is renamed to a temporary name before its first byte
changes, and to its next name after the last. A killed process leaves a file with a temporary name, which the
next run reuses. The file is locked while its owner lives, so that ``shards.clean`` does not remove it. Files
are reused because allocating memory costs as much as the copy itself.

A reader that has opened a file before it was renamed sees its bytes change. So readers in this process hold
the generation (``BufferPool.hold``), and every reader verifies digests.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.snapshot.device_copy import Pinning
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError

__all__ = ["BufferPool", "SnapshotBuffer"]

_DAMAGED = Generation(-1)
_ATTEMPTS = 8


class SnapshotBuffer:
    """One file, mapped into memory when it is first written to."""

    def __init__(self, path: Path, generation: Generation | None, file: int | None = None) -> None:
        self.path = path
        self.generation = generation
        """The generation that it holds; None while it has a temporary name."""
        self.pinning: Pinning | None = None
        self._file = file
        self._memory: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = None

    @classmethod
    def create(cls, folder: Path, rank: int) -> SnapshotBuffer:
        while True:
            path = _temporary(folder, rank)
            try:
                return cls(path, None, _locked(path, os.O_CREAT | os.O_EXCL))
            except _CleanedError:
                continue

    def memory(self, size: int) -> torch.Tensor:
        """Map exactly ``size`` bytes, all allocated: a full file system raises here, without SIGBUS."""
        if self._tensor is not None and len(self._tensor) == size:
            return self._tensor
        self._unmap()
        assert self._file is not None
        os.ftruncate(self._file, size)
        os.posix_fallocate(self._file, 0, size)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._memory = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | populate)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)  # data loader workers do not need it
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        return self._tensor

    def pin(self) -> bool:
        """Let devices write to it directly; returns whether they can."""
        assert self._tensor is not None
        if self.pinning is None:
            self.pinning = Pinning(self._tensor)
        return self.pinning.done

    def lock(self) -> None:
        """Open and lock the file for writing. Idempotent."""
        if self._file is None:
            self._file = _locked(self.path)

    def rename(self, path: Path, generation: Generation | None) -> None:
        self.path.rename(path)
        self.path, self.generation = path, generation

    def make_writable(self, writable: bool) -> None:
        self.path.chmod(0o600 if writable else 0o400)

    def close(self) -> None:
        self._unmap()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _unmap(self) -> None:
        if self.pinning is not None:
            self.pinning.undo()
            self.pinning = None
        memory, self._memory, self._tensor = self._memory, None, None
        if memory is not None:
            with suppress(BufferError):  # still referenced; it is unmapped with the last reference
                memory.close()


class BufferPool:
    """This rank's buffers, oldest first. Thread-safe."""

    def __init__(
        self, folder: Path, rank: int, count: int, protected: Callable[[], frozenset[Generation]] = frozenset
    ) -> None:
        self._folder, self._rank, self._count = folder, rank, count
        self._lock = threading.Lock()
        self._held: dict[Generation, int] = {}
        self._protected = protected
        self._buffers = [*self._left_unsealed(), *self._left_sealed()]

    def take(self) -> SnapshotBuffer:
        """A buffer to write to: an unused or new one, or the oldest sealed one that is not needed.

        Raises ``CheckpointError`` if all are needed.
        """
        with self._lock:
            if unused := [each for each in self._buffers if each.generation is None]:
                return unused[0]
            if len(self._buffers) >= self._count:
                needed = self._protected().union(self._held)
                buffer = next((each for each in self._buffers if each.generation not in needed), None)
                if buffer is None:
                    raise CheckpointError(f"all {self._count} snapshots in memory are needed or being read")
                if self._unseal(buffer):
                    return buffer
            self._buffers.append(SnapshotBuffer.create(self._folder, self._rank))
            return self._buffers[-1]

    def prepare(self, size: int) -> None:
        """Allocate the next buffer in advance, unless all exist."""
        with self._lock:
            is_wanted = len(self._buffers) < self._count and all(each.generation for each in self._buffers)
        if is_wanted:
            buffer = self.take()
            try:
                buffer.memory(size)
            except OSError:
                self.discard(buffer)
                raise

    def seal(self, buffer: SnapshotBuffer, identity: ShardIdentity) -> None:
        """Give a completely written buffer its shard's name; raises ``CheckpointError`` if that exists."""
        path = shards.path_of(self._folder, identity, self._rank)
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is sealed and is not overwritten")
        buffer.make_writable(False)
        with self._lock:
            for attempt in range(_ATTEMPTS):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                try:
                    buffer.rename(path, identity.generation)
                    break
                except FileNotFoundError:
                    # Another rank has removed the folder because it was empty.
                    if attempt == _ATTEMPTS - 1 or not buffer.path.exists():
                        raise
            self._buffers.remove(buffer)
            self._buffers.append(buffer)

    def discard(self, buffer: SnapshotBuffer) -> None:
        """Free a buffer that could not be written."""
        with self._lock:
            self._drop(buffer)

    def retire(self, generation: Generation) -> None:
        """Make this generation's buffer available again, or free it if it is being read."""
        with self._lock:
            for buffer in [each for each in self._buffers if each.generation == generation]:
                if self._unseal(buffer) and generation in self._held:
                    self._drop(buffer)

    def hold(self, generation: Generation) -> Path | None:
        """Keep this generation's buffer unchanged until ``release``; returns its path, or None."""
        with self._lock:
            for buffer in self._buffers:
                if buffer.generation == generation:
                    self._held[generation] = self._held.get(generation, 0) + 1
                    return buffer.path
        return None

    def release(self, generation: Generation) -> None:
        with self._lock:
            self._held[generation] -= 1
            if not self._held[generation]:
                del self._held[generation]

    @property
    def sealed(self) -> list[Generation]:
        """The sealed generations, oldest first."""
        with self._lock:
            return [each.generation for each in self._buffers if each.generation not in (None, _DAMAGED)]

    def close(self) -> None:
        """Close all buffers; sealed ones stay, others are removed."""
        with self._lock:
            for buffer in list(self._buffers):
                if buffer.generation is None:
                    self._drop(buffer)
                buffer.close()
            self._buffers = []

    def _unseal(self, buffer: SnapshotBuffer) -> bool:
        """Rename to a temporary name. False, and the buffer is dropped, if its file is gone or locked."""
        folder = buffer.path.parent
        try:
            buffer.rename(_temporary(self._folder, self._rank), None)
            buffer.make_writable(True)
            buffer.lock()
        except (FileNotFoundError, _CleanedError):
            self._drop(buffer)
            return False
        with suppress(OSError):  # it has other files
            folder.rmdir()
        return True

    def _drop(self, buffer: SnapshotBuffer) -> None:
        self._buffers.remove(buffer)
        if buffer.generation is None:
            buffer.path.unlink(missing_ok=True)
        buffer.close()

    def _left_unsealed(self) -> list[SnapshotBuffer]:
        """Buffers that an earlier process of this rank was writing when it ended."""
        found = []
        for path in sorted(self._folder.glob(f".rank-{self._rank}.*.writing")):
            with suppress(OSError):  # removed meanwhile, or its owner is alive
                buffer = SnapshotBuffer(path, None)
                buffer.make_writable(True)  # the process may have been killed while it sealed or unsealed it
                buffer.lock()
                found.append(buffer)
        return found

    def _left_sealed(self) -> list[SnapshotBuffer]:
        """Sealed buffers of an earlier process, damaged ones first, so that they are reused first."""
        if not self._folder.is_dir():
            return []
        found = [
            SnapshotBuffer(each.path, _generation(each.path))
            for each in shard_files(self._folder, owner=self._rank, holder=self._rank)
        ]
        return sorted(found, key=lambda buffer: (buffer.generation or _DAMAGED)[::-1])


class _CleanedError(OSError):
    """The file was removed or locked by another process before it could be locked."""


def _generation(path: Path) -> Generation:
    try:
        return shards.inspect(path).identity.generation
    except CheckpointError:
        return _DAMAGED


def _temporary(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.{secrets.token_hex(8)}.writing"


def _locked(path: Path, flags: int = 0) -> int:
    """Open and lock a file; raises ``_CleanedError`` if another process has removed or locked it."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink:
            return file
    except BlockingIOError:
        os.close(file)
        raise _CleanedError(f"another process has locked {path}") from None
    except OSError:
        os.close(file)
        raise
    os.close(file)
    raise _CleanedError(f"{path} was removed")
