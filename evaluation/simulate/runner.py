"""Runs many scenarios of one layout, and reports how often they were decided rightly."""

from __future__ import annotations

import resource
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.simulate import hangs, numbers, slowness
from evaluation.simulate.job import Job
from evaluation.simulate.layouts import SMALL, Layout, drawn
from evaluation.simulate.scoring import Outcome, Score, score
from torchscout.campaign.results import interval

__all__ = ["FAMILIES", "GOALS", "Decided", "report_of", "run"]

FAMILIES = (*hangs.FAMILIES, *slowness.FAMILIES, *numbers.FAMILIES)
GOALS = {"wrong_rate": 0.001, "healthy_named_alone": 0, "memory_bytes": 4 << 30}
"""What may be reached at most; the seconds of a round depend on the number of ranks."""
_EXAMPLES = 20
_SEVEREST = (Outcome.WRONG, Outcome.INCONCLUSIVE, Outcome.RIGHT)


@dataclass(frozen=True, slots=True)
class Decided:
    """One scenario, and what was decided."""

    index: int
    family: str
    condition: str
    layout: Layout
    score: Score
    seconds: float
    """Processor time of the longest diagnosis of the observers' reports; 0 for checks."""


def run(layout: Layout | None, scenarios: int, seed: int) -> Iterator[Decided]:
    """Yield the scenarios in order; without a layout, each is that of another small job.

    The same layout, seed and index give the same scenario.
    """
    makers = None if layout is None else _Makers(layout)
    name = zlib.crc32((SMALL if layout is None else f"{layout.name} {layout.degrees}").encode())
    for index in range(scenarios):
        chance = np.random.default_rng([seed, name, index])
        yield (makers or _Makers(drawn(chance))).decided(index, FAMILIES[index % len(FAMILIES)], chance)


class _Makers:
    def __init__(self, layout: Layout) -> None:
        self._job = Job(layout)
        self._hangs, self._slowness = hangs.Hangs(self._job), slowness.Slowness(self._job)

    def decided(self, index: int, family: str, chance: np.random.Generator) -> Decided:
        condition, seconds, scores = "clean", 0.0, list[Score]()
        if family in hangs.FAMILIES:
            if chance.random() < 0.5:
                condition = hangs.CONDITIONS[int(chance.integers(len(hangs.CONDITIONS)))]
            hang: hangs.Hang | None = self._hangs.make(family, condition, chance)
            while hang is not None:
                found, took = hang.decide()
                scores.append(score(hang.truth, found))
                seconds, hang = max(seconds, took), hang.then
        elif family in slowness.FAMILIES:
            scores.append(score(*self._slowness.decided(family, chance)))
        else:
            scores.append(score(*numbers.decided(self._job, family, chance)))
        severest = min(scores, key=lambda each: _SEVEREST.index(each.outcome))
        return Decided(index, family, condition, self._job.layout, severest, seconds)


def report_of(
    layout: Layout | None, scenarios: int, seed: int, show: Callable[[Decided], None] | None = None
) -> dict[str, Any]:
    """Run the scenarios and return the report as plain JSON.

    If it is interrupted (``KeyboardInterrupt``), the report is about the scenarios until then.
    """
    decided: list[Decided] = []
    try:
        for each in run(layout, scenarios, seed):
            decided.append(each)
            if show is not None:
                show(each)
    except KeyboardInterrupt:
        if not decided:
            raise
    outcomes = Counter(each.score.outcome for each in decided)
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for each in decided:
        families[each.family][each.score.outcome.value] += 1
    seconds = sorted(each.seconds for each in decided if each.family in hangs.FAMILIES) or [0.0]
    report: dict[str, Any] = {
        "layout": SMALL if layout is None else layout.name,
        "degrees": "another job for each scenario" if layout is None else layout.degrees,
        "ranks": max(each.layout.ranks for each in decided),
        "scenarios": len(decided),
        "interrupted": len(decided) < scenarios,
        "seed": seed,
        "healthy_named_alone": sum(each.score.healthy_alone for each in decided),
        "seconds": {
            "median": statistics.median(seconds),
            "p99": seconds[int(0.99 * (len(seconds) - 1))],
            "max": seconds[-1],
        },
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "families": {name: dict(counts) for name, counts in families.items()},
        "not_right": [
            {
                "scenario": each.index,
                "family": each.family,
                "condition": each.condition,
                "degrees": f"{each.layout.degrees}, {each.layout.per_host} on a machine",
                "outcome": outcome.value,
                "healthy_alone": each.score.healthy_alone,
                "sentence": each.score.sentence[:300],
            }
            for outcome in _SEVEREST[:2]
            for each in decided
            if each.score.outcome is outcome
        ][:_EXAMPLES],
    }
    for outcome in Outcome:
        report[f"{outcome.value}_rate"] = outcomes[outcome] / len(decided)
        report[f"{outcome.value}_interval"] = list(interval(outcomes[outcome], len(decided)))
    return {**report, "goals": {name: report[name] <= most for name, most in GOALS.items()}}
