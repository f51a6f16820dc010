"""A mixture of experts, which ranks share: routers, AllToAll, and experts among those who hold the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.parallel import DistributedDataParallel

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job
from torchscout.mesh import Mesh
from torchscout.testing.moe_model import (
    EXPERTS,
    MoeTransformer,
    batch,
    expert_names,
    group_of,
    share_gradients,
)

SPREAD = 2
"""Ranks that share the experts of one replica."""


def mesh_of(ranks: int, spread: int = SPREAD) -> Mesh:
    """Every rank is on a machine of its own."""
    machines = [f"machine-{rank}" for rank in range(ranks)]
    return Mesh.grid(replica=ranks, hosts=machines).carve_experts(spread)


def build(mesh: Mesh, rank: int, uneven: float = 0.0) -> tuple[DistributedDataParallel, dist.ProcessGroup]:
    """The model, and the group of those who hold the same experts."""
    partition, holders = (group_of(mesh, axis, rank) for axis in ("expert", "replica"))
    torch.manual_seed(0)
    model = MoeTransformer(EXPERTS, partition, uneven=uneven)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, expert_names(model))
    return DistributedDataParallel(model), holders


# A layer as a whole exchanges tokens with other ranks, so that its parts are replayed.
_PARTS = tuple(
    f"layer.{place}.{part}"
    for place in (0, 1)
    for part in ("norm", "mixer", "mixture_norm", "mixture.router", "mixture.experts")
)


def mixture(job: Job) -> None:
    """Some experts are much more popular than others."""
    mesh = mesh_of(job.world)
    model, holders = build(mesh, job.rank, uneven=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer, parallelism=mesh, layers=_PARTS)
    for step in job.steps():
        optimizer.zero_grad()
        backward(model, step, job.rank)
        share_gradients(model.module, holders)
        optimizer.step()


def backward(model: DistributedDataParallel, step: int, rank: int) -> None:
    tokens, targets = batch(step, rank)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()


_PASSES = ("input", "parameters", "output", "grad_input")
COMPARED = {
    "state/parameters",
    "state/optimizer",
    *(
        f"layer.{place}.{part}/{what}"
        for place in (0, 1)
        for part in ("norm", "mixer", "mixture_norm", "mixture.router")
        for what in _PASSES
    ),
    *(
        f"layer.{place}.mixture.experts/{what}"
        for place in (0, 1)
        for what in (*_PASSES, "up.grad", "down.grad")
    ),
    *(
        f"all_to_all/{plan}.{what}"
        for plan in ("captured", "balanced", "shifted", "reversed", "skewed", "sparse")
        for what in ("sent", "received")
    ),
}
JOBS: dict[str, Entry] = {
    "mixture": Entry(
        mixture,
        ranks=6,
        resumed_on=2,
        compared=COMPARED,
        unchecked=("*experts*",),
        in_test=("wrong_number:expert-weight",),
        in_ci=("healthy", "wrong_number:all-to-all"),
        wrong={
            "expert": Wrong("layer.1.mixture.experts/output", 2),
            "expert-weight": Wrong("layer.0.mixture.experts/down", 2, bit=3, calls=range(1)),
            "expert-slot": Wrong("layer.0.mixture.experts/up.exp_avg_sq", 4, step=3, bit=12, calls=range(1)),
            "router": Wrong("layer.0.mixture.router/output", 5, step=4),
            "all-to-all": Wrong(
                "all_to_all@mesh_expert", 1, "all_to_all/balanced.received", bit=9, calls=range(10, 400)
            ),
        },
    ),
}
