"""Slow links in jobs of frameworks, and checks of what is reported about them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.findings import Findings
from torchscout.config import BaselineConfig, ReplayConfig
from torchscout.faults.plan import FaultPlan

ALL = tuple(range(6))
"""Of two groups that differ both are named; in these jobs they are all there is."""
REMEMBERED = ReplayConfig(interval=1, recipes=("process_groups",), baseline=BaselineConfig(warmup=3))
"""What is slow is held against few steps."""


def slow(ranks: Sequence[int], at: str, axis: str, first: int = 3) -> FaultPlan:
    """Plan a delay of every such collective of these ranks, from a step on."""
    return FaultPlan().slow_collective(ranks=ranks, at=at, axis=axis, step=range(first, 13), seconds=0.25)


def is_named(ranks: tuple[int, ...], axis: str, results: Sequence[Findings]) -> None:
    """Check that the members of the slow group, and nobody else, are named for it."""
    assert max(each.fired for each in results) > 3
    found = {each.ranks: each for one in results for each in one.incidents}
    assert {*found} == {ranks}, [each.sentence for each in found.values()]
    incident = found[ranks]
    assert incident.manifestation.value == "straggler"
    assert all(each.surface.startswith("time/") for each in incident.records)
    assert f"{axis} group" in incident.sentence.lower()
    assert ("no third" in incident.sentence) is (ranks == ALL)


def is_the_jobs(operation: str, results: Sequence[Findings]) -> None:
    """Check that a slow group without a counterpart is reported for the job and names nobody."""
    assert min(each.fired for each in results) > 3
    (incident,) = {each.sentence: each for one in results for each in one.incidents}.values()
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == ("straggler", "job", ())
    assert f"time/process_groups_{operation}@" in incident.sentence
