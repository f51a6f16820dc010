"""Training scripts as a newcomer runs them: with torchrun, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def torchrun(ranks: int, command: Sequence[object], folder: Path, **environment: str) -> str:
    """Run ``command``, a script or ``-m`` and a module, and return its output; fail if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        + [str(each) for each in command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCHSCOUT_MEMORY": str(folder / "memory"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses_in(printed: str) -> dict[int, float]:
    """Return the losses by step, as the examples print them."""
    steps = re.findall(r"^step +(\d+) +loss (\d+\.\d+)$", printed, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in steps}
