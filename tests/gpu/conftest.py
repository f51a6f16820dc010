"""Skips tests whose requirements this machine lacks, with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"


def _missing(backend: str, ranks: int) -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if backend == "nccl" and torch.cuda.device_count() < ranks and os.environ.get(_SHARED) != "1":
        return f"needs {ranks} CUDA devices, or NCCL 2.30 and {_SHARED}=1"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here. ``@pytest.mark.nccl(ranks)`` asks for NCCL ranks."""
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        nccl = item.get_closest_marker("nccl")
        missing = _missing("gloo", 1) if nccl is None else _missing("nccl", nccl.args[0])
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """The environment of ranks that crash. A client of an MPS daemon that is killed, or that reads memory it
    must not, takes all other clients along, and the daemon needs seconds to recover; so these do without
    one."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "no-daemon")}
