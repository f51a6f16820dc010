"""Facts about a machine, findings about them, and the job that the machine is checked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torchscout.mesh import AXES, Mesh

__all__ = [
    "BYTES_PER_PARAMETER",
    "Clock",
    "Finding",
    "Folder",
    "Grade",
    "Installed",
    "JobDescription",
    "Limits",
    "Met",
    "Reached",
    "Stacks",
    "TorchFacts",
    "fail",
    "laid_out",
    "mesh_of",
    "ok",
    "skipped",
    "warn",
]


@dataclass(frozen=True, slots=True)
class Installed:
    """Installed versions."""

    versions: Mapping[str, str | None]
    """Versions of ``Python`` and of packages, by the name of the distribution; None if not installed."""
    curve: bool
    """Whether ZeroMQ is built with encryption."""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Facts about torch, from a process that imports it."""

    version: str | None = None
    built_for: str | None = None
    """The CUDA version it was built for."""
    devices: tuple[str, ...] = ()
    """CUDA devices by name."""
    gloo: bool = False
    nccl: bool = False
    has_triton: bool = False
    fused: bool | None = None
    """Whether the fused signature on a device equals the one computed on the host; None if not tried."""
    fused_problem: str | None = None
    attention: Mapping[str, int] | None = None
    """For each backend, the number of different results of its repeated backward under strict deterministic
    algorithms, 0 if it does not run; None if not tried."""
    problem: str | None = None
    """Why torch could not be imported; the other fields are meaningless then."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, or where it would be created, after an attempt to write there."""

    path: Path
    exists: bool
    problem: str | None
    """Why nothing can be written; None if writing worked."""
    is_private: bool | None = None
    """Whether only its owner can access it, or a folder created in it."""
    in_memory: bool = False
    locks: bool | None = None
    """Whether the file system supports locks."""
    holder: str | None = None
    """The live job that uses it."""
    size: int = 0
    """Bytes of the file system."""
    free: int = 0
    """Bytes that are free for this user."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The result of requesting this process's own stacks by signal."""

    number: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Clock:
    """The monotonic clock, over a short sleep."""

    is_monotonic: bool
    resolution: float
    """In seconds."""
    advanced: float
    """How far it advanced during the sleep."""
    slept: float
    """The requested length of the sleep."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of this user's processes; None is no limit."""

    open_files: int | None
    """The hard limit: a hub raises its soft limit to it."""
    file_size: int | None


@dataclass(frozen=True, slots=True)
class Reached:
    """The result of a message to a board on this machine, by the address that other machines would use."""

    address: str
    port: int | None
    seconds: float | None
    """The round-trip time."""
    problem: str | None
    is_local: bool = False
    """Whether other machines cannot use that address."""


@dataclass(frozen=True, slots=True)
class Met:
    """The answer of the doctor on another machine."""

    address: str
    problem: str | None
    host: str | None = None
    seconds: float | None = None
    """The shortest round-trip time."""
    offset: float | None = None
    """How far its wall clock is ahead of this machine's, in seconds."""
    versions: Mapping[str, str | None] | None = None


class Grade(str, Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """A job runs, but lacks something."""
    FAIL = "fail"
    """A job will not run, or will not be protected as requested."""
    SKIPPED = "skipped"
    """Not requested, or could not be tried."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    status: Grade
    what: str
    """What was found."""
    fix: str | None = None
    """What to do about it."""


def ok(name: str, what: str) -> Finding:
    return Finding(name, Grade.OK, what)


def warn(name: str, what: str, fix: str) -> Finding:
    return Finding(name, Grade.WARN, what, fix)


def fail(name: str, what: str, fix: str) -> Finding:
    return Finding(name, Grade.FAIL, what, fix)


def skipped(name: str, what: str) -> Finding:
    return Finding(name, Grade.SKIPPED, what)


BYTES_PER_PARAMETER = 12
"""A float32 weight and the two moments of Adam."""
_MOST_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class JobDescription:
    """The job that the machine is checked for."""

    ranks: int
    """Ranks on each machine."""
    machines: int = 1
    state_bytes: int | None = None
    """Bytes of one rank's training state: parameters, buffers and optimizer state."""
    mesh: Mesh | None = None
    has_experts: bool = False
    """Whether the layout of expert layers differs from that of dense layers."""

    @property
    def world_size(self) -> int:
        return self.ranks * self.machines if self.mesh is None else len(self.mesh)

    @property
    def hosts(self) -> list[str]:
        return [f"machine {number}" for number in range(self.machines) for _ in range(self.ranks)]


def mesh_of(text: str, experts: int = 1) -> Mesh:
    """Parse a mesh such as ``replica=4,shard=2``. Raises ``ValueError`` if it is not valid."""
    degrees: dict[str, Any] = {}
    for part in text.split(","):
        axis, _, degree = (each.strip() for each in part.partition("="))
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if axis in degrees:
            raise ValueError(f"{axis} is given twice")
        if not degree.isdigit():
            raise ValueError(f"the degree of {axis} must be a number, got {degree!r}")
        degrees[axis] = int(degree)
    if (world := math.prod(degrees.values())) > _MOST_RANKS:
        raise ValueError(f"at most {_MOST_RANKS} ranks are supported, got {world}")
    mesh = Mesh.grid(**degrees)
    return mesh if experts == 1 else mesh.carve_experts(experts, out_of=mesh.peer_axis())


def laid_out(world: int | None, ranks: int | None, machines: int | None, devices: int) -> tuple[int, int]:
    """Ranks on each machine, and machines. What is None follows from the mesh or the devices."""
    if world is None:
        return ranks or devices or 1, machines or 1
    here = ranks or (-(-world // machines) if machines else min(devices or world, world))
    needed = -(-world // here)
    if machines is not None and machines != needed:
        raise ValueError(f"the mesh has {world} ranks: {needed} machines with {here} each, not {machines}")
    if (ranks or machines) and here * needed != world:
        parts = f"{ranks} on each machine" if ranks else f"{machines} machines"
        raise ValueError(f"the mesh has {world} ranks, which cannot be divided into {parts}")
    return here, needed
