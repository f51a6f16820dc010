"""Catalogs and observations as JSON values, and back (paper, section 6.2). Reads and writes no file."""

from __future__ import annotations

from typing import Any

from torchscout.evidence.catalog.catalog import Catalog, Places
from torchscout.evidence.catalog.observed import Observed
from torchscout.evidence.catalog.profile import Rows, ShapeProfile
from torchscout.evidence.catalog.table import Representative, Retained, Table

__all__ = ["catalog_from_json", "catalog_to_json", "observed_from_json", "observed_to_json"]


def catalog_to_json(catalog: Catalog) -> dict[str, Any]:
    return {
        "tables": [_table_to_json(table) for table in catalog.tables],
        "places": [
            {
                "layers": list(places.layers),
                "experts": places.experts,
                "positions": places.positions,
                "tables": list(places.tables),
            }
            for places in catalog.places
        ],
        "gaps": list(catalog.gaps),
    }


def catalog_from_json(value: Any) -> Catalog:
    """A ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` where it is no catalog's."""
    tables = tuple(_table_from_json(table) for table in value["tables"])
    if not tables:
        raise ValueError("it has no tables")
    places = tuple(_places_from_json(each) for each in value["places"])
    if any(number >= len(tables) for each in places for number in each.tables):
        raise ValueError("a place refers to a table that is not there")
    return Catalog(tables, places, tuple(map(_text, value["gaps"])))


def observed_to_json(seen: Observed) -> dict[str, Any]:
    if seen.profile is None:
        return {"rows": list(seen.rows), "reason": seen.reason}
    return {"rows": list(seen.rows), **_profile_to_json(seen.profile)}


def observed_from_json(value: Any) -> Observed:
    """Errors as those of ``catalog_from_json``."""
    rows = _rows(value["rows"])
    if "reason" in value:
        if not (reason := _text(value["reason"])):
            raise ValueError(f"no reason for {rows}")
        return Observed(rows, None, reason)
    return Observed(rows, _profile_from_json(value))


def _table_to_json(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "facts": dict(table.facts),
        "domain": table.domain,
        "admitted": table.admitted,
        "selected": [{"rows": list(each.rows), **_profile_to_json(each.profile)} for each in table.selected],
        "retained": [{"rows": list(each.rows), "reason": each.reason} for each in table.retained],
        "occurrences": table.occurrences,
        "covered": table.covered,
    }


def _table_from_json(value: Any) -> Table:
    return Table(
        name=_text(value["name"]),
        facts={_text(name): _text(fact) for name, fact in value["facts"].items()},
        domain=_text(value["domain"]),
        admitted=_number(value["admitted"]),
        selected=tuple(
            Representative(_rows(each["rows"]), _profile_from_json(each)) for each in value["selected"]
        ),
        retained=tuple(Retained(_rows(each["rows"]), _text(each["reason"])) for each in value["retained"]),
        occurrences=_number(value["occurrences"]),
        covered=_number(value["covered"]),
    )


def _places_from_json(value: Any) -> Places:
    return Places(
        layers=tuple(map(_text, value["layers"])),
        experts=_number(value["experts"]),
        positions=_number(value["positions"]),
        tables=tuple(map(_number, value["tables"])),
    )


def _profile_to_json(profile: ShapeProfile) -> dict[str, Any]:
    return {"fingerprint": profile.fingerprint, "counts": dict(profile.path_counts)}


def _profile_from_json(value: Any) -> ShapeProfile:
    counts = {_text(path): _number(count) for path, count in value["counts"].items()}
    return ShapeProfile.of(_text(value["fingerprint"]), counts)


def _rows(value: Any) -> Rows:
    return tuple(map(_number, value))


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a text")
    return value
