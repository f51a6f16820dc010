"""Keeps the file of a retired copy, so that the next copy can use its memory again.

To allocate and clear new memory takes a receiver longer than to decrypt (docs/benchmarks.md).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import ExitStack
from pathlib import Path

from torchscout.checkpoint.storage.shards import TEMPORARY
from torchscout.utils.private_files import open_file

__all__ = ["SpareFile"]


class SpareFile:
    """A file with a temporary name, open and locked, that no other process uses."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Move a file that is no longer needed to this folder, on the same file system.

        Raises ``OSError`` if a process reads it; then it is deleted, which does not disturb readers.
        """
        self.path = folder / f".spare.{secrets.token_hex(8)}{TEMPORARY}"
        path.rename(self.path)  # no reader can find it under its old name
        with ExitStack() as undo:
            undo.callback(self.path.unlink, missing_ok=True)
            self.path.chmod(0o600)
            self.file = open_file(self.path, os.O_RDWR)
            undo.callback(os.close, self.file)
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Linux grants this lease only for a file that no other process has open.
            fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            status = os.fstat(self.file)
            if not status.st_nlink:
                raise FileNotFoundError(self.path)  # ``shards.clean`` has just removed it
            self.bytes = status.st_blocks * 512
            undo.pop_all()

    def rename(self, path: Path) -> None:
        self.path.rename(path)
        self.path = path

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.file)
