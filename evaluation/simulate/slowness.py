"""Random slow ranks, machines and links, in times with a heavy tail."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evaluation.simulate.job import Job
from evaluation.simulate.scoring import Truth
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.baseline import Stragglers
from torchscout.decision.timings import Calls, Floats, Timings, Work
from torchscout.decision.types import Incident

__all__ = ["FAMILIES", "Slowness"]

FAMILIES = ("slow_rank", "slow_machine", "slow_network", "noise")
_ROUNDS = 6
_REPEATS = 3
"""How often a suspicious layer is timed again; the shortest time counts."""
_COMPUTE_MS, _COLLECTIVE_MS = 20.0, 8.0
_LAYER, _SHAPE = "layers.0", (8192,)


class Slowness:
    """Makes and decides the slow jobs of one layout."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._kinds = [kind for kind in ("tensor", "expert", "replica") if kind in job.line_of]
        ends = np.array([(each.members[0], each.members[-1], len(each.members), 1024) for each in job.lines])
        self._groups = {kind: ends[job.line_of[kind]] for kind in self._kinds}

    def decided(self, family: str, chance: np.random.Generator) -> tuple[Truth, list[Incident]]:
        """Draw who is slow, and observe several checks, as every rank does."""
        truth, ranks, groups = self._drawn(family, chance)
        sigma, tail = float(chance.choice([0.01, 0.03, 0.06])), float(chance.choice([0.0, 1e-4, 1e-3]))

        def times(usual: float, size: int, factors: Mapping[int, float]) -> Floats:
            found = usual * chance.lognormal(0.0, sigma, size)
            found *= 1 + (chance.random(size) < tail) * chance.pareto(1.5, size)
            found[list(factors)] *= list(factors.values())
            return found

        stragglers = Stragglers(self.job.mesh, 0, StragglerConfig(), BaselineConfig())
        found = list[Incident]()
        for step in range(1, _ROUNDS + 1):
            collectives = times(_COLLECTIVE_MS, len(self.job.lines), groups)
            compute = times(_COMPUTE_MS, self.job.size, ranks)
            check = self._timings(step, compute, collectives)
            if stragglers.layers_to_time_again(check):
                again = [times(_COMPUTE_MS, self.job.size, ranks) for _ in range(_REPEATS)]
                check = self._timings(step, np.min([compute, *again], axis=0), collectives)
            found += stragglers.observe(check).incidents
        return truth, found

    def _timings(self, step: int, compute: Floats, collectives: Floats) -> Timings:
        timings, ranks = Timings(step, self.job.mesh), np.arange(self.job.size)
        timings.add(Work("time/module", _LAYER, _SHAPE), ranks, compute)
        for kind in self._kinds:
            calls = Calls(f"time/all_reduce_{kind}", kind, _LAYER, _SHAPE, 1)
            took = collectives[self.job.line_of[kind]][:, np.newaxis]
            timings.add_collectives(calls, ranks, self._groups[kind], took)
        return timings

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
