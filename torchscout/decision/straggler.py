"""Decides which ranks are persistently slower than their peers (paper, sections 5.4 and 6.1).

``History`` is the rule: only slow counts, materially, and so often that chance does not explain it.
``RankStragglers`` applies it to replayed work, ``PhaseStragglers`` to fetching batches and to reading and
writing checkpoints, which are compared without a replay. A rank that never leaves such a phase is a hang.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from torchscout.config import StragglerConfig
from torchscout.decision.progress import Phase
from torchscout.decision.timings import Floats, PeerTimes, Slower, Work
from torchscout.decision.types import (
    Action,
    EvidenceRecord,
    Incident,
    Manifestation,
    Scope,
    Surface,
    surfaces_in_words,
)
from torchscout.mesh import LayerKind, Mesh
from torchscout.utils.text import named, sentences

__all__ = ["COMPUTATION", "History", "PhaseStragglers", "RankStragglers", "SlowRun", "is_known"]

# [Note: A slow round]
#
# Among few peers the scale of one round is itself noise: with 10% jitter and eight equal ranks, kappa 5 finds
# a slow outlier in 4% of all rounds, and misses a rank at twice the median in 8% of them. So a round is slow
# for a rank if it lies beyond kappa *pooled* scales: the median of those of recent rounds, in all peer groups
# of the job, relative to their references. Two peers have no scale without the slower one; theirs is how far
# their difference changes from one round to the next, to which a lasting difference adds nothing.
#
# An estimate from few values is often far too low, and would call a new job's ordinary noise slow. The factor
# exp(4 / degrees of freedom) is close to what Student's distribution asks for: 55 for one degree, 2.7 for
# four, 1.1 for forty. The rounds of an unfinished run are evaluated again as the estimate improves.
#
# The verdict of at least one round of the run must have named the rank, so that a surface with quiet and
# noisy layers, whose pooled scale is too small for some of them, reports only ranks that C3 has named.
# Requiring it in every round would miss too many stragglers.
#
# [Note: A run]
#
# A run lasts until the rank is as fast as its peers. A round in which it is materially slower, but within
# kappa, neither confirms nor ends the run; nor does a round that did not measure it. Otherwise the jitter
# that delays one confirmation would also void those before it.
#
# [Note: How many rounds]
#
# If a rank were slow by chance in a share p of its rounds, one of N ranks would be slow k times in a row
# about N * p**k times a round. The required k is the smallest that keeps this within ``false_alarm_rate``,
# and at least ``confirmations``. N is the number of ranks in the job and p is counted among all of them,
# since a job of many small peer groups has as many chances to be wrong as one large group. p is counted among
# the *other* ranks, so that a straggler does not raise its own k, and counts beginnings of runs, so that one
# lasting straggler does not hide the next. The prior lets a small quiet job report after ``confirmations``
# rounds, and a few rounds of a large job outweigh it.
_PRIOR_SLOW, _PRIOR_SEEN = 0.5, 100.0


class _Noise:
    """How far the times of equal work differ. See [Note: A slow round]."""

    def __init__(self, config: StragglerConfig) -> None:
        self._kappa = config.kappa
        self._rounds: deque[tuple[float, float]] = deque(maxlen=config.history)
        """The scale of each round, and its degrees of freedom."""
        self._differences: dict[tuple[int, int], Floats] = {}
        """Those of pairs in the latest round, by the first rank and the number of pairs."""

    def add(self, comparison: PeerTimes) -> None:
        if (found := self._of(comparison)) is not None:
            self._rounds.append(found)
        self._differences[_place(comparison)] = comparison.differences()

    def limit(self, comparison: PeerTimes | None = None) -> float:
        """Return the excess above which a rank is slow, as if the comparison had been added."""
        more = None if comparison is None else self._of(comparison)
        rounds = [*self._rounds, more] if more is not None else self._rounds
        if not rounds:
            return math.inf
        usual = statistics.median(scale for scale, _ in rounds)
        return self._kappa * usual * math.exp(4 / sum(degrees for _, degrees in rounds))

    def _of(self, comparison: PeerTimes) -> tuple[float, float] | None:
        spreads, counts = comparison.spreads(), comparison.counts - 2
        if (last := self._differences.get(_place(comparison))) is not None:
            # Of a difference with standard deviation s * sqrt(2), the change is 1.349 s in the median.
            changes = np.abs(comparison.differences() - last) / 1.349
            # Successive changes have one difference in common.
            spreads, counts = np.fmin(spreads, changes), np.where(np.isnan(changes), counts, 2 / 3)
        known = ~np.isnan(spreads)
        return (float(np.median(spreads[known])), float(counts[known].sum())) if known.any() else None


def _place(comparison: PeerTimes) -> tuple[int, int]:
    return int(comparison.peers[0, 0]), len(comparison.peers)


class _Round(NamedTuple):
    measured: int
    begun: frozenset[int]
    """The ranks whose run began in this round."""


class _FalseAlarms:
    """How often ranks were slow by chance in recent rounds. See [Note: How many rounds]."""

    def __init__(self, config: StragglerConfig, ranks: int) -> None:
        self._config, self._ranks = config, ranks
        self._rounds: deque[_Round] = deque(maxlen=config.history)

    def add(self, measured: int, begun: frozenset[int]) -> None:
        self._rounds.append(_Round(measured, begun))

    def exclude(self, rank: int, slow: int) -> bool:
        """Return whether so many slow rounds of a rank are more than chance explains."""
        if slow < self._config.confirmations:  # as nearly always
            return False
        others = sum(len(past.begun) - (rank in past.begun) for past in self._rounds)
        seen = sum(past.measured - 1 for past in self._rounds)
        rate = (_PRIOR_SLOW + others) / (_PRIOR_SEEN + seen)
        ranks = max([self._ranks, *(past.measured for past in self._rounds)])
        repeats = math.log(ranks / self._config.false_alarm_rate) / -math.log(rate)
        return slow >= repeats


@dataclass(frozen=True, slots=True)
class SlowRun:
    """A rank that has been confirmed as slow."""

    rank: int
    records: tuple[EvidenceRecord, ...]
    """Its slow rounds: first the latest one whose verdict names the rank, then the others, oldest first."""

    @property
    def since(self) -> int:
        """The step of its first slow round."""
        return min(record.step for record in self.records)


class _Slow(NamedTuple):
    """One round of a run."""

    excess: float
    is_shown: bool
    record: EvidenceRecord


@dataclass(slots=True)
class _Run:
    """The rounds since a rank fell behind its peers."""

    rounds: deque[_Slow]
    begun: bool = False
    """Whether one of the rounds was slow."""
    reported: bool = False


class History:
    """Recent rounds of one surface, and the ranks that are slow in them."""

    def __init__(self, config: StragglerConfig, ranks: int = 2) -> None:
        """``ranks`` may be slow by chance in a round, if not all of them are measured in each."""
        self._config = config
        self._noise, self._alarms = _Noise(config), _FalseAlarms(config, ranks)
        self._runs: dict[int, _Run] = {}

    @property
    def confirmed(self) -> set[int]:
        """Ranks that were confirmed as slow, and have not been as fast as their peers since."""
        return {rank for rank, run in self._runs.items() if run.reported}

    @property
    def behind(self) -> set[int]:
        """Ranks that were materially slower than their peers when they were last measured."""
        return {*self._runs}

    @property
    def unconfirmed(self) -> set[int]:
        """Ranks that were slow, but not often enough to exclude chance."""
        return {rank for rank, run in self._runs.items() if run.begun and not run.reported}

    def would_confirm(self, comparison: PeerTimes) -> set[int]:
        """Return the ranks that this would confirm as slow, or nearly so, without adding it."""
        found, limit = set(), self._noise.limit(comparison)
        for rank, excess, *_ in comparison.slower():
            run = self._runs.get(rank)
            rounds = [excess, *(each.excess for each in run.rounds)] if run is not None else [excess]
            is_often = self._alarms.exclude(rank, sum(each > limit for each in rounds))
            if is_often and not (run is not None and run.reported):
                found.add(rank)
        return found

    def observe(self, comparisons: Sequence[PeerTimes]) -> list[SlowRun]:
        """Add one round; return the runs that it confirms.

        A round may time the surface in several layers; a rank that is slow in one of them is slow.
        """
        timed = {*np.concatenate([each.timed() for each in comparisons]).tolist()} if comparisons else set()
        if not timed:
            return []
        for each in comparisons:
            self._noise.add(each)
        behind = _worst(comparisons)
        for rank in (self._runs.keys() & timed) - behind.keys():
            del self._runs[rank]
        limit = self._noise.limit()
        slow = {rank: self._slow_rounds(rank, *behind[rank], limit) for rank in sorted(behind)}
        begun = frozenset(rank for rank, rounds in slow.items() if rounds and self._begins(rank))
        self._alarms.add(len(timed), begun)
        return [run for rank, rounds in slow.items() if (run := self._confirm(rank, rounds))]

    def _slow_rounds(self, rank: int, slower: Slower, comparison: PeerTimes, limit: float) -> list[_Slow]:
        """Add a round to the run and return its slow ones."""
        run = self._runs.setdefault(rank, _Run(deque(maxlen=self._config.history)))
        if run.reported:
            return []
        run.rounds.append(_Slow(slower.excess, slower.is_shown, comparison.record(slower.row)))
        return [each for each in run.rounds if each.excess > limit]

    def _begins(self, rank: int) -> bool:
        run = self._runs[rank]
        begins, run.begun = not run.begun, True
        return begins

    def _confirm(self, rank: int, rounds: list[_Slow]) -> SlowRun | None:
        shown = [place for place, each in enumerate(rounds) if each.is_shown]
        if not shown or not self._alarms.exclude(rank, len(rounds)):
            return None
        self._runs[rank].reported = True
        self._runs[rank].rounds.clear()
        deciding = rounds.pop(shown[-1])
        return SlowRun(rank, (deciding.record, *(each.record for each in rounds)))


def _worst(comparisons: Iterable[PeerTimes]) -> dict[int, tuple[Slower, PeerTimes]]:
    """Return every rank that is materially slower, with the comparison in which it is slowest."""
    found: dict[int, tuple[Slower, PeerTimes]] = {}
    for comparison in comparisons:
        for each in comparison.slower():
            if each.rank not in found or found[each.rank][0].excess < each.excess:
                found[each.rank] = each, comparison
    return found


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
    """Turns the times of replayed work into incidents.

    A rank may be slow in one layer of many: then it is as fast as its peers in the next check, and slow again
    when that layer has its turn. So each surface has a history over all layers, and one for each of them.
    """

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh = mesh
        self._histories: dict[tuple[Surface, str | None], History] = defaultdict(
            partial(History, config, len(mesh))
        )

    def suspicious_layers(self, compared: Iterable[PeerTimes]) -> set[str]:
        """Return the layers in which these would report a slow rank, without adding them."""
        known = self._confirmed()
        return {
            each.work.layer
            for each in compared
            for layer in (None, each.work.layer)
            if not self._histories[each.work.surface, layer].would_confirm(each) <= known
        }

    def observe(self, compared: Iterable[PeerTimes]) -> list[Incident]:
        """Add one check, without cold rounds (compilation, first use of memory)."""
        timed: dict[tuple[Surface, str | None], list[PeerTimes]] = defaultdict(list)
        for each in compared:
            for layer in (None, each.work.layer):
                timed[each.work.surface, layer].append(each)
        known, slow = self._confirmed(), defaultdict[int, dict[Surface, SlowRun]](dict)
        for (surface, layer), found in timed.items():
            for run in self._histories[surface, layer].observe(found):
                slow[run.rank].setdefault(surface, run)
        return [
            _slow_rank(self._mesh, [*runs.values()], _slow_work)
            for rank, runs in slow.items()
            if rank not in known
        ]

    def _confirmed(self) -> set[int]:
        """Return the ranks that have been reported for any kind of work, and are still slow in it."""
        return set().union(*(each.confirmed for each in self._histories.values()))


_PURPOSES = {
    Phase.INPUT: "to fetch a batch",
    Phase.CHECKPOINT_READ: "to read a checkpoint",
    Phase.CHECKPOINT_WRITE: "to write a checkpoint",
}


class PhaseStragglers:
    """Turns surveys of every rank's recent times into incidents; observers decide when to make one."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh, self._config = mesh, config
        # All data-parallel ranks fetch batches, also those that have different experts.
        self._groups = [group.ranks for group in mesh.peer_groups(LayerKind.DENSE)]
        self._histories = {phase: History(config, len(mesh)) for phase in Phase}

    def observe(self, step: int, milliseconds: Mapping[Phase, Mapping[int, float]]) -> list[Incident]:
        """Add one survey: the recent time of each phase on each rank that timed it."""
        return [
            _slow_rank(self._mesh, [run], partial(_slow_phase, phase))
            for phase, times in milliseconds.items()
            for run in self._histories[phase].observe(self._compared(step, phase, times))
        ]

    def _compared(self, step: int, phase: Phase, times: Mapping[int, float]) -> list[PeerTimes]:
        """In no group of which only some ranks do it, such as when one writes for all."""
        work = Work(f"time/{phase.value}", "", ())
        return [
            PeerTimes(
                step,
                work,
                np.array([ranks]),
                np.array([[times.get(rank, math.nan) for rank in ranks]]),
                self._config,
            )
            for ranks in self._groups
            if 2 * sum(rank in times for rank in ranks) > len(ranks)
        ]


