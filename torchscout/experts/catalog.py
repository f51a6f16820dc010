"""The catalog of expert shapes to replay in each layer, and its file format (paper, section 6.2).

``scout discover`` creates a catalog before training. It is bound to facts about the machine and the experts
(``device_facts`` and a profiler's own), and refused if they have changed. The file is canonical JSON with a
digest, and is replaced atomically.
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
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchscout.errors import CatalogError
from torchscout.experts.coverage import Observed, Rows, ShapeProfile, Table, by_size
from torchscout.utils.text import listed

if TYPE_CHECKING:
    import torch

__all__ = [
    "Catalog",
    "Places",
    "canonical",
    "device_facts",
    "document",
    "drift",
    "load",
    "observed_from_json",
    "observed_to_json",
    "save",
    "text_of",
]


@dataclass(frozen=True, slots=True)
class Drift:
    """One fact that has changed."""

    fact: str
    then: str | None
    """The value when the shapes were executed; None if it was not recorded."""
    now: str | None

    def __str__(self) -> str:
        then, now = ("not recorded" if each is None else repr(each) for each in (self.then, self.now))
        return f"{self.fact} was {then} and is {now}"


def drift(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[Drift, ...]:
    """Return every fact that differs, or that only one side has, sorted by name."""
    names = sorted({*then, *now})
    differing = (name for name in names if then.get(name) != now.get(name))
    return tuple(Drift(name, then.get(name), now.get(name)) for name in differing)


def device_facts(device: torch.device) -> dict[str, str]:
    """Return the device, its driver, and the versions of PyTorch and Triton."""
    import torch  # commands that only read catalogs do not need it

    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu {platform.machine()}",
        "driver": _driver(torch.version.cuda) if is_cuda else "none",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none",
    }


def _driver(cuda: str | None) -> str:
    """Return the version of the NVIDIA driver, from NVML; PyTorch knows only the CUDA version."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return f"unknown, CUDA {cuda}"
    text = ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    library.nvmlShutdown()
    return f"unknown, NVML error {failed}" if failed else text.value.decode()


@dataclass(frozen=True, slots=True)
class Places:
    """Places with identical experts: every expert of every position of these layers."""

    layers: tuple[str, ...]
    """Names or patterns, in which ``*`` matches anything."""
    experts: int
    """Experts of one position, which one kernel executes together."""
    positions: int
    tables: tuple[int, ...]
    """Indices of the catalog's tables for these experts, one or more for each projection."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The representatives of every layer, expert and expert-parallel position."""

    tables: tuple[Table, ...]
    places: tuple[Places, ...]
    gaps: tuple[str, ...] = ()
    """What was requested and is not covered, with the reason."""

    def tables_of(self, layer: str, position: int) -> tuple[Table, ...]:
        """Return the tables of all projections; raise ``CatalogError`` if there are none."""
        for places in self.places:
            is_included = any(fnmatchcase(layer, each) for each in places.layers)
            if is_included and 0 <= position < places.positions:
                return tuple(self.tables[number] for number in places.tables)
        included = [name for places in self.places for name in places.layers]
        raise CatalogError(
            f"the catalog has nothing for expert-parallel position {position} of layer {layer!r}; "
            f"it was made for {listed(included)}"
        )

    def representatives(self, layer: str, position: int) -> tuple[Rows, ...]:
        """Return the shapes to rotate over, smallest first. All projections get the same rows."""
        tables = self.tables_of(layer, position)
        return tuple(sorted({rows for table in tables for rows in table.representatives}, key=by_size))

    def require(self, facts: Mapping[str, str]) -> Table:
        """Return the table with these facts; raise ``CatalogError`` with all facts that have changed."""
        # The dimensions of several projections always differ, so the nearest table is meant.
        table = min(self.tables, key=lambda each: len(drift(each.facts, facts)))
        if drifted := drift(table.facts, facts):
            changes = "; ".join(map(str, drifted))
            raise CatalogError(f"the catalog is not valid here: {changes}. Run scout discover again")
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
    """Raise ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` if it is not a catalog."""
    tables = tuple(_table_from_json(table) for table in value["tables"])
    if not tables:
        raise ValueError("it has no tables")
    places = tuple(
        Places(
            layers=tuple(map(_text, each["layers"])),
            experts=_number(each["experts"]),
            positions=_number(each["positions"]),
            tables=tuple(map(_number, each["tables"])),
        )
        for each in value["places"]
    )
    if any(number >= len(tables) for each in places for number in each.tables):
        raise ValueError("a place refers to a table that does not exist")
    return Catalog(tables, places, tuple(map(_text, value["gaps"])))


