"""How a cell's ranks are laid out; torch-free. What they train is in ``training``."""

from __future__ import annotations

from dataclasses import dataclass

from torchscout.mesh import Mesh

__all__ = ["BLOCKS", "LAYOUTS", "Layout"]

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

    @property
    def ranks(self) -> int:
        return self.replica * self.shard * self.tensor

    def mesh(self) -> Mesh:
        """The machines are left to be found where ranks are not apart."""
        hosts = [f"node-{rank}" for rank in range(self.ranks)] if self.apart else None
        mesh = Mesh.grid(replica=self.replica, shard=self.shard, tensor=self.tensor, hosts=hosts)
        return mesh.carve_experts(self.experts) if self.experts > 1 else mesh


LAYOUTS = {
    "ddp": Layout("DDP", replica=16),
    "fsdp2": Layout("FSDP2", shard=16),
    "hsdp": Layout("HSDP 4x4", replica=4, shard=4),
    "tensor": Layout("8 replicas x 2 tensor", replica=8, tensor=2, apart=True),
    "ep4": Layout("EP4 x DP4", replica=16, experts=4),
    "ep2": Layout("EP2 x DP4", replica=8, experts=2),
    "alone": Layout("one process"),
    "ddp-4": Layout("DDP", replica=4),
    "fsdp2-4": Layout("FSDP2", shard=4),
    "hybrid-8": Layout("4 replicas x 2 tensor", replica=4, tensor=2),
}
"""By the name that cells use. The small ones are for hangs: each of their ranks has an observer process."""
