"""What kind of file system a folder lies in. Linux; elsewhere nothing is known to be in memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_in_memory"]

_IN_MEMORY = {"tmpfs", "ramfs"}


def is_in_memory(folder: Path) -> bool:
    """Whether the folder's file system is made of memory."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = {line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number}
    return bool(kinds & _IN_MEMORY)