def is_known(incident: Incident, known: Incident) -> bool:
    """Return whether another hub has reported a slow phase already, after which its ranks were never fast."""
    return (
        (known.manifestation, known.ranks) == (incident.manifestation, incident.ranks)
        and {record.surface for record in known.records} == {record.surface for record in incident.records}
        and min(record.step for record in incident.records) <= known.step
    )


def _slow_rank(
    mesh: Mesh,
    runs: Sequence[SlowRun],
    describe: Callable[[Sequence[SlowRun], float, float, str, bool], str],
) -> Incident:
    """Report one rank that is slow on one surface or several, or both of two peers, which have no majority.

    ``describe`` receives the runs, the time of the rank and that of its peers, the ranks in words, and
    whether a single rank is named.
    """
    rank, deciding = runs[0].rank, runs[0].records[0]
    is_named = rank in deciding.ranks
    ranks = (rank,) if is_named else deciding.peers
    hosts = mesh.hosts_of(ranks)
    compared = PeerTimes.of(deciding)
    assert compared is not None, "only what was compared is confirmed"
    took, usual = float(compared.times[0, deciding.peers.index(rank)]), float(compared.reference[0])
    return Incident(
        manifestation=Manifestation.STRAGGLER,
        scope=Scope.RANK if is_named else Scope.PEER_GROUP,
        step=max(record.step for record in runs[0].records),
        ranks=ranks,
        hosts=hosts,
        records=tuple(record for run in runs for record in run.records),
        action=Action.INSPECT,
        sentence=sentences(describe(runs, took, usual, named(ranks, hosts), is_named)),
    )


