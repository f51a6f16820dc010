"""A catalog as a file: canonical JSON under a digest, replaced whole or not at all (paper, section 6.2).

Whether the catalog still holds on this machine is ``Catalog.require``'s question, not this file's.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from torchscout.errors import CatalogError
from torchscout.evidence.catalog.catalog import Catalog
from torchscout.evidence.catalog.catalog_json import catalog_from_json, catalog_to_json

__all__ = ["SCHEMA", "document", "load", "save", "text_of"]

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
