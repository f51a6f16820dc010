"""What tests of crashes on devices need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """The environment of ranks that crash. A client of an MPS daemon that is killed, or that reads memory it
    must not, takes all other clients along, and the daemon needs seconds to recover; so these do without
    one."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "no-daemon")}
