"""A TCP listener that limits unauthenticated connections to a ZeroMQ socket.

ZeroMQ accepts as many connections as there are descriptors, and each may send frames of full size before it
has authenticated. So this listener accepts connections instead, and relays bytes to and from a ZeroMQ socket
that other users of the machine cannot reach. CURVE still runs end to end: nothing is decrypted here.

A connection that has not authenticated

- is one of a few. If another one arrives, the oldest is closed, once it has had time for a handshake; until
  then the new one waits in the kernel's queue;
- may send no more than a handshake needs, within a few seconds.

ZeroMQ 4.3.5 ends its process if no file descriptor is left to accept with. So new connections are closed
while this process has few descriptors left; clients connect again.

A connection may also begin with a ticket instead of ZeroMQ's greeting. If the ticket is valid, the connection
is handed over as it is, for bytes that ZeroMQ would only slow down (``checkpoint.replication.streams``).

One thread serves all connections, in the process of the hub or in that which copies shards, never in a
trainer. Torch-free.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from torchscout.utils.procfs import open_descriptors

__all__ = ["DESCRIPTORS_EACH", "MAGIC", "TICKET_BYTES", "Limits", "Listener"]

Address = tuple[str, int]
"""Host and port."""
MAGIC = b"scoutcp1"
"""Begins a connection with a ticket. ZeroMQ's greeting begins with another byte."""
TICKET_BYTES = 16
_OPENING_BYTES = len(MAGIC) + TICKET_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for connections that have not authenticated."""

    connections: int = 8
    """The number of connections."""
    seconds: float = 5.0
    """The time for the whole handshake."""
    grace_seconds: float = 0.25
    """The least time for each, even if others wait; a handshake takes a few milliseconds."""
    received_bytes: int = 4096
    """Greeting, HELLO and INITIATE, which has some hundred bytes of metadata."""


# [Note: when a connection has authenticated]
#
# A CURVE server sends a greeting (64 bytes) to every client and WELCOME (2 + 168 bytes) to clients that know
# its public key, which is derived from the token. READY follows only after INITIATE was decrypted and
# verified. So a client has authenticated if it was sent more than greeting and WELCOME.
_BEFORE_READY = 64 + 2 + 168
_PIECE = 1 << 18
_BACKLOG = 4096
DESCRIPTORS_EACH = 3
"""Descriptors of one connection: both of its ends here, and the ZeroMQ socket's."""
_SPARE_DESCRIPTORS = 8
"""Descriptors that this process must have left, for files that it may open meanwhile."""
_COUNT_SECONDS = 1.0
"""How long a count of descriptors serves."""
_PAUSE_SECONDS = 0.2
"""The pause after a failed accept."""


@dataclass(eq=False, slots=True)
class _End:
    """One of the two sockets of a connection, and the data to be written to it."""

    socket: socket.socket
    pending: memoryview = field(default_factory=lambda: memoryview(b""))
    events: int = 0


@dataclass(eq=False, slots=True)
class _Connection:
    outer: _End
    inner: _End
    since: float
    # Bytes from and to the client, until it has authenticated.
    received: int = 0
    sent: int = 0
    opening: bytes = b""
    """What a connection with a ticket has sent."""


