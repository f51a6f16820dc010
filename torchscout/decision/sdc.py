"""What the comparisons of a replay mean: silent data corruption, or a slow rank (paper, sections 5.3, 5.4 and
6.1).

Every peer receives the same records and reaches the same conclusion. Wrong numbers are reported at once, and
once: a weight that stays wrong is not reported at every check (``OpenIncidents``). A slow rank is reported
when ``straggler.persistence`` confirms it. Communication times are left to ``straggler.groups``, slowdowns
that all peers share to ``straggler.diagnosis``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence

from torchscout.config import StragglerConfig
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope, Surface
from torchscout.decision.repeatability import Repeatability, Repeated
from torchscout.decision.straggler.persistence import Persistence, SlowRun, Times
from torchscout.mesh import Mesh
from torchscout.utils.text import listed, named

__all__ = ["COMPUTATION", "FAILED", "INPUT", "STATE", "OpenIncidents", "ReplayDiagnosis"]


class OpenIncidents:
    """The incidents of replay that have been reported and have not been seen to end."""

    def __init__(self) -> None:
        self._open: dict[Hashable, EvidenceRecord] = {}

    def news(self, incidents: Sequence[Incident], records: Sequence[EvidenceRecord]) -> list[Incident]:
        """Those of one check that were not reported yet; ``records`` are all of that check.

        What was reported ends with the first check that compares the like of it, if only in another layer,
        and does not name the same ranks again; it is news when it comes back.
        """
        still = {_key(incident) for incident in incidents}
        self._open = {
            key: deciding
            for key, deciding in self._open.items()
            if key in still or not _passed(deciding, records)
        }
        fresh = [incident for incident in incidents if _key(incident) not in self._open]
        self._open |= {_key(incident): incident.records[0] for incident in fresh}
        return fresh


def _key(incident: Incident) -> Hashable:
    return incident.manifestation, incident.scope, incident.ranks


def _passed(deciding: EvidenceRecord, records: Sequence[EvidenceRecord]) -> bool:
    """Whether the like of what the incident was about has been compared, and peers agreed."""
    alike = [each.verdict for each in records if each.mode == deciding.mode]
    return any(verdict is not None and verdict.agrees for verdict in alike)


INPUT = "input"
"""The mode of records about whether peers received the same input for a replay."""
STATE = "state"
"""The mode of records about what ranks hold, as weights and optimizer slots, rather than compute."""
FAILED = "replay failed"
"""How the reason begins why there are none."""

_Found = tuple[EvidenceRecord, "Repeated | None"]
"""A disagreement, and what further replays said about it, if there were any."""
_Timed = tuple[tuple[int, ...], Surface]
"""Peers, and what of them was timed."""
_PASSES = ("module", "embedding", "output", "experts")
COMPUTATION: frozenset[Surface] = frozenset(
    {
        *(f"time/{part}" for part in (*_PASSES, "optimizer", "expert_optimizer")),
        *(f"time/{part}_backward" for part in _PASSES),
    }
)
"""The times a rank spends by itself. Every other ``time/`` surface holds up all members of a process
group alike, so that it must never be blamed on an endpoint."""


class ReplayDiagnosis:
    """Turns the records of each round into incidents; remembers only what persistence needs."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._histories: dict[_Timed, _History] = {}

    def observe(
        self,
        records: Sequence[EvidenceRecord],
        *,
        repeats: Sequence[Repeated] = (),
        elsewhere: Collection[int] = (),
    ) -> list[Incident]:
        """Take in the records of one round, as ``repeatability`` keeps them.

        ``repeats`` has what further replays said where records disagree. ``elsewhere`` are ranks that other
        peer groups named for their results in this round. Times of cold rounds (compilation, first touch of
        memory) must not be among the records.
        """
        return [*self._sdc(records, repeats, elsewhere), *self._stragglers(records)]

    def lagging(self, records: Sequence[EvidenceRecord]) -> set[str | None]:
        """Layers in which these records would make a rank be reported as slow. Nothing is taken in."""
        fresh = _History(self._config)
        return {
            record.layer
            for record in records
            if record.surface in COMPUTATION
            and self._histories.get((record.peers, record.surface), fresh).is_news(record)
        }

    def _sdc(
        self,
        records: Sequence[EvidenceRecord],
        repeats: Sequence[Repeated],
        elsewhere: Collection[int],
    ) -> list[Incident]:
        # Surfaces that name the same ranks, or that leave the same peers undecided, are one incident.
        alike: dict[Hashable, list[_Found]] = defaultdict(list)
        again = {_work(each.record): each for each in repeats}
        for record in records:
            if record.manifestation is Manifestation.SDC and record.scope is not None:
                alike[record.peers, record.ranks].append((record, again.get(_work(record))))
        incidents = []
        for found in alike.values():
            partners = self._partners(found[0][0], elsewhere)
            # One of the groups concerned reports for all of them: the one with the lowest rank.
            if not partners or min(partners) > min(found[0][0].ranks):
                incidents.append(self._sdc_incident(found, partners, _nature(found, records)))
        return incidents

    def _partners(self, record: EvidenceRecord, elsewhere: Collection[int]) -> tuple[int, ...]:
        """Whom a result may have been received from: ranks of the same replica whose results differ too.

        Tensor-parallel ranks add up what they compute, and then all of them hold what one did wrong. Pipeline
        stages are replayed each by itself.
        """
        if not record.ranks or _is_about(STATE, record) or _is_about(INPUT, record):
            return ()
        own = {self._place(rank) for rank in record.ranks}
        return tuple(sorted(rank for rank in elsewhere if self._place(rank) in own))

    def _place(self, rank: int) -> tuple[int, int]:
        """Which replica, or shard where there are none, and which stage of it."""
        address = self._mesh.address_of(rank)
        return getattr(address, self._mesh.peer_axis().value), address.pipeline

    def _sdc_incident(
        self,
        found: Sequence[_Found],
        partners: tuple[int, ...],
        nature: str,
    ) -> Incident:
        (deciding, again), records = found[0], [record for record, _ in found]
        attributed = bool(deciding.ranks)
        ranks = tuple(sorted({*(deciding.ranks or deciding.peers), *partners}))
        if partners:
            nature += "; they compute together, and one of them may have it from another"
        return Incident(
            manifestation=Manifestation.SDC,
            scope=self._scope(ranks, partners) if attributed else Scope.PEER_GROUP,
            step=deciding.step,
            ranks=ranks,
            hosts=self._mesh.hosts_of(ranks),
            records=(*records, *(each for _, repeat in found if repeat is not None for each in repeat.again)),
            action=Action.REPLACE if attributed else Action.INSPECT,
            sentence=f"{self._who(ranks)} {_has(ranks, attributed=attributed)} in {_where(records)} "
            f"at step {deciding.step}: {_vote(deciding)}{_repeated(again)}{nature}.",
        )

    def _stragglers(self, records: Sequence[EvidenceRecord]) -> list[Incident]:
        timed: dict[_Timed, list[EvidenceRecord]] = defaultdict(list)
        for record in records:
            if record.manifestation is Manifestation.STRAGGLER and record.surface in COMPUTATION:
                timed[record.peers, record.surface].append(record)
        slow: dict[int, list[SlowRun]] = defaultdict(list)
        for key, found in timed.items():
            history = self._histories.setdefault(key, _History(self._config))
            for run in history.observe(found):
                slow[run.rank].append(run)
        return [self._straggler_incident(runs, records[0].step) for runs in slow.values()]

    def _straggler_incident(self, runs: Sequence[SlowRun], step: int) -> Incident:
        """One rank, slow on one surface or several."""
        rank, deciding = runs[0].rank, runs[0].records[0]
        attributed = rank in deciding.ranks
        ranks = (rank,) if attributed else deciding.peers
        where = _where([run.records[0] for run in runs])
        outcome = f"is slow in {where}" if attributed else f"differ in speed in {where}"
        doubt = "" if attributed else f"; rank {rank} is the slower, but two peers have no majority"
        return Incident(
            manifestation=Manifestation.STRAGGLER,
            scope=Scope.RANK if attributed else Scope.PEER_GROUP,
            step=step,
            ranks=ranks,
            hosts=self._mesh.hosts_of(ranks),
            records=tuple(record for run in runs for record in run.records),
            action=Action.INSPECT,
            sentence=f"{self._who(ranks)} {outcome} at step {step}: {_pace(runs[0])}{doubt}.",
        )

    def _scope(self, outliers: tuple[int, ...], partners: tuple[int, ...]) -> Scope:
        hosts = {self._mesh.host_of(rank) for rank in outliers}
        if len(outliers) > 1 and len(hosts) == 1 and None not in hosts:
            return Scope.MACHINE
        return Scope.PROCESS_GROUP if partners else Scope.RANK

    def _who(self, ranks: tuple[int, ...]) -> str:
        hosts = self._mesh.hosts_of(ranks)
        names = named(ranks).capitalize()
        return f"{names} on {listed(hosts)}" if hosts else names


