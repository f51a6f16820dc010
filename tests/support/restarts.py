"""A job of the catalog under torchrun, which starts it again after a fault (``evaluation.jobs.script``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchscout.decision.types import Decision
from torchscout.run.reader import IncidentLog

ROOT = Path(__file__).parents[2]
SCRIPT = ["-m", "evaluation.jobs.script", "no-wrapper"]


def run(
    folder: Path, *asked: str, restarts: int = 3, ranks: int = 3, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the job to its end; ``asked`` are arguments of the script, ``prefix`` is put before torchrun."""
    folder.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    options = [f"--max-restarts={restarts}", "--monitor-interval=0.2", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=localhost:0"]
    # torchrun's own restart needs the first setting over Gloo (see docs/doctor.md).
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*prefix, *torchrun, *options, *SCRIPT, str(folder), *asked],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | environment,
        check=False,
    )


def answers(folder: Path, ranks: int = 3) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def decisions(folder: Path, life: int = 0) -> list[Decision]:
    return IncidentLog.read(folder / f"run-{life}").decisions
