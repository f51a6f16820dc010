"""Real Gloo ranks inside an ordinary pytest test; the machinery is the demo's own."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from torchscout.testing.local_ranks import LiveRanks, RankError, preload, run_ranks

__all__ = ["LiveRanks", "RankError", "are_fit", "may_have_children", "run_ranks"]
_MOST_THREADS = 100


def are_fit(ranks: LiveRanks) -> bool:
    """Return whether all are alive and have few threads.

    Trainers of frameworks leave process groups behind, and Gloo has threads for each that wake up a hundred
    times a second: ranks with a thousand of them slow down whatever else this machine runs.
    """
    try:
        tasks = [Path(f"/proc/{rank.process.pid}/task") for rank in ranks._ranks]
        return all(len([*each.iterdir()]) <= _MOST_THREADS for each in tasks)
    except OSError:  # one has ended
        return False


def may_have_children() -> None:
    """Let this rank start processes, such as a DataLoader's workers: ranks are daemons, which may not."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


# Test modules import these; a rank that inherits them starts in milliseconds.
preload(
    "pytest",
    "torch._dynamo",  # with the first optimizer
    "torch.distributed.device_mesh",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torchscout.attach",
    "torchscout.session.checkpoints.manager",
)
