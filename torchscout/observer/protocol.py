"""Messages among observers, and an observer's connections to the hub and its standby (paper, section 7).

This replaces the paper's Gloo group, because a collective waits for exactly the observer that is gone.
Messages are JSON objects of bounded size, never pickles. Nothing here waits: what cannot be sent now is
not sent, and what is malformed is counted and dropped. ``Post`` is what an observer reports about its
trainer in a round.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's standing, and how its observer understands its silence."""

    standing: RankStatus
    lines: tuple[CommGroup, ...]
    """Everything the rank communicates on."""
    moving: bool = False
    """It published something a moment ago: not silent, whatever it waits for."""
    excused: bool = False
    """It is paused, or within the allowance for what it is doing: its silence means nothing yet."""
    gone_seconds: float | None = None
    """Since its trainer was seen to have ended before it finished."""
    was_killed: bool = False
    """Its trainer was ended by SIGKILL, which nothing in it sends when it loses a peer."""
    stalled: Progress | None = None
    """What it showed while it stood still for too long, if that was shortly before: a watchdog may have ended
    trainers for it."""
    is_pressed: bool = False
    """It has waited for most of the time that the library allows, which will soon end it."""
    has_timed_out: bool = False
    """It has waited for all of that time, now or a short time ago: what it does since, or that it ends, is a
    consequence."""
    operations: Mapping[str, Any] | None = None
    """What the Flight Recorder of its trainer says is open; see ``flight_recorder``."""
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """What its input and its checkpoints take lately."""

    @property
    def is_still(self) -> bool:
        """Whether the trainer's stacks would tell something."""
        return not self.moving and self.standing.process is Process.RUNNING

    def to_json(self) -> dict[str, Any]:
        return {
            "standing": self.standing.to_json(),
            "lines": b"".join(map(line_text, self.lines)).decode(),
            "moving": self.moving,
            "excused": self.excused,
            "gone_seconds": self.gone_seconds,
            "was_killed": self.was_killed,
            "stalled": None if self.stalled is None else asdict(self.stalled),
            "is_pressed": self.is_pressed,
            "has_timed_out": self.has_timed_out,
            "operations": self.operations,
            "phase_seconds": {phase.value: seconds for phase, seconds in self.phase_seconds.items()},
        }

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], shared: Shared | None = None, size: int | None = None
    ) -> RankReport:
        """``shared`` by the posts of one round: what several say is kept once. ``size`` ranks there are."""
        shared = {} if shared is None else shared
        if document["lines"].count("\n") > LINES:
            raise ValueError(f"a rank communicates on {LINES} lines at most")
        for name, types in _TYPES.items():
            if type(document[name]) not in types:
                raise ValueError(f"{name} is {document[name]!r:.40}")
        return cls(
            standing=RankStatus.from_json(document["standing"], shared),
            lines=tuple([_line(text, shared, size) for text in document["lines"].splitlines()]),
            moving=document["moving"],
            excused=document["excused"],
            gone_seconds=document["gone_seconds"],
            was_killed=document["was_killed"],
            stalled=None if document["stalled"] is None else Progress.from_json(document["stalled"], shared),
            is_pressed=document["is_pressed"],
            has_timed_out=document["has_timed_out"],
            operations=document["operations"],
            phase_seconds={
                Phase(name): float(seconds) for name, seconds in document["phase_seconds"].items()
            },
        )


_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("moving", "excused", "was_killed", "is_pressed", "has_timed_out"), (bool,)),
    "gone_seconds": (int, float, type(None)),
    "operations": (dict, type(None)),
}


def _line(text: str, shared: Shared, size: int | None) -> CommGroup:
    if text not in shared:
        journal = Declarations(size)
        journal.extend(text.encode())
        (shared[text],) = journal.lines
    line: CommGroup = shared[text]
    return line


HUBS_AT_FIRST = 2
"""The hub and its standby. Those that follow in the order of ``hub_ranks`` listen once they are elected."""
LIMIT = 4 << 20
"""Bytes of a message; whoever sends more is disconnected."""
_SOCKETS = CurveSockets("board 4", LIMIT)
connect = _SOCKETS.connect
_LIMITS = Limits(connections=64)
"""Of a hub, to which all observers of a job connect at the same time."""

MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
"""How what a peer has sent fails, by a mistake of ours or of the peer's: it is dropped and counted."""

Message = dict[str, Any]


@dataclass(slots=True)
class Tally:
    """Messages of one process; all zero in a job that is healthy."""

    sent: int = 0
    received: int = 0
    malformed: int = 0


def decode(frame: bytes, tally: Tally) -> Message | None:
    """None, and counted, unless it is a JSON object that says its kind."""
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
    """NaN and infinity are no numbers of ours, and cannot be written down or sent on."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


def _bounded(text: str) -> int:
    if not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"{text:.40} has more than 64 bits")
    return number


def listen_limited(
    context: zmq.Context[zmq.Socket[bytes]], token: str, address: str, port: int
) -> tuple[zmq.Socket[bytes], Listener]:
    """A hub's socket, and the listener in front of it, which limits what a connection may do before it
    authenticates; ``port`` 0 takes a free one.

    The port is reserved; connections are accepted once the listener is started.
    """
    name = f"torchscout-{secrets.token_hex(16)}"
    socket = _SOCKETS.listen(context, token, f"ipc://@{name}")
    try:
        listener = Listener((address, port), name, _LIMITS)
    except OSError:
        socket.close()
        raise
    return socket, listener


class Client:
    """One observer's idle connections, to the hub and to its standby, and to those elected since."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        token: str,
        hubs: Sequence[Address],
        tally: Tally | None = None,
    ) -> None:
        self.tally = Tally() if tally is None else tally
        self._connect = partial(connect, context, token, rank)
        self.sockets = [self._connect(address) for address in hubs[:HUBS_AT_FIRST]]
        self._candidates = list(hubs[HUBS_AT_FIRST:])
        """Where hubs will listen that may be elected yet, in their order."""

    def connect_next(self) -> bool:
        """Connect to the next candidate's hub as well; False where there is none left."""
        if self._candidates:
            self.sockets.append(self._connect(self._candidates.pop(0)))
            return True
        return False

    def is_connected(self, hub: int) -> bool:
        return bool(self.sockets[hub].poll(0, zmq.POLLOUT))

    def connected(self) -> list[bool]:
        return [self.is_connected(hub) for hub in range(len(self.sockets))]

    def send(self, hub: int, kind: str, **fields: Any) -> bool:
        """Whether the message is on its way; a hub that is stopped looks like one that listens."""
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
        """All that has arrived, each message with the hub it is from."""
        for hub, socket in enumerate(self.sockets):
            while socket.poll(0, zmq.POLLIN):
                message = decode(socket.recv(zmq.NOBLOCK), self.tally)
                if message is not None:
                    yield hub, message

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
