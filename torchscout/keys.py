"""Keys for a job's own connections, from the job's token.

CURVE encrypts and authenticates every connection. Both ends derive both key pairs from the token, so
nothing is exchanged or stored: who has the token belongs to the job. A listener's public key is never
sent, so a client without the token cannot even begin the handshake.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import NamedTuple

import zmq
from zmq.utils import z85

__all__ = ["KeyPair", "derive", "new_token"]

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
