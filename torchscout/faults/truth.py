"""What is really wrong, in the words of a detector that makes no mistakes (paper, sections 4, 5 and 7).

How precisely evidence can point depends on the mesh: of two peers nobody can say which one is right, a slow
collective belongs to its process group, and who holds others up is named in a group of any size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchscout.decision.cross_group import scope_of
from torchscout.decision.localization import Group, localize, undecided
from torchscout.decision.record import Incident, Manifestation, Scope, Surface
from torchscout.faults.place import BACKWARD, Kind, Place
from torchscout.mesh import AXES, Axis, Mesh, PeerGroup, Role

if TYPE_CHECKING:
    from torchscout.faults.fault import Fault

__all__ = ["Shown", "Truth", "truths"]


@dataclass(frozen=True, slots=True)
class Truth:
    """One finding that a run with these faults must have."""

    manifestation: Manifestation
    ranks: tuple[int, ...]
    """Who is named; for a group scope all its members."""
    scope: Scope
    surface: Surface
    """As an incident gives it. ``*`` stands for what only the job knows: ``issued/*`` is whatever process
    group the others wait in."""
    steps: range
    """Those in which it may happen."""

    def is_told_by(self, incident: Incident) -> bool:
        """Whether an incident says this, and nothing else."""
        told = (incident.manifestation, incident.ranks, incident.scope)
        wanted = (self.manifestation, self.ranks, self.scope)
        return told == wanted and fnmatchcase(incident.records[0].surface, self.surface)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the plan's author knows of the finding, where it does not follow from the fault alone."""

    surface: Surface | None = None
    scope: Scope | None = None
    ranks: tuple[int, ...] | None = None
    role: Role | None = None
    """Whose peers vote, where experts are carved out of data parallelism."""


def truths(faults: Iterable[Fault], mesh: Mesh) -> tuple[Truth, ...]:
    """The findings of faults that happen in one job, each once: what happens together is told together."""
    together: dict[Hashable, list[Fault]] = defaultdict(list)
    for fault in faults:
        together[_occasion(fault, mesh)].append(fault)
    return tuple(
        _stated(fault.shown, truth)
        for each in together.values()
        for fault, truth in ((each[0], found) for found in _found(each, mesh))
    )


def _occasion(fault: Fault, mesh: Mesh) -> Hashable:
    """Faults with the same one make one finding."""
    kind, common = fault.place.kind, (fault.manifestation, fault.steps)
    if fault.manifestation is Manifestation.SDC:
        return *common, surface_of(fault, mesh), _peers(fault, mesh).ranks
    if kind is Kind.COLLECTIVE:
        return *common, kind, fault.place.slot if fault.manifestation is Manifestation.HANG else ""
    if fault.manifestation is Manifestation.STRAGGLER:
        return *common, kind, _peers(fault, mesh).ranks
    return common


def _found(faults: Sequence[Fault], mesh: Mesh) -> list[Truth]:
    if faults[0].manifestation is Manifestation.SDC:
        return [_wrong(faults, mesh)]
    if faults[0].manifestation is Manifestation.HANG:
        return [_late(faults, mesh)]
    return _slow_groups(faults, mesh) if faults[0].place.kind is Kind.COLLECTIVE else _slow(faults, mesh)


def _wrong(faults: Sequence[Fault], mesh: Mesh) -> Truth:
    """A strict majority shows who is wrong."""
    first, peers = faults[0], _peers(faults[0], mesh).ranks
    ranks = _ranks(faults)
    if 2 * len(ranks) >= len(peers):
        scope, ranks = Scope.PEER_GROUP, peers
    else:
        hosts = {mesh.host_of(rank) for rank in ranks}
        scope = Scope.MACHINE if len(ranks) > 1 and len(hosts) == 1 and None not in hosts else Scope.RANK
    return Truth(first.manifestation, ranks, scope, surface_of(first, mesh), first.steps)


def _late(faults: Sequence[Fault], mesh: Mesh) -> Truth:
    """Who is waited for and does not wait is the source: evidence that needs no vote."""
    ranks, first = _ranks(faults), faults[0]
    on_host = Counter(mesh.host_of(rank) for rank in ranks)
    together = None not in on_host and all(count > 1 for count in on_host.values())
    scope = Scope.MACHINE if together else Scope.RANK
    return Truth(first.manifestation, ranks, scope, surface_of(first, mesh), first.steps)


def _slow(faults: Sequence[Fault], mesh: Mesh) -> list[Truth]:
    """Each slow rank by itself; where all are equally slow it is the job."""
    first, peers = faults[0], _peers(faults[0], mesh)
    surfaces = {
        rank: min(surface_of(each, mesh) for each in faults if each.rank == rank) for rank in _ranks(faults)
    }
    if len(surfaces) == len(mesh):
        return [Truth(first.manifestation, (), Scope.JOB, min(surfaces.values()), first.steps)]
    if not peers.can_attribute:
        surface = min(surfaces.values())
        return [Truth(first.manifestation, peers.ranks, Scope.PEER_GROUP, surface, first.steps)]
    return [
        Truth(first.manifestation, (rank,), Scope.RANK, surface, first.steps)
        for rank, surface in surfaces.items()
    ]


def _slow_groups(faults: Sequence[Fault], mesh: Mesh) -> list[Truth]:
    """What the slow process groups have in common, all others being measured and normal."""
    first = faults[0]
    slow = list(dict.fromkeys(_group(fault, mesh) for fault in faults))
    rivals = {group: _corresponding(group, mesh) for group in slow}
    if all(len(each) >= 3 for each in rivals.values()):
        measured = [group for axis in AXES for group in _groups(axis, mesh)]
        findings = localize(mesh, slow, [each for each in measured if len(_corresponding(each, mesh)) >= 3])
    else:
        findings = tuple(undecided(mesh, rivals[group]) for group in slow)
    return [
        Truth(first.manifestation, each.ranks, scope_of(each), surface_of(first, mesh), first.steps)
        for each in findings
    ]


def _group(fault: Fault, mesh: Mesh) -> Group:
    axis = _axis(fault, mesh)
    return Group(axis, mesh.ranks_along(axis, fault.rank))


def _groups(axis: str, mesh: Mesh) -> list[Group]:
    groups = [] if axis == "pipeline" else mesh.groups_along(axis)  # transfers have no group's time
    return [Group(axis, ranks) for ranks in groups if len(ranks) > 1]


def _corresponding(group: Group, mesh: Mesh) -> list[Group]:
    """Groups that are alike in size and in how they lie on machines, itself among them."""
    return [each for each in _groups(group.axis, mesh) if _placed(each, mesh) == _placed(group, mesh)]


def _placed(group: Group, mesh: Mesh) -> list[int]:
    return sorted(Counter(map(mesh.host_of, group.ranks)).values())


def _axis(fault: Fault, mesh: Mesh) -> str:
    if fault.axis is not None:
        return fault.axis
    everybody = tuple(range(len(mesh)))
    along = [axis for axis in AXES if mesh.ranks_along(axis, 0) == everybody]
    if fault.place.slot != "default_pg" or not along:
        raise ValueError(
            f"along which axis of the mesh the process group of {fault.at!r} lies is not known; "
            f"say it with slow_collective(axis=...), one of {', '.join(AXES)}"
        )
    return along[0]


def _peers(fault: Fault, mesh: Mesh) -> PeerGroup:
    """Who is compared: holders of the same state, or whoever computes the same layer."""
    role = fault.shown.role
    if fault.place.kind in (Kind.PASS, Kind.GRADIENT):
        return mesh.layer_peers_of(fault.rank, role)
    if fault.place.kind is Kind.PHASE:
        return mesh.peers_of(fault.rank, Role.DENSE)  # batches belong to data-parallel ranks
    return mesh.peers_of(fault.rank, role)


def _ranks(faults: Sequence[Fault]) -> tuple[int, ...]:
    return tuple(sorted({fault.rank for fault in faults}))


def _stated(shown: Shown, truth: Truth) -> Truth:
    return replace(
        truth,
        scope=truth.scope if shown.scope is None else shown.scope,
        ranks=truth.ranks if shown.ranks is None else shown.ranks,
    )


def surface_of(fault: Fault, mesh: Mesh) -> Surface:
    """Where it shows first; a module is taken for the layer that replay calls."""
    if fault.shown.surface is not None:
        return fault.shown.surface
    if fault.manifestation is Manifestation.HANG:
        return "issued/*"
    if fault.manifestation is Manifestation.STRAGGLER:
        return _surface_of_time(fault.place, fault, mesh)
    return _surface_of_number(fault.place, mesh)


def _surface_of_time(place: Place, fault: Fault, mesh: Mesh) -> Surface:
    if place.kind is Kind.COLLECTIVE:
        axis = _axis(fault, mesh)
        # Those that gather and reduce a layer's state are told from the ones it makes itself.
        return f"time/{place.name}" if axis in ("replica", "shard") else f"time/{place.name}@{axis}"
    if place.kind is Kind.PHASE:
        return f"time/{place.name}"
    if place.kind is Kind.PASS:
        return "time/module_backward" if place.name in BACKWARD else "time/module"
    raise ValueError(f"a delay at {fault.at!r} shows on no surface: nothing times that place by itself")


def _surface_of_number(place: Place, mesh: Mesh) -> Surface:
    module = place.module or "model"
    if place.kind is Kind.COLLECTIVE:
        return {"all_gather": "*/parameters", "broadcast": "*/input"}.get(place.name, "*")
    if place.kind is Kind.PASS:
        seen = {"input": "output", "forward": "output"}
        return f"{module}/{seen.get(place.name, 'grad_input' if place.name in BACKWARD else place.name)}"
    if place.kind is Kind.GRADIENT:
        return f"{module}/{place.name}.grad"
    if mesh.peer_axis() is Axis.SHARD:  # nobody has a second copy: the owner's own evidence
        return "state/at_rest" if place.slot not in ("", "grad") else "optimizer/update"
    slot = "" if place.slot in ("", "grad") else f".{place.slot}"  # a wrong gradient leaves a wrong weight
    return f"{module}/{place.name}{slot}"