def _slow_work(runs: Sequence[SlowRun], took: float, usual: float, who: str, is_named: bool) -> str:
    where = surfaces_in_words([run.records[0] for run in runs])
    deciding, rounds = runs[0].records[0], len(runs[0].records)
    pace = (
        f"at step {deciding.step}: {took:.1f} ms against {usual:.1f} ms among {len(deciding.peers)} peers, "
        f"slow in {rounds} round{'s' if rounds > 1 else ''} since step {runs[0].since}"
    )
    if is_named:
        return f"{who} is slow in {where} {pace}"
    doubt = f"rank {runs[0].rank} is the slower, but two peers have no majority"
    return f"{who} differ in speed in {where} {pace}; {doubt}"


def _slow_phase(
    phase: Phase, runs: Sequence[SlowRun], took: float, usual: float, who: str, is_named: bool
) -> str:
    run, slow, fast = runs[0], _rounded(took), _rounded(usual)
    proof = f"slow in {len(run.records)} surveys since step {run.since}"
    if is_named:
        return f"{who} takes {slow} {_PURPOSES[phase]} where its peers take {fast}; {proof}"
    return (
        f"{who} differ: rank {run.rank} takes {slow} {_PURPOSES[phase]} where its peer takes {fast}; "
        f"{proof}, but two peers have no majority"
    )


def _rounded(milliseconds: float) -> str:
    return "less than 1 ms" if milliseconds < 1 else f"{milliseconds:.0f} ms"
