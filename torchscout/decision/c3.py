"""Consensus Collective Communication: gather evidence, then let every peer decide alike (paper, algorithm 1).

Torch-free: observers run it over their own channel. It compares and does not interpret.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from torchscout.config import KAPPA
from torchscout.decision import consensus
from torchscout.decision.consensus import Verdict
from torchscout.decision.record import Surface

if TYPE_CHECKING:
    from torchscout.decision.channel import PeerChannel

__all__ = ["compare"]

_INT64 = range(-(1 << 63), 1 << 63)


def compare(
    channel: PeerChannel,
    *,
    exact: Mapping[Surface, int] | None = None,
    times: Mapping[Surface, float] | None = None,
    kappa: float = KAPPA,
) -> dict[Surface, Verdict]:
    """Compare integers exactly (signatures, fingerprints) and milliseconds statistically.

    All surfaces share one exchange but keep separate verdicts, so that a wrong gradient is not
    blamed on the output beside it. Every peer must pass the same surfaces in the same order;
    where they do not, every peer gets the same ``ValueError``.
    """
    exact, times = exact or {}, times or {}
    layout = struct.Struct(f"<Q{len(exact)}q{len(times)}d")
    payload = layout.pack(_layout_digest(exact, times), *exact.values(), *times.values())
    gathered = channel.gather(payload)
    _require_one_layout(gathered, channel.peers.ranks)
    columns = list(zip(*(layout.unpack(peer)[1:] for peer in gathered), strict=True))
    verdicts = {
        surface: consensus.exact(column) for surface, column in zip(exact, columns[: len(exact)], strict=True)
    }
    verdicts |= {
        surface: consensus.statistical(column, kappa=kappa)
        for surface, column in zip(times, columns[len(exact) :], strict=True)
    }
    return verdicts


def _layout_digest(exact: Mapping[Surface, int], times: Mapping[Surface, float]) -> int:
    if both := sorted(exact.keys() & times.keys()):
        raise ValueError(f"compared both exactly and statistically: {', '.join(both)}")
    for surface, value in exact.items():
        if value not in _INT64:
            raise ValueError(f"{surface}: {value} does not fit 64 bits")
    return xxhash.xxh3_64_intdigest("\n".join([*exact, "", *times]).encode())


def _require_one_layout(gathered: Sequence[bytes], ranks: Sequence[int]) -> None:
    """Peers out of step must not have their values compared across surfaces."""
    by_layout: dict[tuple[int, bytes], list[int]] = {}
    for rank, payload in zip(ranks, gathered, strict=True):
        by_layout.setdefault((len(payload) // 8 - 1, payload[:8]), []).append(rank)
    if len(by_layout) > 1:
        told = "; ".join(f"ranks {members} sent {count} values" for (count, _), members in by_layout.items())
        raise ValueError(f"peers compared different surfaces: {told}")
