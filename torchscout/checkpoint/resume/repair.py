"""Repairs a damaged shard with identical bytes from other ranks' shards (paper, sections 8 and 9).

[Note: which bytes may come from another rank]

Replicas hold equal parameters and optimizer state, so a tensor that is damaged in every copy of one rank's
shard is usually whole in another rank's. The header, which has a digest of its own, records the xxh3-128 of
every tensor: a tensor of the same length and digest in another shard holds the same bytes. What differs
between ranks, such as random state and data positions, has different digests and is never taken. A shard
that is missing, or whose header is damaged, cannot be repaired: its rank-local state is lost.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchscout.checkpoint.resume.plan import TensorKey, repair_sources, replaced, tensors_of
from torchscout.checkpoint.resume.transfer import Links, receive_bytes, send_bytes
from torchscout.checkpoint.storage.incoming import IncomingShard
from torchscout.checkpoint.storage.shard_format import Entry
from torchscout.checkpoint.storage.shards import Report
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import open_to_read

__all__ = ["repair"]


def repair(report: Report | None, memory: Path, rank: int, links: Links) -> tuple[Path | None, list[str]]:
    """Repair the damaged shards of one generation. Call it on every rank.

    ``report`` describes this rank's shard; None if it has none with a whole header. Returns the path of this
    rank's repaired shard, or None, and what was done on any rank, in words.
    """
    needs = _exchange(links, None if report is None else tensors_of(report, damaged=True))
    if report is None or None in needs or not any(needs):
        return None, []  # some rank's state is lost, or nothing is damaged that a peer could have
    wanted = {key for keys in needs for key in keys or ()}
    own = tensors_of(report, damaged=False)
    offers = _exchange(links, wanted & own.keys())
    path: Path | None = None
    outcome: str | None = None
    for needy, sources in repair_sources(needs, [keys or () for keys in offers]).items():
        if needy != rank:
            _send(report.path, [own[key] for key, source in sources.items() if source == rank], needy, links)
            continue
        received = {
            key: b"".join(map(bytes, receive_bytes(key[1], source, links.group)))
            for key, source in sources.items()
        }
        try:
            path = _write(report, received, memory, rank)
            outcome = replaced(report, sources, is_done=True)
        except (CheckpointError, OSError) as error:
            assert report.header is not None
            generation = report.header.identity.generation
            outcome = f"rank {rank}'s state at {generation} could not be repaired: {error}"
    return path, [each for each in links.exchange(outcome) if each is not None]


def _exchange(links: Links, keys: Iterable[TensorKey] | None) -> list[list[TensorKey] | None]:
    by_rank = links.exchange(None if keys is None else sorted(keys))
    return [None if keys is None else [(digest, length) for digest, length in keys] for keys in by_rank]


def _send(path: Path, entries: Sequence[Entry], to: int, links: Links) -> None:
    if not entries:
        return
    with open_to_read(path) as file:
        for entry in entries:
            send_bytes(file.fileno(), entry.offset, entry.length, to, links.group)


def _write(report: Report, received: Mapping[TensorKey, bytes], memory: Path, rank: int) -> Path:
    """Write the shard again with these bytes in place of the damaged ones; ``seal`` verifies all of it."""
    header = report.header
    assert header is not None
    incoming = IncomingShard(memory, header.identity, rank, header.size)
    try:
        with (
            open_to_read(report.path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as shard,
        ):
            incoming.append(shard[: header.start])
            for entry in header.entries:
                is_damaged, key = entry.name in report.damaged, (entry.digest, entry.length)
                incoming.append(bytes(entry.offset - incoming.received))
                incoming.append(received[key] if is_damaged else shard[entry.offset : entry.end])
        return incoming.seal()
    finally:
        incoming.discard()