def observed_to_json(seen: Observed) -> dict[str, Any]:
    rows, profile = list(seen.rows), seen.profile
    if profile is None:
        return {"rows": rows, "reason": seen.reason}
    return {"rows": rows, "fingerprint": profile.fingerprint, "counts": dict(profile.path_counts)}


def observed_from_json(value: Any) -> Observed:
    """Raises the same errors as ``catalog_from_json``."""
    return _unprofiled_from_json(value) if "reason" in value else _profiled_from_json(value)


def _unprofiled_from_json(value: Any) -> Observed:
    rows, reason = _rows(value["rows"]), _text(value["reason"])
    if not reason:
        raise ValueError(f"no reason for {rows}")
    return Observed(rows, None, reason)


def _profiled_from_json(value: Any) -> Observed:
    counts = {_text(path): _number(count) for path, count in value["counts"].items()}
    return Observed(_rows(value["rows"]), ShapeProfile.of(_text(value["fingerprint"]), counts))


def _table_to_json(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "facts": dict(table.facts),
        "domain": table.domain,
        "admitted": table.admitted,
        "selected": [observed_to_json(each) for each in table.selected],
        "retained": [observed_to_json(each) for each in table.retained],
        "occurrences": table.occurrences,
        "covered": table.covered,
    }


def _table_from_json(value: Any) -> Table:
    return Table(
        name=_text(value["name"]),
        facts={_text(name): _text(fact) for name, fact in value["facts"].items()},
        domain=_text(value["domain"]),
        admitted=_number(value["admitted"]),
        selected=tuple(_profiled_from_json(each) for each in value["selected"]),
        retained=tuple(_unprofiled_from_json(each) for each in value["retained"]),
        occurrences=_number(value["occurrences"]),
        covered=_number(value["covered"]),
    )


def _rows(value: Any) -> Rows:
    return tuple(map(_number, value))


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")
    return value


KIND = "torchscout catalog"
SCHEMA = 1
"""Version of the file format; other versions are refused."""


# [Note: the layout of a catalog file]
#
# One line of JSON with sorted keys, without spaces and without floats, so that equal catalogs are equal bytes
# and every changed bit is detected: a file must be exactly what ``save`` would write. The digest is the
# SHA-256 of the body in the same format.


def document(catalog: Catalog) -> dict[str, Any]:
    """Return the catalog with its digest, as a JSON document."""
    body = catalog_to_json(catalog)
    digest = hashlib.sha256(canonical(body)).hexdigest()
    return {"kind": KIND, "schema": SCHEMA, "digest": digest, "body": body}


def text_of(catalog: Catalog) -> str:
    """Return the content of this catalog's file, without the newline."""
    return canonical(document(catalog)).decode()


def save(catalog: Catalog, path: Path | str) -> None:
    """Replace the file. If this raises ``CatalogError``, the previous file is intact."""
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
    """Return a saved catalog; raise ``CatalogError`` if it is damaged or not of this version."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path} is damaged, or not a catalog: {error}") from error
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
    digest = hashlib.sha256(canonical(body)).hexdigest()
    if found.get("digest") != digest or data != canonical(found) + b"\n":
        raise ValueError("its digest does not match")
    catalog = catalog_from_json(body)
    if catalog_to_json(catalog) != body:
        raise ValueError("it has fields that this version does not know")
    return catalog


def canonical(value: Any) -> bytes:
    """Return JSON that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sync(folder: Path) -> None:
    """Write a new name in the folder to disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
