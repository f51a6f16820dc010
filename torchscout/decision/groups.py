"""Finds slow process groups and what they have in common: a machine, the network, or the job (paper, section
6.1.2).

A collective delays all its members, so its time names a process group and never one member. Corresponding
groups are compared in every check, and ``localize`` explains those that are persistently slow: set logic
over the slow and the measured groups. Groups are distinguished by what they span, one machine or several, and
not by the name of their axis. Which link or switch is at fault is left to the tools of the network.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import statistical
from torchscout.decision.straggler import History
from torchscout.decision.timings import GroupTimes, PeerTimes, Work
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope, Surface
from torchscout.mesh import Mesh
from torchscout.utils.text import listed, sentences

__all__ = ["Diagnosis", "Group", "GroupStragglers", "Localization", "localize", "undecided"]

_MACHINES = 2
"""Machines that may be at fault at once in a small job."""
_SHARE = 8
"""In a large job one machine in this many may be; if it were more, the fault is not in the machines."""

# [Note: Who is at fault]
#
# A slow group within one machine means that this machine is at fault. It also explains slow groups that span
# this machine and others, which raise the finding from its inner links (intra_machine) to the machine.
#
# Slow groups that touch no such machine are attributed to the network, if groups within their machines were
# measured and are normal. If no group within a machine was measured, the machine itself may be at fault. It
# is named if it alone, or the one smallest set of machines, explains all slow groups, and these lead to
# different machines (one slow group always has several endpoints). Among equally small sets, machines without
# a normal group are preferred. If that does not decide, the candidates are reported as ambiguous.
#
# Many slow groups that share no machine are attributed to the job.


class Group(NamedTuple):
    """A process group of the job."""

    axis: str
    """Its purpose: a mesh axis, or an adapter's name for a group over several axes."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""

    def __str__(self) -> str:
        return f"{self.axis} group {{{_abridged(self.ranks)}}}"


class Diagnosis(str, Enum):
    """The paper's four causes, and two for insufficient evidence."""

    MACHINE = "machine"
    """Groups within a machine, and groups that span it and others, are slow."""
    INTRA_MACHINE = "intra_machine"
    """Only groups within a machine are slow: its inner links."""
    NETWORK = "network"
    """Only groups between machines are slow."""
    JOB = "job"
    """Many groups that share no machine are slow: software, or contention across the cluster."""
    PROCESS_GROUP = "process_group"
    """The machines of slow groups are unknown, or too little was measured to choose among them."""
    UNDECIDED = "undecided"
    """Two corresponding groups differ, and there is no third one to compare with."""


@dataclass(frozen=True, slots=True)
class Localization:
    """Slow process groups and the one cause that explains them."""

    diagnosis: Diagnosis
    hosts: tuple[str, ...]
    """The machines at fault; if ambiguous, the candidates; for the network, the machines it connects."""
    ranks: tuple[int, ...]
    """All ranks of the machines at fault, since machines are replaced; otherwise members of the groups."""
    endpoints: tuple[int, ...]
    """Those of ``ranks`` in which two or more of the slow groups meet."""
    groups: tuple[Group, ...]
    """The slow groups that are explained."""
    ambiguous: bool = False
    """Evidence does not decide between the hosts, or between them and the network."""

    @property
    def names_machines(self) -> bool:
        return self.diagnosis in (Diagnosis.MACHINE, Diagnosis.INTRA_MACHINE) and not self.ambiguous

    @property
    def scope(self) -> Scope:
        if self.names_machines:
            return Scope.MACHINE
        return Scope.JOB if self.diagnosis is Diagnosis.JOB else Scope.PROCESS_GROUP

    @property
    def sentence(self) -> str:
        """The finding in words, without capital and period."""
        groups = listed([str(group) for group in sorted(self.groups, key=lambda group: len(group.ranks))])
        if self.diagnosis is Diagnosis.UNDECIDED:
            return f"{groups} differ on equal work, and there is no third such group to say which is slow"
        slow = f"{groups} {'is' if len(self.groups) == 1 else 'are'} slow"
        hosts, ranks = listed(self.hosts), _abridged(self.ranks)
        if self.ambiguous:
            return f"{slow}: {hosts} or the network between them, which the evidence does not decide"
        at = f"; endpoint {_abridged(self.endpoints)}" if 0 < len(self.endpoints) < len(self.ranks) else ""
        meaning = {
            Diagnosis.MACHINE: f"and meet on {hosts} (ranks {ranks}{at}): a machine fault",
            Diagnosis.INTRA_MACHINE: "and no measured group that leaves the machine is: "
            f"a fault inside {hosts} (ranks {ranks})",
            Diagnosis.NETWORK: f"while groups within machines are normal: the network between {hosts}",
            Diagnosis.JOB: "at once, on too many machines for a fault of their own: "
            "software of the job, or contention across the cluster",
            Diagnosis.PROCESS_GROUP: f"(ranks {ranks}{at}); which machines they run on is not known",
        }
        return f"{slow} {meaning[self.diagnosis]}"


