"""How a fault spreads: who stops where, because somebody else has stopped. Pure."""

from __future__ import annotations

from collections import defaultdict
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
    lagging: Mapping[int, int]
    """Rank that left an operation out -> the line of that operation."""


def spread(job: Job, faults: Faults) -> Standing:
    """Follow every rank until it stops, or waits for a rank that has."""
    ticks = len(job.ticks)
    end = _STEPS * ticks
    held, inside = np.full(job.size, end), np.ones(job.size, dtype=bool)
    waited_for = np.zeros(job.size, dtype=bool)
    marked = np.zeros(len(job.lines) + 1, dtype=bool)  # the last one stands for NOTHING, and stays False
    stopping, stuck_at, skipping = (_by_tick(each) for each in (faults.stops, faults.stuck, faults.skips))
    lagging: dict[int, int] = {}
    first = min([*stopping, *stuck_at, *skipping], default=end)
    for tick in range(first, end):
        lines = job.tick_lines[tick % ticks]
        for rank in stopping.get(tick, ()):
            if held[rank] == end:
                held[rank], inside[rank] = tick, False
        for rank, line in lagging.items():
            if held[rank] == end and lines[rank] == line:
                held[rank] = tick
        skipped = [rank for rank in skipping.get(tick, ()) if held[rank] == end]
        lagging |= {rank: int(lines[rank]) for rank in skipped}
        if job.ticks[tick % ticks].posted:
            continue
        missing = (held <= tick) & (lines != NOTHING)
        missing[skipped] = True
        stalled = [line for line in stuck_at.get(tick, ()) if _all_free(job, line, held, end)]
        open_lines = np.concatenate([lines[missing], np.array(stalled, dtype=lines.dtype)])
        marked[open_lines] = True
        blocked = marked[lines] & (held == end)
        blocked[skipped] = False
        marked[open_lines] = False
        held[blocked] = tick
        entered = np.unique(lines[blocked])
        marked[entered] = True
        waited_for |= missing & marked[lines]
        marked[entered] = False
    return Standing(held, inside, waited_for, lagging)


def _by_tick(faults: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for subject, tick in faults.items():
        found[tick].append(subject)
    return found


def _all_free(job: Job, line: int, held: Ints, end: int) -> bool:
    return bool((held[list(job.members(line))] == end).all())
