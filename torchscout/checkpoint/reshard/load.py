"""Loads a generation that was saved by ranks of another layout, on all ranks or on none (paper, section 9).

Every rank describes the whole state from all headers, reads the parts of tensors that overlap with its own,
and verifies them. What only other machines have is sent over the job's process group.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.reshard.local_state import LocalState, local_state
from torchscout.checkpoint.reshard.reader import ReadPart, ShardReader
from torchscout.checkpoint.reshard.whole_state import StoredPart, WholeState, describe
from torchscout.checkpoint.resume.transfer import Links, receive_bytes, send_bytes
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import FoundShard, Member, Tier, inventory
from torchscout.checkpoint.storage.shard_format import Entry, Header, digest, parse
from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.collect import StateParts
from torchscout.state.layout import bytes_of, empty_tensor
from torchscout.utils.private_files import open_to_read
from torchscout.utils.text import spans

__all__ = ["Layout", "Resharded", "layouts_of", "reshard"]


_Found = tuple[str, int, bool, int, int]
"""Shards that a rank finds: mesh, world size, whether they are on disk, and their first and last rank."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a job that saved a generation were laid out, and who can read their shards."""

    mesh: str
    world_size: int
    readers: tuple[int | None, ...]
    """For each rank of then, the first rank of now that finds its shard; None if no rank does."""
    found_by_all: frozenset[int]
    """Ranks of then whose shards all ranks of now find."""
    in_files: bool
    """Whether a disk holds every shard."""

    @property
    def missing(self) -> list[int]:
        return [rank for rank, reader in enumerate(self.readers) if reader is None]

    def __str__(self) -> str:
        return f"{self.world_size} ranks, {self.mesh}"


@dataclass(frozen=True, slots=True)
class Resharded:
    """This rank's state, verified and not restored yet, or why there is none."""

    state: LocalState | None
    problems: tuple[str, ...]
    """On any rank, in words; the same on every rank."""
    notes: tuple[str, ...] = ()


def layouts_of(
    generation: Generation, member: Member, folders: tuple[Path, Path], links: Links
) -> tuple[list[Layout], list[FoundShard]]:
    """The layouts in which any rank finds shards of this generation, and this rank's own findings."""
    stock = [each for each in inventory(*folders, [generation]).found if each.identity.job == member.job]
    own: dict[tuple[str, int, bool], list[int]] = {}
    for each in stock:
        group = (each.identity.mesh, each.identity.world_size, each.tier is Tier.DISK)
        own.setdefault(group, []).append(each.identity.rank)
    gathered = links.exchange([[*group, spans(ranks)] for group, ranks in own.items()])
    # Ranks that share a disk find the same, and there may be thousands of them.
    finders: dict[_Found, list[int]] = {}
    for rank, rows in enumerate(gathered):
        for mesh, size, is_file, found in rows:
            for first, last in found:
                finders.setdefault((mesh, size, is_file, first, last), []).append(rank)
    layouts = [
        _layout(mesh, size, finders, len(gathered))
        for mesh, size in sorted({(mesh, size) for mesh, size, *_ in finders})
    ]
    return layouts, stock


def _layout(mesh: str, size: int, finders: Mapping[_Found, Sequence[int]], world_size: int) -> Layout:
    readers: dict[int, int] = {}
    found_by_all: set[int] = set()
    in_files: set[int] = set()
    for (*layout, is_file, first, last), found_by in finders.items():
        if layout != [mesh, size]:
            continue
        ranks = range(first, last + 1)
        readers |= {rank: min(found_by[0], readers.get(rank, found_by[0])) for rank in ranks}
        if len(found_by) == world_size:
            found_by_all.update(ranks)
        if is_file:
            in_files.update(ranks)
    first_readers = tuple(readers.get(rank) for rank in range(size))
    return Layout(mesh, size, first_readers, frozenset(found_by_all), in_files == {*range(size)})


def reshard(
    layout: Layout, stock: Sequence[FoundShard], parts: StateParts, member: Member, links: Links
) -> Resharded:
    """Take this rank's state out of the shards of a complete layout. Call it on every rank."""
    files: dict[int, list[Path]] = {rank: [] for rank in range(layout.world_size)}
    for each in sorted(stock, key=lambda each: (each.tier is Tier.DISK, each.holder)):
        if (each.identity.mesh, each.identity.world_size) == (layout.mesh, layout.world_size):
            files[each.identity.rank].append(each.path)
    headers = _headers(layout, files, member.rank, links)
    reader = _Reader(ShardReader(files), files)

    whole: WholeState | None = None

    def attempt(read: ReadPart) -> tuple[LocalState | None, str | None]:
        nonlocal whole
        try:
            whole = whole or _described(headers)
            return local_state(whole, parts, read, member.world_size), None
        except CheckpointError as error:
            return None, str(error)

    _, problem = attempt(reader.plan)
    if problems := _problems(links, problem):
        return Resharded(None, problems)
    reader.receive(layout, headers, member.rank, links)
    state, problem = attempt(reader.read)
    if problems := _problems(links, problem):
        return Resharded(None, problems)
    assert whole is not None, "it was described for planning"
    return Resharded(state, (), (*whole.notes, *reader.files.problems))


