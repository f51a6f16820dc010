"""Finds silent data corruption in comparisons of replayed numbers (paper, sections 5.3 and 6.1).

Every peer receives the same records and reaches the same conclusion. Wrong numbers are reported at once, and
only once: a weight that stays wrong is not reported at every check (``OpenIncidents``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence

from torchscout.decision.repeatability import Repeatability, Repeated
from torchscout.decision.types import (
    Action,
    EvidenceRecord,
    Incident,
    Manifestation,
    Scope,
    surfaces_in_words,
)
from torchscout.mesh import Mesh
from torchscout.utils.text import named, sentences

__all__ = ["FAILED", "INPUT", "STATE", "OpenIncidents", "SdcDiagnosis"]

INPUT = "input"
"""The mode of records that compare the input of a replay."""
STATE = "state"
"""The mode of records that compare what ranks hold, such as weights, rather than what they compute."""
FAILED = "replay failed"
"""The beginning of the reason why a failed replay has nothing to compare."""

_Found = tuple[EvidenceRecord, Repeated | None]
"""A disagreement, and the result of replaying it again."""


class OpenIncidents:
    """The incidents of replay that have been reported and have not ended."""

    def __init__(self) -> None:
        self._open: dict[Hashable, EvidenceRecord] = {}

    def new_ones(self, incidents: Sequence[Incident], records: Sequence[EvidenceRecord]) -> list[Incident]:
        """Return the incidents of one check that have not been reported; ``records`` are all of that check.

        An incident ends with the first check that compares the same kind of work, even in another layer, and
        does not name the same ranks. If it comes back, it is new again.
        """
        current = {_key(incident) for incident in incidents}
        self._open = {
            key: deciding
            for key, deciding in self._open.items()
            if key in current or not _has_agreement(deciding.mode, records)
        }
        new = [incident for incident in incidents if _key(incident) not in self._open]
        self._open |= {_key(incident): incident.records[0] for incident in new}
        return new


def _key(incident: Incident) -> Hashable:
    return incident.manifestation, incident.scope, incident.ranks


def _has_agreement(mode: str | None, records: Sequence[EvidenceRecord]) -> bool:
    return any(each.verdict is not None and each.verdict.agrees for each in records if each.mode == mode)


class SdcDiagnosis:
    """Turns the records of a check into incidents."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def diagnose(
        self,
        records: Sequence[EvidenceRecord],
        *,
        repeats: Sequence[Repeated] = (),
        elsewhere: Collection[int] = (),
    ) -> list[Incident]:
        """Return one incident for all surfaces that name the same ranks, or leave the same peers undecided.

        ``repeats`` has the results of replaying disagreements again. ``elsewhere`` are the ranks that other
        peer groups named in this check.
        """
        alike: dict[Hashable, list[_Found]] = defaultdict(list)
        repeated = {_work(each.record): each for each in repeats}
        for record in records:
            if record.manifestation is Manifestation.SDC and record.scope is not None:
                alike[record.peers, record.ranks].append((record, repeated.get(_work(record))))
        incidents = []
        for found in alike.values():
            partners = self._partners(found[0][0], elsewhere)
            # Of the peer groups concerned, the one with the lowest rank reports for all.
            if not partners or min(partners) > min(found[0][0].ranks):
                incidents.append(self._incident(found, partners, _cause(found, records)))
        return incidents

    def _partners(self, record: EvidenceRecord, elsewhere: Collection[int]) -> tuple[int, ...]:
        """Return the ranks of the same replica whose results differ too.

        Tensor-parallel ranks add up what they compute, so that all of them hold what one computed wrongly.
        Pipeline stages are replayed separately.
        """
        if not record.ranks or _is_about(STATE, record) or _is_about(INPUT, record):
            return ()
        own = {self._replica_and_stage(rank) for rank in record.ranks}
        return tuple(sorted(rank for rank in elsewhere if self._replica_and_stage(rank) in own))

    def _replica_and_stage(self, rank: int) -> tuple[int, int]:
        address = self._mesh.address_of(rank)
        return getattr(address, self._mesh.peer_axis().value), address.pipeline

    def _incident(self, found: Sequence[_Found], partners: tuple[int, ...], cause: str) -> Incident:
        (deciding, repeated), records = found[0], [record for record, _ in found]
        ranks = tuple(sorted({*(deciding.ranks or deciding.peers), *partners}))
        hosts, scope, differ = self._mesh.hosts_of(ranks), Scope.PEER_GROUP, "disagree with each other"
        if deciding.ranks:
            scope = self._scope(ranks, partners)
            differ = "disagrees with its peers" if len(ranks) == 1 else "disagree with their peers"
        if partners:
            cause += "; they compute together, and one of them may have received it from another"
        return Incident(
            manifestation=Manifestation.SDC,
            scope=scope,
            step=deciding.step,
            ranks=ranks,
            hosts=hosts,
            records=(*records, *(each for _, repeat in found if repeat is not None for each in repeat.again)),
            action=Action.REPLACE if deciding.ranks else Action.PREFLIGHT,
            sentence=sentences(
                f"{named(ranks, hosts)} {differ} in {surfaces_in_words(records)} at step {deciding.step}: "
                f"{_vote(deciding)}{_repetition(repeated)}{cause}"
            ),
        )

    def _scope(self, outliers: tuple[int, ...], partners: tuple[int, ...]) -> Scope:
        hosts = {self._mesh.host_of(rank) for rank in outliers}
        if len(outliers) > 1 and len(hosts) == 1 and None not in hosts:
            return Scope.MACHINE
        return Scope.PROCESS_GROUP if partners else Scope.RANK


def _work(record: EvidenceRecord) -> Hashable:
    return record.peers, record.surface, record.layer, record.mode, record.shape


def _vote(record: EvidenceRecord) -> str:
    assert record.verdict is not None
    agreed = max(Counter(record.verdict.evidence).values())
    if not record.ranks:
        return f"at most {agreed} of {len(record.peers)} peers agree, so that no majority says who is right"
    if 2 * (len(record.peers) - len(record.ranks)) <= len(record.peers):
        return "the right value is known without a vote"
    return f"{agreed} of {len(record.peers)} peers agree against {'it' if len(record.ranks) == 1 else 'them'}"


def _repetition(repeated: Repeated | None) -> str:
    if repeated is None or repeated.replays < 2:
        return ""
    if repeated.kind is Repeatability.PERSISTENT:
        more = "a second replay" if repeated.replays == 2 else f"{repeated.replays - 1} further replays"
        return f"; {more} gave the same ({repeated.kind.value})"
    earlier = f", and {repeated.earlier} in earlier checks" if repeated.earlier else ""
    return f"; {repeated.differing} of {repeated.replays} replays differed{earlier} ({repeated.kind.value})"


def _cause(found: Sequence[_Found], records: Sequence[EvidenceRecord]) -> str:
    """Say whether state or only a computation is wrong; empty if unknown."""
    if any(_is_about(STATE, record) for record, _ in found):
        return "; the state itself differs, not only what is computed from it"
    if all(_is_about(INPUT, record) for record, _ in found):
        return "; not all peers received the same input"
    peers = found[0][0].peers
    state = [each for each in records if _is_about(STATE, each) and each.peers == peers]
    if any(each.verdict is not None and each.verdict.agrees for each in state):
        return "; the weights agree, only the computation differs"
    return ""


def _is_about(mode: str, record: EvidenceRecord) -> bool:
    """Whether the record has this mode, in any input variant."""
    return record.mode is not None and record.mode.partition(" ")[0] == mode