_Spans = Mapping[Group, frozenset[str]]


def localize(mesh: Mesh, slow: Iterable[Group], measured: Iterable[Group]) -> tuple[Localization, ...]:
    """Explain the slow groups; returns at most one finding of each kind. See [Note: Who is at fault].

    ``measured`` are all groups that were compared with at least two others; any other group is unknown.
    """
    guilty = sorted(set(slow))
    if not guilty:
        return ()
    if mesh.host_of(0) is None:
        return (_groups_only(mesh, Diagnosis.PROCESS_GROUP, guilty),)
    spans = {group: frozenset(mesh.hosts_of(group.ranks)) for group in {*guilty, *measured}}
    limit = max(_MACHINES, len(mesh.hosts_of(range(len(mesh)))) // _SHARE)
    if _independent(spans, guilty) > limit:
        return (Localization(Diagnosis.JOB, (), (), (), tuple(guilty)),)
    inner = {host for group in guilty if len(spans[group]) == 1 for host in spans[group]}
    leaving = {host for group in guilty if len(spans[group]) > 1 for host in spans[group]}
    findings = [
        _at_machines(mesh, diagnosis, hosts, [group for group in guilty if spans[group] & hosts])
        for diagnosis, hosts in (
            (Diagnosis.MACHINE, inner & leaving),
            (Diagnosis.INTRA_MACHINE, inner - leaving),
        )
        if hosts
    ]
    rest = [group for group in guilty if not spans[group] & inner]
    return (*findings, *_between_machines(mesh, spans, frozenset(guilty), rest))


def undecided(mesh: Mesh, pair: Sequence[Group]) -> Localization:
    """Return the finding for two corresponding groups of which an unknown one is slow."""
    return _groups_only(mesh, Diagnosis.UNDECIDED, pair, ambiguous=True)


def _independent(spans: _Spans, slow: Collection[Group]) -> int:
    """How many slow groups share no machine, and so how many machines at least would be at fault."""
    taken: set[str] = set()
    count = 0
    for group in sorted(slow, key=lambda group: len(spans[group])):
        if taken.isdisjoint(spans[group]):
            taken |= spans[group]
            count += 1
    return count


def _between_machines(
    mesh: Mesh, spans: _Spans, slow: frozenset[Group], rest: Sequence[Group]
) -> list[Localization]:
    """Explain slow groups that span several machines, none of which has a slow group inside."""
    normal_inside = {host for span in spans.values() if len(span) == 1 for host in span}
    open_groups = [group for group in rest if not spans[group] <= normal_inside]
    covers = _smallest_covers({spans[group] for group in open_groups}) if open_groups else []
    chosen = _choose(spans, slow, open_groups, covers)
    findings = []
    if chosen is not None:
        blamed = chosen - normal_inside
        network = [group for group in rest if not spans[group] & blamed]
        if blamed:
            proof = [group for group in rest if spans[group] & blamed]
            findings.append(_at_machines(mesh, Diagnosis.MACHINE, blamed, proof))
    else:
        network = [group for group in rest if group not in open_groups]
        candidates = frozenset().union(*covers)
        diagnosis = Diagnosis.MACHINE if candidates else Diagnosis.PROCESS_GROUP
        findings.append(_groups_only(mesh, diagnosis, open_groups, candidates, ambiguous=True))
    if network:
        findings.append(_groups_only(mesh, Diagnosis.NETWORK, network))
    return findings


def _choose(
    spans: _Spans, slow: frozenset[Group], groups: Sequence[Group], covers: Sequence[frozenset[str]]
) -> frozenset[str] | None:
    """Return the one set of machines that explains ``groups``; empty without groups, None if undecided."""
    if not groups:
        return frozenset()
    with_normal = frozenset().union(*(spans[group] for group in spans.keys() - slow))
    best = [cover for cover in covers if not cover & with_normal] or covers
    if len(best) != 1:
        return None
    directions = Counter(host for span in {spans[group] for group in groups} for host in span)
    return best[0] if all(directions[host] > 1 for host in best[0]) else None


def _smallest_covers(spans: Collection[frozenset[str]]) -> list[frozenset[str]]:
    """Return every smallest set of one or two machines that touches all groups."""
    if single := frozenset.intersection(*spans):
        return [frozenset({host}) for host in sorted(single)]
    pairs = set()
    for host in min(spans, key=len):
        others = frozenset.intersection(*(span for span in spans if host not in span))
        pairs |= {frozenset({host, other}) for other in others}
    return sorted(pairs, key=sorted)


def _at_machines(
    mesh: Mesh, diagnosis: Diagnosis, hosts: Collection[str], groups: Sequence[Group]
) -> Localization:
    named = _in_rank_order(mesh, hosts, groups)
    ranks = tuple(sorted(rank for host in named for rank in mesh.ranks_on(host)))
    return Localization(diagnosis, named, ranks, _endpoints(groups, ranks), tuple(groups))


def _groups_only(
    mesh: Mesh,
    diagnosis: Diagnosis,
    groups: Sequence[Group],
    candidates: Collection[str] = (),
    *,
    ambiguous: bool = False,
) -> Localization:
    ranks = tuple(sorted({rank for group in groups for rank in group.ranks}))
    hosts = _in_rank_order(mesh, candidates, groups) if candidates else mesh.hosts_of(ranks)
    return Localization(diagnosis, hosts, ranks, _endpoints(groups, ranks), tuple(groups), ambiguous)


def _in_rank_order(mesh: Mesh, hosts: Collection[str], groups: Sequence[Group]) -> tuple[str, ...]:
    ranks = sorted({rank for group in groups for rank in group.ranks})
    return tuple(host for host in mesh.hosts_of(ranks) if host in hosts)


def _endpoints(groups: Sequence[Group], ranks: Sequence[int]) -> tuple[int, ...]:
    met = Counter(rank for group in groups for rank in group.ranks)
    return tuple(rank for rank in ranks if met[rank] > 1)


def _abridged(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])


