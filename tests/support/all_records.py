"""Settings for tests that look at every comparison, and not only at findings."""

from __future__ import annotations

from dataclasses import replace

from torchscout.config import ReplayConfig

__all__ = ["all_records"]


def all_records(replay: ReplayConfig | None) -> ReplayConfig | None:
    """Return the same settings, with every comparison recorded."""
    return None if replay is None else replace(replay, records="all")
