"""Runs many scenarios of one layout, and reports how often they were decided rightly."""

from __future__ import annotations

import resource
import statistics
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchscout.campaign.results import interval
from torchscout.config import RecoveryConfig
from torchscout.decision.policy import decide
from torchscout.decision.types import Action, Incident
from torchscout.simulate import hangs, numbers, slowness
from torchscout.simulate.job import Job
from torchscout.simulate.layouts import Layout
from torchscout.simulate.scoring import Outcome, Score, Truth, score

__all__ = ["FAMILIES", "GOALS", "Decided", "report_of", "run"]

FAMILIES = (*hangs.FAMILIES, *slowness.FAMILIES, *numbers.FAMILIES)
GOALS = {"wrong_rate": 0.001, "healthy_named_alone": 0, "seconds": 1.0, "memory_bytes": 2 << 30}
"""What may be reached at most."""
_SAMPLED = 32
"""Reports of a round whose bytes are counted."""
_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class Decided:
    """One scenario, and what was decided."""

    index: int
    family: str
    condition: str
    score: Score
    seconds: float | None
    """Processor time to decide a round of the observers; None for checks, which have several rounds."""
    observer_bytes: tuple[int, ...]
    """The size of some reports."""
    replaced_healthy: bool
    """Whether the recovery policy would replace a machine that has no fault."""


def run(layout: Layout, scenarios: int, seed: int) -> Iterator[Decided]:
    """Yield the scenarios in order. The same layout, seed and index give the same scenario."""
    job = Job(layout)
    makers = _Makers(job)
    for index in range(scenarios):
        name = zlib.crc32(f"{layout.name} {layout.degrees}".encode())
        chance = np.random.default_rng([seed, name, index])
        family = FAMILIES[index % len(FAMILIES)]
        yield makers.decided(index, family, chance)


class _Makers:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._hangs, self._numbers = hangs.Hangs(job), numbers.Numbers(job)
        self._slowness = slowness.Slowness(job)

    def decided(self, index: int, family: str, chance: np.random.Generator) -> Decided:
        condition, seconds = "clean", None
        sizes: tuple[int, ...] = ()
        if family in hangs.FAMILIES:
            condition = _condition(family, chance)
            hang = self._hangs.make(family, condition, chance)
            truth = hang.truth
            begin = time.process_time()
            found = hang.decide(self._job)
            seconds = time.process_time() - begin
            sizes = _sizes(hang)
        elif family in slowness.FAMILIES:
            slow = self._slowness.make(family, chance)
            truth, found = slow.truth, self._slowness.decide(slow)
        else:
            wrong = self._numbers.make(family, chance)
            truth, found = wrong.truth, self._numbers.decide(wrong)
        scored = score(truth, found)
        return Decided(index, family, condition, scored, seconds, sizes, self._replaces_healthy(truth, found))

    def _replaces_healthy(self, truth: Truth, found: list[Incident]) -> bool:
        mesh = self._job.mesh
        faulty = set(mesh.hosts_of(sorted(truth.ranks | truth.group | truth.also | truth.unseen)))
        decisions = [decide(each, (), RecoveryConfig(), has_verified=True) for each in found]
        return any(each.action is Action.REPLACE and not faulty.issuperset(each.hosts) for each in decisions)


def _condition(family: str, chance: np.random.Generator) -> str:
    allowed = ("clean", "duplicates", "skew") if family == "pause" else hangs.CONDITIONS
    return "clean" if chance.random() < 0.5 else allowed[int(chance.integers(len(allowed)))]


def _sizes(hang: hangs.Hang) -> tuple[int, ...]:
    ranks = list(hang.posts)[:: max(1, len(hang.posts) // _SAMPLED)]
    return tuple(len(hang.posts[rank].data) for rank in ranks)


def report_of(
    layout: Layout, scenarios: int, seed: int, show: Callable[[Decided], None] | None = None
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
    report: dict[str, Any] = {
        "layout": layout.name,
        "degrees": layout.degrees,
        "ranks": layout.ranks,
        "scenarios": len(decided),
        "interrupted": len(decided) < scenarios,
        "seed": seed,
    }
    for outcome in Outcome:
        report[f"{outcome.value}_rate"] = outcomes[outcome] / len(decided)
        report[f"{outcome.value}_interval"] = list(interval(outcomes[outcome], len(decided)))
    report |= {
        "healthy_named_alone": sum(each.score.healthy_alone for each in decided),
        "healthy_replaced": sum(each.replaced_healthy for each in decided),
        **_costs(decided, layout.ranks),
        "families": {name: dict(counts) for name, counts in families.items()},
        "not_right": [
            _example(each)
            for outcome in (Outcome.WRONG, Outcome.INCONCLUSIVE)
            for each in decided
            if each.score.outcome is outcome
        ][:_EXAMPLES],
    }
    return {**report, "goals": {name: report_value(report, name) <= most for name, most in GOALS.items()}}


def report_value(report: dict[str, Any], name: str) -> float:
    """Return the figure that a goal is about."""
    value = report[name]
    return float(value["p99"] if isinstance(value, dict) else value)


def _costs(decided: list[Decided], ranks: int) -> dict[str, Any]:
    seconds = sorted(each.seconds for each in decided if each.seconds is not None)
    sizes = [size for each in decided for size in each.observer_bytes]
    return {
        "seconds": {
            "median": statistics.median(seconds) if seconds else 0.0,
            "p99": seconds[int(0.99 * (len(seconds) - 1))] if seconds else 0.0,
            "max": max(seconds, default=0.0),
        },
        "bytes": {
            "observer": int(statistics.median(sizes)) if sizes else 0,
            "observer_max": max(sizes, default=0),
            "hub": int(statistics.fmean(sizes) * ranks) if sizes else 0,
        },
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _example(each: Decided) -> dict[str, Any]:
    return {
        "scenario": each.index,
        "family": each.family,
        "condition": each.condition,
        "outcome": each.score.outcome.value,
        "healthy_alone": each.score.healthy_alone,
        "sentence": each.score.sentence[:300],
    }
