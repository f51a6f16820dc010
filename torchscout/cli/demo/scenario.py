"""Who plays in the demo, and what befalls them; torch-free."""

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
    """What may befall the job, in the order in which it does."""

    STRAGGLER = "straggler"
    SDC = "sdc"
    HANG = "hang"
    NONE = "none"
    """Nothing does, and nobody must be named."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Replicas of a model, each split over tensor-parallel ranks, or over ranks that share its experts."""

    replica: int = 4
    tensor: int = 2
    expert: int = 1
    """More than one: a mixture of experts. What is no expert, all ranks have copies of."""

    def __post_init__(self) -> None:
        if self.ranks > MOST_RANKS:
            raise ValueError(f"at most {MOST_RANKS} ranks run here, got {self.ranks}")
        if self.replica < 3:
            raise ValueError(f"of {self.replica} replicas no majority can name one; take 3 or more")
        if self.tensor not in (1, 2, 4):
            raise ValueError(f"{_HEADS} heads cannot be shared by {self.tensor} ranks; take 1, 2 or 4")
        if self.expert not in (1, 2, 4):
            raise ValueError(f"{_EXPERTS} experts cannot be shared by {self.expert} ranks; take 1, 2 or 4")
        if self.expert > 1 and self.tensor > 1:
            raise ValueError("here a mixture of experts is not tensor-parallel; take expert or tensor alone")

    @classmethod
    def read(cls, ranks: int | None, mesh: str | None) -> Scenario:
        """From the command line; a ``ValueError`` says what cannot be."""
        if mesh is None:
            ranks = ranks or 8
            return cls(ranks // 2, 2) if ranks % 2 == 0 and ranks >= 6 else cls(ranks, 1)
        degrees = _degrees(mesh)
        stage = cls(*(degrees.get(axis, 1) for axis in _AXES))
        if ranks not in (None, stage.ranks):
            raise ValueError(f"{mesh} has {stage.ranks} ranks, not {ranks}")
        return stage

    @property
    def ranks(self) -> int:
        return self.replica * self.tensor * self.expert

    @property
    def has_experts(self) -> bool:
        return self.expert > 1

    @property
    def weight(self) -> str:
        """The MODULE/PARAMETER that goes bad, unless somebody says another."""
        return "layer.1.mixture.experts/down" if self.has_experts else "layer.2.attention.query/weight"

    @property
    def told(self) -> str:
        if self.has_experts:
            shared = f"{self.replica} replicas, whose experts {self.expert} ranks share"
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
    """Which weight goes bad on which rank."""

    rank: int
    at: str


def plan(stage: Scenario, kinds: Sequence[Kind], memory: Memory) -> Mapping[Kind, FaultPlan]:
    """The faults of each kind. Who is slow or stuck is somebody else than whose memory goes bad."""
    from torchscout.faults.plan import FaultPlan

    slow, stuck = (memory.rank + 2) % stage.ranks, (memory.rank + 1) % stage.ranks
    flipped = FaultPlan().flip_bit(rank=memory.rank, at=memory.at, step=_FLIP_STEP, bit=_FLIP_BIT)
    planned = {
        Kind.STRAGGLER: _slow_experts(slow) if stage.has_experts else _slow_layers(slow),
        Kind.SDC: flipped.showing(role=LayerKind.EXPERT if ".experts/" in memory.at else LayerKind.DENSE),
        Kind.HANG: FaultPlan().stall(rank=stuck, at="layer.1/forward", step=_HANG_STEP, seconds=_FOR_EVER),
    }
    return {kind: faults for kind, faults in planned.items() if kind in kinds}


def _slow_layers(rank: int) -> FaultPlan:
    """Whichever layer is replayed."""
    from torchscout.faults.plan import FaultPlan

    faults = FaultPlan()
    for layer in range(LAYERS):
        at = f"layer.{layer}/forward"
        faults = faults.delay(rank=rank, at=at, step=_SLOW, seconds=_SLOW_SECONDS, calls=None)
    return faults


def _slow_experts(rank: int) -> FaultPlan:
    """Whichever layer's experts are replayed."""
    from torchscout.faults.plan import FaultPlan

    faults = FaultPlan()
    for layer in range(_EXPERT_LAYERS):
        at = f"layer.{layer}.mixture.experts/forward"
        faults = faults.delay(rank=rank, at=at, step=_SLOW, seconds=_SLOW_SECONDS, calls=None)
        faults = faults.showing("time/experts", role=LayerKind.EXPERT)
    return faults


def _degrees(mesh: str) -> dict[str, int]:
    degrees = {}
    for part in mesh.split(","):
        axis, _, degree = part.strip().partition("=")
        if axis not in _AXES or not degree.isdigit():
            told = "replica=N or replica=N,tensor=M or, of a mixture of experts, replica=N,expert=M"
            raise ValueError(f"a mesh is {told} here, got {mesh!r}")
        if axis in degrees:
            raise ValueError(f"{axis} is given twice in {mesh!r}")
        degrees[axis] = int(degree)
    return degrees
