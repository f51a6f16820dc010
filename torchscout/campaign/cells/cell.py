"""One cell of a campaign: a job's layout, a fault, and the row of the paper's table that it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum

from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

__all__ = ["DEVICE_ROWS", "LAYOUTS", "ROWS", "Cell", "Hardware", "JobLayout", "Processes", "Row"]


@dataclass(frozen=True, slots=True)
class JobLayout:
    """How a job's ranks are laid out: row-major in the order of the degrees."""

    title: str
    replica: int = 1
    shard: int = 1
    tensor: int = 1
    experts: int = 1
    """How many replicas share the experts: expert parallelism is carved out of data parallelism."""
    apart: bool = False
    """Whether each rank counts as a machine, so that no process group is one machine."""
    smaller: str | None = None
    """The key of the layout to use instead where fewer ranks may run."""
    device: str = "cpu"
    backend: str = "gloo"
    """The backend of process groups: gloo or nccl."""

    @property
    def ranks(self) -> int:
        return self.replica * self.shard * self.tensor

    def mesh(self) -> Mesh:
        """The job's mesh; hosts are detected at run time unless ranks are apart."""
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
machines on which fewer ranks may run. On 4 ranks a mixture either divides its experts, and then two holders
of each cannot name one of them, or it does not: there is one layout of each kind."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that all ranks of a campaign run on."""

    device: str = "cpu"
    backend: str = "gloo"
    max_ranks: int | None = None
    """The most ranks that a job may have; None for any number."""

    def fit(self, key: str) -> JobLayout | None:
        """The layout of this name, or a smaller one with at most ``max_ranks``; None if there is none."""
        layout = LAYOUTS[key]
        while self.max_ranks is not None and layout.ranks > self.max_ranks:
            if layout.smaller is None:
                return None
            layout = LAYOUTS[layout.smaller]
        if (self.device, self.backend) == (layout.device, layout.backend):
            return layout
        return replace(layout, device=self.device, backend=self.backend)


class Processes(str, Enum):
    """The processes that a cell runs in."""

    WARM = "warm"
    """Ranks that have run other cells before, and continue training."""
    RECOVERY = "recovery"
    """Its own ranks, and after the fault new ones that resume from a checkpoint."""
    OBSERVED = "observed"
    """Its own ranks, each with an observer: ranks that hang cannot be used again."""
    ROUTED = "routed"
    """Its own ranks, which train a mixture of experts."""
    LOOP = "loop"
    """Workers of torchrun agents, which restart by themselves."""
    KERNEL = "kernel"
    """Its own process, in which Triton may interpret the expert kernel, and the ranks it starts."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the campaign's table."""

    key: str
    title: str
    trigger: str
    """The injected fault, in a few words."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run with one fault or none; plain data that is sent to every rank."""

    row: str
    """The key of the row it counts for."""
    name: str
    """Its name within row and layout."""
    layout: str
    """A key of ``LAYOUTS``."""
    processes: Processes = Processes.WARM
    faults: FaultPlan = field(default_factory=FaultPlan)
    """Steps count from the start of the cell; step 1 is clean. Without faults nothing must be reported."""
    benign: bool = False
    """Whether the faults are no failure, and nothing must be reported."""
    due: int | None = None
    """The hidden layer that must be replayed when the fault happens; None if that does not matter."""
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    """See ``machine`` for how a cell is adapted to it."""
    coarser: str = ""
    """What must be reported with fewer ranks, if that is less precise than with all."""

    @property
    def identity(self) -> str:
        """``ROW/LAYOUT/NAME@DIGEST``: unique, and the same in every run of the same campaign."""
        described = repr((self.faults, self.benign, self.due, self.seed))
        if self.place is not LAYOUTS[self.layout]:
            described += repr(self.place)
        digest = hashlib.blake2b(described.encode(), digest_size=4).hexdigest()
        return f"{self.row}/{self.layout}/{self.name}@{digest}"

    @property
    def place(self) -> JobLayout:
        """The layout on its hardware. The cell must fit."""
        layout = self.hardware.fit(self.layout)
        assert layout is not None, f"{self.name} needs more ranks than {self.hardware} has"
        return layout

    @property
    def truths(self) -> tuple[GroundTruth, ...]:
        """What a perfect detector reports; empty if nothing is wrong."""
        return () if self.benign else self.faults.truth(self.place.mesh())


ROWS = (
    Row(
        "dense-sdc",
        "Dense SDC",
        "rank 9, persistently, after two accepted checks: a DDP parameter, an FSDP2 replay output, an HSDP "
        "gradient shard; then new processes resume",
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
        "rank 15's expert weights when 128 and when 512 routed rows are replayed, after a clean recipe cycle",
    ),
    Row("moe-clean", "MoE, fault-free", "nothing, for three recipe cycles"),
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
"""Not in the paper's table."""
