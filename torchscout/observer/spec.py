"""What a trainer tells its observer, and which ranks host the hubs.

It is sent over the observer's standard input, because the job's token must not show in a list of
processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchscout.config import ObserverConfig

if TYPE_CHECKING:
    from torchscout.mesh import Mesh

__all__ = ["ObserverSpec", "describe_mesh", "hub_ranks", "mesh_from"]

_MOST_HUBS = 8
"""Ranks that may host one. With all of these lost, a hang is not localized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverSpec:
    """One observer's duties."""

    rank: int
    size: int
    """Ranks in the job."""
    record: str
    """The trainer's progress record."""
    run_dir: str
    """Where incidents are written; an absolute path."""
    token: str
    """The job's own secret; the same on all ranks and of this run only."""
    config: ObserverConfig
    stack: str | None = None
    """The file its trainer writes its stacks to; None where it registered no signal."""
    hub: int | None = None
    """Its place in ``hub_ranks``: 0 hosts the hub, 1 the standby, later ones a hub once they are elected;
    None hosts none."""
    mesh: Mapping[str, Any] | None = None
    """As ``describe_mesh`` has it; only who may host a hub needs one."""
    is_restarted: bool = False
    """Whether it takes the place of an observer that has ended: others have yet to find its hub again."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a job of {self.size} ranks")
        if not Path(self.run_dir).is_absolute():
            raise ValueError(f"run_dir must be an absolute path, got {self.run_dir!r}")
        if self.hub is not None and self.mesh is None:
            raise ValueError(f"rank {self.rank} hosts a hub, which needs the mesh")

    @property
    def log(self) -> Path:
        """Where the observer's own errors go; there is no such file where there are none."""
        return Path(self.run_dir) / "observers" / f"rank-{self.rank}.log"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ObserverSpec:
        return cls(**{**document, "config": ObserverConfig(**document["config"])})


def hub_ranks(hosts: Sequence[str | None]) -> tuple[int, ...]:
    """Who hosts the hub, who its standby, and who is elected in their place, in this order.

    The first rank, and one that does not share its fate: the last rank of another machine, or where there is
    none the last rank. Then the first rank of each machine, the second one of each, and so on.
    """
    last = len(hosts) - 1
    standby = max((rank for rank, host in enumerate(hosts) if host != hosts[0]), default=last)
    seen: Counter[str | None] = Counter()
    others = []
    for rank, host in enumerate(hosts):
        if rank not in {0, standby}:
            others.append((seen[host], rank))
            seen[host] += 1
    candidates = (0, standby, *(rank for _, rank in sorted(others)))
    return tuple(dict.fromkeys(candidates))[:_MOST_HUBS]


def describe_mesh(mesh: Mesh) -> dict[str, Any]:
    """A mesh as plain JSON."""
    ranks = range(len(mesh))
    hosts = [mesh.host_of(rank) for rank in ranks]
    return {
        "dense": [astuple(mesh.address_of(rank, "dense")) for rank in ranks],
        "expert": [astuple(mesh.address_of(rank, "expert")) for rank in ranks],
        "hosts": None if None in hosts else hosts,
    }


def mesh_from(document: Mapping[str, Any]) -> Mesh:
    # Not above: it brings numpy, and most observers never need a mesh.
    from torchscout.mesh import Mesh, MeshAddress

    dense, expert = ([MeshAddress(*row) for row in document[table]] for table in ("dense", "expert"))
    return Mesh(dense, document["hosts"], expert_addresses=expert)
