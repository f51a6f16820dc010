"""The ranks and the faults of the demo. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torchscout.mesh import LayerKind, Mesh

if TYPE_CHECKING:
    from torchscout.faults.plan import FaultPlan

__all__ = ["MOST_RANKS", "STEPS", "Kind", "Memory", "Scenario", "plan"]

STEPS = 12
MOST_RANKS = 64
LAYERS = 4
_HEADS = 4
_EXPERTS, _EXPERT_LAYERS = 4, 2
_AXES = ("replica", "tensor", "expert")
_SLOW = range(3, 6)
_SLOW_SECONDS = 0.3
_FLIP_STEP, _FLIP_BIT = 7, 12
_HANG_STEP = 10
_FOR_EVER = 3600.0


class Kind(str, Enum):
    """The faults of the demo, in the order in which they happen."""

    STRAGGLER = "straggler"
    SDC = "sdc"
    HANG = "hang"
    NONE = "none"
    """No fault happens, and no rank must be named."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The layout: replicas of a model, each split over tensor-parallel or expert-parallel ranks."""

    replica: int = 4
    tensor: int = 2
    expert: int = 1
    """More than 1 trains a mixture of experts, in which all ranks have copies of everything but experts."""

    def __post_init__(self) -> None:
        if self.ranks > MOST_RANKS:
            raise ValueError(f"at most {MOST_RANKS} ranks, got {self.ranks}")
        if self.replica < 3:
            raise ValueError(f"{self.replica} replicas have no majority that can name one; use 3 or more")
        if self.tensor not in (1, 2, 4):
            raise ValueError(f"{_HEADS} heads cannot be split over {self.tensor} ranks; use 1, 2 or 4")
        if self.expert not in (1, 2, 4):
            raise ValueError(f"{_EXPERTS} experts cannot be split over {self.expert} ranks; use 1, 2 or 4")
        if self.expert > 1 and self.tensor > 1:
            raise ValueError("the mixture of experts is not tensor-parallel; use expert or tensor alone")

    @classmethod
    def read(cls, ranks: int | None, mesh: str | None) -> Scenario:
        """Parse ``--ranks`` and ``--mesh``. Raises ``ValueError`` for an impossible layout."""
        if mesh is None:
            ranks = ranks or 8
            return cls(ranks // 2, 2) if ranks % 2 == 0 and ranks >= 6 else cls(ranks, 1)
        degrees = _degrees(mesh)
        scenario = cls(*(degrees.get(axis, 1) for axis in _AXES))
        if ranks not in (None, scenario.ranks):
            raise ValueError(f"{mesh} has {scenario.ranks} ranks, not {ranks}")
        return scenario

    @property
    def ranks(self) -> int:
        return self.replica * self.tensor * self.expert

    @property
    def has_experts(self) -> bool:
        return self.expert > 1

    @property
    def weight(self) -> str:
        """The MODULE/PARAMETER whose bit flips by default."""
        return "layer.1.mixture.experts/down" if self.has_experts else "layer.2.attention.query/weight"

    @property
    def sentence(self) -> str:
        """One sentence about the layout."""
        if self.has_experts:
            shared = f"{self.replica} replicas, with experts split over {self.expert} ranks"
            return f"{self.ranks} CPU ranks train a small mixture of experts: {shared}."
        split = f" x {self.tensor} tensor-parallel ranks" if self.tensor > 1 else ""
        return f"{self.ranks} CPU ranks train a small Transformer: {self.replica} replicas{split}."

    def mesh(self) -> Mesh:
        if self.has_experts:
            return Mesh.grid(replica=self.ranks).carve_experts(self.expert)
        return Mesh.grid(replica=self.replica, tensor=self.tensor)

    def place_of(self, rank: int) -> str:
        if self.has_experts:
            replica, share = divmod(rank, self.expert)
            return f"replica {replica}, experts {share}"
        replica, tensor = divmod(rank, self.tensor)
        return f"replica {replica}" + (f", tensor {tensor}" if self.tensor > 1 else "")


@dataclass(frozen=True, slots=True)
class Memory:
    """The rank and the weight with the flipped bit."""

    rank: int
    at: str


def plan(scenario: Scenario, kinds: Sequence[Kind], memory: Memory) -> Mapping[Kind, FaultPlan]:
    """The faults of each kind. Each happens to another rank."""
    from torchscout.faults.plan import FaultPlan

    slow, stuck = (memory.rank + 2) % scenario.ranks, (memory.rank + 1) % scenario.ranks
    flipped = FaultPlan().flip_bit(rank=memory.rank, at=memory.at, step=_FLIP_STEP, bit=_FLIP_BIT)
    planned = {
        Kind.STRAGGLER: _slow(slow, experts=scenario.has_experts),
        Kind.SDC: flipped.showing(role=LayerKind.EXPERT if ".experts/" in memory.at else LayerKind.DENSE),
        Kind.HANG: FaultPlan().stall(rank=stuck, at="layer.1/forward", step=_HANG_STEP, seconds=_FOR_EVER),
    }
    return {kind: faults for kind, faults in planned.items() if kind in kinds}


def _slow(rank: int, *, experts: bool) -> FaultPlan:
    """Delay every layer, or every layer's experts, whichever is replayed."""
    from torchscout.faults.plan import FaultPlan

    faults = FaultPlan()
    for layer in range(_EXPERT_LAYERS if experts else LAYERS):
        at = f"layer.{layer}.mixture.experts/forward" if experts else f"layer.{layer}/forward"
        faults = faults.delay(rank=rank, at=at, step=_SLOW, seconds=_SLOW_SECONDS, calls=None)
        faults = faults.showing("time/experts", role=LayerKind.EXPERT) if experts else faults
    return faults


def _degrees(mesh: str) -> dict[str, int]:
    degrees = {}
    for part in mesh.split(","):
        axis, _, degree = part.strip().partition("=")
        if axis not in _AXES or not degree.isdigit():
            known = "replica=N, replica=N,tensor=M or, for a mixture of experts, replica=N,expert=M"
            raise ValueError(f"a mesh must be {known}, got {mesh!r}")
        if axis in degrees:
            raise ValueError(f"{axis} is given twice in {mesh!r}")
        degrees[axis] = int(degree)
    return degrees
