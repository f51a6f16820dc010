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

import mmap
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import cycle
from typing import Final, NamedTuple, TypeVar

from torchscout.checkpoint.replication.pace import RateLimit
from torchscout.checkpoint.storage.incoming import IncomingShard
from torchscout.errors import ScoutError
from torchscout.utils.aes_gcm import KEY_BYTES, TAG_BYTES, AesGcm
from torchscout.utils.listener import MAGIC, TICKET_BYTES, Address

__all__ = ["PIECE", "IncomingStream", "OutgoingStream", "Secret", "Stream", "ahead", "mapped_part"]

_CONNECT_SECONDS = 10.0
PIECE = 1 << 20
"""Bytes that are encrypted at once. They fit into a core's cache."""
_AHEAD = 2
"""Pieces that are encrypted while one is sent, or received while one is decrypted."""
_NICENESS = 15
"""A thread gets about a thirtieth of a core where training keeps all cores busy: a copy still ends."""
_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14, which Python does not name."""


T = TypeVar("T")
_END: Final = object()


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
        _lower_priority()
        try:
            self._transfer()
            self.succeeded = True
        except (OSError, ScoutError) as error:
            self.error = error.with_traceback(None)  # which would keep the shard's memory
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
        self._socket = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
        self._socket.settimeout(None)  # whoever waits for progress aborts it
        self._socket.sendall(MAGIC + self._secret.ticket)
        for sealed in ahead(self._sealed(), _AHEAD):
            self.moved += len(sealed) - TAG_BYTES  # before the last piece is sent: it may be answered at once
            self._socket.sendall(sealed)
            self._limit.sent(len(sealed))
        # Closing it while anything is unread, such as ZeroMQ's greeting, would discard what is on its way.
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(4096):
            pass

    def _sealed(self) -> Iterator[memoryview]:
        """The encrypted pieces, each with its tag."""
        _lower_priority()
        cipher = AesGcm(self._secret.key, encrypts=True)
        rooms = cycle([memoryview(bytearray(PIECE + TAG_BYTES)) for _ in range(_AHEAD + 1)])
        for (number, size), room in zip(self._pieces(self._size), rooms, strict=False):
            sealed = room[: size + TAG_BYTES]
            with mapped_part(self._file, number * PIECE, size) as plain:
                cipher.encrypt(number, plain, sealed)
            yield sealed

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
        cipher = AesGcm(self._key, encrypts=False)
        with closing(ahead(self._received(), _AHEAD)) as pieces:
            try:
                for number, (data, tag) in enumerate(pieces):
                    cipher.decrypt(number, data, tag)
                    self._shard.filled(len(data))
                    self.moved += len(data)
            except ScoutError:
                self.abort()  # so that nothing waits for more bytes
                raise
        self._shard.verify()

    def _received(self) -> Iterator[tuple[memoryview, memoryview]]:
        """The encrypted pieces, each in the shard's memory, and their tags."""
        _lower_priority()
        assert self._socket is not None
        self._socket.setblocking(True)
        for _, size in self._pieces(self._shard.size):
            data, tag = self._shard.room(size), memoryview(bytearray(TAG_BYTES))
            _receive(self._socket, data, tag)
            yield data, tag


def _lower_priority() -> None:
    """Of this thread, so that training gets the core where both need it."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def mapped_part(file: int, offset: int, size: int) -> mmap.mmap:
    """Part of a file in memory; to read it into a buffer would take longer.

    The mapping is private, and writable because ``ctypes`` asks for that.
    """
    try:
        mapped = mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=offset)
    except ValueError as error:
        raise OSError(f"the file ends early, after byte {offset}") from error
    with suppress(OSError):  # an older kernel does it page by page
        mapped.madvise(_POPULATE_READ)
    return mapped


def _receive(connection: socket.socket, *rooms: memoryview) -> None:
    left = [each for each in rooms if each]
    while left:
        if not (count := connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]):
            raise ConnectionError("the connection ended in the middle of a shard")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def ahead(items: Iterator[T], most: int) -> Generator[T, None, None]:
    """Yield these items, of which a thread computes up to ``most`` while the caller uses one.

    An error of the thread is raised here. Closing the iterator waits for the item in progress.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="torchscout-ahead")
    try:
        coming = deque(pool.submit(next, items, _END) for _ in range(most + 1))
        while (item := coming.popleft().result()) is not _END:
            yield item  # type: ignore[misc]
            coming.append(pool.submit(next, items, _END))
    finally:
        pool.shutdown(cancel_futures=True)
