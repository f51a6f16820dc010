"""What of this machine a campaign uses, and how its table says so."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchscout.cli.campaign.layout import Hardware

__all__ = ["caption", "described", "hardware_for", "has_triton"]

_BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}
"""Of each device, the default first."""
_RANKS_OF_DEVICE = 4
"""More NCCL ranks than that wait for ever for multiprocessors of a device that they share."""


def hardware_for(device: str, backend: str | None, max_ranks: int | None) -> Hardware:
    """What was asked for; a ``ValueError`` where there is no such thing, or not on this machine."""
    if device not in _BACKENDS:
        raise ValueError(f"no device {device!r}; there is {' and '.join(_BACKENDS)}")
    backend = backend or _BACKENDS[device][0]
    if backend not in _BACKENDS[device]:
        there = " and ".join(_BACKENDS[device])
        raise ValueError(f"no backend {backend!r} for {device}; there is {there}")
    if device == "cpu":
        return Hardware(device, backend, max_ranks)
    if not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, and PyTorch finds none")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ValueError("this PyTorch has no NCCL; --backend gloo runs the same cells over Gloo")
    return Hardware(device, backend, max_ranks or _RANKS_OF_DEVICE * torch.cuda.device_count())


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def described(hardware: Hardware) -> dict[str, Any]:
    """What a report says of the hardware, and the versions that matter."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if hardware.device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        if has_triton():
            versions["triton"] = importlib.metadata.version("triton")
    if hardware.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "device": hardware.device,
        "backend": hardware.backend,
        "max_ranks": hardware.max_ranks,
        "versions": versions,
    }


def caption(report: Mapping[str, Any]) -> str:
    """The table's, from a report that has ``described`` in it."""
    device = {"cpu": "CPU", "cuda": "CUDA"}[report["device"]]
    backend = {"gloo": "Gloo", "nccl": "NCCL"}[report["backend"]]
    most = "" if report["max_ranks"] is None else f", at most {report['max_ranks']} ranks to a job"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{device} ranks over {backend}{most}; {versions}; seed {report['seed']}"
