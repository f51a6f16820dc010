"""The Pareto set of all routings and its templates, against every routing there is, or a sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.tiled_matmul import LOADS, TiledMatmul
from torchscout.experts.coverage import Rows, maximal
from torchscout.experts.discovery import Executions
from torchscout.experts.routing import ExpertCounts, pareto_set, period_of, routings
from torchscout.experts.templates import Routings, routed, templates_for

PATHS = ("interior", "low", "high", "empty", "full step", "tail step")


def table_of(most: int, tile: int, step: int) -> ExpertCounts:
    """What a kernel with such tiles does, worked out by hand: these tests are about what follows from it."""
    rows = []
    for m in range(most + 1):
        whole, rest = divmod(m, tile)
        low, high = 0 < 2 * rest <= tile, 2 * rest > tile
        rows.append([whole, low, high, m == 0, m // step, m % step > 0, whole + (rest > 0)])
    return ExpertCounts(PATHS, ("tiles",), np.array(rows, dtype=np.int64))


def pressure(programs: int):
    return lambda load, _: "full" if load[0] >= programs else "idle"


def waves(programs: int):
    return lambda load, _: f"{-(-load[0] // programs)} waves"


def constant(load: tuple[int, ...], rows: Rows) -> str:
    return "any"


def every_routing(tokens: int, experts: int, most: int | None = None) -> Iterator[Rows]:
    """Once for each multiset: counts do not depend on which expert has which rows."""
    most = tokens if most is None else most
    if experts == 1:
        if tokens <= most:
            yield (tokens,)
        return
    for first in range(min(tokens, most), -1, -1):
        yield from ((first, *rest) for rest in every_routing(tokens - first, experts - 1, first))


def admitted(tokens: int, experts: int, at_most: bool) -> Iterator[Rows]:
    for total in range(tokens + 1) if at_most else [tokens]:
        yield from every_routing(total, experts)


def by_brute_force(
    table: ExpertCounts, experts: int, tokens: int, regime, at_most: bool = False
) -> set[tuple]:
    found: dict[str, set] = {}
    for rows in admitted(tokens, experts, at_most):
        counts = table.of(rows)
        found.setdefault(regime(table.load_of(counts), rows), set()).add(tuple(map(int, counts)))
    best = set()
    for where, each in found.items():
        listed = sorted(each)
        best |= {(where, listed[place]) for place in maximal(np.array(listed))}
    return best


CASES = [
    (tokens, experts, tile, step, regime)
    for tokens, experts in [(0, 2), (1, 1), (5, 1), (1, 3), (7, 2), (12, 3), (17, 3), (20, 4)]
    for tile, step in [(4, 2), (6, 4), (8, 3), (4, 4)]
    for regime in (constant, pressure(4), waves(3))
]
CASES = [(*case, False) for case in CASES] + [(*case, True) for case in CASES if case[0] <= 17]


@pytest.mark.parametrize(("tokens", "experts", "tile", "step", "regime", "at_most"), CASES)
def test_the_pareto_set_and_its_templates_against_every_routing(
    tokens: int, experts: int, tile: int, step: int, regime, at_most: bool
):
    table = table_of(max(tokens, 1), tile, step)
    points = pareto_set(table, experts, tokens, regime, at_most=at_most)
    assert {(each.regime, tuple(map(int, each.counts))) for each in points} == by_brute_force(
        table, experts, tokens, regime, at_most
    )
    for point in points:
        assert len(point.rows) == experts
        assert sum(point.rows) <= tokens if at_most else sum(point.rows) == tokens
        assert (table.of(point.rows) == point.counts).all()

    found = templates_for(table, experts, points, regime)
    wide = table_of(4 * tokens + 4 * tile + 1, tile, step)
    for template in found.chosen:
        counts = wide.of(template.rows)
        assert (counts == template.counts).all()
        assert regime(wide.load_of(counts), template.rows) == template.regime
    for rows in admitted(tokens, experts, at_most):
        counts = table.of(rows)
        where = regime(table.load_of(counts), rows)
        assert any(each.regime == where and (each.counts >= counts).all() for each in found.chosen), rows
    assert found.least <= len(found.chosen) <= len(points)


def test_a_training_batch_over_eight_experts_takes_a_few_dozen_templates():
    table, experts, tokens = table_of(4096, 128, 64), 8, 4096
    assert period_of(table)[0] == 128
    regime = pressure(16)
    points = pareto_set(table, experts, tokens, regime)
    found = templates_for(table, experts, points, regime)
    assert routings(tokens, experts) > 10**21
    assert len(found.chosen) == found.least == 42
    wide = table_of(2 * tokens, 128, 64)
    assert all((wide.of(each.rows) == each.counts).all() for each in found.chosen)
    random_ = random.Random(0)
    for _ in range(3000):
        counts = table.of(drawn(random_, tokens, experts))
        assert any((each.counts >= counts).all() for each in found.chosen)


def drawn(random_: random.Random, tokens: int, experts: int) -> Rows:
    """From even to lopsided, with tails of all kinds."""
    cuts = sorted(
        random_.choice([random_.randint(0, tokens), random_.randint(0, 32) * 128]) for _ in range(experts - 1)
    )
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


def test_counts_without_a_period_are_covered_too():
    """As of a kernel that changes its tiles with the number of rows: every number is a kind of its own."""
    random_ = np.random.default_rng(3)
    counts = np.cumsum(random_.integers(0, 3, size=(10, 4)), axis=0)
    table = ExpertCounts(("a", "b", "c"), ("tiles",), counts)
    assert period_of(table)[0] == 9
    points = pareto_set(table, 3, 9, constant)
    assert {(each.regime, tuple(map(int, each.counts))) for each in points} == by_brute_force(
        table, 3, 9, constant
    )
    found = templates_for(table, 3, points, constant)
    assert all(any(each.covers(point) for each in found.chosen) for point in points)
    assert len(found.chosen) < len(points)


@pytest.mark.parametrize(("at_most", "admitted_routings"), [(False, 120), (True, 330)])
def test_a_real_kernel_that_adds_up_is_covered_for_every_routing(at_most: bool, admitted_routings: int):
    """Each routing of 7 rows, or at most 7, to 4 experts is executed and held against the templates."""
    kernel = TiledMatmul(experts=4, tile=3, step=2, programs=4)
    result = routed("3x2", kernel.facts(), LOADS, Routings(4, 7, at_most), executions=Executions(kernel))
    assert result.table is not None, result.reason
    assert result.table.admitted == admitted_routings
    assert set(result.additivity.by_load) == {"forward/last_tile", "forward/following_tile", "forward/waves"}
    assert "forward/empty" in result.additivity.adding
    chosen = [each.profile for each in result.table.selected]
    assert result.least <= len(chosen) <= result.pareto
    executed = 0
    for rows in itertools.product(range(8), repeat=4):
        if sum(rows) == 7 or (at_most and sum(rows) < 7):
            profile = kernel.profile(rows)
            assert any(each.covers(profile) for each in chosen), rows
            executed += 1
    assert executed == admitted_routings


def test_templates_have_no_more_rows_where_more_rows_bring_another_kernel():
    free, bound = (
        routed("3x2", kernel.facts(), LOADS, Routings(2, 12), executions=Executions(kernel))
        for kernel in (
            TiledMatmul(experts=2, tile=3, programs=2),
            TiledMatmul(experts=2, tile=3, programs=2, switch=12),
        )
    )
    assert max(sum(each.rows) for each in free.table.selected) > 12
    assert max(sum(each.rows) for each in bound.table.selected) == 12
    assert len(free.table.selected) == free.least < len(bound.table.selected) == bound.pareto


def test_where_paths_do_not_add_up_there_are_no_templates_and_the_reason_is_said():
    kernel = TiledMatmul(experts=3, coupled=True)
    result = routed("3x2", kernel.facts(), LOADS, Routings(3, 12), executions=Executions(kernel))
    assert result.table is None
    assert result.reason.startswith(
        "forward/tail_high and forward/tail_low neither add up over experts nor follow from the tiles: see ("
    )


def test_a_routing_whose_paths_cannot_be_counted_ends_the_derivation():
    kernel = TiledMatmul(experts=2, uncountable=frozenset({(5, 0)}))
    result = routed("3x2", kernel.facts(), LOADS, Routings(2, 6), executions=Executions(kernel))
    assert result.table is None
    assert result.reason == "(5, 0): unknown: the tiles were not counted"
