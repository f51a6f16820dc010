"""Random corruption and nondeterministic kernels, in the signatures that peers compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evaluation.simulate.job import Job
from evaluation.simulate.scoring import Truth
from torchscout.decision.consensus import exact
from torchscout.decision.repeatability import SurfaceHistory
from torchscout.decision.sdc import STATE, SdcDiagnosis
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.mesh import PeerGroup

__all__ = ["FAMILIES", "WrongNumbers", "make"]

FAMILIES = ("corruption", "intermittent", "wrong_state", "nondeterministic")
_SURFACES = ("layers.0/output", "layers.0/grad_input", "layers.0/weight.grad")
_CHECKS = 3


@dataclass(frozen=True, slots=True)
class WrongNumbers:
    """Who computes what wrongly, and how often."""

    truth: Truth
    job: Job
    peers: PeerGroup
    rank: int | None
    """None if it is the kernel, on any rank."""
    surface: str
    share: float
    """Of the replays in which a signature differs."""
    is_state: bool
    chance: np.random.Generator

    def decide(self) -> list[Incident]:
        """Check several times, each time replaying disagreements again."""
        history, diagnosis = SurfaceHistory(), SdcDiagnosis(self.job.mesh)
        found: list[Incident] = []
        for step in range(1, _CHECKS + 1):
            records, repeats = [], []
            for surface in _SURFACES:
                if history.reason(surface, "layers.0") is not None:
                    continue
                record = EvidenceRecord(
                    step=step,
                    surface=surface,
                    manifestation=Manifestation.SDC,
                    peers=self.peers.ranks,
                    verdict=(verdict := exact(self._signatures(surface))),
                    layer="layers.0",
                    mode=STATE if self.is_state else "forward",
                )
                if not verdict.agrees:
                    trial = history.trial(record, among=len(_SURFACES), is_held=self.is_state)
                    while trial.is_open:
                        trial.observe(self.peers.ranks, self._signatures(surface))
                    repeats.append(history.conclude(trial))
                    record = repeats[-1].record
                records.append(record)
            found += diagnosis.diagnose(records, repeats=repeats)
        return found

    def _signatures(self, surface: str) -> list[int]:
        """Return the signature of each peer in one replay."""
        values = np.full(len(self.peers), len(surface))
        if surface == self.surface:
            differs = self.chance.random(len(values)) < self.share
            if self.rank is not None:
                differs &= np.array(self.peers.ranks) == self.rank
            others = 1000 if self.share == 1.0 else self.chance.integers(1000, 1 << 40, len(values))
            values = np.where(differs, others, values)
        return [int(each) for each in values]


def make(job: Job, family: str, chance: np.random.Generator) -> WrongNumbers:
    """Make one scenario of a family."""
    rank, truth = int(chance.integers(job.size)), Truth()
    peers = job.mesh.peers_of(rank, "dense")
    is_kernel = family == "nondeterministic"
    if not is_kernel and peers.can_compare:
        is_known = peers.can_attribute
        truth = Truth(frozenset({rank})) if is_known else Truth(group=frozenset(peers.ranks))
    shares = {"intermittent": 0.3, "nondeterministic": float(chance.choice([1e-3, 1e-2, 0.1, 0.5]))}
    surface = _SURFACES[int(chance.integers(len(_SURFACES)))]
    share, is_state = shares.get(family, 1.0), family == "wrong_state"
    return WrongNumbers(truth, job, peers, None if is_kernel else rank, surface, share, is_state, chance)