_MAX_DELAY = 4
"""Rounds that findings may wait until a group is confirmed or normal again."""
_SIZES = 64
"""Sizes of transfers whose history is kept, the latest ones."""
_REST = 2
"""Rounds that a reported group may be normal without being reported again."""


class _Reported(NamedTuple):
    """A part of a finding that was reported."""

    groups: tuple[Group, ...]
    """The slow groups of that finding."""
    rounds: int = 0
    """Rounds that measured any of them since one was last slow."""


class _Kind(NamedTuple):
    """What groups whose times are comparable have in common."""

    axis: str
    surface: Surface
    placement: tuple[int, ...]
    """Members per machine: a group within one machine is not compared with one that spans several."""


class _Corresponding:
    """The groups of one kind, which are numbered, and those that are slow.

    A slow link may show in large transfers only. So there is a history of all sizes, which decides if every
    sequence has another length, and one for each size.
    """

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self.groups: list[Group] = []
        self._all, self._sizes = History(config), OrderedDict[tuple[int, ...], History]()
        self.measured: set[Group] = set()
        """In the latest round."""
        self.record: EvidenceRecord | None = None
        """The latest comparison."""
        self._numbers: dict[Group, int] = {}

    def compared(self, step: int, work: Work, times: Mapping[Group, float]) -> PeerTimes | None:
        """Compare the groups; None if they are too few for a majority."""
        for group in times:
            if group not in self._numbers:
                self._numbers[group] = len(self.groups)
                self.groups.append(group)
        if len(times) < min(3, len(self.groups)) or len(times) < 2:
            return None
        numbers = [self._numbers[group] for group in times]
        self.measured |= times.keys()
        self.record = _evidence(step, work, times, self._config)
        return PeerTimes(step, work, np.array([numbers]), np.array([[*times.values()]]), self._config)

    def observe(self, compared: Sequence[PeerTimes]) -> None:
        """Add one round."""
        self._all.observe(compared)
        for size in dict.fromkeys(each.work.shape for each in compared):
            history = self._sizes.setdefault(size, History(self._config))
            self._sizes.move_to_end(size)
            history.observe([each for each in compared if each.work.shape == size])
        while len(self._sizes) > _SIZES:
            self._sizes.popitem(last=False)

    def slow(self) -> list[Group]:
        """Return the groups that are confirmed as slow."""
        return [self.groups[number] for number in sorted(self._numbered("confirmed"))]

    def pending(self) -> list[Group]:
        """Return those that may be confirmed next."""
        unconfirmed = self._numbered("unconfirmed") - self._numbered("confirmed")
        return [self.groups[number] for number in sorted(unconfirmed)]

    def is_behind(self, group: Group) -> bool:
        return self._numbers.get(group) in self._numbered("behind")

    def _numbered(self, state: Literal["confirmed", "unconfirmed", "behind"]) -> set[int]:
        return set[int]().union(*(getattr(each, state) for each in (self._all, *self._sizes.values())))


