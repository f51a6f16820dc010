"""For tests that look at every comparison, and not only at those with a finding."""

from __future__ import annotations

from dataclasses import replace

from torchscout.config import ReplayConfig

__all__ = ["all_records"]


def all_records(replay: ReplayConfig | None) -> ReplayConfig | None:
    """The same settings, with every comparison written down."""
    return None if replay is None else replace(replay, records="all")
