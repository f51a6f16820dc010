"""Exchanges among peers that a hub relays for ``BoardChannel``. Pure: it neither sends nor waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Exchanges"]

_KEPT_SECONDS = 60.0
_MOST = 256
"""Exchanges under way at once; beyond, the oldest is forgotten, and its peers run out of patience."""


@dataclass(slots=True)
class _Exchange:
    expires: float
    payloads: dict[int, str] = field(default_factory=dict)


class Exchanges:
    """Payloads of exchanges in which not everybody has had a say yet."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int, tuple[int, ...]], _Exchange] = {}

    def add(self, rank: int, message: Mapping[str, Any], now: float) -> list[tuple[int, dict[str, Any]]]:
        """Take one peer's payload; what to send to whom, once it was the last."""
        channel, number, payload = str(message["channel"]), int(message["number"]), str(message["payload"])
        peers = tuple(int(peer) for peer in message["peers"])
        if rank not in peers:
            raise ValueError(f"rank {rank} is no peer of {peers}")
        self._forget(now)
        key = channel, number, peers
        exchange = self._pending.setdefault(key, _Exchange(now + _KEPT_SECONDS))
        exchange.payloads[rank] = payload
        if len(exchange.payloads) < len(peers):
            return []
        del self._pending[key]
        payloads = [exchange.payloads[peer] for peer in peers]
        return [(peer, {"channel": channel, "number": number, "payloads": payloads}) for peer in peers]

    def _forget(self, now: float) -> None:
        for key, exchange in list(self._pending.items()):
            if exchange.expires <= now or len(self._pending) >= _MOST:
                del self._pending[key]