def _evidence(step: int, work: Work, times: Mapping[Group, float], config: StragglerConfig) -> EvidenceRecord:
    """Return the comparison as one of the groups' first members: each has the time of its slowest group."""
    first: dict[int, float] = {}
    for group, milliseconds in times.items():
        first[group.ranks[0]] = max(milliseconds, first.get(group.ranks[0], 0.0))
    peers = tuple(sorted(first))
    return EvidenceRecord(
        step=step,
        surface=work.surface,
        manifestation=Manifestation.STRAGGLER,
        peers=peers,
        verdict=statistical(
            [first[rank] for rank in peers], kappa=config.kappa, ratio=config.min_slowdown_ratio
        ),
        layer=work.layer or None,
        shape=work.shape,
    )


class GroupStragglers:
    """Turns the times of process groups in each check into incidents."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh, self._config = mesh, config
        self._kinds: dict[_Kind, _Corresponding] = {}
        self._placements: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Members per machine, by the ranks of a group."""
        self._reported: dict[tuple[object, ...], _Reported] = {}
        self._delayed = 0
        """Rounds that findings have waited."""

    def observe(
        self, step: int, measured: Iterable[GroupTimes]
    ) -> tuple[list[Incident], list[PeerTimes], list[EvidenceRecord]]:
        """Add the times of one check, without cold ones; return incidents, and what was compared, twice.

        A finding is reported once, and again if it grows, or comes back after some normal rounds.
        """
        rounds: dict[_Kind, list[PeerTimes]] = defaultdict(list)
        alone, records = list[PeerTimes](), list[EvidenceRecord]()
        for kind in self._kinds.values():
            kind.measured = set()
        for times in measured:
            for key, work, of_group in self._by_kind(times):
                kind = self._kinds.setdefault(key, _Corresponding(self._config))
                if (comparison := kind.compared(step, work, of_group)) is not None:
                    rounds[key].append(comparison)
                    records += [kind.record] if kind.record is not None else []
                elif len(kind.groups) == 1:  # it can be compared with its own history only
                    ((group, milliseconds),) = of_group.items()
                    members = np.array([group.ranks])
                    alone.append(PeerTimes(step, work, members, np.full(members.shape, milliseconds)))
        for key, comparisons in rounds.items():
            self._kinds[key].observe(comparisons)
        incidents = self._new_findings(step) if rounds else []
        compared = [each for found in rounds.values() for each in found]
        return incidents, compared + alone, records + [each.record(0) for each in alone]

    def _by_kind(self, times: GroupTimes) -> list[tuple[_Kind, Work, dict[Group, float]]]:
        found: dict[_Kind, dict[Group, float]] = defaultdict(dict)
        for ranks, milliseconds in times.milliseconds.items():
            kind = _Kind(times.axis, times.surface, self._placement(ranks))
            found[kind][Group(times.axis, ranks)] = milliseconds
        work = Work(times.surface, times.layer, (times.elements,))
        return [(kind, work, of_group) for kind, of_group in found.items()]

    def _placement(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in self._placements:
            on_machine = Counter(map(self._mesh.host_of, ranks))
            self._placements[ranks] = tuple(sorted(on_machine.values()))
        return self._placements[ranks]

    def _new_findings(self, step: int) -> list[Incident]:
        self._delayed = self._delayed + 1 if self._may_change() else 0
        if 0 < self._delayed <= _MAX_DELAY:
            return []
        findings = self._findings()
        new = [finding for finding in findings if not _subjects(finding) <= self._reported.keys()]
        self._forget_what_was_normal()
        for finding in findings:
            self._reported |= dict.fromkeys(_subjects(finding), _Reported(finding.groups))
        return [self._incident(finding, step) for finding in new]

    def _forget_what_was_normal(self) -> None:
        """Not after one round: what is hardly slow has a normal round now and then."""
        for subject, (groups, rounds) in list(self._reported.items()):
            measured = [
                (kind, group) for kind in self._kinds.values() for group in groups if group in kind.measured
            ]
            if any(kind.is_behind(group) for kind, group in measured):
                self._reported[subject] = _Reported(groups)
            elif measured and rounds == _REST:
                del self._reported[subject]
            elif measured:
                self._reported[subject] = _Reported(groups, rounds + 1)

    def _findings(self) -> tuple[Localization, ...]:
        slow = [(kind, group) for kind in self._kinds.values() for group in kind.slow()]
        if not slow:
            return ()
        if known := [group for kind, group in slow if len(kind.groups) >= 3]:
            large = (kind for kind in self._kinds.values() if len(kind.groups) >= 3)
            return localize(self._mesh, known, [group for kind in large for group in kind.groups])
        pairs = {tuple(sorted(kind.groups)) for kind, _ in slow}
        return tuple(undecided(self._mesh, pair) for pair in sorted(pairs))

    def _may_change(self) -> bool:
        """Whether a group that may be confirmed next would change the finding.

        A slow machine must not be reported as a slow network because its inner group is confirmed later.
        """
        inner: set[str] = set()
        leaving: set[str] = set()
        pending = list[tuple[str, ...]]()
        for kind in self._kinds.values():
            for group in kind.slow():
                hosts = self._mesh.hosts_of(group.ranks)
                (inner if len(hosts) == 1 else leaving).update(hosts)
            pending += (self._mesh.hosts_of(group.ranks) for group in kind.pending())
        return any(not (leaving if len(hosts) == 1 else inner).isdisjoint(hosts) for hosts in pending)

    def _incident(self, finding: Localization, step: int) -> Incident:
        explained = {*finding.groups}
        actions = {Diagnosis.MACHINE: Action.REPLACE, Diagnosis.JOB: Action.CONTINUE}
        return Incident(
            manifestation=Manifestation.STRAGGLER,
            scope=finding.scope,
            step=step,
            ranks=finding.ranks,
            hosts=finding.hosts,
            records=tuple(
                kind.record
                for kind in self._kinds.values()
                if kind.record is not None and not explained.isdisjoint(kind.slow())
            ),
            action=Action.INSPECT if finding.ambiguous else actions.get(finding.diagnosis, Action.INSPECT),
            sentence=sentences(finding.sentence),
        )


def _subjects(finding: Localization) -> set[tuple[object, ...]]:
    """The parts of a finding, so that a finding which shrinks is not new."""
    parts: Sequence[object] = finding.hosts if finding.names_machines else finding.groups
    if finding.diagnosis is Diagnosis.JOB:
        parts = ["job"]
    return {(finding.diagnosis, finding.ambiguous, part) for part in parts}
