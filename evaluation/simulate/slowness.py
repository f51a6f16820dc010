"""Random slow ranks, machines and links, in times with a heavy tail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from evaluation.simulate.job import Job
from evaluation.simulate.scoring import Truth
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.straggler.diagnosis import Stragglers
from torchscout.decision.straggler.measured import Table, TimedLap, TimedWork, axis_of
from torchscout.decision.straggler.timings import Timings
from torchscout.decision.types import Incident, Surface

__all__ = ["FAMILIES", "Slowness"]

FAMILIES = ("slow_rank", "slow_machine", "slow_network", "noise")
_ROUNDS = 6
_REPEATS = 3
"""How often a suspicious layer is timed again; the shortest time counts."""
_COMPUTE_MS, _COLLECTIVE_MS = 20.0, 8.0
_LAP = 5
"""Numbers of a collective in a table: four that identify its group and its work, and its time."""
_Floats = npt.NDArray[np.float64]


class Slowness:
    """Makes and decides the slow jobs of one layout."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._kinds = [kind for kind in ("tensor", "expert", "replica") if kind in job.line_of]
        self._table = self._described()

    def decided(self, family: str, chance: np.random.Generator) -> tuple[Truth, list[Incident]]:
        """Draw who is slow, and observe several checks, as every rank does."""
        truth, ranks, groups = self._drawn(family, chance)
        sigma, tail = float(chance.choice([0.01, 0.03, 0.06])), float(chance.choice([0.0, 1e-4, 1e-3]))

        def times(usual: float, size: int, factors: Mapping[int, float]) -> _Floats:
            found = usual * chance.lognormal(0.0, sigma, size)
            found *= 1 + (chance.random(size) < tail) * chance.pareto(1.5, size)
            found[list(factors)] *= list(factors.values())
            return found

        def timings(step: int, times_of: list[tuple[_Floats, _Floats]]) -> Timings:
            compute, collectives = (np.min(each, axis=0) for each in zip(*times_of, strict=True))
            values = self._table.values.copy()
            values[:, 0] = compute
            for place, kind in enumerate(self._kinds, 1):
                values[:, place * _LAP] = collectives[self.job.line_of[kind]]
            return Timings(step, self.job.mesh, [replace(self._table, values=values)], StragglerConfig())

        def measured() -> tuple[_Floats, _Floats]:
            size, lines = self.job.size, len(self.job.lines)
            return times(_COMPUTE_MS, size, ranks), times(_COLLECTIVE_MS, lines, groups)

        stragglers = Stragglers(self.job.mesh, 0, StragglerConfig(), BaselineConfig())
        found = list[Incident]()
        for step in range(1, _ROUNDS + 1):
            check = timings(step, drawn := [measured()])
            if stragglers.layers_to_time_again(check):
                check = timings(step, drawn + [measured() for _ in range(_REPEATS)])
            found += stragglers.observe(check).incidents
        return truth, found

    def _drawn(
        self, family: str, chance: np.random.Generator
    ) -> tuple[Truth, dict[int, float], dict[int, float]]:
        """Return what is true, and how much slower some ranks and some lines are."""
        factor, rank = float(chance.uniform(1.5, 3.0)), int(chance.integers(self.job.size))
        if family == "noise":
            return Truth(), {}, {}
        if family == "slow_rank":
            peers = self.job.mesh.layer_peers_of(rank, "dense")
            pair = len(peers) == 2
            truth = Truth(group=frozenset(peers.ranks)) if pair else Truth(frozenset({rank}))
            return truth, {rank: factor}, {}
        here = self.job.mesh.ranks_on(self.job.mesh.host_of(rank) or "")
        spanning = {int(self.job.line_of[kind][each]) for kind in self._kinds for each in here}
        inner = {line for line in spanning if {*self.job.members(line)} <= {*here}}
        if family == "slow_machine":
            return Truth(frozenset(here)), {}, dict.fromkeys(sorted(spanning), factor)
        outer = sorted(spanning - inner)
        everyone = frozenset(each for line in outer for each in self.job.members(line))
        # Without groups of its own, a machine and its link to the network look the same.
        truth = Truth(group=everyone, also=frozenset(() if inner else here))
        return truth, {}, dict.fromkeys(outer, factor)

    def _described(self) -> Table:
        """Return the table in which times are passed to the decision, without them."""
        job, columns = self.job, 1 + _LAP * len(self._kinds)
        laps, values = [], np.zeros((job.size, columns))
        ends = np.array([(each.members[0], each.members[-1], len(each.members), 1024) for each in job.lines])
        for start, kind in zip(range(1, columns, _LAP), self._kinds, strict=True):
            axis = axis_of(job.mesh, job.members(int(job.line_of[kind][0])))
            laps.append(TimedLap(Surface(f"time/all_reduce_{kind}"), axis, start, 1))
            values[:, start : start + _LAP - 1] = ends[job.line_of[kind]]
        work = TimedWork("layers.0", (8192,), {Surface("time/module"): 0}, laps)
        return Table(np.arange(job.size), [work], values)
