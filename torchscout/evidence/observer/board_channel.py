"""C3 over the board: a ``PeerChannel`` among observers (paper, section 5; torch-free)."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from torchscout.errors import ChannelError
from torchscout.observer.protocol import LIMIT, Client, Message

if TYPE_CHECKING:
    from torchscout.mesh import PeerGroup

__all__ = ["BoardChannel"]


class BoardChannel:
    """One observer's end, over its own connection to the hub.

    ``name`` is the same on all peers and unique in the job. Other messages that arrive
    meanwhile are kept for the observer.
    """

    def __init__(self, peers: PeerGroup, rank: int, client: Client, *, name: str, timeout: float) -> None:
        self.peers = peers
        self.position = peers.ranks.index(rank)
        self._client, self._name, self._timeout = client, name, timeout
        self._number = 0

    def gather(self, payload: bytes) -> list[bytes]:
        self._number += 1
        text = base64.b64encode(payload).decode()
        if len(text) * len(self.peers) > LIMIT // 2:
            raise ValueError(f"{len(payload)} bytes from each of {len(self.peers)} peers are too many")
        deadline = time.monotonic() + self._timeout
        self._send(text, deadline)
        while (left := deadline - time.monotonic()) > 0:
            zmq.select(self._client.sockets, [], [], left)
            if (payloads := self._answer()) is not None:
                return [base64.b64decode(each, validate=True) for each in payloads]
        raise ChannelError(f"gather among ranks {self.peers.ranks}: not all came in {self._timeout} s")

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        return self.gather(payload if self.position == source else b"")[source]

    def _send(self, text: str, deadline: float) -> None:
        """To the hub, or to the standby where the hub is gone."""
        fields = {"channel": self._name, "number": self._number, "peers": self.peers.ranks, "payload": text}
        hub, until = 0, deadline - self._timeout / 2
        while (now := time.monotonic()) < deadline:
            if now > until:  # its connection is not merely coming up
                hub = len(self._client.sockets) - 1
            if self._client.send(hub, "share", **fields):
                return
            time.sleep(0.01)
        raise ChannelError(f"gather among ranks {self.peers.ranks}: no hub could be reached")

    def _answer(self) -> Sequence[str] | None:
        answer: Sequence[str] | None = None
        for hub, message in list(self._client.receive()):
            if message["kind"] != "shared":
                self._client.set_aside(hub, message)
            elif self._is_ours(message):
                answer = message["payloads"]
        return answer

    def _is_ours(self, message: Message) -> bool:
        """Not one that came too late for an earlier exchange."""
        return (message.get("channel"), message.get("number")) == (self._name, self._number)
