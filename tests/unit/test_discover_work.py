"""What `scout discover` says at its end, where shapes are unknown or routings cannot be covered."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.tiled_matmul import LOADS, TiledMatmul
from torchscout.cli.discover.command import Screen, screen_of
from torchscout.cli.discover.plan import DiscoveryPlan, Kernel, discovered, layers_in, rows_in
from torchscout.experts.catalog import Catalog
from torchscout.experts.templates import Routings


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch):
    """So that no line of a table is broken."""
    monkeypatch.setenv("COLUMNS", "200")


def planned(routings: Routings | None = None) -> DiscoveryPlan:
    return DiscoveryPlan(
        rows=rows_in("0:9"),
        domain="0:9",
        hidden=3,
        intermediate=2,
        experts=2,
        module=None,
        layers=layers_in("mlp.a, mlp.b"),
        positions=1,
        kernel="triton",
        regime="pressure",
        device="cpu",
        programs=None,
        routings=routings,
    )


def run_discovery(
    kernel: TiledMatmul, folder: Path, routings: Routings | None = None
) -> tuple[Catalog, str, str]:
    console = Console(file=io.StringIO(), width=200)
    with Screen(console) as screen:
        catalog = discovered(planned(routings), [Kernel("3x2", kernel, LOADS)], folder, screen)
    return catalog, screen_of(catalog), console.file.getvalue()


def test_retained_shapes_are_counted_and_shown_with_their_reason(tmp_path: Path):
    odd = TiledMatmul(experts=2, uncountable=frozenset({(4, 4)}), unstable=frozenset({(6, 6), (7, 7)}))
    catalog, shown, _ = run_discovery(odd, tmp_path)
    assert "3 shapes retained (1 unknown, 2 unstable), such as rows 4, unknown: the tiles were not" in shown
    assert {(4, 4), (6, 6), (7, 7)} < set(catalog.representatives("mlp.b", 0))


def test_routings_that_cannot_be_covered_leave_the_uniform_shapes_and_a_reason(tmp_path: Path):
    catalog, shown, _ = run_discovery(TiledMatmul(experts=2, coupled=True), tmp_path, Routings(2, 9))
    assert len(catalog.tables) == 1
    assert "Not covered: every routing of 9 rows to 2 experts, 3x2: forward/tail_low neither add up" in shown
    assert "Only uniform shapes are covered." in shown
    assert all(len(set(rows)) == 1 for rows in catalog.representatives("mlp.a", 0))


def test_routings_that_can_be_covered_have_their_own_table(tmp_path: Path):
    catalog, shown, progress = run_discovery(TiledMatmul(experts=2), tmp_path, Routings(2, 9, at_most=True))
    assert [table.name for table in catalog.tables] == ["3x2", "3x2"]
    assert "every routing of at most 9 rows to 2 experts" in shown
    uneven = [rows for rows in catalog.representatives("mlp.a", 0) if len(set(rows)) > 1]
    assert uneven
    assert "3x2: 10 of 10 shapes" in progress
    assert "3x2, routings: " in progress
