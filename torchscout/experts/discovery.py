"""Executes every admitted shape before training, and keeps a log of it (paper, section 6.2, discovery).

The log has one line of facts, then one for each shape, each under its own digest, so that an interrupted
discovery can go on. A log made under other facts is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torchscout.errors import CatalogError
from torchscout.experts.catalog import drift, drift_in_words, observed_from_json, observed_to_json
from torchscout.experts.coverage import Observed, Profiler, Rows, observe

__all__ = ["DiscoveryLog", "Executions", "discover"]

_KIND = "torchscout discovery"
_SCHEMA = 2
_WITHOUT_DIGESTS = 1
"""The schema whose lines have no digests; such files are still read, and continued with lines that have."""
_DAMAGE = (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What reading a line raises that this version did not write."""


class DiscoveryLog:
    """A file that grows by one line for each shape."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        """Begin the file, or go on with it; a ``CatalogError`` where it was written under other facts, or is
        damaged."""
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
        schema = self._require(lines[0], facts)
        for number, line in enumerate(lines[1:], start=2):
            try:
                seen = observed_from_json(_opened(line, may_lack_digest=schema == _WITHOUT_DIGESTS))
            except _DAMAGE as error:
                raise CatalogError(f"{self.path}:{number} is damaged: {error!r:.300}") from error
            self.seen[seen.rows] = seen
        if rest:  # cut short in the middle of a line, whose shape is executed again
            os.truncate(self.path, len(whole) - len(rest))

    def _require(self, line: bytes, facts: Mapping[str, str]) -> int:
        """The schema of the file; a ``CatalogError`` where it cannot be continued."""
        try:
            head = _opened(line, may_lack_digest=True)
            kind, schema = head["kind"], head["schema"]
            drifted = drift(dict(head["facts"]), facts)
        except _DAMAGE as error:
            raise CatalogError(f"{self.path} is not a discovery's journal: {error!r:.300}") from error
        lowest = _SCHEMA if "digest" in head else _WITHOUT_DIGESTS
        if kind != _KIND or schema != lowest:
            raise CatalogError(f"{self.path} is not a journal of this version")
        if drifted:
            told = drift_in_words(drifted)
            raise CatalogError(f"{self.path} belongs to another discovery: {told}. Begin a new one")
        return lowest

    def _write(self, document: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_sealed(document) + b"\n")


def _sealed(document: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(_canonical(document)).hexdigest()
    return _canonical({**document, "digest": digest})


def _opened(line: bytes, *, may_lack_digest: bool) -> dict[str, Any]:
    """``ValueError`` if it is not byte for byte what was written."""
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


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


class Executions:
    """What each shape did, which is executed when it is first asked for."""

    def __init__(self, profiler: Profiler, resume_from: Path | None = None) -> None:
        """With ``resume_from`` each shape is written to that journal as soon as it is known.

        Those that are there already are not executed again; a ``CatalogError`` if it has other facts.
        """
        self._profiler = profiler
        self._journal = None if resume_from is None else DiscoveryLog(resume_from, profiler.facts())
        self._seen: dict[Rows, Observed] = {} if self._journal is None else dict(self._journal.seen)

    def of(self, rows: Rows) -> Observed:
        if rows not in self._seen:
            self._seen[rows] = observe(self._profiler, rows)
            if self._journal is not None:
                self._journal.add(self._seen[rows])
        return self._seen[rows]


def discover(
    profiler: Profiler,
    shapes: Iterable[Rows],
    *,
    on_progress: Callable[[Observed], None] = lambda _: None,
    resume_from: Path | None = None,
) -> tuple[Observed, ...]:
    """What each shape does, in the order of ``shapes``; see ``Executions`` for ``resume_from``."""
    executions = Executions(profiler, resume_from)
    found: list[Observed] = []
    for rows in dict.fromkeys(shapes):
        found.append(executions.of(rows))
        on_progress(found[-1])
    return tuple(found)
