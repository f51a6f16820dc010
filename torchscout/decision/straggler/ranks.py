"""Finds ranks that compute slowly, from the times of replayed work (paper, sections 5.4 and 6.1).

A slow rank is reported once ``persistence`` confirms it. ``groups`` handles times of communication, and
``diagnosis`` slowdowns that all peers share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torchscout.config import StragglerConfig
from torchscout.decision.straggler.persistence import Chance, Persistence, SlowRun, Times
from torchscout.decision.types import (
    Action,
    EvidenceRecord,
    Incident,
    Manifestation,
    Scope,
    Surface,
    surfaces_in_words,
)
from torchscout.mesh import Mesh
from torchscout.utils.text import named, sentences

__all__ = ["COMPUTATION", "RankStragglers", "slow_rank"]

_PASSES = ("module", "embedding", "output", "experts")
COMPUTATION: frozenset[Surface] = frozenset(
    {
        *(f"time/{part}" for part in (*_PASSES, "optimizer", "expert_optimizer")),
        *(f"time/{part}_backward" for part in _PASSES),
    }
)
"""Times that a rank spends by itself. Every other ``time/`` surface delays all members of a process group
equally, so that it must never be blamed on one of them."""


class RankStragglers:
    """Turns the times of each check into incidents."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh, self._config = mesh, config
        self._histories: dict[tuple[tuple[int, ...], Surface], _History] = {}
        self._chances: dict[Surface, _Chances] = {}

    def observe(self, records: Sequence[EvidenceRecord]) -> list[Incident]:
        """Add the records of one check, without cold rounds (compilation, first use of memory)."""
        timed: dict[tuple[tuple[int, ...], Surface], list[EvidenceRecord]] = defaultdict(list)
        for record in records:
            if record.manifestation is Manifestation.STRAGGLER and record.surface in COMPUTATION:
                timed[record.peers, record.surface].append(record)
        slow: dict[int, list[SlowRun]] = defaultdict(list)
        for key, found in timed.items():
            history = self._histories.setdefault(key, self._new_history(key[1]))
            for run in history.observe(found):
                slow[run.rank].append(run)
        return [self._incident(runs, records[0].step) for runs in slow.values()]

    def suspicious_layers(self, records: Sequence[EvidenceRecord]) -> set[str | None]:
        """Return the layers for which these records would report a slow rank, without adding them."""
        return {
            record.layer
            for record in records
            if record.surface in COMPUTATION
            and (
                self._histories.get((record.peers, record.surface)) or self._new_history(record.surface)
            ).would_report(record)
        }

    def _new_history(self, surface: Surface) -> _History:
        chances = self._chances.setdefault(surface, _Chances(self._config, len(self._mesh)))
        return _History(self._config, chances)

    def _incident(self, runs: Sequence[SlowRun], step: int) -> Incident:
        rank, times, since = runs[0].rank, Times.of(runs[0].records[0]), runs[0].since
        assert times is not None
        where = surfaces_in_words([run.records[0] for run in runs])
        rounds = "1 round" if len(runs[0].records) == 1 else f"{len(runs[0].records)} rounds"
        pace = (
            f"at step {step}: {times.of_rank[rank]:.1f} ms against {times.reference:.1f} ms among "
            f"{len(times)} peers, slow in {rounds} since step {since}"
        )

        def describe(who: str, is_named: bool) -> str:
            if is_named:
                return f"{who} is slow in {where} {pace}"
            doubt = f"rank {rank} is the slower, but two peers have no majority"
            return f"{who} differ in speed in {where} {pace}; {doubt}"

        return slow_rank(self._mesh, runs, step, describe)


def slow_rank(
    mesh: Mesh, runs: Sequence[SlowRun], step: int, describe: Callable[[str, bool], str]
) -> Incident:
    """Report one rank that is slow on one surface or several, or both of two peers, which have no majority.

    ``describe`` receives the ranks in words and whether a single rank is named, and returns the sentence.
    """
    rank, deciding = runs[0].rank, runs[0].records[0]
    is_named = rank in deciding.ranks
    ranks = (rank,) if is_named else deciding.peers
    hosts = mesh.hosts_of(ranks)
    return Incident(
        manifestation=Manifestation.STRAGGLER,
        scope=Scope.RANK if is_named else Scope.PEER_GROUP,
        step=step,
        ranks=ranks,
        hosts=hosts,
        records=tuple(record for run in runs for record in run.records),
        action=Action.INSPECT,
        sentence=sentences(describe(named(ranks, hosts), is_named)),
    )


class _Chances:
    """Those of one surface in any layer, and in each, for all peer groups."""

    def __init__(self, config: StragglerConfig, ranks: int) -> None:
        self._config, self._ranks = config, ranks
        self.all = Chance(config, ranks)
        self._layers: dict[str | None, Chance] = {}

    def of(self, layer: str | None) -> Chance:
        return self._layers.setdefault(layer, Chance(self._config, self._ranks))


class _History:
    """Ranks that stay slow on one surface, in any layer or whenever it is one layer's turn.

    A rank that is slow in one layer of many is as fast as its peers in the next check, and slow again when
    that layer is replayed again.
    """

    def __init__(self, config: StragglerConfig, chances: _Chances) -> None:
        self._config, self._chances = config, chances
        self._all = Persistence(config, chances.all)
        self._layers: dict[str | None, Persistence] = {}

    def would_report(self, record: EvidenceRecord) -> bool:
        """Whether the record would report a rank that has not been reported."""
        layer = self._layers.get(record.layer) or self._new(record.layer)
        found = self._all.would_confirm(record) | layer.would_confirm(record)
        return not found <= self._all.confirmed | self._confirmed_in_layers()

    def observe(self, records: Sequence[EvidenceRecord]) -> list[SlowRun]:
        """Return the runs that a check confirms, one for each rank."""
        known = self._confirmed_in_layers()
        runs = {run.rank: run for run in self._all.observe(records) if run.rank not in known}
        known |= self._all.confirmed
        by_layer: dict[str | None, list[EvidenceRecord]] = defaultdict(list)
        for record in records:
            by_layer[record.layer].append(record)
        for layer, found in by_layer.items():
            history = self._layers.setdefault(layer, self._new(layer))
            runs |= {run.rank: run for run in history.observe(found) if run.rank not in known}
        return [runs[rank] for rank in sorted(runs)]

    def _new(self, layer: str | None) -> Persistence:
        return Persistence(self._config, self._chances.of(layer))

    def _confirmed_in_layers(self) -> set[int]:
        return set().union(*(each.confirmed for each in self._layers.values()))
