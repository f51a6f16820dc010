"""The files in memory that snapshots are written to in turn (paper, section 8).

[Note: sealed or not]

A file has a shard's name only while the shard in it is complete: it is renamed to a temporary name before its
first byte changes, and to its next name after the last. A killed process leaves a file with a temporary name,
which ``shards.clean`` removes in the next run. The file is locked while its owner lives, so that no other
process removes it. A reader that has opened a file before it was renamed sees its bytes change: readers in
this process keep the file (``BufferPool.held``), and every reader verifies digests.

[Note: head room]

To allocate, map and pin memory takes longer than to copy the state, and the size of the state differs a
little from snapshot to snapshot. So all files are mapped and pinned before they are needed, with more room
than is expected, and stay mapped and pinned until a state does not fit. A background thread does this.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import open_file

__all__ = ["Buffer", "BufferPool"]

_ROOM_SHARE, _LEAST_ROOM = 4, 1 << 20
"""Head room: a quarter of the size, and at least 1 MiB."""
_MOST_TIMES = 4
"""A mapping that is more than so many times as large as needed is replaced."""
_ATTEMPTS = 8
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Buffer:
    """One file, mapped into memory."""

    def __init__(self, path: Path, generation: Generation | None) -> None:
        self.path = path
        self.generation = generation
        """The generation that it holds; None while it has a temporary name."""
        self.readers = 0
        self.is_retired = False
        """Whether its generation is not needed any more."""
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        """All bytes of the file; none before it is mapped."""
        self.is_pinned = False
        """Whether CUDA devices write to it directly."""
        self.saved: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """By offset: the tensor, which never changes, whose bytes are there, and their digest."""
        self.shard_bytes = 0
        """The size of the shard in it, or more."""
        self._may_pin = True
        """False once it was tried."""
        self._device: torch.device | None = None
        self._views: dict[Any, torch.Tensor] = {}
        self._file: int | None = None
        self._mapping: mmap.mmap | None = None

    @classmethod
    def create(cls, path: Path) -> Buffer:
        buffer = cls(path, None)
        while buffer._file is None:
            buffer._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(buffer._file, fcntl.LOCK_EX)
            if not os.fstat(buffer._file).st_nlink:  # ``shards.clean`` removed it before it was locked
                buffer.close()
        return buffer

    def prepare(self, size: int, limit: int | None, device: torch.device | None) -> None:
        """Map the file for a shard of this size, and pin it for a CUDA device, unless it is as wanted.

        Raises ``OSError`` if there is no space.
        """
        room = size + max(size // _ROOM_SHARE, _LEAST_ROOM)
        if not size <= len(self.memory) <= max(_MOST_TIMES * size, room, self.shard_bytes):
            self._map(max(size, room if limit is None else min(room, limit)))
        if device is not None and self._may_pin:
            self._pin(device)

    def view(self, first: int, like: torch.Tensor) -> torch.Tensor:
        """The memory at this offset as a dense tensor of the same dtype and shape, made only once."""
        key = (first, like.dtype, like.shape)
        if (found := self._views.get(key)) is None:
            found = self.memory[first : first + like.nbytes].view(like.dtype).view(like.shape)
            self._views[key] = found
        return found

    def rename(self, path: Path, generation: Generation | None) -> bool:
        """Give it another name. Returns False if the file at its path is not its own any more, because a
        damaged shard was repaired."""
        assert self._file is not None
        self.path.rename(path)
        self.path = path
        self.generation = generation
        self.is_retired = False
        os.fchmod(self._file, 0o600 if generation is None else 0o400)
        return os.path.samestat(path.stat(), os.fstat(self._file))

    def close(self) -> None:
        self._unmap()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _map(self, size: int) -> None:
        if self._file is None:  # it is of an earlier run
            self.path.chmod(0o600)
            self._file = open_file(self.path, os.O_RDWR)
            self.shard_bytes = os.fstat(self._file).st_size
            os.fchmod(self._file, 0o400)
            with suppress(BlockingIOError):  # a data loader's worker of the killed job has inherited the lock
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = max(size, self.shard_bytes)
        os.posix_fallocate(self._file, 0, size)  # a full file system raises here, and not SIGBUS later
        self._unmap()
        os.ftruncate(self._file, size)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._mapping = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | populate)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._mapping.madvise(mmap.MADV_DONTFORK)  # data loader workers do not need it
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _unmap(self) -> None:
        if self.is_pinned:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[no-untyped-call]
        self.is_pinned = False
        self._may_pin = True
        self.saved = {}
        self._views = {}
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):  # still referenced; it is unmapped with the last reference
                mapping.close()

    def _pin(self, device: torch.device) -> None:
        self._may_pin = False
        self._device = device
        with torch.cuda.device(device):  # on a new thread the first device would get a context
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.nbytes, _PORTABLE)
            self.is_pinned = not int(status)
            if not self.is_pinned:
                with suppress(RuntimeError):  # otherwise this thread's next kernel would report the error
                    torch.zeros(1, device=device)


class BufferPool:
    """This rank's buffers, those with the oldest snapshots first. Thread-safe, except for ``prepare``."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        count: int,
        limit: int | None,
        protected: Callable[[], frozenset[Generation]],
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._count = count
        self._limit = limit
        self._protected = protected
        self._lock = threading.Lock()
        self.problem = ""
        """Why not all buffers are prepared."""
        left = shard_files(folder, owner=rank, holder=rank) if folder.is_dir() else []
        self._buffers = [Buffer(each.path, each.generation) for each in left]

    def prepare(self, size: int, device: torch.device | None) -> None:
        """Allocate and map all buffers for snapshots of this size, and pin them if a CUDA device is given.

        Call it on one background thread at a time, and not between ``take`` and ``seal``.
        """
        self.problem = ""
        try:
            while len(self._buffers) < self._count:
                buffer = Buffer.create(self._temporary())
                with self._lock:
                    self._buffers.insert(0, buffer)
            for buffer in list(self._buffers):
                with self._lock:
                    if buffer not in self._buffers:
                        continue
                    buffer.readers += 1
                try:
                    buffer.prepare(size, self._limit, device)
                finally:
                    self._release([buffer])
        except (OSError, RuntimeError) as error:
            self.problem = str(error)

    def is_ready(self, size: int) -> bool:
        """Whether there is a buffer with room for the next snapshot.

        The newest snapshot must stay. Which of the others may go is known when a buffer is taken.
        """
        with self._lock:
            roomy = self._with_room(size)
            older = roomy[:-1] if len(roomy) >= self._count else []
            return any(each.generation is None for each in roomy) or any(not each.readers for each in older)

    def take(self, size: int) -> Buffer:
        """A buffer to write to: one without a snapshot, or with the oldest that is not needed.

        Raises ``CheckpointError`` with the reason if there is none. Never allocates.
        """
        needed = self._protected()
        with self._lock:
            roomy = self._with_room(size)
            if unused := [each for each in roomy if each.generation is None]:
                return unused[0]
            if len(roomy) < self._count:
                why = f": {self.problem}" if self.problem else ""
                raise CheckpointError(f"no memory for {size} bytes is ready{why}")
            for buffer in roomy:
                if buffer.generation not in needed and not buffer.readers and self._unseal(buffer):
                    return buffer
        raise CheckpointError(f"all {self._count} snapshots in memory are needed or being read")

    def seal(self, buffer: Buffer, identity: ShardIdentity, size: int) -> None:
        """Give a buffer the name of the shard of ``size`` bytes that was written to it.

        Raises ``CheckpointError`` if there is such a shard.
        """
        path = shards.path_of(self._folder, identity, self._rank)
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is sealed and is not overwritten")
        with self._lock:
            for attempt in range(_ATTEMPTS):
                try:
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    buffer.rename(path, identity.generation)
                    break
                except FileNotFoundError:
                    # Another rank has removed the folder because it was empty; or the buffer's file is gone.
                    if attempt == _ATTEMPTS - 1:
                        self._drop(buffer)
                        raise
            buffer.shard_bytes = size
            self._buffers.remove(buffer)
            self._buffers.append(buffer)

    def retire(self, generation: Generation) -> bool:
        """Make this generation's buffer available again once it is not read; False if there is none."""
        with self._lock:
            found = [each for each in self._buffers if each.generation == generation]
            for buffer in found:
                buffer.is_retired = True
                if not buffer.readers:
                    self._unseal(buffer)
        return bool(found)

    @contextmanager
    def held(self, generation: Generation) -> Iterator[Path | None]:
        """Yield the path of a snapshot, or None; its file does not change within the block."""
        with self._lock:
            found = [each for each in self._buffers if each.generation == generation and not each.is_retired]
            for buffer in found:
                buffer.readers += 1
        try:
            yield found[0].path if found else None
        finally:
            self._release(found)

    @property
    def sealed(self) -> list[Generation]:
        """The generations in memory, oldest first."""
        with self._lock:
            return [each.generation for each in self._buffers if each.generation and not each.is_retired]

    def close(self) -> None:
        """Close all buffers. Files with a snapshot stay, others are removed."""
        with self._lock:
            while self._buffers:
                buffer = self._buffers[-1]
                if buffer.generation is None:
                    self._drop(buffer)
                else:
                    self._buffers.pop().close()

    def _with_room(self, size: int) -> list[Buffer]:
        return [each for each in self._buffers if size <= len(each.memory)]

    def _release(self, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            for buffer in buffers:
                buffer.readers -= 1
                if buffer.is_retired and not buffer.readers:
                    self._unseal(buffer)

    def _unseal(self, buffer: Buffer) -> bool:
        """Rename to a temporary name. False, and the buffer is dropped, if it cannot be written to: somebody
        has removed or replaced its file, or it is of an earlier run and was never mapped."""
        folder, is_writable = buffer.path.parent, False
        with suppress(FileNotFoundError):
            is_writable = buffer.memory.nbytes > 0 and buffer.rename(self._temporary(), None)
        buffer.shard_bytes = 0
        if not is_writable:
            self._drop(buffer)
        with suppress(OSError):  # it has other files
            folder.rmdir()
        return is_writable

    def _drop(self, buffer: Buffer) -> None:
        self._buffers.remove(buffer)
        buffer.path.unlink(missing_ok=True)
        buffer.close()

    def _temporary(self) -> Path:
        return self._folder / f".rank-{self._rank}.{secrets.token_hex(8)}{shards.TEMPORARY}"
