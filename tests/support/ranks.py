"""Real Gloo ranks inside an ordinary pytest test; the machinery is the demo's own."""

from __future__ import annotations

from torchscout.testing.local_ranks import LiveRanks, RankError, preload, run_ranks

__all__ = ["LiveRanks", "RankError", "run_ranks"]

# Test modules import these; a rank that inherits them starts in milliseconds.
preload(
    "pytest",
    "torch._dynamo",  # with the first optimizer
    "torch.distributed.device_mesh",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torchscout.attach",
)
