"""What probes find out about a machine. Plain data: what it means ``checks`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Clock", "Folder", "Installed", "Limits", "Met", "Reached", "Stacks", "TorchFacts"]


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions, as they are written down where packages are installed."""

    versions: Mapping[str, str | None]
    """Of ``Python``, and of packages by the name of the distribution; None is absent."""
    curve: bool
    """Whether ZeroMQ here can encrypt."""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What torch says about itself."""

    version: str | None = None
    built_for: str | None = None
    """The CUDA version it was built for."""
    devices: tuple[str, ...] = ()
    """CUDA devices by name."""
    gloo: bool = False
    nccl: bool = False
    has_triton: bool = False
    fused: bool | None = None
    """Whether the fused signature on a device is what the same fold gives on the host; None if not tried."""
    fused_problem: str | None = None
    attention: Mapping[str, int] | None = None
    """By backend: how many different results repetitions of its backward gave under strict deterministic
    algorithms, 0 where it does not run; None if not tried."""
    problem: str | None = None
    """Why torch could not be asked; then nothing else here counts."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, or where it would be made, after an attempt to write there."""

    path: Path
    exists: bool
    problem: str | None
    """Why nothing can be written; None if something was."""
    is_private: bool | None = None
    """Whether it, or what is made there, is its owner's alone."""
    in_memory: bool = False
    locks: bool | None = None
    """Whether the file system has locks."""
    holder: str | None = None
    """The live job in it."""
    size: int = 0
    """Bytes of the file system."""
    free: int = 0
    """Bytes of it that this user may still take."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """An attempt to get this process's own stacks by signal."""

    number: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Clock:
    """The monotonic clock, over a short sleep."""

    is_monotonic: bool
    resolution: float
    """In seconds."""
    advanced: float
    """By how much it went on while this process slept."""
    slept: float
    """How long that was to be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernel allows processes of this user; None is no limit."""

    open_files: int | None
    """The hard limit: a hub raises its own up to it."""
    file_size: int | None


@dataclass(frozen=True, slots=True)
class Reached:
    """A message to a board of this machine and back, by the address that others would use."""

    address: str
    port: int | None
    seconds: float | None
    """There and back."""
    problem: str | None
    is_local: bool = False
    """Whether no other machine could use that address."""


@dataclass(frozen=True, slots=True)
class Met:
    """What another machine's doctor answered."""

    address: str
    problem: str | None
    host: str | None = None
    seconds: float | None = None
    """There and back, at best."""
    offset: float | None = None
    """How much its wall clock is ahead of this one's, in seconds."""
    versions: Mapping[str, str | None] | None = None
