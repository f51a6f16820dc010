"""How a fault spreads: who stops where, because somebody else has stopped. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from evaluation.simulate.job import NOTHING, Ints, Job

__all__ = ["Faults", "Standing", "spread"]

_STEPS = 2
"""A fault in the first step has stopped every rank by the end of the second."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Ticks count from the beginning of the step with the fault."""

    stops: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the tick whose operation it does not enter, nor any later one."""
    stuck: Mapping[int, int] = field(default_factory=dict)
    """Line -> the tick whose operation does not return, although all members enter it."""
    skips: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the tick whose operation it leaves out, and goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """Where every rank stands once nobody moves."""

    tick: Ints
    """The tick of the operation that a rank is in or, if it has stopped, would enter next."""
    inside: npt.NDArray[np.bool_]
    """False for ranks that stopped by themselves, and wait for nobody."""
    waited_for: npt.NDArray[np.bool_]
    """Ranks without which an operation that others have entered does not return."""
    lagging: Mapping[int, int] = field(default_factory=dict)
    """Rank that left an operation out -> the line of that operation."""


def spread(job: Job, faults: Faults) -> Standing:
    """Follow every rank until it stops, or waits for a rank that has."""
    ticks = len(job.ticks)
    end = _STEPS * ticks
    held, inside = np.full(job.size, end), np.ones(job.size, dtype=bool)
    waited_for, lagging = np.zeros(job.size, dtype=bool), dict[int, int]()
    begin = min([*faults.stops.values(), *faults.stuck.values(), *faults.skips.values()])
    for tick in range(begin, end):
        lines = job.tick_lines[tick % ticks]
        for rank in _at(tick, faults.stops):
            if held[rank] == end:
                held[rank], inside[rank] = tick, False
        for rank, line in lagging.items():
            if held[rank] == end and lines[rank] == line:
                held[rank] = tick
        skipped = [rank for rank in _at(tick, faults.skips) if held[rank] == end]
        lagging |= {rank: int(lines[rank]) for rank in skipped}
        if job.ticks[tick % ticks].posted:
            continue
        missing = (held <= tick) & (lines != NOTHING)
        missing[skipped] = True
        stuck = [line for line in _at(tick, faults.stuck) if (held[[*job.members(line)]] == end).all()]
        blocked = np.isin(lines, [*lines[missing], *stuck]) & (held == end)
        blocked[skipped] = False
        held[blocked] = tick
        waited_for |= missing & np.isin(lines, lines[blocked])
    return Standing(held, inside, waited_for, lagging)


def _at(tick: int, faults: Mapping[int, int]) -> list[int]:
    return [subject for subject, when in faults.items() if when == tick]
