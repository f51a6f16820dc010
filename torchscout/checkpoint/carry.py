"""One shard from one rank to another over a process group (paper, section 9).

For the start of a job, when both ranks are there for nothing else; while it trains, ``replicate`` copies. Who
gives what to whom is agreed before: both ends must be called, and every wait ends with the group's timeout.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from torchscout.checkpoint.arriving import Arriving
from torchscout.checkpoint.shard_format import Identity
from torchscout.checkpoint.tensors import bytes_of
from torchscout.errors import ChannelError, CheckpointError, DamagedError
from torchscout.log import log

__all__ = ["give", "received"]

_CHUNK = 4 << 20
_LARGEST = 1 << 50


def give(path: Path, to: int, group: dist.ProcessGroup) -> None:
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


def received(memory: Path, identity: Identity, me: int, source: int, group: dist.ProcessGroup) -> Path:
    """Take a file; to the end, even if it cannot be kept, because it is sent to the end."""
    announced = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(announced, source, group)
    size = int(announced.item())
    if not 0 < size < _LARGEST:
        raise DamagedError("it cannot be read there")
    problem: CheckpointError | None = None
    arriving: Arriving | None = None
    try:
        arriving = Arriving(memory, identity, me, size)
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


def _appended(arriving: Arriving | None, piece: torch.Tensor) -> CheckpointError | None:
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
