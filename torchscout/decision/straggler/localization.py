"""What slow process groups have in common: a machine, the network, or the job (paper, section 6.1.2).

Set logic over the slow and the measured groups. Groups are distinguished by what they span, one machine or
several, and not by the name of their axis. Which link or switch of the network is at fault is left to the
tools of the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torchscout.mesh import Mesh
from torchscout.utils.text import listed

__all__ = ["Diagnosis", "Group", "Localization", "localize", "undecided"]

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
