"""The keys of a job's board (DESIGN.md, "The observer is light and cannot be stuck")."""

from __future__ import annotations

from torchscout.keys import KeyPair, derive, new_token

_PURPOSE = "board 3"
"""With the version of its messages, to be counted up when they change: observers of another version then fail
at the handshake, and cannot send what the hub would misunderstand."""

__all__ = ["KeyPair", "client_keys", "hub_keys", "new_token"]


def hub_keys(token: str) -> KeyPair:
    return derive(token, _PURPOSE, "hub")


def client_keys(token: str) -> KeyPair:
    return derive(token, _PURPOSE, "client")
