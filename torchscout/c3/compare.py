"""Consensus Collective Communication: gather evidence, then every peer decides alike (paper, algorithm 1)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from torchscout.decision import consensus
from torchscout.decision.consensus import Unanimous
from torchscout.decision.types import Status, Surface, Verdict

if TYPE_CHECKING:
    from torchscout.c3.channel import PeerChannel

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
    distinct = gathered[:1] if consensus.all_equal(gathered) else [*dict.fromkeys(gathered)]
    if len({(len(payload), payload[:8]) for payload in distinct}) > 1:
        raise ValueError(f"peers compared different surfaces: {_layouts(gathered, channel.peers.ranks)}")
    return dict(zip(values, _verdicts(gathered, distinct), strict=True))


def _verdicts(gathered: Sequence[bytes], distinct: Sequence[bytes]) -> Iterator[Verdict]:
    """Decide on each surface. Only those in which peers differ are looked at peer by peer."""
    table = np.frombuffer(b"".join(distinct), "<i8").reshape(len(distinct), -1)[:, 1:]
    is_same = (table == table[0]).all(axis=0).tolist()
    place = {payload: number for number, payload in enumerate(distinct)}
    rows = [place[each] for each in gathered] if len(distinct) > 1 else []
    for column, (same, first) in enumerate(zip(is_same, table[0].tolist(), strict=True)):
        if same:
            yield Verdict(Status.AGREE, (), Unanimous(first, len(gathered)))
        else:
            yield consensus.exact(table[rows, column].tolist())


def _layouts(gathered: Sequence[bytes], ranks: Sequence[int]) -> str:
    """Return how many values each rank sent, in words."""
    by_layout: dict[tuple[int, bytes], list[int]] = {}
    for rank, payload in zip(ranks, gathered, strict=True):
        by_layout.setdefault((len(payload) // 8 - 1, payload[:8]), []).append(rank)
    return "; ".join(f"ranks {members} sent {count} values" for (count, _), members in by_layout.items())
