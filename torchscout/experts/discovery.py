"""Executes every admitted shape before training, and logs the results (paper, section 6.2, discovery).

The log has one line of facts and one line for each shape, each with its digest, so that an interrupted
discovery can be resumed. A log with other facts is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torchscout.errors import CatalogError
from torchscout.experts.catalog import canonical, drift, observed_from_json, observed_to_json
from torchscout.experts.coverage import Observed, Profiler, Rows, observe

__all__ = ["DiscoveryLog", "Executions", "discover"]

_KIND = "torchscout discovery"
_SCHEMA = 2
_WITHOUT_DIGESTS = 1
"""The schema without digests. Such files are still read, and continued with lines that have digests."""
_DAMAGE = (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What reading a line may raise if this version did not write it."""


class DiscoveryLog:
    """A file with one line for each shape."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        """Create or continue the file. Raise ``CatalogError`` if it has other facts or is damaged."""
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
            raise CatalogError(f"{self.path} is not a discovery log")
        schema = self._require(lines[0], facts)
        for number, line in enumerate(lines[1:], start=2):
            try:
                seen = observed_from_json(_opened(line, may_lack_digest=schema == _WITHOUT_DIGESTS))
            except _DAMAGE as error:
                raise CatalogError(f"{self.path}:{number} is damaged: {error!r:.300}") from error
            self.seen[seen.rows] = seen
        if rest:  # an incomplete last line, whose shape is executed again
            os.truncate(self.path, len(whole) - len(rest))

    def _require(self, line: bytes, facts: Mapping[str, str]) -> int:
        """Return the schema of the file; raise ``CatalogError`` if it cannot be continued."""
        try:
            head = _opened(line, may_lack_digest=True)
            kind, schema = head["kind"], head["schema"]
            drifted = drift(dict(head["facts"]), facts)
        except _DAMAGE as error:
            raise CatalogError(f"{self.path} is not a discovery log: {error!r:.300}") from error
        lowest = _SCHEMA if "digest" in head else _WITHOUT_DIGESTS
        if kind != _KIND or schema != lowest:
            raise CatalogError(f"{self.path} is not a discovery log of this version")
        if drifted:
            changes = "; ".join(map(str, drifted))
            raise CatalogError(f"{self.path} belongs to another discovery: {changes}. Use a new file")
        return lowest

    def _write(self, document: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_sealed(document) + b"\n")


def _sealed(document: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(canonical(document)).hexdigest()
    return canonical({**document, "digest": digest})


def _opened(line: bytes, *, may_lack_digest: bool) -> dict[str, Any]:
    """Return the document; raise ``ValueError`` if the line is not exactly what was written."""
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    if "digest" not in document:
        if may_lack_digest:
            return document
        raise ValueError("it has no digest")
    body = {name: value for name, value in document.items() if name != "digest"}
    if _sealed(body) != line:
        raise ValueError("its digest does not match")
    return document


class Executions:
    """The results of shapes, each of which is executed on first use."""

    def __init__(self, profiler: Profiler, resume_from: Path | None = None) -> None:
        """``resume_from`` is a discovery log: shapes in it are not executed again, new ones are added to it.

        Raises ``CatalogError`` if it has other facts.
        """
        self._profiler = profiler
        self._log = None if resume_from is None else DiscoveryLog(resume_from, profiler.facts())
        self._seen: dict[Rows, Observed] = {} if self._log is None else dict(self._log.seen)

    def of(self, rows: Rows) -> Observed:
        """Return the result of this shape."""
        if rows not in self._seen:
            self._seen[rows] = observe(self._profiler, rows)
            if self._log is not None:
                self._log.add(self._seen[rows])
        return self._seen[rows]


def discover(
    profiler: Profiler,
    shapes: Iterable[Rows],
    *,
    on_progress: Callable[[Observed], None] = lambda _: None,
    resume_from: Path | None = None,
) -> tuple[Observed, ...]:
    """Execute all shapes and return the results in order; see ``Executions`` for ``resume_from``."""
    executions = Executions(profiler, resume_from)
    found: list[Observed] = []
    for rows in dict.fromkeys(shapes):
        found.append(executions.of(rows))
        on_progress(found[-1])
    return tuple(found)
