"""The configuration that a trainer sends to its observer, and which ranks host hubs and relays.

It is sent over the observer's standard input, because a list of processes must not show the job's token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchscout.config import ObserverConfig, RecoveryConfig, StragglerConfig
from torchscout.run.folder import Identity
from torchscout.run.notify import Webhook
from torchscout.run.restart import RestartPlan

if TYPE_CHECKING:
    from torchscout.mesh import Mesh

__all__ = ["ObserverSpec", "describe_mesh", "hub_ranks", "mesh_from", "relay_ranks", "relayed_with"]

_MAX_HUBS = 8
"""How many ranks may host a hub. If all of them are lost, hangs are not localized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverSpec:
    """What one observer needs to know."""

    rank: int
    size: int
    """Number of ranks in the job."""
    record: str
    """Path of the trainer's progress record."""
    run: Identity
    """The run, with the directory where incidents are written."""
    token: str
    """The secret of this run of the job, the same on all ranks."""
    config: ObserverConfig
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    """When a rank that is slow to fetch batches, or to read or write checkpoints, is reported;
    ``ObserverConfig.phase_ms`` replaces ``min_slowdown_ms``."""
    stack: str | None = None
    """The file that the trainer writes its stacks to; None if it has registered no signal."""
    hub: int | None = None
    """Position in ``hub_ranks``: 0 hosts the hub, 1 the standby, later ones a hub once they are elected;
    None hosts none."""
    mesh: Mapping[str, Any] | None = None
    """The result of ``describe_mesh``; required for a rank that may host a hub."""
    machine: tuple[int, ...] = ()
    """The ranks of this machine, if the observer of the first one is its relay."""
    recovery: RecoveryConfig | None = None
    """How it decides in place of a trainer that cannot; None if it must not."""
    plan: RestartPlan = field(default_factory=RestartPlan)
    """The restart plan that the job began with."""
    began: float = 0.0
    """When the trainer began, by this machine's monotonic clock."""
    plan_folders: tuple[str, ...] = ()
    """Where restart plans are written; if there are none, nothing is carried out."""
    directory: str = "/"
    """The trainer's current folder."""
    webhook: Webhook | None = None
    """Where the hub posts incidents."""
    launcher: tuple[int, int] | None = None
    """The process that has started the trainer, and when it began; see ``utils.procfs``."""
    error_file: str | None = None
    """Where torchrun's ``record`` writes the exception that ends the trainer."""
    output: int | None = None
    """A descriptor of the job's output, if that is a regular file."""
    is_restarted: bool = False
    """Whether it replaces an observer that has ended, so that the others must first find its hub again."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a job of {self.size} ranks")
        if not self.run_dir.is_absolute():
            raise ValueError(f"run_dir must be an absolute path, got {self.run.run_dir!r}")
        if self.hub is not None and self.mesh is None:
            raise ValueError(f"rank {self.rank} hosts a hub, which needs the mesh")

    @property
    def run_dir(self) -> Path:
        return Path(self.run.run_dir)

    @property
    def log(self) -> Path:
        """The file for the observer's own errors; it is removed if there are none."""
        return self.run_dir / "observers" / f"rank-{self.rank}.log"

    def to_json(self) -> dict[str, Any]:
        # Without the mesh, which ``asdict`` would copy number by number.
        plain = asdict(replace(self, hub=None, mesh=None, plan=RestartPlan()))
        return {**plain, "hub": self.hub, "mesh": self.mesh, "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ObserverSpec:
        recovery, webhook, launcher = (document[name] for name in ("recovery", "webhook", "launcher"))
        converted = {
            "run": Identity(**document["run"]),
            "webhook": None if webhook is None else Webhook(**webhook),
            "launcher": None if launcher is None else tuple(launcher),
            "config": ObserverConfig(**document["config"]),
            "straggler": StragglerConfig(**document["straggler"]),
            "recovery": None if recovery is None else RecoveryConfig(**recovery),
            "plan": RestartPlan.from_json(document["plan"]),
            "plan_folders": tuple(map(str, document["plan_folders"])),
            "machine": tuple(map(int, document["machine"])),
        }
        return cls(**{**document, **converted})


def hub_ranks(hosts: Sequence[str | None]) -> tuple[int, ...]:
    """Return the ranks that host the hub, its standby, and the hubs that are elected later, in this order.

    The hub is on the first rank. The standby is on the last rank of another machine or, if there is none, on
    the last rank. Then follow the first rank of each machine, the second rank of each, and so on.
    """
    standby = max((rank for rank, host in enumerate(hosts) if host != hosts[0]), default=len(hosts) - 1)
    seen: Counter[str | None] = Counter()
    others = []
    for rank, host in enumerate(hosts):
        if rank not in {0, standby}:
            others.append((seen[host], rank))
            seen[host] += 1
    candidates = (0, standby, *(rank for _, rank in sorted(others)))
    return tuple(dict.fromkeys(candidates))[:_MAX_HUBS]


def relay_ranks(hosts: Sequence[str | None] | None, min_ranks: int) -> dict[int, int]:
    """Return the rank whose observer is the relay of each rank: the first of its machine, if it has several.

    There are none in a job of fewer than ``min_ranks`` ranks, or if the machines are unknown.
    """
    if hosts is None or None in hosts or len(hosts) < min_ranks:
        return {}
    machines = defaultdict[str | None, list[int]](list)
    for rank, host in enumerate(hosts):
        machines[host].append(rank)
    return {rank: ranks[0] for ranks in machines.values() if len(ranks) > 1 for rank in ranks}


def relayed_with(rank: int, hosts: Sequence[str | None] | None, min_ranks: int) -> tuple[int, ...]:
    """Return the ranks that have the same relay as this one, itself included; none if it has no relay."""
    relays = relay_ranks(hosts, min_ranks)
    return tuple(other for other, relay in relays.items() if relay == relays.get(rank))


def describe_mesh(mesh: Mesh) -> dict[str, Any]:
    """Return a mesh as plain JSON; ``mesh_from`` reads it."""
    hosts = [mesh.host_of(rank) for rank in range(len(mesh))]
    return {
        "dense": mesh.rows("dense"),
        "expert": mesh.rows("expert"),
        "hosts": None if None in hosts else hosts,
    }


def mesh_from(document: Mapping[str, Any]) -> Mesh:
    # Imported here because it brings numpy, and most observers never need a mesh.
    import numpy as np

    from torchscout.mesh import AXES, Mesh

    dense, expert = (
        np.array(document[table], dtype=np.int64).reshape(-1, len(AXES)) for table in ("dense", "expert")
    )
    return Mesh(dense, document["hosts"], expert_addresses=expert)
