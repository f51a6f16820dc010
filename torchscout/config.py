"""One frozen dataclass per subsystem; every field is explained under it and validated once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KAPPA", "MATERIAL_RATIO", "StragglerConfig"]

KAPPA = 5.0
"""Robust scales a time may lie from the peers' median before it is an outlier."""
MATERIAL_RATIO = 1.1
"""Times closer than this ratio are the same for every practical purpose."""


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """When a slow rank is worth an incident."""

    kappa: float = KAPPA
    """Robust scales above the peers' median; larger is less sensitive."""
    material_ratio: float = MATERIAL_RATIO
    """A slowdown below this ratio to the median is never reported."""
    material_ms: float = 1.0
    """Nor is one below this many milliseconds."""
    confirmations: int = 2
    """Consecutive rounds a rank must be slow; noisy jobs need more, and get it by themselves."""

    def __post_init__(self) -> None:
        if self.kappa <= 0:
            raise ValueError(f"kappa must be positive, got {self.kappa}")
        if self.material_ratio < 1:
            raise ValueError(f"material_ratio must be at least 1, got {self.material_ratio}")
        if self.material_ms < 0:
            raise ValueError(f"material_ms must not be negative, got {self.material_ms}")
        if self.confirmations < 1:
            raise ValueError(f"confirmations must be at least 1, got {self.confirmations}")
