"""One cell of a campaign: a job's layout, a fault, and the row of the paper's table that it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum

from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

__all__ = [
    "BLOCKS",
    "DEVICE_ROWS",
    "LAYOUTS",
    "ROWS",
    "Cell",
    "Hardware",
    "JobLayout",
    "Processes",
    "Row",
    "row_of",
]

BLOCKS = 3
"""Of the Transformer that is trained."""


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Ranks row-major in this order: the last degree varies fastest."""

    title: str
    replica: int = 1
    shard: int = 1
    tensor: int = 1
    experts: int = 1
    """Replicas that share the experts of a mixture: expert parallelism is carved out of data parallelism."""
    apart: bool = False
    """Whether each rank is taken to be on a machine of its own, so that a group is no machine."""
    smaller: str | None = None
    """The key of the layout that is used instead where there may not be as many ranks."""
    device: str = "cpu"
    backend: str = "gloo"
    """Of the process groups: Gloo or NCCL."""

    @property
    def ranks(self) -> int:
        return self.replica * self.shard * self.tensor

    def mesh(self) -> Mesh:
        """The machines are left to be found where ranks are not apart."""
        hosts = [f"node-{rank}" for rank in range(self.ranks)] if self.apart else None
        mesh = Mesh.grid(replica=self.replica, shard=self.shard, tensor=self.tensor, hosts=hosts)
        return mesh.carve_experts(self.experts) if self.experts > 1 else mesh


LAYOUTS = {
    "ddp": JobLayout("DDP", replica=16, smaller="ddp-8"),
    "fsdp2": JobLayout("FSDP2", shard=16, smaller="fsdp2-8"),
    "hsdp": JobLayout("HSDP 4x4", replica=4, shard=4, smaller="hsdp-8"),
    "tensor": JobLayout("8 replicas x 2 tensor", replica=8, tensor=2, apart=True, smaller="tensor-8"),
    "ep4": JobLayout("EP4 x DP4", replica=16, experts=4, smaller="ep4-8"),
    "ep2": JobLayout("EP2 x DP4", replica=8, experts=2, smaller="dp-4"),
    "alone": JobLayout("one process"),
    "ddp-4": JobLayout("DDP", replica=4, smaller="ddp-3"),
    "fsdp2-4": JobLayout("FSDP2", shard=4, smaller="fsdp2-3"),
    "hybrid-8": JobLayout("4 replicas x 2 tensor", replica=4, tensor=2, smaller="hybrid-4"),
    "ddp-8": JobLayout("DDP", replica=8, smaller="ddp-4"),
    "ddp-3": JobLayout("DDP", replica=3),
    "fsdp2-8": JobLayout("FSDP2", shard=8, smaller="fsdp2-4"),
    "fsdp2-3": JobLayout("FSDP2", shard=3),
    "hsdp-8": JobLayout("HSDP 4x2", replica=4, shard=2, smaller="hsdp-4"),
    "hsdp-4": JobLayout("HSDP 2x2", replica=2, shard=2),
    "tensor-8": JobLayout("4 replicas x 2 tensor", replica=4, tensor=2, apart=True, smaller="tensor-6"),
    "tensor-6": JobLayout("3 replicas x 2 tensor", replica=3, tensor=2, apart=True, smaller="tensor-4"),
    "tensor-4": JobLayout("2 replicas x 2 tensor", replica=2, tensor=2, apart=True),
    "hybrid-4": JobLayout("2 replicas x 2 tensor", replica=2, tensor=2),
    "ep4-8": JobLayout("EP2 x DP4", replica=8, experts=2, smaller="ep4-4"),
    "ep4-4": JobLayout("EP2 x DP2", replica=4, experts=2),
    "dp-4": JobLayout("EP1 x DP4", replica=4),
}
"""By the name that cells use. The small ones are for hangs, where each rank has an observer process, and for
machines on which fewer ranks may run. On 4 ranks a mixture either divides its experts, and of two holders
of each nobody can be named, or it does not: there is one layout of each kind."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all ranks of a campaign run on."""

    device: str = "cpu"
    backend: str = "gloo"
    max_ranks: int | None = None
    """How many a job may have; None for any number."""

    def fit(self, key: str) -> JobLayout | None:
        """The layout of this name, or a smaller one with at most ``max_ranks``; None where there is none."""
        layout = LAYOUTS[key]
        while self.max_ranks is not None and layout.ranks > self.max_ranks:
            if layout.smaller is None:
                return None
            layout = LAYOUTS[layout.smaller]
        if (self.device, self.backend) == (layout.device, layout.backend):
            return layout
        return replace(layout, device=self.device, backend=self.backend)


