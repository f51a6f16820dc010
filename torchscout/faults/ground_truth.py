"""What a perfect detector would report (paper, sections 4, 5 and 7).

The mesh limits how precise evidence can be: with two peers, it is unknown which one is right; a slow
collective belongs to its process group; a rank that others wait for is named in a group of any size.
A module counts as the layer that replay calls; for a part of a layer, a plan must use ``showing``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise

from torchscout.decision.groups import Group, localize, undecided
from torchscout.decision.types import Incident, Manifestation, Scope, Surface
from torchscout.faults.effects import CallEffect, Skip, StayInside, Swap
from torchscout.faults.fault import BACKWARD, Fault, FaultSite, Shown, SiteKind
from torchscout.mesh import AXES, Axis, LayerKind, Mesh, PeerGroup
from torchscout.replay.recipes.owned_state import OWNED_STATE

__all__ = ["GroundTruth", "axis_of", "peers_of", "surface_of", "truths"]


def surface_of(fault: Fault, mesh: Mesh) -> Surface:
    """The surface on which a fault shows first, as in an incident; ``*`` is known only at run time."""
    if fault.shown.surface is not None:
        return fault.shown.surface
    if fault.manifestation is Manifestation.CRASH:
        return "process"
    if fault.manifestation is Manifestation.HANG:
        return _surface_of_hang(fault)
    if fault.manifestation is Manifestation.STRAGGLER:
        return _surface_of_time(fault.place, fault, mesh)
    return _surface_of_number(fault.place, mesh)


def _surface_of_hang(fault: Fault) -> Surface:
    if fault.place.kind is not SiteKind.COLLECTIVE:
        return "issued/*|entered/*"  # the latter on devices
    group = fault.place.slot if fault.place.slot not in ("", "undefined") else "*"
    if isinstance(fault.effect, Skip | Swap):
        return f"deadlock|fingerprint/{group}"  # the latter if its next collective is on the same group
    if isinstance(fault.effect, CallEffect):
        return f"fingerprint/{group}"
    return f"issued/{group}|entered/{group}"


def _surface_of_time(place: FaultSite, fault: Fault, mesh: Mesh) -> Surface:
    if place.kind is SiteKind.COLLECTIVE:
        axis = axis_of(fault, mesh)
        # Any of embeddings, layers and outputs, forward and backward. Collectives that gather and reduce a
        # layer's state have other surfaces than those of the layer itself.
        return f"time/*{place.name}*" if axis in ("replica", "shard") else f"time/*{place.name}*@{axis}"
    if place.kind is SiteKind.PHASE:
        return f"time/{place.name}"
    if place.kind is SiteKind.PASS:
        return "time/module_backward" if place.name in BACKWARD else "time/module"
    raise ValueError(f"a delay at {fault.at!r} cannot be detected: this site is not timed")


def _surface_of_number(place: FaultSite, mesh: Mesh) -> Surface:
    module = place.module or "model"
    if place.kind is SiteKind.COLLECTIVE:
        return {"all_gather": "*/parameters", "broadcast": "*/input"}.get(place.name, "*")
    if place.kind is SiteKind.PASS:
        seen = {"input": "output", "forward": "output"}
        return f"{module}/{seen.get(place.name, 'grad_input' if place.name in BACKWARD else place.name)}"
    if place.kind is SiteKind.GRADIENT:
        return f"{module}/{place.name}.grad"
    if mesh.peer_axis() is Axis.SHARD:  # there is no second copy, only the owner's evidence
        if place.slot == "grad":
            raise ValueError(
                f"a wrong gradient of {place.tensor} cannot be detected: only its owner has that shard of it"
            )
        return OWNED_STATE if place.slot else "optimizer/update"
    slot = "" if place.slot in ("", "grad") else f".{place.slot}"  # a wrong gradient makes a wrong weight
    return f"{module}/{place.name}{slot}"


def axis_of(fault: Fault, mesh: Mesh) -> str:
    """The mesh axis of a collective's process group. Raises ``ValueError`` if it is unknown."""
    if fault.axis is not None:
        return fault.axis
    everybody = tuple(range(len(mesh)))
    along = [axis for axis in AXES if mesh.ranks_along(axis, 0) == everybody]
    if fault.place.slot != "default_pg" or not along:
        raise ValueError(
            f"the mesh axis of the process group of {fault.at!r} is unknown; "
            f"pass axis, one of {', '.join(AXES)}"
        )
    return along[0]


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """One incident that a run with these faults must report."""

    manifestation: Manifestation
    ranks: tuple[int, ...]
    """The named ranks; all members for a group scope."""
    scope: Scope
    surface: Surface
    """The surface of the incident. ``*`` is known only at run time: ``issued/*`` is any process group that
    other ranks wait in. ``|`` separates surfaces of which timing decides which shows first."""
    steps: range
    """The steps in which it may happen."""

    def matches(self, incident: Incident) -> bool:
        """Whether an incident reports exactly this."""
        found = (incident.manifestation, incident.ranks, incident.scope)
        patterns = self.surface.split("|")
        is_there = any(fnmatchcase(incident.records[0].surface, each) for each in patterns)
        return is_there and found == (self.manifestation, self.ranks, self.scope)


