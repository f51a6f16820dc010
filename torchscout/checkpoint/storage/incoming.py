"""Receives a shard into a folder, and verifies it while it arrives (paper, section 9).

The file has a temporary name until every bit of it is verified. Its bytes come straight into the memory of
the file, where they are decrypted and verified piece by piece, while they are in a core's cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack, suppress
from pathlib import Path

import xxhash

from torchscout.checkpoint.storage.shard_format import (
    PREFIX_BYTES,
    Buffer,
    Entry,
    ShardIdentity,
    parse,
    probe,
)
from torchscout.checkpoint.storage.shards import created, make_folder, path_of, temporary_name
from torchscout.checkpoint.storage.spare_file import SpareFile
from torchscout.errors import CheckpointError, DamagedError

__all__ = ["IncomingShard"]

_AT_ONCE = 1 << 20
"""Bytes that are allocated at once: a multiple of every page size."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python does not name."""


class IncomingShard:
    """A shard that is being received into a folder; nothing remains of it without ``publish``."""

    def __init__(
        self, memory: Path, identity: ShardIdentity, holder: int, size: int, spare: SpareFile | None = None
    ) -> None:
        """Raises ``CheckpointError`` if there is no space for it. Uses up the spare file."""
        self.identity, self.size, self.received = identity, size, 0
        self.path = path_of(memory, identity, holder)
        self._given = self._allocated = 0
        with ExitStack() as undo:
            if spare is not None:
                undo.callback(spare.discard)
            try:
                make_folder(self.path.parent)
                free = shutil.disk_usage(self.path.parent).free + (0 if spare is None else spare.bytes)
                if free < size:
                    raise CheckpointError(
                        f"{self.path.parent} has too little space: {size} bytes needed, {free} free"
                    )
                if spare is None:
                    self._temporary, self._file = created(self.path)
                    undo.callback(os.close, self._file)
                    undo.callback(self._temporary.unlink, missing_ok=True)
                else:
                    spare.rename(temporary_name(self.path))
                    self._temporary, self._file = spare.path, spare.file
                os.ftruncate(self._file, size)
                self._mapped = mmap.mmap(self._file, size)
            except OSError as error:
                raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
            undo.pop_all()
        self._open = True
        self._bytes = memoryview(self._mapped)
        self._check = _check(self._bytes, identity)
        next(self._check)

    @property
    def complete(self) -> bool:
        return self.received == self.size

    def room(self, size: int) -> memoryview:
        """The file's memory for the next bytes: fill it and call ``filled``. Raises ``CheckpointError``.

        Another thread may call ``filled`` meanwhile, for the rooms in their order.
        """
        start, self._given = self._given, self._given + size
        if self._given > self.size:
            raise DamagedError(f"received more than the announced {self.size} bytes")
        while self._allocated < self._given:
            self._allocate(min(_AT_ONCE, self.size - self._allocated))
        return self._bytes[start : self._given]

    def filled(self, size: int) -> None:
        """Verify these next bytes as far as they can be verified alone; raises ``DamagedError``."""
        self.received += size
        self._check.send(self.received)

    def append(self, data: Buffer) -> None:
        """Write the next bytes; raises as ``room`` and ``filled`` do."""
        self.room(len(data))[:] = data
        self.filled(len(data))

    def seal(self) -> Path:
        """Give the file its name if it is complete, and return its path; see ``verify`` and ``publish``."""
        try:
            self.verify()
            return self.publish()
        finally:
            self.discard()

    def verify(self) -> None:
        """Raise ``DamagedError`` if anything is missing. All that has arrived is verified already."""
        if not self.complete:
            raise DamagedError(f"only {self.received} of {self.size} bytes have arrived")

    def publish(self) -> Path:
        """Give the verified file its name, and return its path; raises ``CheckpointError``.

        Replaces an existing copy: that has the same name and so the same content, unless it is damaged.
        """
        try:
            os.fchmod(self._file, 0o400)
            self._temporary.replace(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
        finally:
            self.discard()
        return self.path

    def discard(self) -> None:
        """Remove it, unless it is published. Idempotent."""
        if self._open:
            self._open = False
            self._temporary.unlink(missing_ok=True)
            os.close(self._file)
            self._unmap()

    def _unmap(self) -> None:
        """An unlinked file keeps its memory while it is mapped."""
        self._check.close()
        self._bytes.release()
        with suppress(BufferError):  # still referenced by an error; it is unmapped with the last reference
            self._mapped.close()

    def _allocate(self, size: int) -> None:
        """Give the next bytes memory, all at once: a page fault for each page would take longer, and where
        there is no space it would be a signal that ends the process."""
        try:
            try:
                self._mapped.madvise(_POPULATE_WRITE, self._allocated, size)
            except OSError as error:
                if error.errno == errno.EFAULT:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                os.posix_fallocate(self._file, self._allocated, size)  # an older kernel
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
        self._allocated += size


def _check(shard: memoryview, identity: ShardIdentity) -> Generator[None, int, None]:
    """Verify a shard that grows: send it how many bytes are there. Raises ``DamagedError``.

    Every byte is read once, in order, when it is there.
    """
    there, size = 0, len(shard)
    while there < min(PREFIX_BYTES, size):
        there = yield
    start = probe(shard[:PREFIX_BYTES], size)
    while there < start:
        there = yield
    header = parse(shard[:start], size)
    if header.size != size:
        raise DamagedError(f"announced with {size} bytes, but the shard has {header.size}")
    if header.identity != identity:
        raise DamagedError(f"announced as {_described(identity)}, but it is {_described(header.identity)}")
    position = start
    for entry in header.entries:
        while there < entry.offset:
            there = yield
        if any(shard[position : entry.offset]):
            raise DamagedError(f"the bytes before tensor {entry.name!r} are damaged: they are not zero")
        there = yield from _check_tensor(shard, entry, there)
        position = entry.end
    while True:
        yield


def _check_tensor(shard: memoryview, entry: Entry, there: int) -> Generator[None, int, int]:
    """The same for one tensor, whose first byte is next; returns how many bytes are there."""
    found, position = xxhash.xxh3_128(), entry.offset
    while True:
        end = min(there, entry.end)
        found.update(shard[position:end])
        if end == entry.end:
            break
        position, there = end, (yield)
    if found.hexdigest() != entry.digest:
        raise DamagedError(f"tensor {entry.name!r} is damaged: its digest does not match")
    return there


def _described(identity: ShardIdentity) -> str:
    return (
        f"the state of rank {identity.rank} of {identity.world_size} at {identity.generation}, "
        f"job {identity.job!r:.40}, mesh {identity.mesh!r:.80}"
    )
