"""What a discovery has seen so far, line by line, so that an interrupted one goes on (paper, section 6.2).

A line of facts, then one for each shape. What was seen under other facts says nothing here: it is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchscout.errors import CatalogError
from torchscout.evidence.catalog.catalog_json import observed_from_json, observed_to_json
from torchscout.evidence.catalog.environment import drift, drift_in_words
from torchscout.evidence.catalog.observed import Observed
from torchscout.evidence.catalog.profile import Rows

__all__ = ["Journal"]

_KIND = "torchscout discovery"
_SCHEMA = 1


class Journal:
    """A file that grows by one line for each shape."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        """Begin the file, or go on with it; a ``CatalogError`` where it was written under other facts."""
        self.path = path
        self.seen: dict[Rows, Observed] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._read(facts)
        else:
            self._write({"kind": _KIND, "schema": _SCHEMA, "facts": dict(facts)})

    def add(self, seen: Observed) -> None:
        self.seen[seen.rows] = seen
        self._write(observed_to_json(seen))

    def _read(self, facts: Mapping[str, str]) -> None:
        whole = self.path.read_bytes()
        *lines, rest = whole.split(b"\n")
        if not lines:
            raise CatalogError(f"{self.path} is not a discovery's journal")
        if rest:  # cut short in the middle of a line, whose shape is executed again
            os.truncate(self.path, len(whole) - len(rest))
        self._require(lines[0], facts)
        for number, line in enumerate(lines[1:], start=2):
            try:
                seen = observed_from_json(json.loads(line))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CatalogError(f"{self.path}:{number} is damaged: {error!r}") from error
            self.seen[seen.rows] = seen

    def _require(self, line: bytes, facts: Mapping[str, str]) -> None:
        try:
            head = json.loads(line)
            is_ours = head["kind"] == _KIND and head["schema"] == _SCHEMA
            drifted = drift(head["facts"], facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CatalogError(f"{self.path} is not a discovery's journal: {error!r}") from error
        if not is_ours:
            raise CatalogError(f"{self.path} is not a journal of this version")
        if drifted:
            told = drift_in_words(drifted)
            raise CatalogError(f"{self.path} belongs to another discovery: {told}. Begin a new one")

    def _write(self, document: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(document, separators=(",", ":")) + "\n")
