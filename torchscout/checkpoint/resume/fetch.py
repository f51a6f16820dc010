"""Brings every rank's state of the agreed generation to that rank, whole (paper, sections 8 and 9).

All ranks call it at the start, over process groups of SCOUT's own. A shard that turns out to be damaged is
demoted, on all ranks at once and in words, and all agree again: on the next source, or the next older
generation. So all end with the same generation, or all with the same error. Between ranks a shard is sent
over a process group; both ends must be called, and every wait ends with the group's timeout. While a job
trains, ``replication`` copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.resume.plan import Listing, RestorePlan, ShardLocation, agree
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.encoding import bytes_of
from torchscout.checkpoint.storage.inventory import FoundShard, Inventory, Member, Tier, inventory
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.checkpoint.storage.shards import IncomingShard
from torchscout.errors import ChannelError, CheckpointError, DamagedError, UnavailableError
from torchscout.log import log

__all__ = ["Fetched", "Links", "fetch", "receive_shard", "send_shard", "whole"]

_CHUNK = 4 << 20
_LARGEST = 1 << 50


def send_shard(path: Path, to: int, group: dist.ProcessGroup) -> None:
    """Send a file. One that cannot be read is announced as such, or filled up: its digests will not match."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        _send(torch.tensor([0], device="cpu"), to, group)
        return
    try:
        size = os.fstat(file).st_size
        _send(torch.tensor([size], device="cpu"), to, group)
        for offset in range(0, size, _CHUNK):
            piece = bytearray(min(_CHUNK, size - offset))
            _fill(piece, file, offset)
            _send(torch.frombuffer(piece, dtype=torch.uint8), to, group)
    finally:
        os.close(file)


def _fill(piece: bytearray, file: int, offset: int) -> None:
    view = memoryview(piece)
    try:
        while view and (count := os.preadv(file, [view], offset)):
            view, offset = view[count:], offset + count
    except OSError as error:
        log.error("reading a shard failed: %s", error)


def receive_shard(
    memory: Path, identity: ShardIdentity, me: int, source: int, group: dist.ProcessGroup
) -> Path:
    """Take a file; to the end, even if it cannot be kept, because it is sent to the end."""
    announced = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(announced, source, group)
    size = int(announced.item())
    if not 0 < size < _LARGEST:
        raise DamagedError("it cannot be read there")
    problem: CheckpointError | None = None
    arriving: IncomingShard | None = None
    try:
        arriving = IncomingShard(memory, identity, me, size)
    except CheckpointError as error:
        problem = error
    try:
        for offset in range(0, size, _CHUNK):
            piece = torch.empty(min(_CHUNK, size - offset), dtype=torch.uint8, device="cpu")
            _receive(piece, source, group)
            problem = problem or _appended(arriving, piece)
        if problem is not None:
            raise problem
        assert arriving is not None
        return arriving.seal()
    finally:
        if arriving is not None:
            arriving.discard()


def _appended(arriving: IncomingShard | None, piece: torch.Tensor) -> CheckpointError | None:
    assert arriving is not None
    try:
        arriving.append(bytes_of(piece))
    except CheckpointError as error:
        return error
    return None


def _send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup) -> None:
    try:
        dist.send(tensor, group=group, group_dst=to)
    except RuntimeError as error:
        raise ChannelError(f"sending a shard to rank {to} failed: {error}") from error


def _receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    try:
        dist.recv(tensor, group=group, group_src=source)
    except RuntimeError as error:
        raise ChannelError(f"receiving a shard from rank {source} failed: {error}") from error


_TOLD = 20
"""Unreadable files that a rank tells the others about."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Links:
    """How ranks speak with each other at the start."""

    exchange: Callable[[Any], list[Any]]
    """Every rank's JSON document, by rank: see ``Communicators.exchange``."""
    group: dist.ProcessGroup
    """Of all ranks in order, for tensors on the CPU. Its timeout bounds every wait."""


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """One rank's state, verified."""

    plan: RestorePlan
    path: Path
    """The file it is from."""
    value: T
    """What ``load`` made of it."""
    demoted: tuple[str, ...]
    """What was damaged on the way here, on any rank, in words."""

    @property
    def generation(self) -> Generation:
        assert self.plan.generation is not None, "fetch raises otherwise"
        return self.plan.generation

    @property
    def step(self) -> int:
        return self.generation.step


def whole(path: Path) -> None:
    """Look at every bit, or ``DamagedError``."""
    report = shards.verify(path)
    if not report.whole:
        raise DamagedError(f"{path}: {'; '.join(report.problems[:3])}")


def fetch(
    member: Member,
    wanted: Sequence[Generation],
    folders: tuple[Path, Path],
    links: Links,
    load: Callable[[Path], T],
) -> Fetched[T]:
    """The first of the ``wanted`` generations that every rank can have whole, from memory and disk.

    ``load`` reads a shard and verifies it, as ``shards.load`` and ``whole`` do, and raises
    ``CheckpointError`` if it cannot. ``UnavailableError``, on every rank alike, if nothing can be had.
    """
    desk = _Desk(member, folders[0], links, inventory(*folders, wanted), load)
    demoted = desk.share(list(desk.stock.problems[:_TOLD]))
    while True:
        plan = agree(desk.listings(wanted), wanted)
        if plan.generation is None:
            raise UnavailableError(". ".join([plan.reason, *demoted]))
        if plan.passed:
            log.error("%s", plan.reason)
        desk.attempt(plan)
        damaged = desk.finish_update(plan)
        if not damaged:
            path, value = desk.result()
            return Fetched(plan, path, value, tuple(demoted))
        demoted += damaged


