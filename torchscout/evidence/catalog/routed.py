"""Templates that cover every routing of T rows to a kernel's experts, executed (beyond section 6.2).

Where counts do not add up there is no table but a reason; then the uniform shapes are all that is covered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from torchscout.evidence.catalog.additivity import Additivity, Loads, additivity, alone
from torchscout.evidence.catalog.cover import check_cover
from torchscout.evidence.catalog.discovery import Executions
from torchscout.evidence.catalog.observed import Observed
from torchscout.evidence.catalog.profile import Rows, ShapeProfile
from torchscout.evidence.catalog.routing import ExpertCounts, RoutingPoint, pareto_set, routings
from torchscout.evidence.catalog.table import Representative, Table
from torchscout.evidence.catalog.templates import Template, Templates, templates_for

__all__ = ["SAMPLES", "Routed", "Routings", "routed", "samples"]

SAMPLES = 200
"""Routings that are executed to try the sums on, and then the templates."""


@dataclass(frozen=True, slots=True)
class Routed:
    """What is known of a kernel's routings."""

    table: Table | None
    reason: str = ""
    """Why there is no table."""
    additivity: Additivity | None = None
    pareto: int = 0
    """Counts that no routing exceeds."""
    least: int = 0
    """No set of templates is smaller."""


@dataclass(frozen=True, slots=True)
class Routings:
    """The routings to cover."""

    experts: int
    tokens: int
    """Rows that the experts get together."""
    at_most: bool = False
    """Whether they may also get fewer."""

    def __str__(self) -> str:
        return f"every routing of {'at most ' * self.at_most}{self.tokens} rows to {self.experts} experts"

    def admit(self, rows: Rows) -> bool:
        return sum(rows) <= self.tokens if self.at_most else sum(rows) == self.tokens


def samples(admitted: Routings, count: int = SAMPLES, seed: int = 0) -> Iterator[Rows]:
    """From even to lopsided routings, with empty experts and cuts beside round numbers."""
    drawing = random.Random(seed)
    experts = admitted.experts
    for _ in range(count):
        used = drawing.randint(1, experts)
        tokens = drawing.randint(0, admitted.tokens) if admitted.at_most else admitted.tokens
        cuts = sorted(_cut(drawing, tokens) for _ in range(used - 1))
        parts = [after - before for before, after in pairwise([0, *cuts, tokens])]
        parts += [0] * (experts - used)
        drawing.shuffle(parts)
        yield tuple(parts)


def _cut(drawing: random.Random, tokens: int) -> int:
    anywhere = drawing.randint(0, tokens)
    rounded = anywhere & -(1 << drawing.randint(0, tokens.bit_length()))
    return min(max(rounded + drawing.choice((-1, 0, 0, 1)), 0), tokens)


def routed(
    name: str,
    facts: Mapping[str, str],
    loads: Loads,
    admitted: Routings,
    *,
    executions: Executions,
    on_progress: Callable[[Observed], None] = lambda _: None,
) -> Routed:
    """Measure single experts, try whether they add up, derive the templates, execute those, and check."""
    experts, tokens, at_most = admitted.experts, admitted.tokens, admitted.at_most
    tried = dict.fromkeys([*(alone(rows, experts) for rows in range(tokens + 1)), *samples(admitted)])
    profiles: dict[Rows, ShapeProfile] = {}
    for rows in tried:
        seen = executions.of(rows)
        on_progress(seen)
        if seen.profile is None:
            return Routed(None, f"{rows}: {seen.reason}")
        profiles[rows] = seen.profile
    adds = additivity(profiles, experts, tokens, loads)
    if adds.table is None:
        return Routed(None, adds.reason, adds)

    def regime(_: tuple[int, ...], rows: Rows) -> str:
        seen = executions.of(rows)
        return seen.reason if seen.profile is None else seen.profile.fingerprint

    points = pareto_set(adds.table, experts, tokens, regime, at_most=at_most)
    found = templates_for(adds.table, experts, points, regime)
    return _qualified(name, facts, adds, profiles, points, found, executions, admitted)


def _qualified(
    name: str,
    facts: Mapping[str, str],
    adds: Additivity,
    profiles: dict[Rows, ShapeProfile],
    points: tuple[RoutingPoint, ...],
    found: Templates,
    executions: Executions,
    admitted: Routings,
) -> Routed:
    """Nothing derived is believed: templates must do what they are meant to, and cover what was executed."""
    assert adds.table is not None
    profiles = {rows: profile for rows, profile in profiles.items() if admitted.admit(rows)}
    derived: list[RoutingPoint | Template] = [*points, *found.chosen]
    for each in derived:
        seen = executions.of(each.rows)
        if seen.profile is None:
            return Routed(None, f"{each.rows}: {seen.reason}", adds)
        if reason := _surprise(adds.table, each, seen.profile):
            return Routed(None, reason, adds)
        profiles[each.rows] = seen.profile
    check = check_cover(profiles, [each.rows for each in found.chosen])
    if not check.complete:
        return Routed(None, f"the templates do not cover {check.uncovered[0]}", adds)
    table = Table(
        name=name,
        facts=dict(facts),
        domain=str(admitted),
        admitted=routings(admitted.tokens, admitted.experts, at_most=admitted.at_most),
        selected=tuple(Representative(each.rows, profiles[each.rows]) for each in found.chosen),
        retained=(),
        occurrences=check.occurrences,
        covered=check.covered,
    )
    return Routed(table, "", adds, len(points), found.least)


def _surprise(table: ExpertCounts, meant: RoutingPoint | Template, profile: ShapeProfile) -> str:
    if profile.fingerprint != meant.regime:
        return f"{meant.rows} ran in another regime than expected: {profile.fingerprint}"
    counts = dict(profile.path_counts)
    for path, expected in zip(table.paths, meant.counts, strict=False):
        if counts.get(path, 0) != expected:
            return f"{meant.rows} took {path} {counts.get(path, 0)} times, its experts alone {expected}"
    return ""
