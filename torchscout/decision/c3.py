"""Consensus Collective Communication: gather evidence, then every peer decides alike (paper, algorithm 1)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from torchscout.decision import consensus
from torchscout.decision.consensus import Verdict
from torchscout.decision.record import Surface

if TYPE_CHECKING:
    from torchscout.decision.channel import PeerChannel

__all__ = ["compare"]

_INT64 = range(-(1 << 63), 1 << 63)


def compare(channel: PeerChannel, values: Mapping[Surface, int]) -> dict[Surface, Verdict]:
    """Compare 64-bit integers, such as signatures, exactly among peers.

    All surfaces share one exchange but have separate verdicts, so that a wrong gradient is not blamed on the
    output. Every peer must pass the same surfaces in the same order; otherwise every peer raises the same
    ``ValueError``.
    """
    for surface, value in values.items():
        if value not in _INT64:
            raise ValueError(f"{surface}: {value} does not fit 64 bits")
    layout = struct.Struct(f"<Q{len(values)}q")
    digest = xxhash.xxh3_64_intdigest("\n".join(values).encode())
    gathered = channel.gather(layout.pack(digest, *values.values()))
    _require_one_layout(gathered, channel.peers.ranks)
    columns = zip(*(layout.unpack(peer)[1:] for peer in gathered), strict=True)
    return {surface: consensus.exact(column) for surface, column in zip(values, columns, strict=True)}


def _require_one_layout(gathered: Sequence[bytes], ranks: Sequence[int]) -> None:
    """Values of different surfaces must not be compared."""
    by_layout: dict[tuple[int, bytes], list[int]] = {}
    for rank, payload in zip(ranks, gathered, strict=True):
        by_layout.setdefault((len(payload) // 8 - 1, payload[:8]), []).append(rank)
    if len(by_layout) > 1:
        sent = "; ".join(f"ranks {members} sent {count} values" for (count, _), members in by_layout.items())
        raise ValueError(f"peers compared different surfaces: {sent}")
