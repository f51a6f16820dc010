"""The rules, case by case; many peers are compared as arrays, with the same verdicts."""

from __future__ import annotations

import math
import random
import statistics
import struct

import numpy as np
import pytest

from torchscout.c3 import compare as c3
from torchscout.c3.channel import PeerChannel
from torchscout.decision import consensus
from torchscout.decision.consensus import Unanimous, dispersions, exact, known, robust_scale, statistical
from torchscout.decision.types import Status
from torchscout.mesh import Axis, PeerGroup

AGREE, ATTRIBUTED, INCONCLUSIVE = Status.AGREE, Status.ATTRIBUTED, Status.INCONCLUSIVE
nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("evidence", "status", "outliers"),
    [
        ([7], AGREE, ()),
        ([7, 7], AGREE, ()),
        ([7, 7, 7], AGREE, ()),
        ([7, 9, 7], ATTRIBUTED, (1,)),
        ([1, 2, 7, 7, 7], ATTRIBUTED, (0, 1)),  # 3-1-1: both minorities
        ([2, 2, 7, 7, 7], ATTRIBUTED, (0, 1)),
        ([7, 9], INCONCLUSIVE, ()),
        ([7, 7, 9, 9], INCONCLUSIVE, ()),
        ([1, 2, 3], INCONCLUSIVE, ()),
        ([7, 7, 7, 1, 2, 3], INCONCLUSIVE, ()),  # half is not a strict majority
    ],
)
def test_exact(evidence: list[int], status: Status, outliers: tuple[int, ...]):
    verdict = exact(evidence)
    assert (verdict.status, verdict.outliers, verdict.evidence) == (status, outliers, tuple(evidence))
    assert verdict.bitmap == tuple(int(i in outliers) for i in range(len(evidence)))


@pytest.mark.parametrize(
    ("times", "status", "outliers"),
    [
        ([1.0], AGREE, ()),
        ([1.0, 1.0, 1.0], AGREE, ()),
        ([1.0, 1.0, 100.0], ATTRIBUTED, (2,)),
        ([100.0, 1.0, 1.0, 1.0], ATTRIBUTED, (0,)),
        ([1.0, 1.01, 0.99, 1.02, 2.0], ATTRIBUTED, (4,)),
        ([1.0, 1.01, 0.99, 1.02, 0.1], ATTRIBUTED, (4,)),  # which direction matters is not for this rule
        ([1.0, 1.1, 0.9, 1.2, 0.8], AGREE, ()),
        ([1.0, 1.05], AGREE, ()),
        ([1.0, 1.2], INCONCLUSIVE, ()),
        ([0.0, 1.0], INCONCLUSIVE, ()),
        ([0.0, 0.0], AGREE, ()),
        ([1.0, nan, 1.0], ATTRIBUTED, (1,)),
        ([1.0, inf, 1.0, 1.0], ATTRIBUTED, (1,)),
        ([1.0, -inf, 1.0, 50.0, 1.0, 1.0], ATTRIBUTED, (1, 3)),
        ([nan], INCONCLUSIVE, ()),
        ([1.0, nan], INCONCLUSIVE, ()),
        ([nan, nan, 1.0], INCONCLUSIVE, ()),
        ([nan, 1.0, 2.0], INCONCLUSIVE, ()),  # two finite ones are a pair again
        ([inf, inf, inf], INCONCLUSIVE, ()),
    ],
)
def test_statistical(times: list[float], status: Status, outliers: tuple[int, ...]):
    verdict = statistical(times)
    assert (verdict.status, verdict.outliers) == (status, outliers)


@pytest.mark.parametrize(
    ("evidence", "status", "outliers"),
    [
        ([7, 7], AGREE, ()),
        ([7, 9], ATTRIBUTED, (1,)),
        ([9, 9, 9, 7], ATTRIBUTED, (0, 1, 2)),  # a majority is not needed, and may be wrong
        ([9, 9], ATTRIBUTED, (0, 1)),
    ],
)
def test_outliers_from_a_known_value(evidence: list[int], status: Status, outliers: tuple[int, ...]):
    verdict = known(evidence, 7)
    assert (verdict.status, verdict.outliers) == (status, outliers)
    assert verdict.evidence == tuple(evidence)


def test_kappa_is_the_sensitivity():
    times = [1.0, 1.01, 0.99, 1.02, 1.1]
    assert statistical(times, kappa=5).outliers == (4,)
    assert statistical(times, kappa=50).agrees


def test_the_scale_falls_back_and_is_zero_only_for_equal_values():
    assert robust_scale([1.0, 2.0, 3.0]) == pytest.approx(1.4826)
    assert robust_scale([1, 1, 1, 1, 1, 2, 2, 2, 2]) == pytest.approx(1 / 1.349)  # MAD 0, quartiles apart
    assert robust_scale([1.0, 1.0, 100.0]) == pytest.approx(9.9)  # quartiles equal: the range
    assert robust_scale([3.0, 3.0]) == 0
    generator = random.Random(0)
    for _ in range(500):
        values = [generator.choice([1.0, 1.5, 2.0, 40.0]) for _ in range(generator.randint(2, 9))]
        assert (robust_scale(values) == 0) == (len(set(values)) == 1), values


