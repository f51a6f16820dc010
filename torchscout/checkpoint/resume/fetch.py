"""Brings every rank's state of the agreed generation to that rank, whole (paper, sections 8 and 9).

All ranks call it at the start, over process groups of SCOUT's own. A shard that turns out to be damaged is
discarded on all ranks at once, and all ranks agree again: on the next source, on repairing it, or on the next
older generation. So all ranks end with the same generation, or all with the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.resume.plan import Listing, RestorePlan, ShardLocation, agree, unlisted
from torchscout.checkpoint.resume.repair import repair
from torchscout.checkpoint.resume.transfer import Links, receive_shard, send_shard
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import FoundShard, Inventory, Member, RankState, Tier, inventory
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError, DamagedError, UnavailableError
from torchscout.log import log
from torchscout.utils.text import named

__all__ = ["Fetched", "fetch"]

_MOST_PROBLEMS = 20
"""Unreadable files that a rank reports to the other ranks."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """One rank's state, verified."""

    plan: RestorePlan
    path: Path | None
    """The file that was loaded; None if the state comes from the shards of several ranks."""
    value: T
    """What ``load`` returned."""
    demoted: tuple[str, ...]
    """What was found damaged on any rank, and what was repaired, in words."""

    @property
    def generation(self) -> Generation:
        assert self.plan.generation is not None, "fetch raises otherwise"
        return self.plan.generation

    @property
    def step(self) -> int:
        return self.generation.step


def fetch(
    member: Member,
    wanted: Sequence[Generation],
    folders: tuple[Path, Path],
    links: Links,
    load: Callable[[Path], T],
) -> Fetched[T]:
    """Load the first of the ``wanted`` generations that every rank can have whole, from memory and disk.

    ``load`` reads and verifies a shard, as ``shards.load`` does, and raises ``CheckpointError`` if it cannot.
    Raises ``UnavailableError``, on every rank alike, if no generation is left.
    """
    # Usually all ranks have their own shards of the first generation. Those of others are only looked for if
    # they are missing: there may be thousands on a disk that all ranks share.
    ours = _Participant(member, folders, links, load)
    ours.look_for([(each, member.rank) for each in wanted])
    looked_for: frozenset[RankState] = frozenset()
    demoted: list[str] = []

    def report(sentences: Sequence[str]) -> None:
        """All ranks know the same problems, and rank 0 logs them."""
        demoted.extend(sentences)
        for each in sentences if member.rank == 0 else ():
            log.error("%s", each)

    report(ours.gather_problems())
    damaged_generation: Generation | None = None
    while True:
        listings = ours.listings(wanted)
        if lost := unlisted(listings, wanted) - looked_for:
            ours.look_for(lost)
            looked_for |= lost
            report(ours.gather_problems())
            continue
        plan = agree(listings, wanted)
        if damaged_generation not in (None, plan.generation):  # no whole copy of it is left: repair one
            report(ours.repair())
            damaged_generation = None
            continue
        if plan.generation is None:
            raise UnavailableError(". ".join([plan.reason, *demoted]))
        ours.attempt(plan)
        if not (damaged := ours.discard_damaged(plan)):
            if plan.passed and member.rank == 0:
                log.error("%s", plan.reason)
            path, value = ours.result()
            return Fetched(plan, path, value, tuple(demoted))
        report(damaged)
        damaged_generation = plan.generation