class _Desk(Generic[T]):
    """One rank's part in it."""

    def __init__(
        self, member: Member, memory: Path, links: Links, stock: Inventory, load: Callable[[Path], T]
    ) -> None:
        self.stock = stock
        self._member, self._memory, self._links, self._load = member, memory, links, load
        self._loaded: tuple[Path, T] | None = None
        self._damaged: str | None = None
        self._fatal: str | None = None

    def share(self, problems: list[str]) -> list[str]:
        """All ranks' problems, each with its rank, and told to whoever reads the log."""
        gathered = self._links.exchange(problems)
        told = [f"rank {rank}, {each}" for rank, said in enumerate(gathered) for each in said]
        for each in told:
            log.error("a checkpoint's shard is damaged: %s", each)
        return told

    def listings(self, wanted: Sequence[Generation]) -> list[Listing]:
        """What every rank finds; ``CheckpointError`` if they are not about to do the same."""
        member = self._member
        purpose = [member.job, member.mesh, member.world_size, [list(each) for each in wanted]]
        listing = Listing.of(self.stock, member, wanted)
        told = self._links.exchange({"purpose": purpose, "listing": listing.to_json()})
        for rank, each in enumerate(told):
            if each["purpose"] != told[0]["purpose"]:
                raise CheckpointError(
                    "ranks disagree on what to load (job, mesh, world size, generations): "
                    f"rank 0 says {told[0]['purpose']}, rank {rank} says {each['purpose']}"
                )
        if len(told) != member.world_size:
            raise CheckpointError(f"{len(told)} ranks take part, of a world size of {member.world_size}")
        return [Listing.from_json(each["listing"]) for each in told]

    def attempt(self, plan: RestorePlan) -> None:
        """Move what must be moved, pair by pair in the order of ranks; then load."""
        assert plan.generation is not None
        self._damaged = self._fatal = None
        me = self._member.rank
        for rank, source in enumerate(plan.sources):
            if source.reader == rank:
                continue
            copy = ShardLocation(rank, plan.generation, source.tier, source.holder)
            if source.reader == me:
                send_shard(self._found(copy).path, rank, self._links.group)
            elif rank == me:
                self._take(self._member.at(plan.generation), source.reader)
        if self._damaged is None and self._fatal is None:
            self._open(self._best(plan))

    def finish_update(self, plan: RestorePlan) -> list[str]:
        """What was damaged on any rank, and is no longer counted on; an error on all if one cannot go on."""
        assert plan.generation is not None
        told = self._links.exchange([self._damaged, self._fatal])
        if fatal := [f"rank {rank}: {each[1]}" for rank, each in enumerate(told) if each[1] is not None]:
            raise CheckpointError(f"{plan.generation} cannot be loaded. " + "; ".join(fatal))
        damaged = []
        for rank, (why, _) in enumerate(told):
            if why is not None:
                source = plan.sources[rank]
                sentence = (
                    f"rank {rank}'s state at {plan.generation} in {source.told(rank)} is damaged: {why}"
                )
                log.error("%s", sentence)
                damaged.append(sentence)
                bad = ShardLocation(rank, plan.generation, source.tier, source.holder)
                self._demote(bad, sentence, unread=source.reader != self._member.rank)
        return damaged

    def result(self) -> tuple[Path, T]:
        assert self._loaded is not None
        return self._loaded

    def _demote(self, bad: ShardLocation, sentence: str, unread: bool) -> None:
        """Ranks of one machine, or of one shared disk, find the same file: whoever does looks at it now."""
        for found in [each for each in self.stock.found if ShardLocation.of(each) == bad]:
            if not unread or not shards.verify(found.path).whole:
                self.stock = self.stock.without(found.path, sentence)

    def _best(self, plan: RestorePlan) -> Path:
        """What the plan names, or what was moved here for it."""
        assert plan.generation is not None
        me = self._member.rank
        source = plan.sources[me]
        if source.reader != me:
            return shards.path_of(self._memory, self._member.at(plan.generation), me)
        return self._found(ShardLocation(me, plan.generation, source.tier, source.holder)).path

    def _found(self, copy: ShardLocation) -> FoundShard:
        return next(each for each in self.stock.found if ShardLocation.of(each) == copy)

    def _open(self, path: Path) -> None:
        if self._loaded is not None and self._loaded[0] == path:
            return
        self._loaded = None  # before another one takes as much memory
        try:
            self._loaded = (path, self._load(path))
        except (CheckpointError, OSError) as error:
            self._damaged = str(error)

    def _take(self, identity: ShardIdentity, source: int) -> None:
        me = self._member.rank
        try:
            path = receive_shard(self._memory, identity, me, source, self._links.group)
        except DamagedError as error:
            self._damaged = str(error)
        except CheckpointError as error:
            self._fatal = str(error)
        else:
            others = self.stock.without(path, "replaced") if self._has(path) else self.stock
            arrived = FoundShard(identity, me, Tier.MEMORY, path)
            self.stock = Inventory((*others.found, arrived), self.stock.problems)

    def _has(self, path: Path) -> bool:
        return any(each.path == path for each in self.stock.found)