class Listener:
    """Accepts at one address and relays to one local socket, from ``start`` until ``close``."""

    def __init__(
        self,
        address: Address,
        inner: str,
        limits: Limits = Limits(),  # noqa: B008
        *,
        admit: Callable[[bytes, socket.socket], bool] = lambda *_: False,
    ) -> None:
        """Reserve the address; connections are refused until ``start``.

        ``inner`` is the abstract name of the ZeroMQ socket. ``admit`` is called, on the listener's thread,
        with a ticket and the connection that it came with; returns whether it takes the connection over.
        Raises ``OSError`` if the address is not available.
        """
        self.limits = limits
        self._inner, self._admit = inner, admit
        self._connections: set[_Connection] = set()
        self._unauthenticated: dict[_Connection, None] = {}
        """Oldest first."""
        self._listens = True
        self._room = 0.0
        """Connections to accept before descriptors are counted again."""
        self._counted_until = 0.0
        self._paused_until = 0.0
        self._ends_at: float | None = None
        self._thread: threading.Thread | None = None
        with ExitStack() as undo:
            self._accepting = undo.enter_context(_bound(address))
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._wake_out, self._wake = socket.socketpair()
            undo.pop_all()
        for each in (self._accepting, self._wake_out):
            self._selector.register(each, selectors.EVENT_READ)
        self.port: int = self._accepting.getsockname()[1]

    def start(self) -> None:
        """Accept connections and serve them in a thread."""
        self._accepting.listen(_BACKLOG)
        self._thread = threading.Thread(target=self.serve, name="torchscout-listener", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        finally:
            for connection in list(self._connections):
                self._end(connection)
            for each in (self._accepting, self._wake_out):
                each.close()
            self._selector.close()

    def close(self, seconds: float = 0.0) -> None:
        """Stop accepting, and give the ZeroMQ socket this long to close its connections. Idempotent."""
        if self._ends_at is not None:
            return
        self._ends_at = time.monotonic() + seconds
        self._wake.close()
        if self._thread is None:
            self.serve()  # only closes sockets
        else:
            self._thread.join(seconds + 5.0)

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        return not self._connections or time.monotonic() >= self._ends_at

    def _turn(self) -> None:
        for key, events in self._selector.select(self._timeout()):
            if key.fileobj is self._wake_out:
                self._selector.unregister(self._wake_out)  # it would stay readable
            elif key.fileobj is self._accepting and self._ends_at is None:
                self._accept()
            elif isinstance(key.data, _Connection) and key.data in self._connections:
                try:
                    self._relay(key.data, key.fileobj, events)
                except BlockingIOError:
                    continue
                except OSError:
                    self._end(key.data)
        self._close_overdue(time.monotonic())

    def _timeout(self) -> float | None:
        """Seconds until a connection is overdue, or until connections are accepted again; None for no
        limit."""
        now, moments = time.monotonic(), []
        if self._unauthenticated:
            moments.append(next(iter(self._unauthenticated)).since + self.limits.seconds)
        if not self._listens:
            moments.append(self._paused_until)
        if self._ends_at is not None:
            moments.append(self._ends_at)
        return max(0.0, min(moments) - now) if moments else None

    def _close_overdue(self, now: float) -> None:
        for connection in list(self._unauthenticated):
            if now - connection.since < self.limits.seconds:
                break
            self._end(connection)
        if not self._listens and now >= self._paused_until and self._ends_at is None:
            self._listens = True
            self._selector.register(self._accepting, selectors.EVENT_READ)

    def _accept(self) -> None:
        now = time.monotonic()
        if len(self._unauthenticated) >= self.limits.connections:
            oldest = next(iter(self._unauthenticated))
            if (free := oldest.since + self.limits.grace_seconds) > now:
                self._pause(free)
                return
            self._end(oldest)
        try:
            outer, _ = self._accepting.accept()
        except (BlockingIOError, ConnectionError):  # the client is gone
            return
        except OSError:  # no descriptors or no memory: try again later
            self._pause(now + _PAUSE_SECONDS)
            return
        inner = None
        try:
            if not self._has_room():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            inner.connect(f"\0{self._inner}")  # a local socket connects at once or fails
            self._begin(outer, inner, now)
        except OSError:
            outer.close()
            if inner is not None:
                inner.close()
            self._pause(now + _PAUSE_SECONDS)

    def _has_room(self) -> bool:
        """Whether this process has descriptors left for one more connection.

        A count serves for a while, and for half of what was left: it takes the longer the more there are, and
        a hub accepts all observers of a job at once.
        """
        now = time.monotonic()
        if self._room <= 0 or now >= self._counted_until:
            left = _descriptors_left()
            if left < _SPARE_DESCRIPTORS:
                return False
            self._room = max(1, left // 2 // DESCRIPTORS_EACH)
            self._counted_until = now + _COUNT_SECONDS
        self._room -= 1
        return True

    def _begin(self, outer: socket.socket, inner: socket.socket, now: float) -> None:
        for each in (outer, inner):
            each.setblocking(False)
        outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel notices that a machine is gone, without messages of ours.
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection = _Connection(_End(outer), _End(inner), now)
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        self._watch(connection)

    def _pause(self, until: float) -> None:
        """Leave new connections in the kernel's queue for a while."""
        self._listens, self._paused_until = False, until
        self._selector.unregister(self._accepting)

    def _relay(self, connection: _Connection, at: object, events: int) -> None:
        outer, inner = connection.outer, connection.inner
        here, there = (outer, inner) if at is outer.socket else (inner, outer)
        if events & selectors.EVENT_WRITE:
            here.pending = here.pending[here.socket.send(here.pending) :]
        if events & selectors.EVENT_READ and not there.pending:
            begins = here is outer and not connection.received
            data = here.socket.recv(_OPENING_BYTES - len(connection.opening) if begins else _PIECE)
            if not data:
                self._end(connection)
                return
            if begins and (connection.opening + data).startswith(MAGIC[:1]):
                self._open_with_ticket(connection, data)
                return
            self._count(connection, here, len(data))
            with suppress(BlockingIOError):
                there.pending = memoryview(data)
                there.pending = there.pending[there.socket.send(there.pending) :]
        if connection in self._connections:
            self._watch(connection)

    def _open_with_ticket(self, connection: _Connection, data: bytes) -> None:
        """Hand the connection over if its ticket is valid, and close it otherwise."""
        connection.opening += data
        if len(connection.opening) < _OPENING_BYTES:
            return
        outer = connection.outer
        self._selector.unregister(outer.socket)
        outer.events = 0
        handed = outer.socket.dup()
        magic, ticket = connection.opening[: len(MAGIC)], connection.opening[len(MAGIC) :]
        if magic != MAGIC or not self._admit(ticket, handed):
            handed.close()
        self._end(connection)

    def _count(self, connection: _Connection, here: _End, size: int) -> None:
        if connection not in self._unauthenticated:
            return
        if here is connection.outer:
            connection.received += size
            if connection.received > self.limits.received_bytes:
                raise OSError(errno.EMSGSIZE, "more than a handshake needs")
            return
        connection.sent += size
        if connection.sent > _BEFORE_READY:
            del self._unauthenticated[connection]

    def _watch(self, connection: _Connection) -> None:
        """Read each end while the other one has nothing to write, and write it while data is left."""
        outer, inner = connection.outer, connection.inner
        for here, there in ((outer, inner), (inner, outer)):
            events = (0 if there.pending else selectors.EVENT_READ) | (
                selectors.EVENT_WRITE if here.pending else 0
            )
            if events == here.events:
                continue
            if not events:
                self._selector.unregister(here.socket)
            elif here.events:
                self._selector.modify(here.socket, events, connection)
            else:
                self._selector.register(here.socket, events, connection)
            here.events = events

    def _end(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._unauthenticated.pop(connection, None)
        for end in (connection.outer, connection.inner):
            if end.events:
                self._selector.unregister(end.socket)
                end.events = 0
            end.socket.close()


def _bound(address: Address) -> socket.socket:
    host, port = address
    everywhere = host in {"*", "::"}
    dual = everywhere and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if ":" in host or dual else socket.AF_INET)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("" if everywhere else host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _descriptors_left() -> float:
    """How many more descriptors this process may open."""
    try:
        used = open_descriptors(os.getpid())
    except OSError as error:
        return 0 if error.errno in (errno.EMFILE, errno.ENFILE) else math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit - used