class _History:
    """Who stays slow on one surface: whatever is replayed, or whenever it is one layer's turn.

    A rank that is slow in one layer of many is back with its peers in the next round, and slow again when the
    rotation has come to that layer once more.
    """

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._all = Persistence(config)
        self._each: dict[str | None, Persistence] = {}

    @property
    def _reported(self) -> set[int]:
        return self._all.confirmed.union(*(each.confirmed for each in self._each.values()))

    def is_news(self, record: EvidenceRecord) -> bool:
        """Whether it would make a rank be reported that was not."""
        of_layer = self._each.get(record.layer) or Persistence(self._config)
        return not self._all.would_confirm(record) | of_layer.would_confirm(record) <= self._reported

    def observe(self, records: Sequence[EvidenceRecord]) -> list[SlowRun]:
        """The runs that a round confirms, one for a rank."""
        known = set().union(*(each.confirmed for each in self._each.values()))
        runs = {run.rank: run for run in self._all.observe(records) if run.rank not in known}
        known |= self._all.confirmed
        for layer, found in _by_layer(records).items():
            history = self._each.setdefault(layer, Persistence(self._config))
            runs |= {run.rank: run for run in history.observe(found) if run.rank not in known}
        return [runs[rank] for rank in sorted(runs)]


def _by_layer(records: Sequence[EvidenceRecord]) -> dict[str | None, list[EvidenceRecord]]:
    found: dict[str | None, list[EvidenceRecord]] = defaultdict(list)
    for record in records:
        found[record.layer].append(record)
    return found


