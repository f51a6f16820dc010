"""Sockets, keys and addresses of a job's own connections.

CURVE encrypts and authenticates every connection. Both ends derive both key pairs from the job's token, so
no key is exchanged or stored: whoever has the token belongs to the job. A listener's public key is never
sent, so a client without the token cannot even begin the handshake.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import math
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from torchscout.errors import ScoutError
from torchscout.utils.listener import Address

__all__ = [
    "EVERYWHERE",
    "Address",
    "CurveSockets",
    "KeyPair",
    "derive",
    "encode",
    "interface_of_job",
    "listening_address",
    "new_token",
    "own_address",
    "read_json",
]

_SHORTEST = 16
_HANDSHAKE_MS = 5000
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 100, 2000
_FLUSH_MS = 200
_KEEPALIVE_SECONDS = 60
_BACKLOG = 4096

_Context = zmq.Context[zmq.Socket[bytes]]


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


def new_token() -> str:
    """A token for a job; one rank makes it and tells the others."""
    return secrets.token_hex(32)


def derive(token: str, purpose: str, role: str) -> KeyPair:
    """The keys of one end of all connections that serve one purpose."""
    if len(token) < _SHORTEST:
        raise ValueError(f"a job's token needs at least {_SHORTEST} characters, got {len(token)}")
    secret = z85.encode(hashlib.sha256(f"torchscout {purpose}\0{role}\0{token}".encode()).digest())
    return KeyPair(zmq.curve_public(secret), secret)


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message as JSON; raises ``ValueError`` for a number that JSON does not have."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False).encode()


def read_json(text: bytes) -> Any:
    """Read what a peer sent; raises ``ValueError`` also for numbers that cannot be recorded or sent on."""
    return _DECODER.decode(text.decode())


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _bounded(text: str) -> int:
    if not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"{text:.40} has more than 64 bits")
    return number


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, parse_int=_bounded)
"""Made once: ``json.loads`` makes one for each text, which takes longer than to read a short one."""


class CurveSockets(NamedTuple):
    """Makes the two ends of encrypted connections that serve one purpose."""

    purpose: str
    """Include a version, and raise it when messages change: ends of different versions then fail at the
    handshake instead of misunderstanding each other."""
    max_bytes: int
    """The size of a frame; whoever sends a larger one is disconnected."""

    def listen(self, context: _Context, token: str, endpoint: str) -> zmq.Socket[bytes]:
        """Return a socket that serves any number of clients; over ``ipc:`` only those of this user."""
        with ExitStack() as undo:
            socket = undo.enter_context(self._socket(context, zmq.ROUTER))
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = derive(token, self.purpose, "listener")
            socket.router_mandatory = True  # sending to a client that is not connected fails at once
            socket.router_handover = True  # a client that connects again replaces its lost connection
            socket.backlog = _BACKLOG
            if endpoint.startswith("ipc:"):
                socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            socket.bind(endpoint)
            undo.pop_all()
        return socket

    def connect(
        self, context: _Context, token: str, name: int | str, address: Address | str
    ) -> zmq.Socket[bytes]:
        """Return a client's socket. The handshake carries its name, a rank for most, so that the listener may
        send first. ``address`` may also be an endpoint."""
        with ExitStack() as undo:
            socket = undo.enter_context(self._socket(context, zmq.DEALER))
            socket.curve_serverkey = derive(token, self.purpose, "listener").public
            socket.curve_publickey, socket.curve_secretkey = derive(token, self.purpose, "client")
            socket.routing_id = str(name).encode()
            socket.immediate = True  # nothing is queued for a listener that is not there
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _LONGEST_RECONNECT_MS
            if not isinstance(address, str):
                host, port = address
                address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
            socket.connect(address)
            undo.pop_all()
        return socket

    def _socket(self, context: _Context, kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.ipv6 = True
        socket.linger = _FLUSH_MS
        socket.maxmsgsize = self.max_bytes
        socket.handshake_ivl = _HANDSHAKE_MS  # afterwards an unauthenticated peer loses its descriptor
        # By the kernel, so that a vanished machine is noticed without a message of ours.
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, _KEEPALIVE_SECONDS
        return socket


EVERYWHERE = {"*", "0.0.0.0", "::"}
"""What stands for every interface of a machine."""
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface."""


def own_address(hosts: Sequence[str], rank: int, listens: str = "*") -> str:
    """Where other machines reach this one: not what its own name means here, often loopback."""
    other = next((host for host in hosts if host != hosts[rank]), None)
    for address in _own_addresses(listens, other):
        if other is None or not ipaddress.ip_address(address).is_loopback:
            return address
    if other is None:
        return "127.0.0.1"
    raise ScoutError(
        f"found no address of this machine that {other} could reach: let that name resolve here, or set "
        f"ObserverConfig.address, now {listens!r}, to the name of a network interface or to an address"
    )


def listening_address(hosts: Sequence[str], rank: int, listens: str = "*") -> tuple[str, str]:
    """On which address to listen, and by which other ranks reach it.

    By default nobody else does: on loopback where all ranks are on one machine, and otherwise on the one
    address by which the other machines reach this one.
    """
    if len(set(hosts)) == 1 and listens == "*":
        return "127.0.0.1", "127.0.0.1"
    address = own_address(hosts, rank, listens)
    return (listens if listens in EVERYWHERE - {"*"} else address), address


def interface_of_job() -> str:
    """The network interface of the job's process groups: a setting of Gloo or NCCL, or the one towards rank
    0; an empty text if that is unknown."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if setting := os.environ.get(variable):
            return setting
    used = {*_addresses_towards(os.environ.get("MASTER_ADDR") or "localhost")}
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without an IPv4 address
            if _address_of(name) in used:
                return name
    return ""


def _own_addresses(listens: str, other: str | None) -> Iterator[str]:
    if listens not in EVERYWHERE:
        yield _address_of(listens)
        return
    # Where the ranks met everybody could go; a machine's name may mean nothing elsewhere.
    for name in filter(None, (os.environ.get("MASTER_ADDR"), other)):
        yield from _addresses_towards(name)


def _addresses_towards(name: str) -> Iterator[str]:
    """Which of its addresses this machine would use to talk to that one."""
    with suppress(socket.gaierror):
        for family, kind, protocol, _, target in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing: only asks which way one would go
                yield probe.getsockname()[0]


def _address_of(interface: str) -> str:
    """Its IPv4 address; an address stands for itself.

    ZeroMQ would take an IPv6 one, and that is mostly one that means nothing beyond the next cable.
    """
    if interface not in (name for _, name in socket.if_nameindex()):
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