def truths(faults: Iterable[Fault], mesh: Mesh) -> tuple[GroundTruth, ...]:
    """The findings of faults in one job; faults that happen together make one finding."""
    together: dict[Hashable, list[Fault]] = defaultdict(list)
    for fault in faults:
        together[_finding_key(fault, mesh)].append(fault)
    return tuple(
        _with_expectations(fault.shown, truth)
        for each in together.values()
        for fault, truth in ((each[0], found) for found in _found(each, mesh))
    )


def _finding_key(fault: Fault, mesh: Mesh) -> Hashable:
    """Faults with the same key make one finding."""
    kind, common = fault.place.kind, (fault.manifestation, fault.steps)
    if fault.manifestation is Manifestation.SDC:
        return *common, surface_of(fault, mesh), peers_of(fault, mesh).ranks
    if kind is SiteKind.COLLECTIVE:
        # All slow process groups are localized together, by what they have in common.
        is_slow = fault.manifestation is Manifestation.STRAGGLER
        return *common, kind, "" if is_slow else (surface_of(fault, mesh), type(fault.effect))
    if fault.manifestation is Manifestation.STRAGGLER:
        return *common, kind, peers_of(fault, mesh).ranks
    return common


def _found(faults: Sequence[Fault], mesh: Mesh) -> list[GroundTruth]:
    if faults[0].manifestation is Manifestation.SDC:
        return [_wrong(faults, mesh)]
    if faults[0].manifestation is Manifestation.CRASH:
        return [_ended(faults, mesh)]
    if faults[0].manifestation is Manifestation.HANG:
        return [_late(faults, mesh)]
    return _slow_groups(faults, mesh) if faults[0].place.kind is SiteKind.COLLECTIVE else _slow(faults, mesh)


def _wrong(faults: Sequence[Fault], mesh: Mesh) -> GroundTruth:
    """A strict majority shows which ranks are wrong; owned state that must not change shows by itself."""
    first, peers = faults[0], peers_of(faults[0], mesh).ranks
    ranks, surface = _ranks(faults), surface_of(faults[0], mesh)
    if 2 * len(ranks) >= len(peers) and surface != OWNED_STATE:
        scope, ranks = Scope.PEER_GROUP, peers
    else:
        scope = _scope(ranks, mesh)
    return GroundTruth(first.manifestation, ranks, scope, surface, first.steps)


def _scope(ranks: Sequence[int], mesh: Mesh) -> Scope:
    """Several ranks of one machine point to the machine."""
    hosts = {mesh.host_of(rank) for rank in ranks}
    return Scope.MACHINE if len(ranks) > 1 and len(hosts) == 1 and None not in hosts else Scope.RANK


def _ended(faults: Sequence[Fault], mesh: Mesh) -> GroundTruth:
    """Observers see that processes have ended; it needs no vote."""
    ranks, first = _ranks(faults), faults[0]
    scope = Scope.JOB if 1 < len(ranks) == len(mesh) else _scope(ranks, mesh)
    return GroundTruth(first.manifestation, ranks, scope, surface_of(first, mesh), first.steps)


def _late(faults: Sequence[Fault], mesh: Mesh) -> GroundTruth:
    """A rank that others wait for and that waits for no rank is the source: this evidence needs no vote.

    The members of the group vote on a rank that issued another operation or waits in a cycle. If all have
    entered, no member is to blame.
    """
    ranks, first = _ranks(faults), faults[0]
    if isinstance(first.effect, CallEffect | StayInside):
        members = _group(first, mesh).ranks
        if isinstance(first.effect, StayInside) or 2 * len(ranks) >= len(members):
            surface = surface_of(first, mesh)
            return GroundTruth(first.manifestation, members, Scope.PROCESS_GROUP, surface, first.steps)
    on_host = Counter(mesh.host_of(rank) for rank in ranks)
    together = None not in on_host and all(count > 1 for count in on_host.values())
    scope = Scope.MACHINE if together else Scope.RANK
    return GroundTruth(first.manifestation, ranks, scope, surface_of(first, mesh), first.steps)