def _described(headers: Sequence[Header | str]) -> WholeState:
    if wrong := [each for each in headers if isinstance(each, str)]:
        raise DamagedError("; ".join(wrong))
    return describe([each for each in headers if isinstance(each, Header)])


def _problems(links: Links, problem: str | None) -> tuple[str, ...]:
    found = enumerate(links.exchange(problem))
    return tuple(f"rank {rank}: {each}" for rank, each in found if each is not None)


def _headers(layout: Layout, files: dict[int, list[Path]], me: int, links: Links) -> list[Header | str]:
    """The headers of all shards, or why one cannot be read. Its first reader sends it to all ranks, unless
    they all find the shard."""
    sent: dict[str, Any] = {}
    for rank, reader in enumerate(layout.readers):
        if reader == me and rank not in layout.found_by_all:
            try:
                path = files[rank][0]
                header = shards.inspect(path)
                with open_to_read(path) as file:
                    start = base64.b64encode(file.read(header.start)).decode()
                sent[str(rank)] = [start, header.size]
            except (CheckpointError, OSError) as error:
                sent[str(rank)] = str(error)
    received = {rank: each for found in links.exchange(sent) for rank, each in found.items()}
    return [_header(files[rank], received.get(str(rank))) for rank in range(layout.world_size)]


def _header(paths: Sequence[Path], received: Any) -> Header | str:
    try:
        if paths:
            return shards.inspect(paths[0])
        if isinstance(received, str):
            return received
        return parse(base64.b64decode(received[0]), received[1])
    except CheckpointError as error:
        return str(error)


class _Reader:
    """Reads parts that this rank finds, and receives those that it does not."""

    def __init__(self, files: ShardReader, paths: dict[int, list[Path]]) -> None:
        self.files, self._paths = files, paths
        self._wanted: dict[tuple[int, str], Entry] = {}
        self._received: dict[tuple[int, str], torch.Tensor] = {}
        self._damaged: dict[tuple[int, str], str] = {}

    def plan(self, copies: Sequence[StoredPart]) -> torch.Tensor:
        """Note a part that another rank must send; returns memory that is not filled."""
        if not self._local(copies):
            first = copies[0]
            self._wanted[first.rank, first.entry.name] = first.entry
        return empty_tensor(copies[0].entry.dtype, copies[0].entry.shape)

    def read(self, copies: Sequence[StoredPart]) -> torch.Tensor:
        if local := self._local(copies):
            return self.files(local)
        key = (copies[0].rank, copies[0].entry.name)
        if key in self._damaged:
            raise DamagedError(self._damaged[key])
        return self._received[key]

    def receive(self, layout: Layout, headers: Sequence[Header | str], me: int, links: Links) -> None:
        """Send and receive, rank by rank in the same order everywhere."""
        wanted = links.exchange([[rank, name] for rank, name in self._wanted])
        for needy, keys in enumerate(wanted):
            for rank, name in keys:
                source, header = layout.readers[rank], headers[rank]
                assert source is not None, "the layout is complete"
                assert isinstance(header, Header), "planning has refused it otherwise"
                if source == me:
                    entry = next(each for each in header.entries if each.name == name)
                    with open_to_read(self._paths[rank][0]) as file:
                        send_bytes(file.fileno(), entry.offset, entry.length, needy, links.group)
                elif needy == me:
                    self._take(rank, self._wanted[rank, name], source, links)

    def _take(self, rank: int, entry: Entry, source: int, links: Links) -> None:
        tensor = empty_tensor(entry.dtype, entry.shape)
        memory, position = bytes_of(tensor), 0
        for piece in receive_bytes(entry.length, source, links.group):
            memory[position : position + len(piece)] = piece
            position += len(piece)
        self._received[rank, entry.name] = tensor
        if digest(memory) != entry.digest:
            self._damaged[rank, entry.name] = (
                f"tensor {entry.name!r} of rank {rank}'s shard, which rank {source} reads, is damaged: its "
                "digest does not match"
            )

    def _local(self, copies: Sequence[StoredPart]) -> list[StoredPart]:
        return [each for each in copies if self._paths[each.rank]]
