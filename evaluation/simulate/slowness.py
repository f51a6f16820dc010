"""Random slow ranks, machines and links, in times with a heavy tail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evaluation.simulate.job import NOTHING, Job
from evaluation.simulate.scoring import Truth
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.straggler.diagnosis import Stragglers
from torchscout.decision.straggler.measured import Table, TimedLap, TimedWork, axis_of
from torchscout.decision.straggler.timings import Timings
from torchscout.decision.types import Incident, Surface

__all__ = ["FAMILIES", "Slow", "Slowness"]

FAMILIES = ("slow_rank", "slow_machine", "slow_network", "noise")

_ROUNDS = 6
_REPEATS = 3
"""How often a suspicious layer is timed again; the shortest time counts."""
_COMPUTE_MS, _COLLECTIVE_MS = 20.0, 8.0
_ELEMENTS = 1024
_LAP = 5
"""Numbers of a collective in a table: four that identify its group, and its time."""
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slow:
    """How much slower some ranks and groups are, over several checks."""

    truth: Truth
    compute: Mapping[int, float]
    """Rank -> factor."""
    groups: Mapping[int, float]
    """Line -> factor."""
    sigma: float
    tail: float
    """How often a time is taken from the tail."""
    seed: int


class _Rows(NamedTuple):
    """Ranks with times of the same kinds."""

    table: Table
    """Without the times."""
    lines: npt.NDArray[np.int64]
    """For each rank, the line of each of its process groups."""


class Slowness:
    """Makes and decides the slow jobs of one layout."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._kinds = [kind for kind in ("tensor", "expert", "replica") if kind in job.line_of]
        self._tables = self._rows()

    def make(self, family: str, chance: np.random.Generator) -> Slow:
        """Make one scenario of a family."""
        compute: dict[int, float] = {}
        groups: dict[int, float] = {}
        truth, factor = Truth(), float(chance.uniform(1.5, 3.0))
        rank = int(chance.integers(self.job.size))
        on_host = [each for each in range(rank // 8 * 8, rank // 8 * 8 + 8) if each < self.job.size]
        if family == "slow_rank":
            compute, peers = {rank: factor}, self.job.mesh.layer_peers_of(rank, "dense")
            pair = len(peers) == 2
            truth = Truth(group=frozenset(peers.ranks)) if pair else Truth(frozenset({rank}))
        elif family != "noise":
            spanning = {line for each in on_host for line in self._lines_of(each)}
            inner = {line for line in spanning if set(self.job.members(line)) <= set(on_host)}
            slow = spanning if family == "slow_machine" else spanning - inner
            groups = dict.fromkeys(sorted(slow), factor)
            everyone = frozenset(each for line in slow for each in self.job.members(line))
            truth = Truth(frozenset(on_host)) if family == "slow_machine" else Truth(group=everyone)
        sigma, tail = float(chance.choice([0.01, 0.03, 0.06])), float(chance.choice([0.0, 1e-4, 1e-3]))
        return Slow(truth, compute, groups, sigma, tail, int(chance.integers(1 << 32)))

    def decide(self, slow: Slow) -> list[Incident]:
        """Observe several checks, as every rank does."""
        config = StragglerConfig()
        stragglers = Stragglers(self.job.mesh, 0, config, BaselineConfig())
        chance = np.random.default_rng(slow.seed)
        found: list[Incident] = []
        for step in range(1, _ROUNDS + 1):
            compute, groups = self._drawn(slow, chance)
            timings = Timings(step, self.job.mesh, self._measured(compute, groups), config)
            if stragglers.layers_to_time_again(timings):
                for _ in range(_REPEATS):
                    again, more = self._drawn(slow, chance)
                    compute, groups = np.minimum(compute, again), np.minimum(groups, more)
                timings = Timings(step, self.job.mesh, self._measured(compute, groups), config)
            found += stragglers.observe(timings).incidents
        return found

    def _lines_of(self, rank: int) -> list[int]:
        lines = (int(self.job.line_of[kind][rank]) for kind in self._kinds)
        return [line for line in lines if line != NOTHING]

    def _drawn(self, slow: Slow, chance: np.random.Generator) -> tuple[_Floats, _Floats]:
        def noisy(size: int, factors: Mapping[int, float]) -> _Floats:
            times = chance.lognormal(0.0, slow.sigma, size)
            times *= 1 + (chance.random(size) < slow.tail) * chance.pareto(1.5, size)
            times[list(factors)] *= list(factors.values())
            return times

        compute = _COMPUTE_MS * noisy(self.job.size, slow.compute)
        return compute, _COLLECTIVE_MS * noisy(len(self.job.lines), slow.groups)

    def _rows(self) -> list[_Rows]:
        """Group the ranks by the process groups that they have, and describe their times."""
        alike: dict[tuple[tuple[str, str], ...], list[tuple[int, list[int]]]] = defaultdict(list)
        axes: dict[int, str] = {}
        for rank in range(self.job.size):
            lines = {kind: int(self.job.line_of[kind][rank]) for kind in self._kinds}
            present = {kind: line for kind, line in lines.items() if line != NOTHING}
            for line in present.values():
                axes.setdefault(line, axis_of(self.job.mesh, self.job.members(line)))
            key = tuple((kind, axes[line]) for kind, line in present.items())
            alike[key].append((rank, [*present.values()]))
        return [self._described(key, members) for key, members in alike.items()]

    def _described(
        self, kinds: tuple[tuple[str, str], ...], members: Sequence[tuple[int, list[int]]]
    ) -> _Rows:
        laps = [
            TimedLap(Surface(f"time/all_reduce_{kind}"), axis, 1 + place * _LAP, 1)
            for place, (kind, axis) in enumerate(kinds)
        ]
        values = np.zeros((len(members), 1 + len(kinds) * _LAP))
        for row, (_, lines) in enumerate(members):
            for lap, line in zip(laps, lines, strict=True):
                of_line = self.job.members(line)
                identity = of_line[0], of_line[-1], len(of_line), _ELEMENTS
                values[row, lap.start : lap.start + len(identity)] = identity
        ranks = np.array([rank for rank, _ in members])
        work = TimedWork("layers.0", (8192,), {Surface("time/module"): 0}, laps)
        of_ranks = np.array([lines for _, lines in members], np.int64).reshape(len(members), len(kinds))
        return _Rows(Table(ranks, [work], values), of_ranks)

    def _measured(self, compute: _Floats, groups: _Floats) -> list[Table]:
        found = []
        for each in self._tables:
            values = each.table.values.copy()
            values[:, 0] = compute[each.table.ranks]
            values[:, _LAP::_LAP] = groups[each.lines]
            found.append(replace(each.table, values=values))
        return found
