"""The files behind snapshots: a few, filled in turn (paper, section 8).

[Note: sealed or not]

A file has the name of a shard only while it is whole: it loses that name, by a rename, before its first byte
changes, and gets the next one, by a rename, after its last. Whoever is killed in between leaves a file of a
temporary name. The next start takes it over; it is locked while its owner lives, so that ``shards.clean``
leaves it alone until then. Files are reused because fresh memory costs as much as the copy itself.

A reader that has opened a file before it lost its name sees bytes change. So whoever reads in this process
holds the generation meanwhile (``Slots.hold``), and every reader verifies digests.
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

from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.snapshot.device_copy import Pinning
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError

__all__ = ["BufferPool", "SnapshotBuffer"]

_DAMAGED = Generation(-1)
_ATTEMPTS = 8


class SnapshotBuffer:
    """One file, mapped once it is written to."""

    def __init__(self, path: Path, generation: Generation | None, file: int | None = None) -> None:
        self.path = path
        self.generation = generation
        """What it holds, whole; None while it has a temporary name."""
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
                continue  # the next one has another name

    def memory(self, size: int) -> torch.Tensor:
        """Exactly so many bytes, all of them allocated: a full file system says so here, not by a signal."""
        if self._tensor is not None and len(self._tensor) == size:
            return self._tensor
        self._unmap()
        assert self._file is not None
        os.ftruncate(self._file, size)
        os.posix_fallocate(self._file, 0, size)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._memory = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | populate)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)  # workers of a loader have no use for it
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        return self._tensor

    def pin(self) -> bool:
        """Let devices write to it directly; False where they cannot."""
        assert self._tensor is not None
        if self.pinning is None:
            self.pinning = Pinning(self._tensor)
        return self.pinning.done

    def lock(self) -> None:
        """Open it, if it is not, as the one that writes to it."""
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
            with suppress(BufferError):  # somebody still looks at it; it goes when they do
                memory.close()


class BufferPool:
    """This rank's files, oldest first. Any thread may call."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        count: int,
        protected: Callable[[], frozenset[Generation]] = frozenset,
    ) -> None:
        self._folder, self._rank, self._count = folder, rank, count
        self._lock = threading.Lock()
        self._held: dict[Generation, int] = {}
        self._protected = protected
        self._slots = [*self._left_unsealed(), *self._left_sealed()]

    def take(self) -> SnapshotBuffer:
        """One to be written to, without a shard's name: free, new, or the oldest of those that are sealed."""
        with self._lock:
            for slot in [each for each in self._slots if each.generation is None]:
                return slot
            if len(self._slots) < self._count:
                self._slots.append(SnapshotBuffer.create(self._folder, self._rank))
                return self._slots[-1]
            kept = self._protected().union(self._held)
            for slot in [each for each in self._slots if each.generation not in kept]:
                if self._unseal(slot):
                    return slot
                self._slots.append(SnapshotBuffer.create(self._folder, self._rank))
                return self._slots[-1]
        raise CheckpointError(f"all {self._count} snapshots in memory are needed or being read")

    def prepare(self, size: int) -> None:
        """Have a file of this size ready, if there are not all yet."""
        with self._lock:
            is_wanted = len(self._slots) < self._count and all(each.generation for each in self._slots)
        if is_wanted:
            slot = self.take()
            try:
                slot.memory(size)
            except OSError:
                self.discard(slot)
                raise

    def seal(self, slot: SnapshotBuffer, identity: ShardIdentity) -> None:
        """Give it its shard's name; it must be whole."""
        path = shards.path_of(self._folder, identity, self._rank)
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is sealed and is not overwritten")
        slot.make_writable(False)
        with self._lock:
            for attempt in range(_ATTEMPTS):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                try:
                    slot.rename(path, identity.generation)
                    break
                except FileNotFoundError:
                    # Another rank removed the folder because it was empty.
                    if attempt == _ATTEMPTS - 1 or not slot.path.exists():
                        raise
            self._slots.remove(slot)
            self._slots.append(slot)

    def discard(self, slot: SnapshotBuffer) -> None:
        """It could not be filled; whatever is wrong with it, its memory is given back."""
        with self._lock:
            self._drop(slot)

    def retire(self, generation: Generation) -> None:
        """Take this one's name away; the file is the next to be filled, unless somebody reads it."""
        with self._lock:
            for slot in [each for each in self._slots if each.generation == generation]:
                if self._unseal(slot) and generation in self._held:
                    self._drop(slot)

    def hold(self, generation: Generation) -> Path | None:
        """Keep this one as it is until ``release``, and say where it is, if it is."""
        with self._lock:
            for slot in self._slots:
                if slot.generation == generation:
                    self._held[generation] = self._held.get(generation, 0) + 1
                    return slot.path
        return None

    def release(self, generation: Generation) -> None:
        with self._lock:
            self._held[generation] -= 1
            if not self._held[generation]:
                del self._held[generation]

    @property
    def sealed(self) -> list[Generation]:
        """Oldest first."""
        with self._lock:
            return [each.generation for each in self._slots if each.generation not in (None, _DAMAGED)]

    def close(self) -> None:
        """What is sealed stays; what is not is removed."""
        with self._lock:
            for slot in list(self._slots):
                if slot.generation is None:
                    self._drop(slot)
                slot.close()
            self._slots = []

    def _unseal(self, slot: SnapshotBuffer) -> bool:
        """False, and it is one no more, if somebody removed the file, or a child of a dead owner has it."""
        folder = slot.path.parent
        try:
            slot.rename(_temporary(self._folder, self._rank), None)
            slot.make_writable(True)
            slot.lock()
        except (FileNotFoundError, _CleanedError):
            self._drop(slot)
            return False
        with suppress(OSError):  # others keep theirs there
            folder.rmdir()
        return True

    def _drop(self, slot: SnapshotBuffer) -> None:
        self._slots.remove(slot)
        if slot.generation is None:
            slot.path.unlink(missing_ok=True)
        slot.close()

    def _left_unsealed(self) -> list[SnapshotBuffer]:
        """What an earlier life of this rank was filling when it ended."""
        found = []
        for path in sorted(self._folder.glob(f".rank-{self._rank}.*.writing")):
            with suppress(OSError):  # cleaned away meanwhile, or somebody lives who has it
                found.append(SnapshotBuffer(path, None, _locked(path)))
        return found

    def _left_sealed(self) -> list[SnapshotBuffer]:
        """Those that are damaged come first, they are the least loss."""
        found = [
            SnapshotBuffer(each.path, _generation(each.path))
            for each in (shard_files(self._folder) if self._folder.is_dir() else ())
            if each.rank == each.holder == self._rank
        ]
        return sorted(found, key=lambda slot: (slot.generation or _DAMAGED)[::-1])


class _CleanedError(OSError):
    """Before it was locked somebody took the file for abandoned."""


def _generation(path: Path) -> Generation:
    try:
        return shards.inspect(path).identity.generation
    except CheckpointError:
        return _DAMAGED


def _temporary(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.{secrets.token_hex(8)}.writing"


def _locked(path: Path, flags: int = 0) -> int:
    """Open and locked, by which others know that its owner lives."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink:
            return file
    except BlockingIOError:
        os.close(file)
        raise _CleanedError(f"somebody else has {path}") from None
    except OSError:
        os.close(file)
        raise
    os.close(file)
    raise _CleanedError(f"{path} was removed")
