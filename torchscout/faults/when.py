"""When a fault happens: in one step, in a range of them, from one on, or by chance.

Chance is decided for each step by itself, from a seed: all ranks and all runs decide alike.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import xxhash

__all__ = ["Recurring", "Steps", "since", "steps_of"]


@dataclass(frozen=True, slots=True)
class Recurring:
    """In each of ``steps`` with some probability: an intermittent fault."""

    steps: range
    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"a probability is above 0 and at most 1, got {self.probability}")

    def __contains__(self, step: object) -> bool:
        drawn = xxhash.xxh3_64_intdigest(f"{self.seed} {step}".encode()) / 2**64
        return step in self.steps and drawn < self.probability


Steps = int | range | Recurring
"""How a plan says when, in training steps counted from 1."""


def since(step: int) -> range:
    """In this step and in all after it: a persistent fault."""
    return range(step, sys.maxsize)


def steps_of(when: Steps) -> range | Recurring:
    """The same, as something that a step can be in; a ``ValueError`` for steps that there are not."""
    if isinstance(when, int):
        when = range(when, when + 1)
    steps = when.steps if isinstance(when, Recurring) else when
    if not steps or min(steps[0], steps[-1]) < 1:
        raise ValueError(f"steps are counted from 1, got {steps}")
    return when
