"""The settings of replay, which can change while it runs: on rank 0 first, then on all ranks alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torchscout.config import ReplayConfig

__all__ = ["ReplaySettings"]

_CHANGEABLE = {"interval", "recipes", "variants", "max_overhead"}


class ReplaySettings:
    """What applies now, and what was requested on this rank. Rank 0's requests apply to all ranks."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = self._requested_config = config
        self.requests = 0
        """How many changes were requested on this rank."""
        self.adopted = 0
        """How many requests of rank 0 have been applied."""

    def request(self, kinds: Collection[str], **settings: Any) -> None:
        """Request other settings; raise ``ValueError`` for those that cannot change while replay runs.

        ``kinds`` are the recipes that there are.
        """
        if unknown := sorted(settings.keys() - _CHANGEABLE):
            raise ValueError(f"replay can change {sorted(_CHANGEABLE)} while it runs, not {unknown}")
        requested = replace(self._requested_config, **settings)
        if "interval" in settings and isinstance(requested.recipes, Mapping):
            raise ValueError(
                f"recipes have intervals of their own, {dict(requested.recipes)}; change recipes="
            )
        missing = requested.intervals.keys() - set(kinds)
        if settings.get("recipes") and missing:
            raise ValueError(f"recipes {sorted(missing)} were not there when replay was attached")
        self._requested_config = requested
        self.requests += 1

    def requested(self) -> dict[str, Any]:
        """Return what was requested on this rank, for ``adopt`` on all ranks."""
        return _document(self._requested_config, self.requests)

    def current(self) -> dict[str, Any]:
        """Return what applies on this rank, for ``adopt`` on all ranks."""
        return _document(self.config, self.adopted)

    def adopt(self, document: Mapping[str, Any]) -> None:
        """Apply the settings of rank 0."""
        self.adopted = document["changes"]
        self.config = replace(
            self.config,
            recipes=document["intervals"],
            variants=tuple(document["variants"]),
            max_overhead=document["max_overhead"],
        )


def _document(config: ReplayConfig, changes: int) -> dict[str, Any]:
    return {
        "intervals": config.intervals,
        "variants": list(config.variants),
        "max_overhead": config.max_overhead,
        "changes": changes,
    }
