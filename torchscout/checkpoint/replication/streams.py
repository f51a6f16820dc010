"""Moves a shard's bytes over a TCP connection of their own, encrypted, on a thread of its own.

    24 bytes    which transfer this is: a magic number with a version, and a ticket
    1 MiB       encrypted with AES-128-GCM, then a tag of 16 bytes; repeated, the last piece may be shorter

The holder makes the ticket and the key for each transfer and sends them over the authenticated connection of
``messages``. The size is known from there too, so nothing here has a length that could be wrong. The number
of a piece is its nonce: pieces that are changed, exchanged, repeated or left out do not decrypt.

[Note: why not CURVE or TLS for the bytes]

CURVE encrypts in software; OpenSSL uses the processor's AES instructions. TLS would too, but Python's ``ssl``
reads one record of 16 KiB per call: it was as fast without digest and file as this is with both
(docs/benchmarks.md). It also needs certificates, which the standard library cannot make. TCP's own flow
control limits what is in flight.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from torchscout.checkpoint.replication.pace import RateLimit
from torchscout.checkpoint.storage.shards import IncomingShard
from torchscout.errors import ScoutError
from torchscout.utils.aes_gcm import KEY_BYTES, TAG_BYTES, AesGcm
from torchscout.utils.listener import MAGIC, TICKET_BYTES, Address

__all__ = ["PIECE", "IncomingStream", "OutgoingStream", "Secret", "Stream"]

_CONNECT_SECONDS = 10.0
PIECE = 1 << 20
"""Bytes that are encrypted at once. They fit into a core's cache."""


class Secret(NamedTuple):
    """Admits one transfer and encrypts it."""

    ticket: bytes
    key: bytes

    @classmethod
    def new(cls) -> Secret:
        return cls(secrets.token_bytes(TICKET_BYTES), secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_json(cls, value: object) -> Secret:
        """Raises ``ValueError`` if it is malformed."""
        data = bytes.fromhex(value) if isinstance(value, str) else b""
        if len(data) != TICKET_BYTES + KEY_BYTES:
            raise ValueError(f"not the secret of a transfer: {len(data)} bytes")
        return cls(data[:TICKET_BYTES], data[TICKET_BYTES:])

    def to_json(self) -> str:
        return (self.ticket + self.key).hex()


class Stream(ABC):
    """One transfer, on a thread that begins with ``start``."""

    def __init__(self, over: Callable[[], None]) -> None:
        """``over`` is called, on the thread, when it ends."""
        self.moved = 0
        """Bytes of the shard that were sent or received."""
        self.error: Exception | None = None
        self.succeeded = self.ended = False
        """Whether the thread will not touch the shard any more."""
        self._over = over
        self._aborted = False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="torchscout-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def abort(self) -> None:
        """End it, soon."""
        self._aborted = True
        with suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @abstractmethod
    def _transfer(self) -> None: ...

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        try:
            self._transfer()
            self.succeeded = True
        except (OSError, ScoutError) as error:
            self.error = error
        finally:
            self._close()
            self.ended = True
            self._over()

    def _pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """The number and the size of each piece."""
        for number, start in enumerate(range(0, size, PIECE)):
            if self._aborted:
                raise ConnectionAbortedError("the transfer was given up")
            yield number, min(PIECE, size - start)


class OutgoingStream(Stream):
    """Sends a file."""

    def __init__(
        self,
        address: Address,
        secret: Secret,
        file: int,
        size: int,
        over: Callable[[], None],
        limit: RateLimit,
    ) -> None:
        """``file`` may be closed meanwhile."""
        super().__init__(over)
        self._limit = limit
        self._address, self._secret, self._size = address, secret, size
        self._file = os.dup(file)

    def _transfer(self) -> None:
        cipher = AesGcm(self._secret.key, encrypts=True)
        self._socket = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
        self._socket.settimeout(None)  # whoever waits for progress aborts it
        self._socket.sendall(MAGIC + self._secret.ticket)
        plain, sealed = bytearray(PIECE), bytearray(PIECE + TAG_BYTES)
        for number, size in self._pieces(self._size):
            if os.preadv(self._file, [memoryview(plain)[:size]], self.moved) != size:
                raise OSError(f"the file ends early, after byte {self.moved}")
            cipher.encrypt(number, plain, size, sealed)
            self.moved += size  # before it is sent: the receiver may answer the last piece at once
            self._socket.sendall(memoryview(sealed)[: size + TAG_BYTES])
            self._limit.sent(size)
        # Closing it while anything is unread, such as ZeroMQ's greeting, would discard what is on its way.
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(4096):
            pass

    def _close(self) -> None:
        super()._close()
        os.close(self._file)


class IncomingStream(Stream):
    """Receives into a shard, which is complete and verified if it ends without an error."""

    def __init__(
        self, connection: socket.socket, key: bytes, shard: IncomingShard, over: Callable[[], None]
    ) -> None:
        super().__init__(over)
        self._socket, self._key, self._shard = connection, key, shard

    def _transfer(self) -> None:
        assert self._socket is not None
        self._socket.setblocking(True)
        cipher = AesGcm(self._key, encrypts=False)
        plain, sealed = bytearray(PIECE), bytearray(PIECE + TAG_BYTES)
        for number, size in self._pieces(self._shard.size):
            _receive(self._socket, memoryview(sealed)[: size + TAG_BYTES])
            cipher.decrypt(number, sealed, size, plain)
            self._shard.append(memoryview(plain)[:size])
            self.moved += size
        self._shard.verify()


def _receive(connection: socket.socket, room: memoryview) -> None:
    while room:
        if not (count := connection.recv_into(room)):
            raise ConnectionError("the connection ended in the middle of a shard")
        room = room[count:]
