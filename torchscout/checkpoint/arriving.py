"""A shard that arrives from elsewhere: kept aside until every bit of it is verified (paper, section 9).

For shards in memory, so that nothing is forced to a disk. Where the bytes come from is not known here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torchscout.checkpoint import shards
from torchscout.checkpoint.shard_format import Buffer, Identity
from torchscout.errors import CheckpointError, DamagedError

__all__ = ["Arriving"]


class Arriving:
    """One shard on its way into this folder; without ``seal`` nothing of it stays."""

    def __init__(self, memory: Path, identity: Identity, holder: int, size: int) -> None:
        """``CheckpointError`` if there is no room for it."""
        self.identity, self.size, self.received = identity, size, 0
        self.path = shards.path_of(memory, identity, holder)
        try:
            shards.make_folder(self.path.parent)
            if (free := shutil.disk_usage(self.path.parent).free) < size:
                raise CheckpointError(f"{self.path.parent} has no room: {size} bytes to keep, {free} free")
            self._temporary, self._file = shards.created(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
        self._open = True

    @property
    def complete(self) -> bool:
        return self.received == self.size

    def append(self, data: Buffer) -> None:
        """The next bytes; ``CheckpointError`` if they cannot be kept."""
        view = memoryview(data)
        if len(view) > self.size - self.received:
            raise DamagedError(f"more bytes than the {self.size} that were announced")
        try:
            while view:
                count = os.pwrite(self._file, view, self.received)
                self.received, view = self.received + count, view[count:]
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error

    def seal(self) -> Path:
        """Verify all of it as it lies here, and give it its name; ``DamagedError`` if it is not what it says.

        It takes the place of a copy that is there already: that one has the same name, so it was sealed
        from the same state, and who sends it again does not know it to be whole.
        """
        try:
            report = shards.verify(self._temporary)
            found = None if report.header is None else report.header.identity
            if not report.whole:
                raise DamagedError("; ".join(report.problems[:3]).replace(str(self._temporary), "what came"))
            if found != self.identity:
                raise DamagedError(f"announced as {_told(self.identity)}, but it is {_told(found)}")
            os.fchmod(self._file, 0o400)
            self._temporary.replace(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
        finally:
            self.discard()
        return self.path

    def discard(self) -> None:
        """Forget it, unless it is sealed; again is no mistake."""
        if self._open:
            self._open = False
            self._temporary.unlink(missing_ok=True)
            os.close(self._file)


def _told(identity: Identity | None) -> str:
    assert identity is not None, "what is whole has a header"
    return (
        f"the state of rank {identity.rank} of {identity.world_size} at {identity.generation}, "
        f"job {identity.job!r:.40}, mesh {identity.mesh!r:.80}"
    )
