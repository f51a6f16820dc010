"""Random slow ranks, machines and links, in times with a heavy tail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evaluation.simulate.job import Job
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


class Slowness:
    """Makes and decides the slow jobs of one layout."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._kinds = [kind for kind in ("tensor", "expert", "replica") if kind in job.line_of]
        self._table = self._described()

    def make(self, family: str, chance: np.random.Generator) -> Slow:
        """Make one scenario of a family."""
        compute: dict[int, float] = {}
        groups: dict[int, float] = {}
        truth, factor = Truth(), float(chance.uniform(1.5, 3.0))
        rank = int(chance.integers(self.job.size))
        here = self.job.mesh.ranks_on(self.job.mesh.host_of(rank) or "")
        if family == "slow_rank":
            compute, peers = {rank: factor}, self.job.mesh.layer_peers_of(rank, "dense")
            pair = len(peers) == 2
            truth = Truth(group=frozenset(peers.ranks)) if pair else Truth(frozenset({rank}))
        elif family != "noise":
            spanning = {int(self.job.line_of[kind][each]) for kind in self._kinds for each in here}
            inner = {line for line in spanning if {*self.job.members(line)} <= {*here}}
            groups = dict.fromkeys(sorted(spanning - (set() if family == "slow_machine" else inner)), factor)
            everyone = frozenset(each for line in groups for each in self.job.members(line))
            # Without groups of its own, a machine and its link to the network look the same.
            link = Truth(group=everyone, also=frozenset(() if inner else here))
            truth = Truth(frozenset(here)) if family == "slow_machine" else link
        sigma, tail = float(chance.choice([0.01, 0.03, 0.06])), float(chance.choice([0.0, 1e-4, 1e-3]))
        return Slow(truth, compute, groups, sigma, tail)

    def decide(self, slow: Slow, chance: np.random.Generator) -> list[Incident]:
        """Observe several checks, as every rank does."""
        found = list[Incident]()
        stragglers = Stragglers(self.job.mesh, 0, StragglerConfig(), BaselineConfig())
        for step in range(1, _ROUNDS + 1):
            compute, groups = self._drawn(slow, chance)
            timings = self._timings(step, compute, groups)
            if stragglers.layers_to_time_again(timings):
                for _ in range(_REPEATS):
                    again, more = self._drawn(slow, chance)
                    compute, groups = np.minimum(compute, again), np.minimum(groups, more)
                timings = self._timings(step, compute, groups)
            found += stragglers.observe(timings).incidents
        return found

    def _drawn(self, slow: Slow, chance: np.random.Generator) -> tuple[_Floats, _Floats]:
        def noisy(size: int, factors: Mapping[int, float]) -> _Floats:
            times = chance.lognormal(0.0, slow.sigma, size)
            times *= 1 + (chance.random(size) < slow.tail) * chance.pareto(1.5, size)
            times[list(factors)] *= list(factors.values())
            return times

        compute = _COMPUTE_MS * noisy(self.job.size, slow.compute)
        return compute, _COLLECTIVE_MS * noisy(len(self.job.lines), slow.groups)

    # How times are passed to the decision: in a table of all ranks.

    def _described(self) -> Table:
        """Return the table without times."""
        job, columns = self.job, 1 + _LAP * len(self._kinds)
        laps, values = [], np.zeros((job.size, columns))
        ends = np.array(
            [(each.members[0], each.members[-1], len(each.members), _ELEMENTS) for each in job.lines]
        )
        for start, kind in zip(range(1, columns, _LAP), self._kinds, strict=True):
            axis = axis_of(job.mesh, job.members(int(job.line_of[kind][0])))
            laps.append(TimedLap(Surface(f"time/all_reduce_{kind}"), axis, start, 1))
            values[:, start : start + _LAP - 1] = ends[job.line_of[kind]]
        work = TimedWork("layers.0", (8192,), {Surface("time/module"): 0}, laps)
        return Table(np.arange(job.size), [work], values)

    def _timings(self, step: int, compute: _Floats, groups: _Floats) -> Timings:
        values = self._table.values.copy()
        values[:, 0] = compute
        for place, kind in enumerate(self._kinds, 1):
            values[:, place * _LAP] = groups[self.job.line_of[kind]]
        return Timings(step, self.job.mesh, [replace(self._table, values=values)], StragglerConfig())
