"""Which expert shapes to replay where in the model, and on which machine that holds (paper, section 6.2).

Made before training by ``discovery``, asked during training. How it is kept in a file ``catalog_file`` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torchscout.decision.wording import listed
from torchscout.errors import CatalogError
from torchscout.evidence.catalog.cover import by_size
from torchscout.evidence.catalog.environment import drift, drift_in_words
from torchscout.evidence.catalog.profile import Rows
from torchscout.evidence.catalog.table import Table

__all__ = ["Catalog", "Place", "Places"]


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
