"""Random corruption and nondeterministic kernels, in the signatures that peers compare."""

from __future__ import annotations

import numpy as np

from evaluation.simulate.job import Job
from evaluation.simulate.scoring import Truth
from torchscout.decision.consensus import exact
from torchscout.decision.repeatability import SurfaceHistory
from torchscout.decision.sdc import STATE, SdcDiagnosis
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation

__all__ = ["FAMILIES", "decided"]

FAMILIES = ("corruption", "intermittent", "wrong_state", "nondeterministic")
_SURFACES = ("layers.0/output", "layers.0/grad_input", "layers.0/weight.grad")
_CHECKS = 3


def decided(job: Job, family: str, chance: np.random.Generator) -> tuple[Truth, list[Incident]]:
    """Draw who computes what wrongly, and check it several times, replaying disagreements again each time."""
    rank, wrong = int(chance.integers(job.size)), _SURFACES[int(chance.integers(len(_SURFACES)))]
    peers, is_kernel, is_state = (
        job.mesh.peers_of(rank),
        family == "nondeterministic",
        family == "wrong_state",
    )
    truth = Truth()
    if not is_kernel and peers.can_compare:
        is_known = peers.can_attribute
        truth = Truth(frozenset({rank})) if is_known else Truth(group=frozenset(peers.ranks))
    shares = {"intermittent": 0.3, "nondeterministic": float(chance.choice([1e-3, 1e-2, 0.1, 0.5]))}
    share = shares.get(family, 1.0)

    def signatures(surface: str) -> list[int]:
        """Return the signature of each peer in one replay; a kernel differs on any of them."""
        values = np.full(len(peers), len(surface))
        if surface == wrong:
            differs = (chance.random(len(values)) < share) & (is_kernel | (peers.array == rank))
            others = 1000 if share == 1.0 else chance.integers(1000, 1 << 40, len(values))
            values = np.where(differs, others, values)
        return [int(each) for each in values]

    history, diagnosis, found = SurfaceHistory(), SdcDiagnosis(job.mesh), list[Incident]()
    for step in range(1, _CHECKS + 1):
        records, repeats = [], []
        for surface in _SURFACES:
            if history.reason(surface, "layers.0") is not None:
                continue
            record = EvidenceRecord(
                step=step,
                surface=surface,
                manifestation=Manifestation.SDC,
                peers=peers.ranks,
                verdict=(verdict := exact(signatures(surface))),
                layer="layers.0",
                mode=STATE if is_state else "forward",
            )
            if not verdict.agrees:
                trial = history.trial(record, among=len(_SURFACES), is_held=is_state)
                while trial.is_open:
                    trial.observe(peers.ranks, signatures(surface))
                repeats.append(history.conclude(trial))
                record = repeats[-1].record
            records.append(record)
        found += diagnosis.diagnose(records, repeats=repeats)
    return truth, found
