"""Whether the grouped GEMM's paths add up over experts, in the kernel itself, and what covers its routings.

Triton decides at import whether its interpreter runs the kernel, so this file runs itself once in a process
of its own and the test reads what that process printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXPERTS, TOKENS = 2, 34


def run() -> dict[str, Any]:
    from torchscout.cli.discover.plan import kernel_loads
    from torchscout.experts.discovery import Executions
    from torchscout.experts.kernel.grouped_gemm import Tiling
    from torchscout.experts.kernel.profiler import KernelProfiler
    from torchscout.experts.templates import Routings, routed

    kernel = KernelProfiler(16, 20, EXPERTS, device="cpu", programs=3, tiling=Tiling(16, 16, 8))
    executions = Executions(kernel)
    result = routed("16x20", kernel.facts(), kernel_loads(), Routings(EXPERTS, TOKENS), executions=executions)
    assert result.table is not None, result.reason
    chosen = [each.profile for each in result.table.selected]
    uncovered = []
    for first in range(TOKENS + 1):
        profile = executions.of((first, TOKENS - first)).profile
        if not any(each.covers(profile) for each in chosen):
            uncovered.append(first)
    return {
        "by load": result.additivity.by_load,
        "selected": len(chosen),
        "least": result.least,
        "pareto": result.pareto,
        "uncovered": uncovered,
    }


@pytest.mark.slow
def test_paths_of_the_kernel_add_up_and_its_templates_cover_every_routing():
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["uncovered"]
    assert found["selected"] == found["least"] <= found["pareto"]
    assert {path.partition("/")[2] for path in found["by load"]} <= {"last_tile", "following_tile", "waves"}


if __name__ == "__main__":
    print(json.dumps(run()))
