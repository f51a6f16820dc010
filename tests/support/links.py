"""Slow links that frameworks are given, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.findings import Findings
from torchscout.config import BaselineConfig, ReplayConfig
from torchscout.faults.plan import FaultPlan

__all__ = ["ALL", "REMEMBERED", "is_named", "is_the_jobs", "slow"]

ALL = tuple(range(6))
"""Of two groups that differ both are named; in these jobs they are all there is."""
REMEMBERED = ReplayConfig(interval=1, recipes=("process_groups",), baseline=BaselineConfig(warmup=3))
"""What is slow is held against few steps."""


def slow(ranks: Sequence[int], at: str, axis: str, first: int = 3) -> FaultPlan:
    """From a step on, every such collective of these ranks."""
    return FaultPlan().slow_collective(ranks=ranks, at=at, axis=axis, step=range(first, 13), seconds=0.25)


def is_named(ranks: tuple[int, ...], axis: str, results: Sequence[Findings]) -> None:
    """The members of the slow group, and nobody else, for nothing else."""
    assert max(each.fired for each in results) > 3
    found = {each.ranks: each for one in results for each in one.incidents}
    assert {*found} == {ranks}, [each.sentence for each in found.values()]
    incident = found[ranks]
    assert incident.manifestation.value == "straggler"
    assert all(each.surface.startswith("time/") for each in incident.records)
    assert f"{axis} group" in incident.sentence.lower()
    assert ("no third" in incident.sentence) is (ranks == ALL)


def is_the_jobs(operation: str, results: Sequence[Findings]) -> None:
    """A group that has no other to be compared with: what has become slower is said, and nobody named."""
    assert min(each.fired for each in results) > 3
    (incident,) = {each.sentence: each for one in results for each in one.incidents}.values()
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == ("straggler", "job", ())
    assert f"time/process_groups_{operation}@" in incident.sentence
