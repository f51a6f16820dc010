"""Moves shards between ranks over a process group when a job starts (paper, section 9).

Both ends must be called, and every wait ends with the group's timeout. While a job trains, ``replication``
copies shards instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.incoming import IncomingShard
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import ChannelError, CheckpointError, DamagedError
from torchscout.log import log
from torchscout.state.layout import bytes_of
from torchscout.utils import unlisted_groups
from torchscout.utils.private_files import open_file

__all__ = ["Links", "receive_bytes", "receive_shard", "send_bytes", "send_shard"]

_CHUNK = 4 << 20
_LARGEST = 1 << 50


@dataclass(frozen=True, slots=True)
class Links:
    """How ranks communicate at the start of a job."""

    exchange: Callable[[Any], list[Any]]
    """Gathers a JSON document from every rank, in rank order; see ``Communicators.exchange``."""
    group: dist.ProcessGroup
    """All ranks in order, for CPU tensors. Its timeout bounds every wait."""


def send_shard(path: Path, to: int, group: dist.ProcessGroup) -> None:
    """Send the shard in a file. If it cannot be read, the receiver raises ``DamagedError``."""
    try:
        size = shards.inspect(path).size
        file = open_file(path, os.O_RDONLY)
    except (CheckpointError, OSError):
        _send(torch.tensor([0], device="cpu"), to, group)
        return
    try:
        _send(torch.tensor([size], device="cpu"), to, group)
        send_bytes(file, 0, size, to, group)
    finally:
        os.close(file)


def receive_shard(
    memory: Path, identity: ShardIdentity, me: int, source: int, group: dist.ProcessGroup
) -> Path:
    """Receive a file into this folder and return its path, once every bit of it is verified.

    Raises ``DamagedError`` if the bytes are not the shard's, ``CheckpointError`` if they cannot be written.
    """
    announced = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(announced, source, group)
    size = int(announced.item())
    if not 0 < size < _LARGEST:
        raise DamagedError(f"rank {source} cannot read it")
    pieces = receive_bytes(size, source, group)
    try:
        incoming = IncomingShard(memory, identity, me, size)
        try:
            for piece in pieces:
                incoming.append(piece)
            return incoming.seal()
        finally:
            incoming.discard()
    finally:
        for _ in pieces:
            pass  # the sender sends everything, also what cannot be written here


def send_bytes(file: int, offset: int, length: int, to: int, group: dist.ProcessGroup) -> None:
    """Send part of a file. Bytes that cannot be read are sent as zeros; digests will not match them."""
    for start in range(offset, offset + length, _CHUNK):
        piece = bytearray(min(_CHUNK, offset + length - start))
        view, position = memoryview(piece), start
        try:
            while view and (count := os.preadv(file, [view], position)):
                view, position = view[count:], position + count
        except OSError as error:
            log.error("reading a shard failed: %s", error)
        _send(torch.frombuffer(piece, dtype=torch.uint8), to, group)


def receive_bytes(length: int, source: int, group: dist.ProcessGroup) -> Iterator[memoryview]:
    """Yield ``length`` bytes in pieces, each valid until the next."""
    for start in range(0, length, _CHUNK):
        piece = torch.empty(min(_CHUNK, length - start), dtype=torch.uint8, device="cpu")
        _receive(piece, source, group)
        yield bytes_of(piece)


def _send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup) -> None:
    try:
        unlisted_groups.send(tensor, group, to=to)
    except RuntimeError as error:
        raise ChannelError(f"sending a shard to rank {to} failed: {error}") from error


def _receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    try:
        unlisted_groups.receive(tensor, group, source=source)
    except RuntimeError as error:
        raise ChannelError(f"receiving a shard from rank {source} failed: {error}") from error
