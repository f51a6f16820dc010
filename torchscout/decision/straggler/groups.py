"""Finds slow process groups and what they have in common (paper, section 6.1.2).

A collective delays all its members, so its time names a process group and never one member. Corresponding
groups are compared in every check; ``localization`` explains those that ``persistence`` confirms as slow.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import statistical
from torchscout.decision.straggler.localization import Diagnosis, Group, Localization, localize, undecided
from torchscout.decision.straggler.persistence import Persistence
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope, Surface
from torchscout.mesh import Mesh
from torchscout.utils.text import sentences

__all__ = ["CollectiveTime", "GroupDiagnosis", "incident", "scope_of"]


class CollectiveTime(NamedTuple):
    """How long one collective took on one process group."""

    axis: str
    ranks: tuple[int, ...]
    surface: Surface
    """Which collective: ``time/all_gather``."""
    milliseconds: float
    shape: tuple[int, ...] = ()
    """The size of the work; only equal shapes are compared."""


_MAX_DELAY = 4
"""Rounds that findings may wait until a group is confirmed or normal again."""


_REST = 2
"""Rounds that a reported group may be normal without being reported again."""


class _Reported(NamedTuple):
    """A part of a finding that was reported."""

    groups: tuple[Group, ...]
    """The slow groups of that finding."""
    rounds: int = 0
    """Rounds that measured any of them since one was last slow."""


class _Kind(NamedTuple):
    """What corresponding groups, whose times are comparable, have in common."""

    axis: str
    surface: Surface
    shape: tuple[int, ...]
    placement: tuple[int, ...]
    """Members per machine: a group within one machine is not compared with one that spans several."""


class GroupDiagnosis:
    """Turns the times of process groups in each check into incidents."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh, self._config = mesh, config
        self._rounds: dict[_Kind, Persistence] = {}
        self._known: dict[_Kind, dict[Group, int]] = defaultdict(dict)
        """Every group compared so far, with its index, which ``Persistence`` uses as a rank."""
        self._records: dict[Surface, tuple[EvidenceRecord, ...]] = {}
        self._reported: dict[tuple[object, ...], _Reported] = {}
        self._placements: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Members per machine, by the ranks of a group."""
        self._delayed = 0
        """Rounds that findings have waited."""

    def observe(
        self, step: int, times: Iterable[CollectiveTime], records: Sequence[EvidenceRecord]
    ) -> list[Incident]:
        """Add the times of one round, without cold ones, and at least one record for each of their surfaces.

        A finding is reported once, and again if it grows, or comes back after some normal rounds. Raises
        ``ValueError`` for a surface without a record, for a group that is timed twice or is not in the mesh,
        and for a time that is not finite.
        """
        kinds = self._corresponding(times)
        proof = {surface: tuple(r for r in records if r.surface == surface) for _, surface, _, _ in kinds}
        if bare := sorted(surface for surface, found in proof.items() if not found):
            raise ValueError(f"step {step}: no evidence record for {', '.join(bare)}")
        self._records |= proof
        for kind, members in kinds.items():
            self._compare(step, kind, members)
        self._delayed = self._delayed + 1 if self._may_change() else 0
        if 0 < self._delayed <= _MAX_DELAY:
            return []
        findings = self._findings()
        new = [finding for finding in findings if not _subjects(finding) <= self._reported.keys()]
        self._rest(kinds)
        for finding in findings:
            self._reported |= dict.fromkeys(_subjects(finding), _Reported(finding.groups))
        return [incident(finding, step, self._proof(finding)) for finding in new]

    def _rest(self, kinds: Mapping[_Kind, Mapping[Group, float]]) -> None:
        """Forget what was normal for some rounds: what is hardly slow has a normal round now and then."""
        for subject, (groups, rounds) in list(self._reported.items()):
            measured = [(kind, group) for kind in kinds for group in groups if group in kinds[kind]]
            if any(self._is_behind(*each) for each in measured):
                self._reported[subject] = _Reported(groups)
            elif measured and rounds == _REST:
                del self._reported[subject]
            elif measured:
                self._reported[subject] = _Reported(groups, rounds + 1)

    def _is_behind(self, kind: _Kind, group: Group) -> bool:
        return kind in self._rounds and self._known[kind].get(group) in self._rounds[kind].behind

    def _corresponding(self, times: Iterable[CollectiveTime]) -> dict[_Kind, dict[Group, float]]:
        kinds: dict[tuple[object, ...], dict[Group, float]] = defaultdict(dict)
        for axis, ranks, surface, milliseconds, shape in times:
            group = Group(axis, ranks)
            placement = self._placements.get(ranks) or self._placement(group)
            if not 0 <= milliseconds < math.inf:
                raise ValueError(f"{group}: {surface} took {milliseconds} ms")
            members = kinds[axis, surface, shape, placement]
            if group in members:
                raise ValueError(f"{group}: {surface} was timed twice in one round")
            members[group] = milliseconds
        return {_Kind(*kind): members for kind, members in kinds.items()}  # type: ignore[arg-type]

    def _placement(self, group: Group) -> tuple[int, ...]:
        """Return the members per machine of a new group."""
        ranks = group.ranks
        if len(ranks) < 2 or list(ranks) != sorted(set(ranks)):
            raise ValueError(
                f"a {group.axis} group needs two or more ranks, unique and ascending, got {ranks}"
            )
        if ranks[0] < 0 or ranks[-1] >= len(self._mesh):
            raise ValueError(f"{group} is not in a mesh of {len(self._mesh)} ranks")
        placement = tuple(sorted(Counter(map(self._mesh.host_of, ranks)).values()))
        self._placements[ranks] = placement
        return placement

    def _compare(self, step: int, kind: _Kind, members: Mapping[Group, float]) -> None:
        known = self._known[kind]
        if len(members) < 3 <= len(known):
            return  # too few groups for a majority
        peers = tuple(known.setdefault(group, len(known)) for group in members)
        verdict = statistical(
            list(members.values()), kappa=self._config.kappa, ratio=self._config.min_slowdown_ratio
        )
        record = EvidenceRecord(
            step=step,
            surface=kind.surface,
            manifestation=Manifestation.STRAGGLER,
            peers=peers,
            verdict=verdict,
        )
        self._rounds.setdefault(kind, Persistence(self._config)).observe([record])

    def _findings(self) -> tuple[Localization, ...]:
        measured = [group for known in self._known.values() if len(known) >= 3 for group in known]
        slow = [group for kind, group in self._slow() if len(self._known[kind]) >= 3]
        if slow:
            return localize(self._mesh, slow, measured)
        pairs = {tuple(sorted(self._known[kind])) for kind, _ in self._slow()}
        return tuple(undecided(self._mesh, pair) for pair in sorted(pairs))

    def _slow(self) -> list[tuple[_Kind, Group]]:
        return [
            (kind, list(self._known[kind])[place])
            for kind, rounds in self._rounds.items()
            for place in sorted(rounds.confirmed)
        ]

    def _may_change(self) -> bool:
        """Whether a group that may be confirmed next would change the finding.

        A slow machine must not be reported as a slow network because its inner group is confirmed later.
        """
        inner: set[str] = set()
        leaving: set[str] = set()
        for _, group in self._slow():
            hosts = self._mesh.hosts_of(group.ranks)
            (inner if len(hosts) == 1 else leaving).update(hosts)
        pending = (
            self._mesh.hosts_of(list(self._known[kind])[place].ranks)
            for kind, rounds in self._rounds.items()
            for place in rounds.unconfirmed
        )
        return any(not (leaving if len(hosts) == 1 else inner).isdisjoint(hosts) for hosts in pending)

    def _proof(self, finding: Localization) -> list[EvidenceRecord]:
        explained = set(finding.groups)
        surfaces = dict.fromkeys(kind.surface for kind, group in self._slow() if group in explained)
        return [record for surface in surfaces for record in self._records[surface]]


def _subjects(finding: Localization) -> set[tuple[object, ...]]:
    """The parts of a finding, so that a finding which shrinks is not new."""
    parts: Sequence[object] = finding.hosts if finding.names_machines else finding.groups
    if finding.diagnosis is Diagnosis.JOB:
        parts = ["job"]
    return {(finding.diagnosis, finding.ambiguous, part) for part in parts}


def scope_of(finding: Localization) -> Scope:
    """Return the scope of a finding."""
    if finding.names_machines:
        return Scope.MACHINE
    return Scope.JOB if finding.diagnosis is Diagnosis.JOB else Scope.PROCESS_GROUP


def incident(finding: Localization, step: int, records: Sequence[EvidenceRecord]) -> Incident:
    """Return the incident for a finding; ``records`` prove it."""
    action = {Diagnosis.MACHINE: Action.REPLACE, Diagnosis.JOB: Action.CONTINUE}
    return Incident(
        manifestation=Manifestation.STRAGGLER,
        scope=scope_of(finding),
        step=step,
        ranks=finding.ranks,
        hosts=finding.hosts,
        records=tuple(records),
        action=Action.INSPECT if finding.ambiguous else action.get(finding.diagnosis, Action.INSPECT),
        sentence=sentences(finding.sentence),
    )
