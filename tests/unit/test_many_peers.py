"""Many peers are compared as arrays, with the same verdicts as few are, one by one."""

from __future__ import annotations

import math
import random
import struct

import pytest

from torchscout.decision.consensus import c3
from torchscout.decision.consensus import rules as consensus
from torchscout.decision.consensus.channel import PeerChannel
from torchscout.mesh import Axis, PeerGroup


def times(chance: random.Random, count: int) -> list[float]:
    noise = chance.choice([0.0, 0.001, 0.1])
    values = [10.0 + chance.gauss(0, noise) for _ in range(count)]
    for _ in range(chance.choice([0, 0, 1, 3, count // 2, count])):
        values[chance.randrange(count)] = chance.choice([1.0, 25.0, 25.0, math.inf, math.nan, 10.0])
    return values


@pytest.mark.parametrize("seed", range(60))
def test_times_of_many_peers_get_the_same_verdict(seed: int, monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(seed)
    values = times(chance, chance.randrange(consensus.MANY, 300))
    kappa = chance.choice([2.0, 5.0])
    as_arrays = consensus.statistical(values, kappa=kappa)
    monkeypatch.setattr(consensus, "MANY", math.inf)
    one_by_one = consensus.statistical(values, kappa=kappa)
    assert (as_arrays.status, as_arrays.outliers) == (one_by_one.status, one_by_one.outliers)
    assert all(isinstance(each, int) for each in as_arrays.outliers)


class Answering:
    """A channel that returns what other peers sent."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows, self.position = rows, 0
        self.peers = PeerGroup(tuple(range(len(rows))), Axis.REPLICA)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload[:8] + struct.pack(f"<{len(row)}q", *row) for row in self._rows]


@pytest.mark.parametrize("seed", range(60))
def test_signatures_of_many_peers_get_the_same_verdict_as_each_surface_alone(seed: int):
    chance = random.Random(seed)
    peers, surfaces = chance.randrange(1, 200), chance.randrange(1, 20)
    right = [chance.randrange(-(1 << 63), 1 << 63) for _ in range(surfaces)]
    rows = [list(right) for _ in range(peers)]
    for _ in range(chance.choice([0, 0, 1, 2, peers * surfaces])):
        rows[chance.randrange(peers)][chance.randrange(surfaces)] = chance.choice([0, 1, -(1 << 63)])
    channel: PeerChannel = Answering(rows)  # type: ignore[assignment]
    found = c3.compare(channel, dict(zip(map(str, range(surfaces)), rows[0], strict=True)))
    assert list(found.values()) == [consensus.exact(column) for column in zip(*rows, strict=True)]