def _work(record: EvidenceRecord) -> Hashable:
    return record.peers, record.surface, record.layer, record.mode, record.shape


def _has(ranks: Sequence[int], *, attributed: bool) -> str:
    if not attributed:
        return "disagree with each other"
    return "disagrees with its peers" if len(ranks) == 1 else "disagree with their peers"


def _vote(record: EvidenceRecord) -> str:
    assert record.verdict is not None
    agreed = max(Counter(record.verdict.evidence).values())
    if not record.ranks:
        return f"at most {agreed} of {len(record.peers)} peers agree, so that no majority says who is right"
    if 2 * (len(record.peers) - len(record.ranks)) <= len(record.peers):
        return "what was right is known without a vote"
    return f"{agreed} of {len(record.peers)} peers agree against {'it' if len(record.ranks) == 1 else 'them'}"


def _repeated(again: Repeated | None) -> str:
    if again is None or again.replays < 2:
        return ""
    if again.kind is Repeatability.PERSISTENT:
        told = "a second replay" if again.replays == 2 else f"{again.replays - 1} further replays"
        return f"; {told} gave the same ({again.kind.value})"
    earlier = f", and {again.earlier} in earlier checks" if again.earlier else ""
    return f"; {again.differing} of {again.replays} replays differed{earlier} ({again.kind.value})"


def _pace(run: SlowRun) -> str:
    times = Times.of(run.records[0])
    assert times is not None
    slow = (
        f"{times.of_rank[run.rank]:.1f} ms against {times.reference:.1f} ms among {len(times.of_rank)} peers"
    )
    since = min(record.step for record in run.records)
    rounds = "1 round" if len(run.records) == 1 else f"{len(run.records)} rounds"
    return f"{slow}, slow in {rounds} since step {since}"


def _where(records: Sequence[EvidenceRecord]) -> str:
    surfaces = listed(dict.fromkeys(record.surface for record in records))
    unsaid = (each.layer for each in records if each.layer is not None and not _is_named(each))
    layers = dict.fromkeys(unsaid)
    return f"{surfaces} (of {listed(layers)})" if layers else surfaces


def _is_named(record: EvidenceRecord) -> bool:
    """Whether a record's surface says already what it belongs to."""
    return record.surface.startswith((f"{record.layer}/", f"{record.layer}."))


def _nature(found: Sequence[_Found], records: Sequence[EvidenceRecord]) -> str:
    """Whether what a rank holds is wrong, or only what it computes; nothing where that is not known."""
    deciding = found[0][0]
    if any(_is_about(STATE, record) for record, _ in found):
        return "; the state itself differs, not only what is computed from it"
    if all(_is_about(INPUT, record) for record, _ in found):
        return "; what was sent to all has not arrived everywhere alike"
    held = [each for each in records if _is_about(STATE, each) and each.peers == deciding.peers]
    if any(each.verdict is not None and each.verdict.agrees for each in held):
        return "; the weights agree, only the computation differs"
    return ""


def _is_about(mode: str, record: EvidenceRecord) -> bool:
    """Whatever the input variant."""
    return record.mode is not None and record.mode.partition(" ")[0] == mode
