"""From executed shapes to a catalog in a file, and every way in which that file is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiled_matmul import TiledMatmul
from torchscout.errors import CatalogError
from torchscout.experts.catalog import Catalog, Places, document, drift, load, save
from torchscout.experts.coverage import tabulated, uniform
from torchscout.experts.discovery import discover

SHAPES = [uniform(rows, 2) for rows in range(20)]


def made(profiler: TiledMatmul | None = None) -> Catalog:
    up = profiler or TiledMatmul(inner=3, outer=2, experts=2)
    down = TiledMatmul(inner=2, outer=3, experts=2)
    tables = tuple(
        tabulated(f"{each.inner}x{each.outer}", each.facts(), "rows 0 to 19", discover(each, SHAPES))
        for each in (up, down)
    )
    return Catalog(tables, (Places(("layer.0", "layer.1"), experts=2, positions=3, tables=(0, 1)),))


def test_every_shape_is_executed_three_times():
    profiler = TiledMatmul(experts=2)
    discover(profiler, [*SHAPES, SHAPES[0]])
    assert profiler.executed == [rows for rows in SHAPES for _ in range(3)]


def test_the_representatives_are_those_of_both_projections_without_duplicates():
    catalog = made()
    up, down = catalog.tables
    assert up.admitted == 20
    assert 1 < len(up.selected) < 10
    assert catalog.representatives("layer.1", 2) == up.representatives == down.representatives


@pytest.mark.parametrize(("layer", "position"), [("layer.2", 0), ("layer.0", 3), ("layer.0", -1)])
def test_a_place_that_was_not_discovered_has_no_representatives(layer: str, position: int):
    with pytest.raises(CatalogError, match=r"made for layer\.0 and layer\.1"):
        made().representatives(layer, position)


def test_shapes_without_a_stable_profile_are_all_retained_with_the_reason():
    profiler = TiledMatmul(experts=2, uncountable=frozenset({(3, 3)}), unstable=frozenset({(5, 5)}))
    table = made(profiler).tables[0]
    assert {each.rows: each.reason.partition(":")[0] for each in table.retained} == {
        (3, 3): "unknown",
        (5, 5): "unstable",
    }
    assert "forward/interior 2 times and then 3" in table.retained[1].reason
    assert {(3, 3), (5, 5)} < set(table.representatives)
    assert {each.rows for each in table.selected}.isdisjoint({(3, 3), (5, 5)})
    assert table.admitted == 20


def test_a_saved_catalog_is_loaded_as_it_was(tmp_path: Path):
    profiler = TiledMatmul(experts=2, uncountable=frozenset({(3, 3)}))
    catalog = replace(made(profiler), gaps=("uneven routings: not requested",))
    save(catalog, tmp_path / "catalog.json")
    assert load(tmp_path / "catalog.json") == catalog
    assert list(tmp_path.iterdir()) == [tmp_path / "catalog.json"]


def test_the_same_shapes_give_the_same_bytes(tmp_path: Path):
    for name in "ab":
        save(made(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_changed_byte_is_detected(tmp_path: Path):
    path = tmp_path / "catalog.json"
    save(made(), path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CatalogError):
            load(path)
    path.write_bytes(whole[:-20])
    with pytest.raises(CatalogError, match="damaged"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "something else"}, "is not a catalog; scout discover makes one"),
        ({"schema": 99}, "has schema 99, this version reads 1"),
        ({"body": {"tables": [], "places": []}}, "its digest does not match"),
        pytest.param({}, "its digest does not match", id="only reformatted"),
    ],
)
def test_a_file_with_wrong_fields_is_refused(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "catalog.json"
    path.write_text(json.dumps(document(made()) | change))
    with pytest.raises(CatalogError, match=message):
        load(path)


def test_a_missing_file_and_a_list_are_refused(tmp_path: Path):
    with pytest.raises(CatalogError, match=r"cannot read .*No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(CatalogError, match="is not a catalog"):
        load(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("name", "message"), [("none/catalog.json", "No such file"), ("folder", "directory")]
)
def test_a_catalog_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path, name: str, message: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(CatalogError, match=f"cannot write .*{message}"):
        save(made(), tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_everything_that_drifted_is_named_with_both_values():
    facts = TiledMatmul(inner=3, outer=2, experts=2).facts() | {"torch": "9.9", "tile": "8"}
    with pytest.raises(CatalogError) as refused:
        made().require(facts)
    message = str(refused.value)
    assert "tile was '4' and is '8'" in message
    assert "and is '9.9'" in message
    assert "scout discover again" in message
    assert "inner" not in message


def test_a_fact_that_only_one_side_knows_is_drift():
    assert [str(each) for each in drift({"a": "1", "b": "2"}, {"b": "2", "c": "3"})] == [
        "a was '1' and is not recorded",
        "c was not recorded and is '3'",
    ]


def test_a_catalog_with_unknown_fields_is_refused_even_with_a_valid_digest(tmp_path: Path):
    """They would be ignored."""
    whole = document(made())
    for change in ({"extra": 1}, {"gaps": "ab"}):
        body = {**whole["body"], **change}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        text = json.dumps({**whole, "body": body, "digest": digest}, sort_keys=True, separators=(",", ":"))
        (tmp_path / "catalog.json").write_text(text + "\n")
        with pytest.raises(CatalogError, match="fields that this version does not know"):
            load(tmp_path / "catalog.json")
