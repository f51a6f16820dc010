"""Which process groups are slow, and what an operator should do about it (paper, section 6.1.2).

A collective holds up all its members, so its time names a process group and never an endpoint.
Here corresponding groups are compared round after round; those that stay slow are handed to
``localization``, and what it finds becomes an incident.

Nothing is timed or gathered here, module times are ``decision.sdc``, and how often a group must
be slow is ``persistence``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import statistical
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope, Surface
from torchscout.decision.straggler.localization import Diagnosis, Group, Localization, localize, undecided
from torchscout.decision.straggler.persistence import Persistence
from torchscout.mesh import Mesh

__all__ = ["CollectiveTime", "GroupDiagnosis", "incident", "scope_of"]


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """How long one collective took on one process group."""

    axis: str
    ranks: tuple[int, ...]
    surface: Surface
    """Which collective: ``time/all_gather``."""
    milliseconds: float
    shape: tuple[int, ...] = ()
    """The size of the work; only collectives of equal shape are compared."""

    def __post_init__(self) -> None:
        if len(self.ranks) < 2 or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(
                f"a {self.axis} group needs two or more ranks, unique and ascending, got {self.ranks}"
            )
        if not (math.isfinite(self.milliseconds) and self.milliseconds >= 0):
            raise ValueError(f"{self.group}: {self.surface} took {self.milliseconds} ms")

    @classmethod
    def of_members(
        cls, axis: str, surface: Surface, milliseconds: Mapping[int, float], shape: tuple[int, ...] = ()
    ) -> CollectiveTime:
        """One number from each member's own: the smallest.

        The member that enters last waits for nobody, so its time is the transfer. The others'
        times also hold their wait for it, and a rank that computes late is another diagnosis.
        """
        if not milliseconds:
            raise ValueError(f"{surface} of a {axis} group needs the time of its members, got none")
        return cls(axis, tuple(sorted(milliseconds)), surface, min(milliseconds.values()), shape)

    @property
    def group(self) -> Group:
        return Group(self.axis, self.ranks)


_PATIENCE = 4
"""Rounds to wait for a group to be confirmed or cleared: one at the edge must not silence the others."""


class _Kind(NamedTuple):
    """Groups correspond, and their times are comparable, if they are alike in all of this."""

    axis: str
    surface: Surface
    shape: tuple[int, ...]
    placement: tuple[int, ...]
    """Members per machine: a group within one machine is not measured against one that leaves it."""


class GroupDiagnosis:
    """Slow process groups, round after round, and the findings that are new."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._rounds: dict[_Kind, Persistence] = {}
        self._known: dict[_Kind, dict[Group, int]] = defaultdict(dict)
        """Every group compared so far and its place, which stands for it where ``Persistence`` has ranks."""
        self._records: dict[Surface, tuple[EvidenceRecord, ...]] = {}
        self._reported: set[tuple[object, ...]] = set()
        self._held = 0
        """Rounds for which findings have been held back."""

    def observe(
        self, step: int, times: Iterable[CollectiveTime], records: Sequence[EvidenceRecord]
    ) -> list[Incident]:
        """Take in one warm round: every group's times, and at least one record for each of their surfaces.

        A finding is reported once, and again when it grows or comes back.
        """
        kinds = _corresponding(self._mesh, times)
        proof = {surface: tuple(r for r in records if r.surface == surface) for _, surface, _, _ in kinds}
        if bare := sorted(surface for surface, found in proof.items() if not found):
            raise ValueError(f"step {step}: no evidence record for {', '.join(bare)}")
        self._records |= proof
        for kind, members in kinds.items():
            self._compare(step, kind, members)
        self._held = self._held + 1 if self._half_confirmed() else 0
        if 0 < self._held <= _PATIENCE:
            return []
        findings = self._findings()
        news = [finding for finding in findings if not _subjects(finding) <= self._reported]
        self._reported = {subject for finding in findings for subject in _subjects(finding)}
        return [incident(finding, step, self._proof(finding)) for finding in news]

    def _compare(self, step: int, kind: _Kind, members: Mapping[Group, float]) -> None:
        known = self._known[kind]
        if len(members) < 3 <= len(known):
            return  # too few were measured this time for a majority
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

    def _half_confirmed(self) -> bool:
        """Whether a group that may be confirmed next would change what the confirmed ones mean.

        Surfaces are not all confirmed in one round: a machine must not pass for the network because
        the group within it was measured later.
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


def _corresponding(mesh: Mesh, times: Iterable[CollectiveTime]) -> dict[_Kind, dict[Group, float]]:
    kinds: dict[_Kind, dict[Group, float]] = defaultdict(dict)
    for time in times:
        if time.ranks[0] < 0 or time.ranks[-1] >= len(mesh):
            raise ValueError(f"{time.group} is not in a mesh of {len(mesh)} ranks")
        placement = sorted(Counter(map(mesh.host_of, time.ranks)).values())
        members = kinds[_Kind(time.axis, time.surface, time.shape, tuple(placement))]
        if time.group in members:
            raise ValueError(f"{time.group}: {time.surface} was timed twice in one round")
        members[time.group] = time.milliseconds
    return kinds


def _subjects(finding: Localization) -> set[tuple[object, ...]]:
    """What a finding is about, each part by itself, so that a shrinking one is no news."""
    parts: Sequence[object] = finding.hosts if finding.names_machines else finding.groups
    if finding.diagnosis is Diagnosis.JOB:
        parts = ["job"]
    return {(finding.diagnosis, finding.ambiguous, part) for part in parts}


def scope_of(finding: Localization) -> Scope:
    """How precisely a finding points."""
    if finding.names_machines:
        return Scope.MACHINE
    return Scope.JOB if finding.diagnosis is Diagnosis.JOB else Scope.PROCESS_GROUP


def incident(finding: Localization, step: int, records: Sequence[EvidenceRecord]) -> Incident:
    """The finding as something to act on, with the comparisons that prove it."""
    action = {Diagnosis.MACHINE: Action.REPLACE, Diagnosis.JOB: Action.CONTINUE}
    return Incident(
        manifestation=Manifestation.STRAGGLER,
        scope=scope_of(finding),
        step=step,
        ranks=finding.ranks,
        hosts=finding.hosts,
        records=tuple(records),
        action=Action.INSPECT if finding.ambiguous else action.get(finding.diagnosis, Action.INSPECT),
        sentence=f"{finding.sentence[0].upper()}{finding.sentence[1:]}.",
    )
