"""A new folder that appears under its name when it is complete, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchscout.errors import CheckpointError

__all__ = ["new_folder", "refuse_occupied"]


@contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` unless the block raises.

    Raises ``CheckpointError`` if the target exists and is not an empty folder; with ``force`` it is replaced.
    """
    refuse_occupied(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.writing")
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        refuse_occupied(target, force=force)  # it may have appeared meanwhile
        _rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_occupied(target: Path, *, force: bool) -> None:
    """Raise ``CheckpointError`` if this is a file, or without ``force`` a folder that is not empty."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target} exists and is not a folder")
    if target.is_dir() and not force and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; choose another folder, or add --force to replace it")


def _rename(temporary: Path, target: Path) -> None:
    if not target.is_dir() or not any(target.iterdir()):
        temporary.rename(target)  # replaces an empty folder
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(8)}.replaced")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
