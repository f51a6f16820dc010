"""What the checks of a job cover, including expert shapes, and what they leave out (paper, sections 6.2, 8).

Certification is not all or nothing: what cannot be replayed is left out, and named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchscout.adapters.modules import unwrapped
from torchscout.adapters.structure import Part
from torchscout.decision.repeatability import NONDETERMINISTIC, REFUSED
from torchscout.errors import CatalogError
from torchscout.experts.catalog import load
from torchscout.experts.coverage import Rows
from torchscout.experts.launch_profiler import facts_of
from torchscout.replay.recipe import Recipe
from torchscout.replay.recipes.experts import ExpertsRecipe
from torchscout.replay.recipes.layer import LayerRecipe
from torchscout.replay.recipes.optimizer import OptimizerRecipe
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.utils.text import listed

__all__ = ["NO_CATALOG", "Covered", "RecipeCycle", "covered_by", "left_out", "shapes_in", "unwatched"]

_BETWEEN = "Wrong numbers between two checks are found if they leave a trace in what is compared or watched."
_MOST_REASONS = 3
NO_CATALOG = (
    "Experts are replayed only with as many rows as training happens to route to them; `scout discover` "
    "makes a catalog of shapes for ReplayConfig(expert_catalog=...)"
)


@dataclass(frozen=True, slots=True)
class RecipeCycle:
    """What it takes to cover a mixture of experts."""

    recipes: int | None = None
    """Consecutive paths (shapes of layers that are alike) that cover the catalog on every rank; None without
    a catalog."""
    lacking: str | None = None
    """What checks do not cover, and why."""


def shapes_in(
    path: str | Path, experts: Sequence[Part], position: int, device: torch.device
) -> Mapping[str, Sequence[Rows]]:
    """Return the shapes to replay, by the name of the experts.

    ``position`` is this rank's position among the ranks that share the experts of a layer. Raises
    ``CatalogError`` if the catalog was not made for these experts as they run here.
    """
    catalog = load(path)
    for part in experts:
        regimes = [table.facts.get("regime", "") for table in catalog.tables_of(part.name, position)]
        try:
            for facts in facts_of(unwrapped(part.module), device, regimes[0]):
                catalog.require(facts)
        except CatalogError as error:
            raise CatalogError(f"{part.name}: {error}") from error
    return {part.name: catalog.representatives(part.name, position) for part in experts}


@dataclass(frozen=True, slots=True)
class Covered:
    """What checks cover. Shares are of the elements of this rank's parameters."""

    compared: float
    """The share that is compared with the copies of replicas."""
    watched: float
    """The share that is watched between updates, because only this rank holds it."""
    parts: int
    """Layers, embeddings and output layers that are replayed in turn."""
    updates: int
    """Optimizers whose updates are recomputed."""
    optimizers: int
    paths: int = 0
    """Expert shapes of a catalog that are replayed in turn, each on one of the layers that are alike."""
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What is left out, by reason."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence()}

    def sentence(self) -> str:
        parts = [f"{_percent(self.compared)} of the parameters are compared among replicas"]
        if self.watched or not self.compared:
            parts.append(f"{_percent(self.watched)} are watched between updates")
        in_turn = f"{self.parts} modules are replayed in turn"
        parts.append("1 module is replayed" if self.parts == 1 else in_turn)
        if self.paths:
            parts.append(f"experts are replayed on {self.paths} paths of a catalog")
        parts.append(f"updates of {self.updates} of {self.optimizers} optimizers are recomputed")
        covered = listed(parts)
        left_out = [f"{listed(names)} ({reason})" for reason, names in self.missing.items()]
        if (more := len(left_out) - _MOST_REASONS) > 0:
            left_out[_MOST_REASONS:] = [f"and more for {more} other reasons"]
        missing = f" Not covered: {'; '.join(left_out)}." if left_out else ""
        return f"{covered[0].upper()}{covered[1:]}.{missing} {_BETWEEN}"


def covered_by(
    recipes: Iterable[Recipe], parameters: Collection[torch.Tensor], not_checked: Mapping[str, str]
) -> Covered:
    """What these recipes cover of these parameters; ``not_checked`` has the reasons by surface."""
    recipes, missing = list(recipes), left_out(not_checked)
    owned = [each for each in recipes if isinstance(each, OwnedStateRecipe)]
    refused = {name for names in missing.values() for name in names}
    for name, reason in sorted({k: v for each in owned for k, v in each.unwatched().items()}.items()):
        missing.setdefault(f"not watched between updates: {reason}", []).append(name)
    for recipe in recipes:
        for name, reason in recipe.refused().items() if isinstance(recipe, LayerRecipe) else ():
            known = missing.setdefault(reason, [])
            if not any(each.startswith(f"{name}/") for each in known):
                known.append(name)
    compared = [
        each for recipe in recipes if isinstance(recipe, ReplicatedStateRecipe) for each in recipe.compared()
    ]
    watched = [tensor for recipe in owned for tensor in recipe.watched_state().values()]
    updating = [each for each in recipes if isinstance(each, OptimizerRecipe)]
    return Covered(
        compared=_share(compared, parameters),
        watched=_share(watched, parameters),
        parts=sum(each.modules for each in recipes if isinstance(each, LayerRecipe)),
        paths=sum(each.paths for each in recipes if isinstance(each, ExpertsRecipe)),
        updates=len({id(of) for each in updating for of in each.recomputed(refused)}),
        optimizers=len({id(of) for each in updating for of in each.communication}),
        missing=missing,
    )


def _share(some: Iterable[torch.Tensor], parameters: Collection[torch.Tensor]) -> float:
    of = {id(each) for each in some}
    total = sum(each.numel() for each in parameters)
    return sum(each.numel() for each in parameters if id(each) in of) / total if total else 0.0


def left_out(not_checked: Mapping[str, str]) -> dict[str, list[str]]:
    """The surfaces that can never be checked, by reason."""
    found: dict[str, list[str]] = {}
    for surface, reason in not_checked.items():
        if reason.startswith((NONDETERMINISTIC, REFUSED)):
            plain = reason.removeprefix(f"{REFUSED}: ")
            plain = plain.partition(": ")[2] if plain.startswith("rank ") else plain
            found.setdefault(plain, []).append(surface)
    return {reason: sorted(names) for reason, names in found.items()}


def _percent(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:.3g}%"


def unwatched(share: float, needed: float) -> str | None:
    """Return why state with one owner prevents certification: it may have changed unnoticed. None if enough
    of it was watched."""
    if share >= needed:
        return None
    return (
        f"{share:.0%} of the state with one owner was watched since the last check, but certification "
        f"needs {needed:.0%}; see ReplayConfig.watched and watch_budget"
    )
