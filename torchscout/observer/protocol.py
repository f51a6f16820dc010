"""Messages among observers, and an observer's connections to the hubs (paper, section 7).

This replaces the paper's Gloo group, because a collective waits for exactly the observer that is gone.
Messages are JSON objects of bounded size, never pickles. Nothing here waits: a message that cannot be sent
now is not sent, and a malformed one is counted and dropped.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import zmq

from torchscout.decision.progress import CommGroup, Phase, Process, Progress, RankStatus, Shared
from torchscout.observer.record.layout import LINES, Declarations, line_text
from torchscout.utils.listener import Limits, Listener
from torchscout.utils.network import Address, CurveSockets, encode

__all__ = [
    "HUBS_AT_FIRST",
    "LIMIT",
    "MISTAKES",
    "Address",
    "Client",
    "Message",
    "RankReport",
    "Tally",
    "connect",
    "decode",
    "encode",
    "listen_limited",
]

HUBS_AT_FIRST = 2
"""The hub and its standby. The other candidates in ``hub_ranks`` listen once they are elected."""
LIMIT = 4 << 20
"""Maximum size of a message in bytes; whoever sends more is disconnected."""
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
"""What handling a message may raise, by a mistake of ours or of the peer: it is counted and dropped."""

_SOCKETS = CurveSockets("board 4", LIMIT)
connect = _SOCKETS.connect
_LIMITS = Limits(connections=64)
"""All observers of a job connect to its hub at the same time."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What an observer reports about its trainer in a round."""

    status: RankStatus
    lines: tuple[CommGroup, ...]
    """Everything that the rank communicates on."""
    moving: bool = False
    """It has just published something, so it is not silent, whatever it waits for."""
    excused: bool = False
    """It is paused, or within the allowance for its phase: its silence means nothing yet."""
    gone_seconds: float | None = None
    """How long ago the trainer was seen to have ended early."""
    was_killed: bool = False
    """The trainer was ended by SIGKILL, which nothing inside it sends when it loses a peer."""
    stalled: Progress | None = None
    """Its progress during a stall that was too long and ended shortly before: a watchdog may have ended
    trainers because of it."""
    is_pressed: bool = False
    """It has used most of the time that the communication library allows, which will soon end it."""
    has_timed_out: bool = False
    """It has used all of that time, now or a short time ago: what it has done since, or that it has ended, is
    a consequence."""
    operations: Mapping[str, Any] | None = None
    """The operations that are open according to the trainer's Flight Recorder; see ``flight_recorder``."""
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """Recent duration of its input and its checkpoints."""

    @property
    def is_still(self) -> bool:
        """Whether the trainer's stacks are of interest."""
        return not self.moving and self.status.process is Process.RUNNING

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status.to_json(),
            "lines": b"".join(map(line_text, self.lines)).decode(),
            "stalled": None if self.stalled is None else asdict(self.stalled),
            "phase_seconds": {phase.value: seconds for phase, seconds in self.phase_seconds.items()},
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
        }

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], shared: Shared | None = None, size: int | None = None
    ) -> RankReport:
        """Read a report of a job with ``size`` ranks; raises one of ``MISTAKES`` if it is malformed.

        The reports of one round pass the same ``shared``, so that equal parts are kept once.
        """
        shared = {} if shared is None else shared
        if document["lines"].count("\n") > LINES:
            raise ValueError(f"a rank communicates on {LINES} lines at most")
        for name, types in _PLAIN_FIELDS.items():
            if type(document[name]) not in types:
                raise ValueError(f"{name} is {document[name]!r:.40}")
        seconds = document["phase_seconds"].items()
        return cls(
            status=RankStatus.from_json(document["status"], shared),
            lines=tuple([_line(text, shared, size) for text in document["lines"].splitlines()]),
            stalled=None if document["stalled"] is None else Progress.from_json(document["stalled"], shared),
            phase_seconds={Phase(name): float(each) for name, each in seconds},
            **{name: document[name] for name in _PLAIN_FIELDS},
        )


_PLAIN_FIELDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("moving", "excused", "was_killed", "is_pressed", "has_timed_out"), (bool,)),
    "gone_seconds": (int, float, type(None)),
    "operations": (dict, type(None)),
}
"""Fields that are JSON as they are, with the types that they may have."""


def _line(text: str, shared: Shared, size: int | None) -> CommGroup:
    if text not in shared:
        declared = Declarations(size)
        declared.extend(text.encode())
        (shared[text],) = declared.lines
    line: CommGroup = shared[text]
    return line


@dataclass(slots=True)
class Tally:
    """Counts the messages of one process; all zero while the job is healthy."""

    sent: int = 0
    received: int = 0
    malformed: int = 0


def decode(frame: bytes, tally: Tally) -> Message | None:
    """Return the message, or None if it is not a JSON object with a kind, and count it."""
    tally.received += 1
    try:
        message = json.loads(frame, parse_constant=_finite, parse_float=_finite, parse_int=_bounded)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and isinstance(message.get("kind"), str):
        return message
    tally.malformed += 1
    return None


def _finite(text: str) -> float:
    """NaN and infinity are rejected, because they can be neither recorded nor sent on."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _bounded(text: str) -> int:
    if not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"{text:.40} has more than 64 bits")
    return number


def listen_limited(
    context: zmq.Context[zmq.Socket[bytes]], token: str, address: str, port: int
) -> tuple[zmq.Socket[bytes], Listener]:
    """Return a hub's socket, and the listener in front of it, which limits unauthenticated connections.

    The port is reserved, and connections are accepted once the listener is started; ``port`` 0 takes a free
    one. Raises ``OSError`` if the address is not available.
    """
    name = f"torchscout-{secrets.token_hex(16)}"
    socket = _SOCKETS.listen(context, token, f"ipc://@{name}")
    try:
        return socket, Listener((address, port), name, _LIMITS)
    except OSError:
        socket.close()
        raise


class Client:
    """One observer's idle connections to the hub, its standby, and the hubs elected since."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], rank: int, token: str, hubs: Sequence[Address]
    ) -> None:
        self.tally = Tally()
        self._connect = partial(connect, context, token, rank)
        self.sockets: list[zmq.Socket[bytes]] = []
        self._candidates = list(hubs[HUBS_AT_FIRST:])
        """The addresses of hubs that may still be elected, in their order."""
        with ExitStack() as undo:
            undo.callback(self.close)
            for address in hubs[:HUBS_AT_FIRST]:
                self.sockets.append(self._connect(address))
            undo.pop_all()

    def connect_next(self) -> bool:
        """Connect to the next candidate's hub as well; return False if there is none left."""
        if self._candidates:
            self.sockets.append(self._connect(self._candidates.pop(0)))
            return True
        return False

    def is_connected(self, hub: int) -> bool:
        return bool(self.sockets[hub].poll(0, zmq.POLLOUT))

    def connected(self) -> list[bool]:
        return [self.is_connected(hub) for hub in range(len(self.sockets))]

    def send(self, hub: int, kind: str, **fields: Any) -> bool:
        """Return whether the message was sent; a hub that is stopped looks as if it listened."""
        message = encode(kind, **fields)
        if len(message) > LIMIT:
            return False
        try:
            self.sockets[hub].send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.tally.sent += 1
        return True

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Yield all messages that have arrived, each with the hub that sent it."""
        for hub, socket in enumerate(self.sockets):
            while socket.poll(0, zmq.POLLIN):
                message = decode(socket.recv(zmq.NOBLOCK), self.tally)
                if message is not None:
                    yield hub, message

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
