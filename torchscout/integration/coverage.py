"""Which shapes of experts checks go over, and what that lacks (paper, sections 6.2 and 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchscout.errors import CatalogError
from torchscout.evidence.catalog import catalog_file
from torchscout.evidence.catalog.catalog import Catalog
from torchscout.evidence.catalog.facts import facts_of
from torchscout.evidence.catalog.profile import Rows
from torchscout.integration.modules import unwrapped
from torchscout.integration.structure import Part

__all__ = ["NO_CATALOG", "Coverage", "shapes_in"]

NO_CATALOG = (
    "experts are replayed only with as many rows as training happens to route to them; scout discover "
    "makes a catalog of shapes, for ReplayConfig(catalog=...)"
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What accepted checks say about a mixture of experts."""

    recipes: int | None = None
    """Checks in a row that go over all shapes of the catalog, on every rank; None without one."""
    lacking: str | None = None
    """What they do not go over, and why."""


def shapes_in(
    path: str | Path, experts: Sequence[Part], position: int, device: torch.device
) -> Mapping[str, Sequence[Rows]]:
    """The shapes to replay, by the name of the experts; a ``CatalogError`` says why the catalog is refused.

    ``position`` is this rank's among those who share the experts of a layer.
    """
    catalog = catalog_file.load(path)
    for part in experts:
        _require(catalog, part, position, device)
    return {part.name: catalog.representatives(part.name, position) for part in experts}


def _require(catalog: Catalog, part: Part, position: int, device: torch.device) -> None:
    """That it was made for these experts, as they would run here."""
    regimes = [table.facts.get("regime", "") for table in catalog.tables_of(part.name, position)]
    try:
        for facts in facts_of(unwrapped(part.module), device, regimes[0]):
            catalog.require(facts)
    except CatalogError as error:
        raise CatalogError(f"{part.name}: {error}") from error
