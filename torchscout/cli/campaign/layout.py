"""How a cell's ranks are laid out and what they run on; torch-free. What they train is in ``training``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchscout.mesh import Mesh

__all__ = ["BLOCKS", "LAYOUTS", "Hardware", "Layout"]

BLOCKS = 3
"""Of the Transformer that is trained."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks row-major in this order: the last degree varies fastest."""

    title: str
    replica: int = 1
    shard: int = 1
    tensor: int = 1
    experts: int = 1
    """Replicas that share the experts of a mixture: expert parallelism is carved out of data parallelism."""
    apart: bool = False
    """Whether each rank is taken to be on a machine of its own, so that a group is no machine."""
    smaller: str | None = None
    """The key of the layout that is used instead where there may not be as many ranks."""
    device: str = "cpu"
    backend: str = "gloo"
    """Of the process groups: Gloo or NCCL."""

    @property
    def ranks(self) -> int:
        return self.replica * self.shard * self.tensor

    def mesh(self) -> Mesh:
        """The machines are left to be found where ranks are not apart."""
        hosts = [f"node-{rank}" for rank in range(self.ranks)] if self.apart else None
        mesh = Mesh.grid(replica=self.replica, shard=self.shard, tensor=self.tensor, hosts=hosts)
        return mesh.carve_experts(self.experts) if self.experts > 1 else mesh


LAYOUTS = {
    "ddp": Layout("DDP", replica=16, smaller="ddp-8"),
    "fsdp2": Layout("FSDP2", shard=16, smaller="fsdp2-8"),
    "hsdp": Layout("HSDP 4x4", replica=4, shard=4, smaller="hsdp-8"),
    "tensor": Layout("8 replicas x 2 tensor", replica=8, tensor=2, apart=True, smaller="tensor-8"),
    "ep4": Layout("EP4 x DP4", replica=16, experts=4, smaller="ep4-8"),
    "ep2": Layout("EP2 x DP4", replica=8, experts=2, smaller="dp-4"),
    "alone": Layout("one process"),
    "ddp-4": Layout("DDP", replica=4, smaller="ddp-3"),
    "fsdp2-4": Layout("FSDP2", shard=4, smaller="fsdp2-3"),
    "hybrid-8": Layout("4 replicas x 2 tensor", replica=4, tensor=2, smaller="hybrid-4"),
    "ddp-8": Layout("DDP", replica=8, smaller="ddp-4"),
    "ddp-3": Layout("DDP", replica=3),
    "fsdp2-8": Layout("FSDP2", shard=8, smaller="fsdp2-4"),
    "fsdp2-3": Layout("FSDP2", shard=3),
    "hsdp-8": Layout("HSDP 4x2", replica=4, shard=2, smaller="hsdp-4"),
    "hsdp-4": Layout("HSDP 2x2", replica=2, shard=2),
    "tensor-8": Layout("4 replicas x 2 tensor", replica=4, tensor=2, apart=True, smaller="tensor-6"),
    "tensor-6": Layout("3 replicas x 2 tensor", replica=3, tensor=2, apart=True, smaller="tensor-4"),
    "tensor-4": Layout("2 replicas x 2 tensor", replica=2, tensor=2, apart=True),
    "hybrid-4": Layout("2 replicas x 2 tensor", replica=2, tensor=2),
    "ep4-8": Layout("EP2 x DP4", replica=8, experts=2, smaller="ep4-4"),
    "ep4-4": Layout("EP2 x DP2", replica=4, experts=2),
    "dp-4": Layout("EP1 x DP4", replica=4),
}
"""By the name that cells use. The small ones are for hangs, where each rank has an observer process, and for
machines on which fewer ranks may run. On 4 ranks a mixture either divides its experts, and of two holders
of each nobody can be named, or it does not: there is one layout of each kind."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all ranks of a campaign run on."""

    device: str = "cpu"
    backend: str = "gloo"
    max_ranks: int | None = None
    """How many a job may have; None for any number."""

    def fit(self, key: str) -> Layout | None:
        """The layout of this name, or a smaller one with at most ``max_ranks``; None where there is none."""
        layout = LAYOUTS[key]
        while self.max_ranks is not None and layout.ranks > self.max_ranks:
            if layout.smaller is None:
                return None
            layout = LAYOUTS[layout.smaller]
        if (self.device, self.backend) == (layout.device, layout.backend):
            return layout
        return replace(layout, device=self.device, backend=self.backend)
