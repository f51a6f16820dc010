"""Which expert shapes to replay where in the model, and the file that says so (paper, section 6.2).

A catalog is made before training by ``scout discover``. It is bound to facts of the machine and of the
experts (``device_facts`` and a profiler's own), and refused where they have changed. Its file is canonical
JSON under a digest, and is replaced as a whole or not at all.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchscout.errors import CatalogError
from torchscout.experts.coverage import Observed, Representative, Retained, Rows, ShapeProfile, Table, by_size
from torchscout.utils.text import listed

if TYPE_CHECKING:
    import torch

__all__ = [
    "SCHEMA",
    "Catalog",
    "Drift",
    "Place",
    "Places",
    "catalog_from_json",
    "catalog_to_json",
    "device_facts",
    "document",
    "drift",
    "drift_in_words",
    "load",
    "observed_from_json",
    "observed_to_json",
    "save",
    "text_of",
]


@dataclass(frozen=True, slots=True)
class Drift:
    """One fact that is not what it was."""

    fact: str
    then: str | None
    """When the shapes were executed; None if nobody asked."""
    now: str | None

    def __str__(self) -> str:
        return f"{self.fact} was {_told(self.then)} and is {_told(self.now)}"


def drift(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[Drift, ...]:
    """Every fact that differs, or that only one side knows, by name."""
    names = sorted({*then, *now})
    differing = (name for name in names if then.get(name) != now.get(name))
    return tuple(Drift(name, then.get(name), now.get(name)) for name in differing)


def drift_in_words(drifted: tuple[Drift, ...]) -> str:
    """All of them: whoever has to put one right wants to know of the others."""
    return "; ".join(map(str, drifted))


def _told(value: str | None) -> str:
    return "not recorded" if value is None else repr(value)


def device_facts(device: torch.device) -> dict[str, str]:
    """Device, driver, and the versions that compile for it."""
    import torch  # commands that only read catalogs do without

    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu {platform.machine()}",
        "driver": _driver(torch.version.cuda) if is_cuda else "none",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none",
    }


def _driver(cuda: str | None) -> str:
    """The NVIDIA driver's version, from its own library; torch knows only which CUDA it serves."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return f"unknown, CUDA {cuda}"
    text = ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    library.nvmlShutdown()
    return f"unknown, NVML error {failed}" if failed else text.value.decode()


class Place(NamedTuple):
    """One expert of the model."""

    layer: str
    expert: int
    """Its number among the experts of its position."""
    position: int
    """The expert-parallel position that holds it."""


@dataclass(frozen=True, slots=True)
class Places:
    """All places whose experts are built alike: every expert of every position of these layers."""

    layers: tuple[str, ...]
    """By name; ``*`` in one stands for anything."""
    experts: int
    """Of one position: those that one kernel executes together."""
    positions: int
    tables: tuple[int, ...]
    """Which tables hold here, of each projection one or more, by their number in the catalog."""

    def __iter__(self) -> Iterator[Place]:
        return (
            Place(layer, expert, position)
            for layer in self.layers
            for position in range(self.positions)
            for expert in range(self.experts)
        )


@dataclass(frozen=True, slots=True)
class Catalog:
    """The representatives of every layer, expert and expert-parallel position."""

    tables: tuple[Table, ...]
    places: tuple[Places, ...]
    gaps: tuple[str, ...] = ()
    """What was asked for and is not covered, and why."""

    def tables_of(self, layer: str, position: int) -> tuple[Table, ...]:
        """Those of each projection of the experts there."""
        for places in self.places:
            is_meant = any(fnmatchcase(layer, each) for each in places.layers)
            if is_meant and 0 <= position < places.positions:
                return tuple(self.tables[number] for number in places.tables)
        held = [name for places in self.places for name in places.layers]
        raise CatalogError(
            f"the catalog has nothing for expert-parallel position {position} of layer {layer!r}; "
            f"it was made for {listed(held)}"
        )

    def representatives(self, layer: str, position: int) -> tuple[Rows, ...]:
        """The shapes to rotate through there, smallest first.

        An expert's projections all see the same rows, so each of these shapes is one execution of them all.
        """
        tables = self.tables_of(layer, position)
        return tuple(sorted({rows for table in tables for rows in table.representatives}, key=by_size))

    def require(self, facts: Mapping[str, str]) -> Table:
        """The table that was made under these facts; a ``CatalogError`` names whatever has changed."""
        # With several projections the facts differ in their dimensions anyway: the nearest table is meant.
        table = min(self.tables, key=lambda each: len(drift(each.facts, facts)))
        if drifted := drift(table.facts, facts):
            raise CatalogError(
                f"the catalog does not hold here: {drift_in_words(drifted)}. Run scout discover again"
            )
        return table


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


KIND = "torchscout catalog"
SCHEMA = 1
"""Version of the file; other versions are refused."""


# [Note: the layout of a catalog file]
#
# One line of JSON with sorted keys, without spaces and without floats, so that equal catalogs are equal bytes
# and no bit can change unseen: what is read must be exactly what would be written. The digest is the SHA-256
# of the body written by itself in the same way.


def document(catalog: Catalog) -> dict[str, Any]:
    """The catalog with its digest, as one JSON document."""
    body = catalog_to_json(catalog)
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    return {"kind": KIND, "schema": SCHEMA, "digest": digest, "body": body}


def text_of(catalog: Catalog) -> str:
    """What a file of this catalog holds, but for the end of its line."""
    return _canonical(document(catalog)).decode()


def save(catalog: Catalog, path: Path | str) -> None:
    """Put this catalog in the place of the last; after a ``CatalogError`` the last one is still there."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(text_of(catalog).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(path.parent)
    except OSError as error:
        raise CatalogError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path | str) -> Catalog:
    """The catalog as it was saved; a ``CatalogError`` if it is damaged, or is none of this version's."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path} is damaged, or no catalog: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise CatalogError(f"{path} is not a catalog; scout discover makes one")
    if found.get("schema") != SCHEMA:
        raise CatalogError(f"{path} has schema {found.get('schema')!r:.20}, this version reads {SCHEMA}")
    try:
        return _catalog_in(found, data)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
        raise CatalogError(f"{path} is not a catalog: {error!r:.300}") from error
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path} is damaged: {error!s:.300}. Run scout discover again") from error


def _catalog_in(found: dict[str, Any], data: bytes) -> Catalog:
    body = found.get("body")
    if (
        found.get("digest") != hashlib.sha256(_canonical(body)).hexdigest()
        or data != _canonical(found) + b"\n"
    ):
        raise ValueError("its digest does not match")
    catalog = catalog_from_json(body)
    if catalog_to_json(catalog) != body:
        raise ValueError("it says more than a catalog of this version")
    return catalog


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sync(folder: Path) -> None:
    """The new name itself must be on the disk, too."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
