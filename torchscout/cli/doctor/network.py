"""Whether observers would reach a board: a message over the real thing, here or between machines (section 7).

A doctor that listens answers anybody who asks, and tells its host's name, its versions and its clock.
So its key is no secret; a job's board has one of its own. It listens as a job's hub does, with limits on
what a connection may do before it authenticates.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import zmq

from torchscout.cli.doctor.facts import Met, Reached
from torchscout.errors import ScoutError
from torchscout.observer import protocol
from torchscout.observer.protocol import Address, Message, Tally
from torchscout.utils import network
from torchscout.utils.network import EVERYWHERE, own_address

__all__ = ["Visit", "address_for_others", "meet", "reach_own_board", "serve"]

_ANYBODY = "scout doctor, known to all"
_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's: which way one would go there is the way out of this machine."""
_PATIENCE_SECONDS = 5.0
_ASKED_TIMES = 8
_LOOK_SECONDS = 0.2

Versions = Mapping[str, str | None]


class Visit(NamedTuple):
    """Another machine's doctor, as the one that listens sees it."""

    host: str
    versions: Versions


def address_for_others(listens: str) -> str:
    """By which other machines would reach this one; if none could, its own."""
    here = socket.gethostname()
    try:
        return own_address([here, _ELSEWHERE], 0, listens)
    except ScoutError:  # there is no way out of this machine
        return own_address([here], 0, listens)


def reach_own_board(listens: str, port: int) -> Reached:
    """Host a board here, and send a message to it by the address that other machines would use."""
    try:
        address = address_for_others(listens)
        is_local = ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError) as error:
        return Reached(listens, port or None, None, f"{listens!r} is no interface or address here: {error}")
    token = network.new_token()
    with _context() as context:
        try:
            hub, listener = protocol.listen_limited(
                context, token, listens if listens in EVERYWHERE else address, port
            )
        except OSError as error:
            return Reached(address, port or None, None, f"cannot listen there: {error.strerror}", is_local)
        with closing(listener):
            listener.start()
            seconds = _there_and_back(context, hub, token, (address, listener.port))
        problem = None if seconds is not None else f"no message came through in {_PATIENCE_SECONDS:.0f} s"
        return Reached(address, listener.port, seconds, problem, is_local)


def _there_and_back(
    context: zmq.Context[zmq.Socket[bytes]], hub: zmq.Socket[bytes], token: str, address: Address
) -> float | None:
    client = protocol.connect(context, token, 0, address)
    if not client.poll(int(1000 * _PATIENCE_SECONDS), zmq.POLLOUT):  # only once the handshake is done
        return None
    began = time.monotonic()
    client.send(protocol.encode("hello"))
    if not hub.poll(int(1000 * _PATIENCE_SECONDS), zmq.POLLIN):
        return None
    hub.send_multipart(hub.recv_multipart())
    return time.monotonic() - began if client.poll(int(1000 * _PATIENCE_SECONDS), zmq.POLLIN) else None


def serve(
    listens: str, port: int, versions: Versions, until: float | None, ready: Callable[[int], None]
) -> Iterator[Visit]:
    """Answer other machines' doctors until then, by the monotonic clock; each that asks is given once."""
    with _context() as context:
        address = listens if listens in EVERYWHERE else address_for_others(listens)
        try:
            hub, listener = protocol.listen_limited(context, _ANYBODY, address, port)
        except OSError as error:
            raise ScoutError(f"cannot listen on {address}: {error.strerror}") from error
        with closing(listener):
            listener.start()
            ready(listener.port)
            yield from _visits(hub, versions, until)


def _visits(hub: zmq.Socket[bytes], versions: Versions, until: float | None) -> Iterator[Visit]:
    seen: set[bytes] = set()
    while until is None or time.monotonic() < until:
        if not hub.poll(int(1000 * _LOOK_SECONDS), zmq.POLLIN):
            continue
        identity, *frames = hub.recv_multipart()
        message = protocol.decode(b"".join(frames), Tally())
        if message is None or message["kind"] != "hello":
            continue
        told = {"time": time.time(), "host": socket.gethostname(), "versions": dict(versions)}
        with suppress(zmq.ZMQError):  # it has left already
            hub.send_multipart([identity, protocol.encode("here", **told)], zmq.NOBLOCK)
        if identity not in seen:
            seen.add(identity)
            yield Visit(str(message.get("host")), _versions(message))


def meet(address: Address, versions: Versions) -> Met:
    """Ask the doctor that listens there."""
    told = f"{address[0]}:{address[1]}"
    try:
        # ZeroMQ would try for ever, and say nothing.
        socket.create_connection(address, timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
        return Met(told, f"cannot connect: {error.strerror or error}")
    with _context() as context:
        client = protocol.connect(context, _ANYBODY, secrets.randbelow(1 << 62), address)
        if not client.poll(int(1000 * _PATIENCE_SECONDS), zmq.POLLOUT):
            return Met(told, "something listens there, but it is not `scout doctor --listen`")
        heard = [*_heard(client, versions)]
    if not heard:
        return Met(told, f"connected, but no answer came within {_PATIENCE_SECONDS:.0f} s")
    seconds, offset, message = min(heard, key=lambda each: each[0])
    return Met(told, None, str(message.get("host")), seconds, offset, _versions(message))


def _heard(client: zmq.Socket[bytes], versions: Versions) -> Iterator[tuple[float, float, Message]]:
    """Several answers: the quickest tells most about the clock. None more once one fails to come."""
    for _ in range(_ASKED_TIMES):
        answer = _asked(client, versions)
        if answer is None:
            return
        yield answer


def _asked(client: zmq.Socket[bytes], versions: Versions) -> tuple[float, float, Message] | None:
    """How long it took, how far the other's clock is ahead, and the answer."""
    began, here = time.monotonic(), time.time()
    client.send(protocol.encode("hello", host=socket.gethostname(), versions=dict(versions)))
    if not client.poll(int(1000 * _PATIENCE_SECONDS), zmq.POLLIN):
        return None
    seconds = time.monotonic() - began
    message = protocol.decode(client.recv(), Tally())
    if message is None or not isinstance(message.get("time"), float):
        return None
    return seconds, message["time"] - (here + seconds / 2), message


def _versions(message: Message) -> Versions:
    told: Any = message.get("versions")
    if not isinstance(told, dict):
        return {}
    return {str(name): None if each is None else str(each) for name, each in told.items()}


@contextmanager
def _context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=200)
