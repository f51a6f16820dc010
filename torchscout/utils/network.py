"""Addresses and keys of a job's own connections.

CURVE encrypts and authenticates every connection. Both ends derive both key pairs from the job's token, so
that nothing is exchanged or stored: who has the token belongs to the job. A listener's public key is never
sent, so a client without the token cannot even begin the handshake.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils import z85

from torchscout.errors import ScoutError

__all__ = [
    "EVERYWHERE",
    "KeyPair",
    "client_keys",
    "derive",
    "hub_keys",
    "listening_address",
    "new_token",
    "own_address",
]

_SHORTEST = 16


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


_PURPOSE = "board 3"
"""With the version of its messages, to be counted up when they change: observers of another version then fail
at the handshake, and cannot send what the hub would misunderstand."""


def hub_keys(token: str) -> KeyPair:
    return derive(token, _PURPOSE, "hub")


def client_keys(token: str) -> KeyPair:
    return derive(token, _PURPOSE, "client")


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
