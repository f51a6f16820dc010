"""Random corruption and nondeterministic kernels, in the signatures that peers compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.simulate.job import Job
from evaluation.simulate.scoring import Truth
from torchscout.c3 import compare as c3
from torchscout.decision.consensus import Verdict
from torchscout.decision.repeatability import Repeated, SurfaceHistory
from torchscout.decision.sdc import STATE, SdcDiagnosis
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Surface
from torchscout.mesh import PeerGroup

__all__ = ["FAMILIES", "Numbers", "WrongNumbers"]

FAMILIES = ("corruption", "intermittent", "wrong_state", "nondeterministic")

_SURFACES = ("layers.0/output", "layers.0/grad_input", "layers.0/weight.grad")
_CHECKS = 3


@dataclass(frozen=True, slots=True)
class WrongNumbers:
    """Who computes what wrongly, and how often."""

    truth: Truth
    peers: PeerGroup
    rank: int
    surface: str
    how_often: float
    """The share of replays in which ``rank`` or, with a nondeterministic kernel, any rank differs."""
    everywhere: bool
    """Whether it is the kernel, on any rank."""
    is_state: bool
    seed: int


class Numbers:
    """Makes and decides the wrong numbers of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def make(self, family: str, chance: np.random.Generator) -> WrongNumbers:
        """Make one scenario of a family."""
        rank = int(chance.integers(self.job.size))
        peers = self.job.mesh.peers_of(rank, "dense")
        is_kernel = family == "nondeterministic"
        truth = Truth()
        if not is_kernel and peers.can_compare:
            few = not peers.can_attribute
            truth = Truth(group=frozenset(peers.ranks)) if few else Truth(frozenset({rank}))
        often = {"intermittent": 0.3, "nondeterministic": float(chance.choice([1e-3, 1e-2, 0.1, 0.5]))}
        return WrongNumbers(
            truth,
            peers,
            rank,
            _SURFACES[int(chance.integers(len(_SURFACES)))],
            often.get(family, 1.0),
            is_kernel,
            family == "wrong_state",
            int(chance.integers(1 << 32)),
        )

    def decide(self, wrong: WrongNumbers) -> list[Incident]:
        """Check several times, each time replaying disagreements again."""
        chance = np.random.default_rng(wrong.seed)
        history, diagnosis = SurfaceHistory(), SdcDiagnosis(self.job.mesh)
        found: list[Incident] = []
        for step in range(1, _CHECKS + 1):
            records, repeats = self._check(step, wrong, history, chance)
            found += diagnosis.diagnose(records, repeats=repeats)
        return found

    def _check(
        self, step: int, wrong: WrongNumbers, history: SurfaceHistory, chance: np.random.Generator
    ) -> tuple[list[EvidenceRecord], list[Repeated]]:
        ranks = wrong.peers.ranks
        compared = [surface for surface in _SURFACES if history.reason(surface, "layers.0") is None]
        values = {surface: _values(wrong, surface, chance) for surface in compared}
        records, repeats = [], []
        for surface, verdict in _compare(wrong.peers, values).items():
            record = EvidenceRecord(
                step=step,
                surface=surface,
                manifestation=Manifestation.SDC,
                peers=ranks,
                verdict=verdict,
                layer="layers.0",
                mode=STATE if wrong.is_state else "forward",
            )
            if not verdict.agrees:
                trial = history.trial(record, among=len(_SURFACES), is_held=wrong.is_state)
                while trial.is_open:
                    trial.observe(ranks, _values(wrong, surface, chance))
                repeats.append(history.conclude(trial))
                record = repeats[-1].record
            records.append(record)
        return records, repeats


def _values(wrong: WrongNumbers, surface: str, chance: np.random.Generator) -> list[int]:
    """The signature of each peer in one replay."""
    values = np.full(len(wrong.peers), len(surface))
    if surface == wrong.surface:
        differs = chance.random(len(values)) < wrong.how_often
        if not wrong.everywhere:
            differs &= np.array(wrong.peers.ranks) == wrong.rank
        persistent = wrong.how_often == 1.0
        values = np.where(
            differs, 1000 if persistent else chance.integers(1000, 1 << 40, len(values)), values
        )
    return [int(each) for each in values]


class _Board:
    """A channel whose peers' payloads are all known; while they are not, it keeps this peer's."""

    def __init__(self, peers: PeerGroup) -> None:
        self.peers, self.position = peers, 0
        self.payloads: list[bytes] = []

    def gather(self, payload: bytes) -> list[bytes]:
        if len(self.payloads) < len(self.peers):
            self.payloads.append(payload)
            return [payload] * len(self.peers)
        return self.payloads

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        raise NotImplementedError(f"nothing is broadcast here, from {source}: {payload[:8]!r}")

    def highest(self, values: Sequence[int]) -> list[int]:
        raise NotImplementedError(f"nothing is voted on here: {values!r:.40}")


def _compare(peers: PeerGroup, values: Mapping[Surface, Sequence[int]]) -> dict[Surface, Verdict]:
    """Send what each peer computed, and decide as each of them does."""
    board = _Board(peers)
    for position in range(len(peers)):
        own = {surface: each[position] for surface, each in values.items()}
        c3.compare(board, own)
    return c3.compare(board, own)
