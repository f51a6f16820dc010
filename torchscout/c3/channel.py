"""How peers exchange evidence: the only place where C3 uses ``torch.distributed``.

Payloads are bytes, never pickles: a peer sends data, not code.
"""

from __future__ import annotations

import datetime
import json
import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchscout.errors import ChannelError
from torchscout.mesh import PeerGroup
from torchscout.utils import unlisted_groups

__all__ = ["PeerChannel", "ProcessGroupChannel", "ThreadChannel", "decoded"]


class PeerChannel(Protocol):
    """One rank's end of the exchange among ``peers``.

    Every peer calls the same methods in the same order. If a peer does not take part within the timeout of
    the channel, methods raise ``ChannelError``.
    """

    @property
    def peers(self) -> PeerGroup: ...

    @property
    def position(self) -> int:
        """The position of this rank in ``peers.ranks``."""
        ...

    def gather(self, payload: bytes) -> list[bytes]:
        """Send a payload of any length; return the payloads of all peers, in peer order."""
        ...

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        """Return the payload of the peer at position ``source``, which all peers pass alike."""
        ...

    def highest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each 64-bit integer over all peers, which pass equally many."""
        ...


_HEADER = struct.Struct("<q")  # the length of the payload
_BLOCK = 4096  # bytes of the first exchange; hundreds of surfaces need no second one


class ProcessGroupChannel:
    """A channel over a process group that training does not use.

    ``device`` is where the backend of the group needs its tensors: ``cpu`` for Gloo, the rank's device for
    NCCL. ``patience`` replaces the timeout of the group in broadcasts. Raises ``ValueError`` if the group has
    more or fewer ranks than ``peers``.
    """

    def __init__(
        self,
        peers: PeerGroup,
        group: dist.ProcessGroup,
        *,
        device: torch.device | str = "cpu",
        patience: datetime.timedelta | None = None,
    ) -> None:
        if group.size() != len(peers):
            raise ValueError(f"the process group has {group.size()} ranks, its peers are {peers.ranks}")
        self.peers = peers
        self.position = group.rank()
        self._group, self._patience = group, patience
        self._device = torch.device(device)

    def gather(self, payload: bytes) -> list[bytes]:
        # Peers that are out of step may send other lengths, and an all-gather of unequal tensors would hang.
        # A first block of fixed size tells every peer all lengths.
        firsts = self._all_gather(_HEADER.pack(len(payload)) + payload, _BLOCK)
        lengths = [_HEADER.unpack_from(first)[0] for first in firsts]
        carried = _BLOCK - _HEADER.size
        if (rest := max(lengths) - carried) <= 0:
            return [_body(first, length) for first, length in zip(firsts, lengths, strict=True)]
        seconds = self._all_gather(payload[carried:], rest)
        wholes = [first + second for first, second in zip(firsts, seconds, strict=True)]
        return [_body(whole, length) for whole, length in zip(wholes, lengths, strict=True)]

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        first = self._broadcast(_HEADER.pack(len(payload)) + payload, _BLOCK, source)
        (length,) = _HEADER.unpack_from(first)
        carried = _BLOCK - _HEADER.size
        if length <= carried:
            return _body(first, length)
        return _body(first + self._broadcast(payload[carried:], length - carried, source), length)

    def highest(self, values: Sequence[int]) -> list[int]:
        column = torch.tensor(values, dtype=torch.int64, device=self._device)
        try:
            unlisted_groups.all_reduce_max(column, self._group)
        except RuntimeError as error:
            raise ChannelError(f"ranks {self.peers.ranks} could not agree: {error}") from error
        highest: list[int] = column.tolist()
        return highest

    def _all_gather(self, payload: bytes, size: int) -> list[bytes]:
        local = self._tensor(payload, size)
        gathered = local.new_empty(len(self.peers), size)
        try:
            unlisted_groups.all_gather(gathered.unbind(), local, self._group)
        except RuntimeError as error:
            raise ChannelError(f"gather among ranks {self.peers.ranks} failed: {error}") from error
        on_host = gathered.cpu().numpy()  # one transfer for all peers
        return [row.tobytes() for row in on_host]

    def _broadcast(self, payload: bytes, size: int, source: int) -> bytes:
        tensor = self._tensor(payload, size)
        try:
            unlisted_groups.broadcast(tensor, self._group, source=source, timeout=self._patience)
        except RuntimeError as error:
            raise ChannelError(f"broadcast among ranks {self.peers.ranks} failed: {error}") from error
        return tensor.cpu().numpy().tobytes()

    def _tensor(self, payload: bytes, size: int) -> torch.Tensor:
        padded = bytearray(payload[:size].ljust(size, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8).to(self._device)


def _body(block: bytes, length: int) -> bytes:
    return block[_HEADER.size : _HEADER.size + length]


def decoded(documents: Sequence[bytes | str]) -> list[Any]:
    """Decode JSON documents. Equal ones, which are usual, are decoded once and share one object."""
    known = {each: json.loads(each) for each in dict.fromkeys(documents)}
    return [known[each] for each in documents]


class ThreadChannel:
    """A channel among threads of one process, for tests."""

    def __init__(
        self, peers: PeerGroup, position: int, board: list[bytes], barrier: threading.Barrier
    ) -> None:
        self.peers = peers
        self.position = position
        self._board, self._barrier = board, barrier

    @classmethod
    def create_all(cls, peers: PeerGroup, *, timeout: float = 10.0) -> Sequence[ThreadChannel]:
        """Return one end for each peer, in peer order."""
        board, barrier = [b""] * len(peers), threading.Barrier(len(peers), timeout=timeout)
        return [cls(peers, position, board, barrier) for position in range(len(peers))]

    def gather(self, payload: bytes) -> list[bytes]:
        self._board[self.position] = payload
        self._meet()
        gathered = list(self._board)
        self._meet()  # no peer may overwrite the board before all have read it
        return gathered

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        return self.gather(payload)[source]

    def highest(self, values: Sequence[int]) -> list[int]:
        layout = struct.Struct(f"<{len(values)}q")
        columns = zip(*map(layout.unpack, self.gather(layout.pack(*values))), strict=True)
        return [max(each) for each in columns]

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ChannelError(f"a peer among ranks {self.peers.ranks} did not take part") from error
