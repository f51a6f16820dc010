"""Decides which generation all ranks load, and where each gets its shard (paper, sections 8 and 9).

Pure functions of what every rank has found: each rank computes them from the same listings and comes to the
same plan. ``inventory`` reads the folders, ``fetch`` moves shards, ``repair`` replaces damaged tensors, and
``checkpoint.gate`` decides which generations may be loaded at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchscout.checkpoint.gate import Generation, is_number
from torchscout.checkpoint.storage.inventory import FoundShard, Inventory, Member, RankState, Tier
from torchscout.checkpoint.storage.shard_format import Entry
from torchscout.checkpoint.storage.shards import Report
from torchscout.errors import UnavailableError

__all__ = [
    "Listing",
    "RestorePlan",
    "ShardLocation",
    "Source",
    "TensorKey",
    "agree",
    "repair_sources",
    "replaced",
    "tensors_of",
    "unlisted",
]

_TIERS = (Tier.MEMORY, Tier.DISK)
_MOST_NAMED = 8
"""Ranks, or files of other jobs, that a message names."""


class ShardLocation(NamedTuple):
    """One copy of one rank's state."""

    rank: int
    generation: Generation
    tier: Tier
    holder: int

    @classmethod
    def of(cls, found: FoundShard) -> ShardLocation:
        return cls(found.identity.rank, found.identity.generation, found.tier, found.holder)


@dataclass(frozen=True, slots=True)
class Listing:
    """The shards that one rank finds, as it reports them to the other ranks."""

    copies: frozenset[ShardLocation]
    strangers: tuple[str, ...] = ()
    """Shards of another job, mesh or world size, with both values."""

    @classmethod
    def of(cls, stock: Inventory, member: Member, wanted: Sequence[Generation]) -> Listing:
        objections = {each: member.objection(each.identity) for each in stock.found}
        ours = (ShardLocation.of(each) for each, why in objections.items() if why is None)
        strangers = [f"{each.path}: {why}" for each, why in objections.items() if why is not None]
        return cls(
            frozenset(each for each in ours if each.generation in wanted), tuple(strangers[:_MOST_NAMED])
        )

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
    """The rank that reads the file."""
    tier: Tier
    holder: int
    """The rank whose file it is."""

    def described(self, rank: int) -> str:
        """In words, as ``rank`` sees it."""
        whose = "its own" if self.reader == rank else f"rank {self.reader}'s"
        return f"{whose} {self.tier.value}"

    def cost(self, rank: int) -> tuple[int, ...]:
        """``rank`` takes the cheapest source: its own memory, its own disk, another rank's memory, another
        rank's disk, in this order."""
        reader, tier, holder = self
        # Several ranks of one machine find the same file; its holder reads it, so that the work is shared.
        return reader != rank, tier is Tier.DISK, holder != rank, reader != holder, reader, holder


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What all ranks load."""

    generation: Generation | None
    """None if no allowed generation is available on every rank."""
    sources: tuple[Source, ...]
    """In rank order; none if every rank takes parts of several shards."""
    passed: tuple[tuple[Generation, str], ...]
    """Newer generations that are not available, and why, in words."""
    in_files: bool = False
    """Whether a disk holds every rank's state."""

    def source_of(self, rank: int) -> str | None:
        """Where this rank gets its state, in words."""
        return self.sources[rank].described(rank) if self.sources else None

    @property
    def reason(self) -> str:
        """The choice in words."""
        lost = "; ".join(f"{generation} cannot be had: {why}" for generation, why in self.passed)
        if self.generation is None:
            return f"No checkpoint is left that may be loaded: {lost}"
        return f"All ranks load {self.generation}" + (f", because {lost}" if lost else "")


def agree(listings: Sequence[Listing], wanted: Sequence[Generation]) -> RestorePlan:
    """Plan to load the first of the ``wanted`` generations of which every rank's shard is listed.

    Raises ``UnavailableError`` if there is none and the shards found are of another job, mesh or world size.
    """
    if not wanted:
        raise ValueError("wanted must name at least one generation")
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
        f"rank {rank} finds {each}" for rank, listing in enumerate(listings) for each in listing.strangers
    ]:
        raise UnavailableError(
            f"{plan.reason}. What is there is not of this job: {'; '.join(strangers[:_MOST_NAMED])}"
        )
    return plan


def unlisted(listings: Sequence[Listing], wanted: Sequence[Generation]) -> frozenset[RankState]:
    """What no rank lists; nothing if every rank's state of the first generation is listed."""
    listed = {(copy.generation, copy.rank) for listing in listings for copy in listing.copies}
    lost = frozenset((each, rank) for each in wanted for rank in range(len(listings))) - listed
    return lost if any(generation == wanted[0] for generation, _ in lost) else frozenset()


def _copies(listings: Sequence[Listing]) -> dict[tuple[int, Generation], list[Source]]:
    """All places where each rank's state of each generation can be read."""
    found: dict[tuple[int, Generation], list[Source]] = {}
    for reader, listing in enumerate(listings):
        for copy in listing.copies:
            source = Source(reader, copy.tier, copy.holder)
            found.setdefault((copy.rank, copy.generation), []).append(source)
    return found


def _best(sources: Sequence[Source], rank: int) -> Source | None:
    return min(sources, key=lambda source: source.cost(rank), default=None)


def _gone(missing: Sequence[int], world_size: int) -> str:
    if len(missing) == world_size:
        return "no rank has a shard of it"
    named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
    whose, its = (f"rank {named}", "its") if len(missing) == 1 else (f"ranks {named}", "their")
    return (
        f"no whole shard of {whose} is left in any memory or on any disk, and {its} random state and data "
        "position cannot be taken from another rank"
    )


TensorKey = tuple[str, int]
"""A tensor's digest and length: tensors with the same key hold the same bytes."""


def tensors_of(report: Report, *, damaged: bool) -> dict[TensorKey, Entry]:
    """The damaged tensors of a shard with a whole header, or all others."""
    assert report.header is not None
    entries = [each for each in report.header.entries if (each.name in report.damaged) is damaged]
    return {(each.digest, each.length): each for each in entries}


def repair_sources(
    damaged: Sequence[Collection[TensorKey] | None], whole: Sequence[Collection[TensorKey]]
) -> dict[int, dict[TensorKey, int]]:
    """For each rank whose shard can be repaired, the rank that has each of its damaged tensors.

    Both arguments have the tensors of each rank's shard of one generation. ``damaged`` is None for a rank
    without a shard whose header is whole: then the generation is lost, and nothing is repaired. See
    [Note: which bytes may come from another rank].
    """
    found: dict[int, dict[TensorKey, int]] = {}
    for rank, keys in enumerate(() if None in damaged else damaged):
        having = {
            key: [peer for peer, held in enumerate(whole) if peer != rank and key in held]
            for key in keys or ()
        }
        if having and all(having.values()):
            found[rank] = {key: peers[0] for key, peers in having.items()}
    return found


def replaced(report: Report, sources: Mapping[TensorKey, int], *, is_done: bool) -> str:
    """The repair of one shard, in words."""
    assert report.header is not None
    count, identity = len(report.damaged), report.header.identity
    what = "1 damaged tensor" if count == 1 else f"{count} damaged tensors"
    peers = ", ".join(f"rank {each}" for each in sorted({*sources.values()}))
    verb = ("was" if count == 1 else "were") if is_done else "would be"
    whose = f"rank {identity.rank}'s state at {identity.generation}"
    return f"{what} of {whose} {verb} replaced with identical bytes from {peers}"
