"""Real Gloo ranks inside an ordinary pytest test; the machinery is the demo's own."""

from __future__ import annotations

import multiprocessing

from torchscout.testing.local_ranks import LiveRanks, RankError, preload, run_ranks

__all__ = ["LiveRanks", "RankError", "may_have_children", "run_ranks"]


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
