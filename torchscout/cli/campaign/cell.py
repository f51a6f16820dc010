"""One cell of a campaign: a job, the faults that happen in it, and what must be found (paper, evaluation)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum

from torchscout.cli.campaign.layout import LAYOUTS, Hardware, Layout
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan

__all__ = ["Cell", "Processes", "Row"]


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
    """See ``fitting`` for how a cell is adapted to it."""
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
    def place(self) -> Layout:
        """How its ranks are laid out on its hardware; only of a cell that fits."""
        layout = self.hardware.fit(self.layout)
        assert layout is not None, f"{self.name} needs more ranks than {self.hardware} has"
        return layout

    @property
    def truths(self) -> tuple[GroundTruth, ...]:
        """What a perfect detector says; nothing where nothing is wrong."""
        return () if self.benign else self.faults.truth(self.place.mesh())
