"""The keys of a job's board (DESIGN.md, "The observer is light and cannot be stuck")."""

from __future__ import annotations

from torchscout.keys import KeyPair, derive, new_token

__all__ = ["KeyPair", "client_keys", "hub_keys", "new_token"]


def hub_keys(token: str) -> KeyPair:
    return derive(token, "board", "hub")


def client_keys(token: str) -> KeyPair:
    return derive(token, "board", "client")
