"""Sends a message to a real board, on this machine or between machines (paper, section 7).

A listening doctor sends its host name, versions and time to any doctor that connects, so its key is not
secret; a job's board has its own key. It listens like a job's hub, with limits on what a connection may do
before it authenticates.
"""

from __future__ import annotations

import ipaddress
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import zmq

from torchscout.cli.doctor.facts import Met, Reached
from torchscout.errors import ScoutError
from torchscout.observer.rounds import protocol
from torchscout.observer.rounds.protocol import Address, Message, Tally
from torchscout.utils import network
from torchscout.utils.identity import host_name
from torchscout.utils.network import EVERYWHERE, own_address

__all__ = ["Visit", "address_for_others", "meet", "reach_own_board", "serve"]

_PUBLIC_TOKEN = "scout doctor, known to all"
_OTHER_ADDRESS = "192.0.2.1"
"""A reserved address: the route to it shows the interface that other machines would use."""
_TIMEOUT_SECONDS = 5.0
_ROUNDS = 8
_POLL_SECONDS = 0.2

Versions = Mapping[str, str | None]


class Visit(NamedTuple):
    """A doctor that has connected."""

    host: str
    versions: Versions


def address_for_others(listens: str) -> str:
    """The address by which other machines would reach this one; a local address if there is none."""
    here = socket.gethostname()
    try:
        return own_address([here, _OTHER_ADDRESS], 0, listens)
    except ScoutError:  # no route to other machines
        return own_address([here], 0, listens)


def reach_own_board(listens: str, port: int) -> Reached:
    """Host a board, and send a message to it by the address that other machines would use."""
    try:
        address = address_for_others(listens)
        is_local = ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError) as error:
        return Reached(
            listens,
            port or None,
            None,
            f"{listens!r} is not an interface or address of this machine: {error}",
        )
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
            seconds = _round_trip(context, hub, token, (address, listener.port))
        problem = None if seconds is not None else f"no message arrived within {_TIMEOUT_SECONDS:.0f} s"
        return Reached(address, listener.port, seconds, problem, is_local)


def _round_trip(
    context: zmq.Context[zmq.Socket[bytes]], hub: zmq.Socket[bytes], token: str, address: Address
) -> float | None:
    client = protocol.connect(context, token, 0, address)
    if not client.poll(int(1000 * _TIMEOUT_SECONDS), zmq.POLLOUT):  # ready once the handshake is done
        return None
    began = time.monotonic()
    client.send(protocol.encode("hello"))
    if not hub.poll(int(1000 * _TIMEOUT_SECONDS), zmq.POLLIN):
        return None
    hub.send_multipart(hub.recv_multipart())
    return time.monotonic() - began if client.poll(int(1000 * _TIMEOUT_SECONDS), zmq.POLLIN) else None


def serve(
    listens: str, port: int, versions: Versions, until: float | None, ready: Callable[[int], None]
) -> Iterator[Visit]:
    """Answer other doctors until the monotonic time ``until``; yield each doctor once.

    ``ready`` is called with the port.
    """
    with _context() as context:
        address = listens if listens in EVERYWHERE else address_for_others(listens)
        try:
            hub, listener = protocol.listen_limited(context, _PUBLIC_TOKEN, address, port)
        except OSError as error:
            raise ScoutError(f"cannot listen on {address}: {error.strerror}") from error
        with closing(listener):
            listener.start()
            ready(listener.port)
            yield from _visits(hub, versions, until)


def _visits(hub: zmq.Socket[bytes], versions: Versions, until: float | None) -> Iterator[Visit]:
    seen: set[bytes] = set()
    while until is None or time.monotonic() < until:
        if not hub.poll(int(1000 * _POLL_SECONDS), zmq.POLLIN):
            continue
        identity, *frames = hub.recv_multipart()
        message = protocol.decode(b"".join(frames), Tally())
        if message is None or message["kind"] != "hello":
            continue
        answer = {"time": time.time(), "host": host_name(), "versions": dict(versions)}
        with suppress(zmq.ZMQError):  # it has already disconnected
            hub.send_multipart([identity, protocol.encode("here", **answer)], zmq.NOBLOCK)
        if identity not in seen:
            seen.add(identity)
            yield Visit(str(message.get("host")), _versions(message))


def meet(address: Address, versions: Versions) -> Met:
    """Exchange messages with the doctor that listens at ``address``."""
    where = f"{address[0]}:{address[1]}"
    try:
        # ZeroMQ would try forever without an error.
        socket.create_connection(address, timeout=_TIMEOUT_SECONDS).close()
    except OSError as error:
        return Met(where, f"cannot connect: {error.strerror or error}")
    with _context() as context:
        client = protocol.connect(context, _PUBLIC_TOKEN, secrets.randbelow(1 << 62), address)
        if not client.poll(int(1000 * _TIMEOUT_SECONDS), zmq.POLLOUT):
            return Met(where, "another program listens there, not `scout doctor --listen`")
        # Until an answer is missing: the fastest of several shows the clock's offset best.
        answers = [*itertools.takewhile(bool, (_ask(client, versions) for _ in range(_ROUNDS)))]
    if not answers:
        return Met(where, f"connected, but no answer arrived within {_TIMEOUT_SECONDS:.0f} s")
    seconds, offset, message = min(filter(None, answers), key=lambda each: each[0])
    return Met(where, None, str(message.get("host")), seconds, offset, _versions(message))


def _ask(client: zmq.Socket[bytes], versions: Versions) -> tuple[float, float, Message] | None:
    """The round-trip time, how far the other clock is ahead, and the answer; None without one."""
    began, here = time.monotonic(), time.time()
    client.send(protocol.encode("hello", host=host_name(), versions=dict(versions)))
    if not client.poll(int(1000 * _TIMEOUT_SECONDS), zmq.POLLIN):
        return None
    seconds = time.monotonic() - began
    message = protocol.decode(client.recv(), Tally())
    if message is None or not isinstance(message.get("time"), float):
        return None
    return seconds, message["time"] - (here + seconds / 2), message


def _versions(message: Message) -> Versions:
    found: Any = message.get("versions")
    if not isinstance(found, dict):
        return {}
    return {str(name): None if each is None else str(each) for name, each in found.items()}


@contextmanager
def _context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=200)