class Processes(str, Enum):
    """Which processes a cell runs in."""

    WARM = "warm"
    """Ranks that have run other cells before, and go on training."""
    RECOVERY = "recovery"
    """Ranks of its own, and after the fault new ones that go on from a checkpoint."""
    OBSERVED = "observed"
    """Ranks of its own, each with its observer: what hangs cannot be used again."""
    ROUTED = "routed"
    """Ranks of its own that train a mixture of experts."""
    KERNEL = "kernel"
    """A process of its own, in which Triton may interpret the kernel of experts, and the ranks it starts."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the campaign's table."""

    key: str
    title: str
    trigger: str
    """What is injected, in a few words."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Plain data that travels to every rank."""

    row: str
    """The key of the row it counts for."""
    name: str
    """What tells it from the others of its row."""
    layout: str
    """A key of ``LAYOUTS``."""
    processes: Processes = Processes.WARM
    faults: FaultPlan = field(default_factory=FaultPlan)
    """Steps are the cell's own: the first one is clean. Without faults nothing must be reported."""
    benign: bool = False
    """What happens is no failure: nothing must be reported of it."""
    due: int | None = None
    """The hidden layer that replay must be at when the fault happens, where that matters."""
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    """See ``machine`` for how a cell is adapted to it."""
    coarser: str = ""
    """What must be reported with fewer ranks, where that is less precise than what was planned."""

    @property
    def identity(self) -> str:
        """The same in every run of the same campaign, and for no other cell: ``ROW/LAYOUT/NAME@DIGEST``."""
        told = repr((self.faults, self.benign, self.due, self.seed))
        if self.place is not LAYOUTS[self.layout]:
            told += repr(self.place)
        digest = hashlib.blake2b(told.encode(), digest_size=4).hexdigest()
        return f"{self.row}/{self.layout}/{self.name}@{digest}"

    @property
    def place(self) -> JobLayout:
        """How its ranks are laid out on its hardware; only of a cell that fits."""
        layout = self.hardware.fit(self.layout)
        assert layout is not None, f"{self.name} needs more ranks than {self.hardware} has"
        return layout

    @property
    def truths(self) -> tuple[GroundTruth, ...]:
        """What a perfect detector says; nothing where nothing is wrong."""
        return () if self.benign else self.faults.truth(self.place.mesh())


ROWS = (
    Row(
        "dense-sdc",
        "Dense SDC",
        "rank 9, persistently, after two accepted checks: a DDP parameter, an FSDP2 replay output, an HSDP "
        "gradient shard; then new processes go on",
    ),
    Row(
        "numerical-sdc",
        "Dense numerical SDC",
        "one forward output or parameter of one rank, 64 of them in the lowest bits",
    ),
    Row("numerical-clean", "Dense numerical, fault-free", "nothing"),
    Row("compute-straggler", "Compute straggler", "rank 9's layers take 250 ms longer"),
    Row(
        "communication-straggler",
        "Communication straggler",
        "rank 15's tensor-parallel collective takes 250 ms longer",
    ),
    Row(
        "moe-sdc",
        "MoE SDC",
        "rank 15's expert weights when 128, and when 512 routed rows are due, after one clean recipe cycle",
    ),
    Row("moe-clean", "MoE, fault-free", "nothing, for two recipe cycles"),
    Row(
        "hang",
        "Hang and input stall",
        "one rank frozen, stopped, late with its input, or in another collective",
    ),
    Row("hang-clean", "Hang, fault-free", "nothing"),
    Row(
        "moe-kernel",
        "MoE kernel-role SDC",
        "inside the expert kernel: every work item of the selected shapes, of both projections; and one, "
        "persistently, on rank 7 of 8 and on rank 15 of 16",
    ),
)
DEVICE_ROWS = (Row("device-hang", "Device stuck (CUDA only)", "one rank's kernel does not end for 6 s"),)
"""What only a device can show; not in the paper's table."""


def row_of(key: str) -> Row:
    return next(row for row in ROWS if row.key == key)
