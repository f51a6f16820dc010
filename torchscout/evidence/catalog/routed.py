"""Templates that cover every routing of T rows to a kernel's experts, executed (beyond section 6.2).

Where counts do not add up there is no table but a reason; then the uniform shapes are all that is covered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchscout.evidence.catalog.additivity import Additivity, Loads, additivity, alone
from torchscout.evidence.catalog.cover import CoverCheck, check_cover
from torchscout.evidence.catalog.discovery import Executions
from torchscout.evidence.catalog.observed import Observed, known
from torchscout.evidence.catalog.profile import Rows, ShapeProfile
from torchscout.evidence.catalog.routing import ExpertCounts, RegimeOf, RoutingPoint, pareto_set, routings
from torchscout.evidence.catalog.table import Representative, Table
from torchscout.evidence.catalog.templates import Template, Templates, templates_for

__all__ = ["SAMPLES", "Routed", "Routings", "first_shapes", "routed", "samples"]

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
    """No set of templates is smaller; 0 where only routings of the admitted rows will do as templates."""


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


def first_shapes(admitted: Routings) -> list[Rows]:
    """What is executed before anything can be derived: single experts, and routings to try the sums on."""
    single = (alone(rows, admitted.experts) for rows in range(admitted.tokens + 1))
    return list(dict.fromkeys([*single, *samples(admitted)]))


# [Note: what the Pareto set teaches]
#
# A path can add up in every routing that was drawn and not in the extreme ones: last tiles do until there are
# more tiles than programs. The Pareto set holds the extremes, so it is executed as a whole. A routing that
# contradicts the sums is one more execution to try them on; its path is then left to the load, and the set is
# derived again from the paths that remain, as long as they become fewer.


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
    profiles: dict[Rows, ShapeProfile] = {}
    for rows in first_shapes(admitted):
        seen = executions.of(rows)
        on_progress(seen)
        if seen.profile is None:
            return Routed(None, f"{rows}: {seen.reason}")
        profiles[rows] = seen.profile
    before = None
    while True:
        adds = additivity(profiles, admitted.experts, admitted.tokens, loads)
        if adds.table is None:
            return Routed(None, adds.reason, adds)
        points = _points(adds.table, admitted, executions)
        surprise = _executed(adds.table, points, executions, profiles)
        if not surprise:
            break
        if adds.adding == before:
            return Routed(None, surprise, adds)
        before = adds.adding
    few = templates_for(adds.table, admitted.experts, points, _regime(executions))
    # More rows than were admitted may bring another kernel; the routings of the Pareto set have no more.
    plain = Templates(tuple(Template(each.rows, each.counts, each.regime) for each in points), 0)
    reasons = []
    for found in (few, plain):
        checked = _checked(adds.table, admitted, found, executions, profiles)
        if isinstance(checked, CoverCheck):
            table = _table(name, facts, admitted, found, executions, checked)
            return Routed(table, "", adds, len(points), found.least)
        reasons.append(checked)
    return Routed(None, reasons[0], adds)


def _regime(executions: Executions) -> RegimeOf:
    def regime(_: tuple[int, ...], rows: Rows) -> str:
        seen = executions.of(rows)
        return seen.reason if seen.profile is None else seen.profile.fingerprint

    return regime


def _points(table: ExpertCounts, admitted: Routings, executions: Executions) -> tuple[RoutingPoint, ...]:
    regime = _regime(executions)
    return pareto_set(table, admitted.experts, admitted.tokens, regime, at_most=admitted.at_most)


def _executed(
    table: ExpertCounts,
    derived: Sequence[RoutingPoint | Template],
    executions: Executions,
    profiles: dict[Rows, ShapeProfile],
) -> str:
    """Execute what was derived, adding to ``profiles``, and say what is not as expected, if anything."""
    surprise = ""
    for each in derived:
        seen = executions.of(each.rows)
        if seen.profile is None:
            return f"{each.rows}: {seen.reason}"
        profiles[each.rows] = seen.profile
        surprise = surprise or _unexpected(table, each, seen.profile)
    return surprise


def _checked(
    table: ExpertCounts,
    admitted: Routings,
    found: Templates,
    executions: Executions,
    profiles: Mapping[Rows, ShapeProfile],
) -> CoverCheck | str:
    """Nothing derived is believed: templates must do what they are meant to, and cover what was executed."""
    executed = {rows: profile for rows, profile in profiles.items() if admitted.admit(rows)}
    if surprise := _executed(table, found.chosen, executions, executed):
        return surprise
    check = check_cover(executed, [each.rows for each in found.chosen])
    return check if check.complete else f"the templates do not cover {check.uncovered[0]}"


def _table(
    name: str,
    facts: Mapping[str, str],
    admitted: Routings,
    found: Templates,
    executions: Executions,
    check: CoverCheck,
) -> Table:
    profiles = known(executions.of(each.rows) for each in found.chosen)
    return Table(
        name=name,
        facts=dict(facts),
        domain=str(admitted),
        admitted=routings(admitted.tokens, admitted.experts, at_most=admitted.at_most),
        selected=tuple(Representative(rows, profile) for rows, profile in profiles.items()),
        retained=(),
        occurrences=check.occurrences,
        covered=check.covered,
    )


def _unexpected(table: ExpertCounts, meant: RoutingPoint | Template, profile: ShapeProfile) -> str:
    if profile.fingerprint != meant.regime:
        return f"{meant.rows} ran in another regime than expected: {profile.fingerprint}"
    counts = dict(profile.path_counts)
    for path, expected in zip(table.paths, meant.counts, strict=False):
        if counts.get(path, 0) != expected:
            return f"{meant.rows} took {path} {counts.get(path, 0)} times, its experts alone {expected}"
    return ""