def _slow(faults: Sequence[Fault], mesh: Mesh) -> list[GroundTruth]:
    """One finding for each slow rank; one for the job if all are slow."""
    first, peers = faults[0], peers_of(faults[0], mesh)
    surfaces = {
        rank: min(surface_of(each, mesh) for each in faults if each.rank == rank) for rank in _ranks(faults)
    }
    if len(surfaces) == len(mesh):
        return [GroundTruth(first.manifestation, (), Scope.JOB, min(surfaces.values()), first.steps)]
    if not peers.can_attribute:
        surface = min(surfaces.values())
        return [GroundTruth(first.manifestation, peers.ranks, Scope.PEER_GROUP, surface, first.steps)]
    return [
        GroundTruth(first.manifestation, (rank,), Scope.RANK, surface, first.steps)
        for rank, surface in surfaces.items()
    ]


def _slow_groups(faults: Sequence[Fault], mesh: Mesh) -> list[GroundTruth]:
    """What the slow process groups have in common, if all other groups are measured and normal."""
    first = faults[0]
    slow = list(dict.fromkeys(group for fault in faults for group in _slow_with(fault, mesh)))
    rivals = {group: _corresponding(group, mesh) for group in slow}
    if all(len(each) >= 3 for each in rivals.values()):
        measured = [group for axis in AXES for group in _groups(axis, mesh)]
        findings = localize(mesh, slow, [each for each in measured if len(_corresponding(each, mesh)) >= 3])
    else:
        findings = tuple(undecided(mesh, rivals[group]) for group in slow)
    surfaces = {surface_of(fault, mesh) for fault in faults}
    surface = surfaces.pop() if len(surfaces) == 1 else "time/*"
    return [
        GroundTruth(first.manifestation, each.ranks, each.scope, surface, first.steps) for each in findings
    ]


def _slow_with(fault: Fault, mesh: Mesh) -> list[Group]:
    """The groups in which other ranks wait for this one."""
    group = _group(fault, mesh)
    parts = [Group(group.axis, ranks) for ranks in _timed_together(group.axis, group.ranks)]
    return [part for part in parts if fault.rank in part.ranks]


def _group(fault: Fault, mesh: Mesh) -> Group:
    axis = axis_of(fault, mesh)
    return Group(axis, mesh.ranks_along(axis, fault.rank))


def _groups(axis: str, mesh: Mesh) -> list[Group]:
    groups = [group for ranks in mesh.groups_along(axis) for group in _timed_together(axis, ranks)]
    return [Group(axis, ranks) for ranks in groups if len(ranks) > 1]


def _timed_together(axis: str, ranks: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
    """A pipeline stage sends to its neighbours, and each pair of stages is timed."""
    return list(pairwise(ranks)) if axis == "pipeline" else [ranks]


def _corresponding(group: Group, mesh: Mesh) -> list[Group]:
    """The groups of the same size and placement on machines, including this one."""
    return [each for each in _groups(group.axis, mesh) if _placed(each, mesh) == _placed(group, mesh)]


def _placed(group: Group, mesh: Mesh) -> list[int]:
    return sorted(Counter(map(mesh.host_of, group.ranks)).values())


def peers_of(fault: Fault, mesh: Mesh) -> PeerGroup:
    """The ranks that are compared: those that hold the same state, or compute the same layer."""
    role = fault.shown.role
    if fault.place.kind in (SiteKind.PASS, SiteKind.GRADIENT):
        return mesh.layer_peers_of(fault.rank, role)
    if fault.place.kind is SiteKind.PHASE:
        return mesh.peers_of(fault.rank, LayerKind.DENSE)  # batches belong to data-parallel ranks
    return mesh.peers_of(fault.rank, role)


def _ranks(faults: Sequence[Fault]) -> tuple[int, ...]:
    return tuple(sorted({fault.rank for fault in faults}))


def _with_expectations(shown: Shown, truth: GroundTruth) -> GroundTruth:
    return replace(
        truth,
        scope=truth.scope if shown.scope is None else shown.scope,
        ranks=truth.ranks if shown.ranks is None else shown.ranks,
    )
