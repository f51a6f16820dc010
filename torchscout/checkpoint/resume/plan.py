"""Which generation all ranks go back to, and where each gets its state (paper, sections 8 and 9).

A pure decision from what every rank has found: all ranks make it for themselves, from the same lists, and so
make the same. Reading the folders is for ``inventory``, moving shards for ``fetch``; which generations may be
taken at all is decided before, by ``checkpoint.selection``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchscout.checkpoint.generation import Generation, is_number
from torchscout.checkpoint.storage.inventory import FoundShard, Inventory, Member, Tier
from torchscout.errors import UnavailableError

__all__ = ["Listing", "RestorePlan", "ShardLocation", "Source", "agree"]

_TIERS = (Tier.MEMORY, Tier.DISK)
_TOLD = 8
"""Files of other jobs that a rank tells the others about."""


class ShardLocation(NamedTuple):
    """A copy of one rank's state, and in whose file it is."""

    rank: int
    generation: Generation
    tier: Tier
    holder: int

    @classmethod
    def of(cls, found: FoundShard) -> ShardLocation:
        return cls(found.identity.rank, found.identity.generation, found.tier, found.holder)


@dataclass(frozen=True, slots=True)
class Listing:
    """What one rank tells the others about the shards it finds."""

    copies: frozenset[ShardLocation]
    strangers: tuple[str, ...] = ()
    """Shards that are of another job, mesh or world size, with both values."""

    @classmethod
    def of(cls, stock: Inventory, member: Member, wanted: Sequence[Generation]) -> Listing:
        told = {each: member.objection(each.identity) for each in stock.found}
        ours = frozenset(ShardLocation.of(each) for each, why in told.items() if why is None)
        strangers = [f"{each.path}: {why}" for each, why in told.items() if why is not None]
        return cls(frozenset(each for each in ours if each.generation in wanted), tuple(strangers[:_TOLD]))

    def to_json(self) -> dict[str, Any]:
        rows = sorted(
            [each.rank, *each.generation, _TIERS.index(each.tier), each.holder] for each in self.copies
        )
        return {"copies": rows, "strangers": list(self.strangers)}

    @classmethod
    def from_json(cls, document: Any) -> Listing:
        rows = document["copies"]
        if wrong := [row for row in rows if len(row) != 5 or not all(map(is_number, row)) or row[3] > 1]:
            raise ValueError(f"not a copy of a rank's state: {wrong[0]!r:.80}")
        copies = (ShardLocation(row[0], Generation(row[1], row[2]), _TIERS[row[3]], row[4]) for row in rows)
        return cls(frozenset(copies), tuple(map(str, document["strangers"])))


class Source(NamedTuple):
    """Where a rank gets its state."""

    reader: int
    """The rank that finds the file in its folders, and reads it."""
    tier: Tier
    holder: int
    """Whose file it is."""

    def told(self, rank: int) -> str:
        whose = "its own" if self.reader == rank else f"rank {self.reader}'s"
        return f"{whose} {self.tier.value}"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What all ranks load."""

    generation: Generation | None
    """None if none of those that may be taken can be had; a person decides what then."""
    sources: tuple[Source, ...]
    """Each rank's."""
    passed: tuple[tuple[Generation, str], ...]
    """Newer ones that would have been taken, and why they cannot be had, in words."""

    in_files: bool = False
    """Whether every rank's state is on a disk as well, or only there."""

    @property
    def reason(self) -> str:
        """The choice in words."""
        lost = "; ".join(f"{generation} cannot be had: {why}" for generation, why in self.passed)
        if self.generation is None:
            return f"No checkpoint is left that may be loaded: {lost}"
        return f"All ranks load {self.generation}" + (f", because {lost}" if lost else "")


def agree(listings: Sequence[Listing], wanted: Sequence[Generation]) -> RestorePlan:
    """The first of the ``wanted`` of which every rank can have its state, given all ranks' listings.

    ``UnavailableError`` if none can be had and what is there is of another job, mesh or world size.
    """
    if not wanted:
        raise ValueError("no generation is wanted, so there is nothing to agree on")
    copies = _copies(listings)
    passed: list[tuple[Generation, str]] = []
    for generation in wanted:
        sources = [_best(copies.get((rank, generation), ()), rank) for rank in range(len(listings))]
        missing = [rank for rank, source in enumerate(sources) if source is None]
        if not missing:
            found = (copies[rank, generation] for rank in range(len(listings)))
            in_files = all(any(each.tier is Tier.DISK for each in held) for held in found)
            chosen = tuple(each for each in sources if each is not None)
            return RestorePlan(generation, chosen, tuple(passed), in_files)
        passed.append((generation, _gone(missing, len(listings))))
    plan = RestorePlan(None, (), tuple(passed))
    if strangers := [
        f"rank {rank} finds {each}" for rank, told in enumerate(listings) for each in told.strangers
    ]:
        raise UnavailableError(
            f"{plan.reason}. What is there is not of this job: {'; '.join(strangers[:_TOLD])}"
        )
    return plan


def _copies(listings: Sequence[Listing]) -> dict[tuple[int, Generation], list[Source]]:
    """Where the state of each rank at each generation can be read."""
    found: dict[tuple[int, Generation], list[Source]] = {}
    for reader, listing in enumerate(listings):
        for copy in listing.copies:
            source = Source(reader, copy.tier, copy.holder)
            found.setdefault((copy.rank, copy.generation), []).append(source)
    return found


def _best(sources: Sequence[Source], rank: int) -> Source | None:
    """Own memory, own disk, another one's memory, another one's disk."""
    return min(sources, key=lambda source: _cost(source, rank), default=None)


def _cost(source: Source, rank: int) -> tuple[int, ...]:
    elsewhere, slower = source.reader != rank, source.tier is Tier.DISK
    # Several ranks of one machine find the same file; whose it is reads it, so that the work is shared.
    return (
        elsewhere,
        slower,
        source.holder != rank,
        source.reader != source.holder,
        source.reader,
        source.holder,
    )


def _gone(missing: Sequence[int], world_size: int) -> str:
    if len(missing) == world_size:
        return "no rank finds anything of it"
    named = ", ".join(map(str, missing[:_TOLD])) + (", ..." if len(missing) > _TOLD else "")
    whose = f"rank {named}" if len(missing) == 1 else f"ranks {named}"
    return f"the state of {whose} is nowhere, neither in any memory nor on any disk"