class _Participant(Generic[T]):
    """One rank's part in fetching."""

    def __init__(
        self, member: Member, folders: tuple[Path, Path], links: Links, load: Callable[[Path], T]
    ) -> None:
        self._member, self._folders, self._links, self._load = member, folders, links, load
        self._memory = folders[0]
        self._stock = Inventory(())
        self._damaged: dict[ShardLocation, int] = {}
        """The shards that turned out damaged on any rank, and who read them."""
        self._known: set[str] = set()
        """The problems that were gathered before."""
        self._loaded: tuple[Path, T] | None = None
        self._problem: str | None = None
        """How this rank's shard is damaged, in the last attempt."""
        self._fatal: str | None = None
        """Why this rank cannot load anything."""
        self._repairable: shards.Report | None = None
        """The last damaged shard of the generation that this rank could read itself."""

    def look_for(self, states: Collection[RankState]) -> None:
        """Add shards of these to the inventory, except those that turned out damaged."""
        seen, had = inventory(*self._folders, {each for each, _ in states}, states), self._stock
        new = [each for each in seen.found if each not in had.found]
        self._stock = Inventory((*had.found, *new), (*had.problems, *seen.problems))
        for bad in self._damaged:
            self._discard(bad)

    def gather_problems(self) -> list[str]:
        """Return the new unreadable files; ranks of one machine, or of one shared disk, find the same."""
        new = [each for each in self._stock.problems if each not in self._known]
        gathered = self._links.exchange(new[:_MOST_PROBLEMS])
        finders: dict[str, list[int]] = {}
        for rank, found in enumerate(gathered):
            for each in found:
                finders.setdefault(each, []).append(rank)
        self._known.update(finders)
        return [f"a shard that {named(ranks)} found {each}" for each, ranks in finders.items()]

    def listings(self, wanted: Sequence[Generation]) -> list[Listing]:
        """Every rank's shards; raises ``CheckpointError`` if ranks are about to load different things."""
        member = self._member
        purpose = [member.job, member.mesh, member.world_size, [list(each) for each in wanted]]
        listing = Listing.of(self._stock, member, wanted)
        answers = self._links.exchange({"purpose": purpose, "listing": listing.to_json()})
        for rank, each in enumerate(answers):
            if each["purpose"] != answers[0]["purpose"]:
                raise CheckpointError(
                    "ranks disagree on what to load (job, mesh, world size, generations): "
                    f"rank 0 says {answers[0]['purpose']}, rank {rank} says {each['purpose']}"
                )
        if len(answers) != member.world_size:
            raise CheckpointError(f"{len(answers)} ranks take part, of a world size of {member.world_size}")
        return [Listing.from_json(each["listing"]) for each in answers]

    def attempt(self, plan: RestorePlan) -> None:
        """Move shards between ranks, pair by pair in rank order; then load."""
        assert plan.generation is not None
        self._problem = self._fatal = None
        me = self._member.rank
        for rank, source in enumerate(plan.sources):
            if source.reader == rank:
                continue
            if source.reader == me:
                location = ShardLocation(rank, plan.generation, source.tier, source.holder)
                send_shard(self._path(location), rank, self._links.group)
            elif rank == me:
                self._receive(self._member.at(plan.generation), source.reader)
        if self._problem is None and self._fatal is None:
            self._open(plan)

    def discard_damaged(self, plan: RestorePlan) -> list[str]:
        """Stop counting on shards that turned out damaged on any rank, and return what was wrong with them.

        Raises ``CheckpointError`` on all ranks if one of them cannot go on.
        """
        assert plan.generation is not None
        outcomes = self._links.exchange([self._problem, self._fatal])
        if fatal := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why is not None]:
            raise CheckpointError(f"{plan.generation} cannot be loaded. " + "; ".join(fatal))
        damaged = []
        for rank, (why, _) in enumerate(outcomes):
            if why is None:
                continue
            source = plan.sources[rank]
            place = source.described(rank)
            damaged.append(f"rank {rank}'s state at {plan.generation} in {place} is damaged: {why}")
            bad = ShardLocation(rank, plan.generation, source.tier, source.holder)
            self._damaged[bad] = source.reader
            self._discard(bad)
        return damaged

    def _discard(self, bad: ShardLocation) -> None:
        # Ranks of one machine, or of one shared disk, find the same file: each of them looks at it now.
        for found in [each for each in self._stock.found if ShardLocation.of(each) == bad]:
            if self._damaged[bad] == self._member.rank or not shards.verify(found.path).whole:
                self._stock = self._stock.without(found.path)

    def repair(self) -> list[str]:
        """Repair this generation's damaged shards where other ranks have the same bytes; see ``repair``."""
        report, self._repairable = self._repairable, None
        if self._loaded is not None:
            path = self._loaded[0]
            report = shards.Report(path, shards.inspect(path), (), ())
        repaired, sentences = repair(report, self._memory, self._member.rank, self._links)
        if repaired is not None:
            self._add(shards.inspect(repaired).identity, repaired)
        return sentences

    def result(self) -> tuple[Path, T]:
        assert self._loaded is not None
        return self._loaded

    def _path(self, location: ShardLocation) -> Path:
        return next(each.path for each in self._stock.found if ShardLocation.of(each) == location)

    def _open(self, plan: RestorePlan) -> None:
        """Load the shard that the plan names, or that was received for it."""
        assert plan.generation is not None
        me = self._member.rank
        _, tier, holder = source = plan.sources[me]
        here = (tier, holder) if source.reader == me else (Tier.MEMORY, me)
        path = self._path(ShardLocation(me, plan.generation, *here))
        if self._loaded is not None and self._loaded[0] == path:
            return
        self._loaded = None  # before another one takes as much memory
        try:
            self._loaded = (path, self._load(path))
        except (CheckpointError, OSError) as error:
            self._problem = str(error)
            report = shards.verify(path)
            self._repairable = report if report.header is not None else self._repairable

    def _receive(self, identity: ShardIdentity, source: int) -> None:
        try:
            path = receive_shard(self._memory, identity, self._member.rank, source, self._links.group)
        except DamagedError as error:
            self._problem = str(error)
        except CheckpointError as error:
            self._fatal = str(error)
        else:
            self._add(identity, path)

    def _add(self, identity: ShardIdentity, path: Path) -> None:
        kept = tuple(each for each in self._stock.found if each.path != path)
        added = FoundShard(identity, self._member.rank, Tier.MEMORY, path)
        self._stock = Inventory((*kept, added), self._stock.problems)