@pytest.mark.parametrize("rule", [exact, statistical])
def test_no_evidence_is_refused(rule):
    with pytest.raises(ValueError, match="at least one peer"):
        rule([])


def test_kappa_must_be_positive():
    with pytest.raises(ValueError, match="got -1"):
        statistical([1.0], kappa=-1)


def times(chance: random.Random, count: int) -> list[float]:
    noise = chance.choice([0.0, 0.001, 0.1])
    values = [10.0 + chance.gauss(0, noise) for _ in range(count)]
    for _ in range(chance.choice([0, 0, 1, 3, count // 2, count])):
        values[chance.randrange(count)] = chance.choice([1.0, 25.0, 25.0, math.inf, math.nan, 10.0])
    return values


def plainly(values: list[float], kappa: float) -> tuple[Status, tuple[int, ...]]:
    """The rule without arrays, for values of which most are finite and more than half differ."""
    finite = [value for value in values if math.isfinite(value)]
    center = statistics.median(finite)
    reach = kappa * 1.4826 * statistics.median(abs(value - center) for value in finite)
    far = [not math.isfinite(value) or abs(value - center) > reach for value in values]
    outliers = tuple(place for place, is_far in enumerate(far) if is_far)
    return Status.ATTRIBUTED if outliers else Status.AGREE, outliers


def test_times_are_compared_by_the_median_of_their_deviations():
    chance = random.Random(0)
    for _ in range(200):
        values, kappa = times(chance, chance.randrange(3, 300)), chance.choice([2.0, 5.0])
        verdict = statistical(values, kappa=kappa)
        if verdict.status is not Status.INCONCLUSIVE and 2 * len({*values}) > len(values) + 2:
            assert (verdict.status, verdict.outliers) == plainly(values, kappa), values
        assert all(isinstance(each, int) for each in verdict.outliers)


def test_rows_are_summarized_without_their_nan():
    rows = np.array([[1.0, np.nan, 3.0, 2.0], [1.0, 1.0, 1.0, 100.0], [7.0, np.nan, np.nan, np.nan]])
    center, scale = dispersions(rows)
    assert center.tolist() == [2.0, 1.0, 7.0]
    assert scale.tolist() == [robust_scale([1.0, 2.0, 3.0]), robust_scale(rows[1]), 0.0]


MEASURED = [*map(float, range(64))]


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (Unanimous(7, 3), (7, 7, 7)),
        (exact(Unanimous(7, 3)).evidence, (7, 7, 7)),
        (statistical(MEASURED).evidence, tuple(MEASURED)),
    ],
)
def test_evidence_of_many_peers_is_equal_to_a_tuple(evidence, expected: tuple[float, ...]):
    assert evidence == expected
    assert expected == evidence
    assert evidence != expected[1:]
    assert {evidence} == {expected}
    assert (repr(evidence), len(evidence), [*evidence]) == (repr(expected), len(expected), [*expected])
    assert (evidence[0], evidence[-1], evidence[1:]) == (expected[0], expected[-1], expected[1:])
    assert {*map(type, evidence)} == {*map(type, expected)} == {type(evidence[0])}
    for value in (7, 1.0, -1):
        assert (value in evidence, evidence.count(value)) == (value in expected, expected.count(value))
    with pytest.raises(IndexError):
        evidence[len(expected)]


def test_evidence_does_not_change_with_the_array_that_it_came_from():
    values = np.array(MEASURED)
    verdict = statistical(values)
    values[:] = 0.0
    assert verdict.evidence == tuple(MEASURED)


class Answering:
    """A channel that returns what other peers sent."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows, self.position = rows, 0
        self.peers = PeerGroup(tuple(range(len(rows))), Axis.REPLICA)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload[:8] + struct.pack(f"<{len(row)}q", *row) for row in self._rows]


def test_signatures_of_many_peers_get_the_same_verdict_as_each_surface_alone():
    chance = random.Random(0)
    for _ in range(60):
        peers, surfaces = chance.randrange(1, 200), chance.randrange(1, 20)
        right = [chance.randrange(-(1 << 63), 1 << 63) for _ in range(surfaces)]
        rows = [list(right) for _ in range(peers)]
        for _ in range(chance.choice([0, 0, 1, 2, peers * surfaces])):
            rows[chance.randrange(peers)][chance.randrange(surfaces)] = chance.choice([0, 1, -(1 << 63)])
        channel: PeerChannel = Answering(rows)  # type: ignore[assignment]
        found = c3.compare(channel, dict(zip(map(str, range(surfaces)), rows[0], strict=True)))
        assert list(found.values()) == [consensus.exact(column) for column in zip(*rows, strict=True)]
