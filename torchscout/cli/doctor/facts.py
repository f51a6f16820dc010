"""Facts about a machine, findings about them, and the job they are compared with."""

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


class Grade(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """A job runs, and does without something."""
    FAIL = "fail"
    """A job will not run, or not be protected as it was asked to be."""
    SKIPPED = "skipped"
    """Nothing was asked about it, or it could not be tried."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    name: str
    status: Grade
    what: str
    """What was seen."""
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
"""A weight of float32, and two slots of Adam's."""
_MOST_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What is known of the job."""

    ranks: int
    """On this machine, and on each other one."""
    machines: int = 1
    state_bytes: int | None = None
    """Of one rank: parameters, buffers, all that optimizers keep."""
    mesh: Mesh | None = None
    has_experts: bool = False
    """Whether the mesh has expert layers laid out otherwise than dense ones."""

    @property
    def world_size(self) -> int:
        return self.ranks * self.machines if self.mesh is None else len(self.mesh)

    @property
    def hosts(self) -> list[str]:
        return [f"machine {number}" for number in range(self.machines) for _ in range(self.ranks)]


def mesh_of(told: str, experts: int = 1) -> Mesh:
    """From ``replica=4,shard=2``; a ``ValueError`` says what is wrong with it."""
    degrees: dict[str, Any] = {}
    for part in told.split(","):
        axis, _, degree = (each.strip() for each in part.partition("="))
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if axis in degrees:
            raise ValueError(f"{axis} is given twice")
        if not degree.isdigit():
            raise ValueError(f"the degree of {axis} must be a number, got {degree!r}")
        degrees[axis] = int(degree)
    if (world := math.prod(degrees.values())) > _MOST_RANKS:
        raise ValueError(f"at most {_MOST_RANKS} ranks can be looked at, got {world}")
    mesh = Mesh.grid(**degrees)
    return mesh if experts == 1 else mesh.carve_experts(experts, out_of=mesh.peer_axis())


def laid_out(world: int | None, ranks: int | None, machines: int | None, devices: int) -> tuple[int, int]:
    """Ranks on each machine, and machines; what is not told follows from the mesh or the devices here."""
    if world is None:
        return ranks or devices or 1, machines or 1
    here = ranks or (-(-world // machines) if machines else min(devices or world, world))
    needed = -(-world // here)
    if machines is not None and machines != needed:
        raise ValueError(f"the mesh has {world} ranks: {needed} machines with {here} each, not {machines}")
    if (ranks or machines) and here * needed != world:
        told = f"{ranks} on each machine" if ranks else f"{machines} machines"
        raise ValueError(f"the mesh has {world} ranks, which cannot be divided into {told}")
    return here, needed
