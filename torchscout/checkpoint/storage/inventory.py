"""Lists the shards that a rank finds in memory and on disk (paper, sections 8 and 9).

Only headers are read; tensors are verified when a shard is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError

__all__ = ["FoundShard", "Inventory", "Member", "RankState", "Tier", "inventory"]


class Tier(str, Enum):
    """Where a shard is stored, fastest first."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a job."""

    job: str
    mesh: str
    world_size: int
    rank: int

    def at(self, generation: Generation, rank: int | None = None) -> ShardIdentity:
        """The identity of this rank's state, or of another rank's."""
        owner = self.rank if rank is None else rank
        return ShardIdentity(
            job=self.job, mesh=self.mesh, world_size=self.world_size, rank=owner, generation=generation
        )

    def objection(self, identity: ShardIdentity) -> str | None:
        """Why state of this identity belongs to another job, mesh or world size; None if it does not."""
        for name in ("job", "world_size", "mesh"):
            theirs, ours = getattr(identity, name), getattr(self, name)
            if theirs != ours:
                return f"it is of {name.replace('_', ' ')} {theirs!r:.100}, this job is of {ours!r:.100}"
        return None


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard whose header is whole."""

    identity: ShardIdentity
    holder: int
    """The rank that keeps the file; another than ``identity.rank`` if it is a copy."""
    tier: Tier
    path: Path


RankState = tuple[Generation, int]
"""A generation, and the rank whose state of it is meant."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The shards that one rank finds."""

    found: tuple[FoundShard, ...]
    problems: tuple[str, ...] = ()
    """Files with a shard's name that are not whole shards, in words."""

    def without(self, path: Path) -> Inventory:
        """The inventory after this file turned out to be damaged."""
        return Inventory(tuple(each for each in self.found if each.path != path), self.problems)


def inventory(
    memory: Path,
    disk: Path,
    generations: Collection[Generation] | None = None,
    states: Collection[RankState] | None = None,
) -> Inventory:
    """List both folders' shards: of these generations or of all, and of these ranks' state or of every
    rank's. A missing folder counts as empty."""
    found: list[FoundShard] = []
    problems: list[str] = []
    for tier, folder in ((Tier.MEMORY, memory), (Tier.DISK, disk)):
        if not folder.is_dir():
            continue
        for file in shard_files(folder, lambda each: generations is None or each in generations):
            if states is not None and (file.generation, file.rank) not in states:
                continue
            seen = _inspect(file.path, file.holder, tier)
            if isinstance(seen, str):
                problems.append(seen)
            else:
                found.append(seen)
    return Inventory(tuple(found), tuple(problems))


def _inspect(path: Path, holder: int, tier: Tier) -> FoundShard | str:
    try:
        identity = shards.inspect(path).identity
    except CheckpointError as error:
        return f"in {tier.value}: {error}"
    # Reject a file under another shard's name: otherwise two files could claim to be the same shard.
    if shards.path_of(path.parent.parent, identity, holder) != path:
        return f"in {tier.value}: {path} holds the state of rank {identity.rank} at {identity.generation}"
    return FoundShard(identity, holder, tier, path)
