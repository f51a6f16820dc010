"""The hardware of this machine, and which cells can run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from torchscout.campaign.cells.cell import LAYOUTS, Cell, Hardware, Processes
from torchscout.decision.types import Manifestation
from torchscout.faults.effects import DeviceSpin, Sleep
from torchscout.faults.fault import SiteKind
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import Fault, FaultPlan

__all__ = ["Skipped", "caption", "counted_by_reason", "described", "fitted", "hardware_for", "has_triton"]

_BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}
"""The backends of each device, the default first."""
_RANKS_OF_DEVICE = 4
"""More NCCL ranks that share a device would wait forever for its multiprocessors."""


def hardware_for(device: str, backend: str | None, max_ranks: int | None) -> Hardware:
    """The hardware that was asked for. Raises ``ValueError`` if it does not exist, or not on this machine."""
    if device not in _BACKENDS:
        raise ValueError(f"unknown device {device!r}; choose {' or '.join(_BACKENDS)}")
    backend = backend or _BACKENDS[device][0]
    if backend not in _BACKENDS[device]:
        known = " or ".join(_BACKENDS[device])
        raise ValueError(f"unknown backend {backend!r} for {device}; choose {known}")
    if device == "cpu":
        return Hardware(device, backend, max_ranks)
    if not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, but PyTorch finds none")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ValueError("this PyTorch has no NCCL; --backend gloo runs the same cells over Gloo")
    return Hardware(device, backend, max_ranks or _RANKS_OF_DEVICE * torch.cuda.device_count())


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def described(hardware: Hardware) -> dict[str, Any]:
    """The hardware and the relevant versions, for a report."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if hardware.device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        if has_triton():
            versions["triton"] = importlib.metadata.version("triton")
    if hardware.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {**asdict(hardware), "versions": versions}


def caption(report: Mapping[str, Any]) -> str:
    """The table's caption, from a report that includes ``described``."""
    device = {"cpu": "CPU", "cuda": "CUDA"}[report["device"]]
    backend = {"gloo": "Gloo", "nccl": "NCCL"}[report["backend"]]
    most = "" if report["max_ranks"] is None else f", at most {report['max_ranks']} ranks to a job"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{device} ranks over {backend}{most}; {versions}; seed {report['seed']}"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that is not run."""

    cell: str
    """``ROW/LAYOUT/NAME``."""
    row: str
    reason: str


def counted_by_reason(skipped: Iterable[Skipped]) -> list[str]:
    """One line for each row and reason: a row may have hundreds of cells."""
    counts = Counter((each.row, each.reason) for each in skipped)
    return [f"skipped    {count} of {row}: {reason}" for (row, reason), count in counts.items()]


def fitted(
    cells: Iterable[Cell], hardware: Hardware, *, with_triton: bool = True
) -> tuple[list[Cell], list[Skipped]]:
    """Adapt cells to the hardware; return those that can run and those that cannot."""
    fit: list[Cell] = []
    skipped: list[Skipped] = []
    for cell in cells:
        layout = hardware.fit(cell.layout)
        name = f"{cell.row}/{cell.layout}/{cell.name}"
        if layout is None:
            title = LAYOUTS[cell.layout].title
            reason = f"{title} needs more than {hardware.max_ranks} ranks, even if reduced"
            skipped.append(Skipped(name, cell.row, reason))
        elif cell.processes is Processes.KERNEL and not with_triton:
            skipped.append(Skipped(name, cell.row, "the expert kernel needs Triton: pip install triton"))
        else:
            share = layout.ranks / LAYOUTS[cell.layout].ranks
            faults = FaultPlan(tuple(_moved(fault, share, hardware.device) for fault in cell.faults))
            moved = replace(cell, hardware=hardware, faults=faults)
            fit.append(replace(moved, coarser=_coarser(cell.truths, moved.truths)))
    return fit, skipped


def _coarser(planned: Sequence[GroundTruth], here: Sequence[GroundTruth]) -> str:
    """How the right answer is less precise: with two peers, nobody can say which one is wrong."""
    for before, after in zip(planned, here, strict=True):
        if len(after.ranks) > len(before.ranks):
            scope = after.scope.value.replace("_", " ")
            return f"{scope} of {len(after.ranks)} ranks instead of {len(before.ranks)}"
    return ""


def _moved(fault: Fault, share: float, device: str) -> Fault:
    """The fault on the corresponding rank; slow computation becomes a slow device on CUDA."""
    is_slow_work = fault.manifestation is Manifestation.STRAGGLER and fault.place.kind is SiteKind.PASS
    effect = fault.effect
    if device == "cuda" and is_slow_work and type(effect) is Sleep:
        effect = DeviceSpin(effect.seconds)
    return replace(fault, rank=int(fault.rank * share), effect=effect)
