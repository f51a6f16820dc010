"""A job of replicas, shards and tensor-parallel ranks with made-up machines, for slow ranks and links."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.findings import Findings, findings_of
from tests.support.replayed_job import Net, batch
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh, MeshAddress

ALL = None
"""Every pass over a place, training's own and replay's."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in the order of the paper's figure: tensor-parallel slices, then replicas, then shards."""

    replica: int
    shard: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.replica * self.shard * self.tensor

    def mesh(self) -> Mesh:
        """Return a mesh in which the tensor-parallel ranks of one replica and shard share a machine."""
        places = [
            (tensor, replica, shard)
            for tensor in range(self.tensor)
            for replica in range(self.replica)
            for shard in range(self.shard)
        ]
        addresses = [MeshAddress(replica=d, shard=s, tensor=t) for t, d, s in places]
        return Mesh(addresses, [f"machine-{d}-{s}" for _, d, s in places])

    def devices(self) -> DeviceMesh:
        return init_device_mesh(
            "cpu",
            (self.tensor, self.replica, self.shard),
            mesh_dim_names=("tp", "dp_replicate", "dp_shard"),
        )


@dataclass(frozen=True)
class Result(Findings):
    """The result of one rank."""

    @property
    def stragglers(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return scope, ranks and step of each incident; fail on any other kind."""
        assert {each.manifestation.value for each in self.incidents} <= {"straggler"}, self.sentences
        return [(each.scope.value, each.ranks, each.step) for each in self.incidents]

    @property
    def sentences(self) -> list[str]:
        return [each.sentence for each in self.incidents]


def train(rank: int, layout: Layout, faults: FaultPlan, steps: int, run_dir: Path) -> Result:
    """Train with a check at every step."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    net, devices = Net(), layout.devices()
    for block in net.stack:
        if layout.tensor > 1:
            parallelize_module(block, devices["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=devices["dp_replicate", "dp_shard"])
    fully_shard(net, mesh=devices["dp_replicate", "dp_shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    with Injector(faults, rank, net, optimizer) as injector:
        session = enable_resiliency(
            net,
            optimizer,
            replay=ReplayConfig(interval=1, records="all"),
            observer=None,
            parallelism=layout.mesh(),
            run_dir=run_dir,
        )
        row = rank % (layout.replica * layout.shard)
        for step in range(1, steps + 1):
            tokens, targets = batch(step, row)  # tensor-parallel ranks see the same
            loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Result(fired=len(injector.fired), **findings_of(session))
