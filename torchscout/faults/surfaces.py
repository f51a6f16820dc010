"""On which surface a fault shows first, in the words of the detectors (paper, sections 5 to 7).

A module is taken for the layer that replay calls; what is inside of one, a plan must say by ``showing``.
"""

from __future__ import annotations

import signal

from torchscout.decision.record import Manifestation, Surface
from torchscout.evidence.replay.at_rest import AT_REST
from torchscout.faults.call_effects import CallEffect, Skip, Swap
from torchscout.faults.place import BACKWARD, Kind, Place
from torchscout.faults.planned import Fault
from torchscout.faults.process_effects import Signal
from torchscout.mesh import AXES, Axis, Mesh

__all__ = ["axis_of", "surface_of"]


def surface_of(fault: Fault, mesh: Mesh) -> Surface:
    """As an incident gives it; ``*`` stands for what only the job knows."""
    if fault.shown.surface is not None:
        return fault.shown.surface
    if fault.manifestation is Manifestation.HANG:
        return _surface_of_hang(fault)
    if fault.manifestation is Manifestation.STRAGGLER:
        return _surface_of_time(fault.place, fault, mesh)
    return _surface_of_number(fault.place, mesh)


def _surface_of_hang(fault: Fault) -> Surface:
    if fault.effect == Signal(signal.SIGKILL):
        return "process|issued/*|entered/*"  # it is seen to be gone before others wait for it, or after
    if fault.place.kind is not Kind.COLLECTIVE:
        return "issued/*|entered/*"  # the latter where devices enter operations
    group = fault.place.slot if fault.place.slot not in ("", "undefined") else "*"
    if isinstance(fault.effect, Skip | Swap):
        return f"deadlock|fingerprint/{group}"  # the latter where its next collective is on the same group
    if isinstance(fault.effect, CallEffect):
        return f"fingerprint/{group}"
    return f"issued/{group}|entered/{group}"


def _surface_of_time(place: Place, fault: Fault, mesh: Mesh) -> Surface:
    if place.kind is Kind.COLLECTIVE:
        axis = axis_of(fault, mesh)
        # Of embeddings, layers and outputs, forward and backward; those that gather and reduce a layer's
        # state are told from the ones it makes itself.
        return f"time/*{place.name}*" if axis in ("replica", "shard") else f"time/*{place.name}*@{axis}"
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
        if place.slot == "grad":
            raise ValueError(
                f"a wrong gradient of {place.tensor} shows on no surface: only its owner has that shard of it"
            )
        return AT_REST if place.slot else "optimizer/update"
    slot = "" if place.slot in ("", "grad") else f".{place.slot}"  # a wrong gradient leaves a wrong weight
    return f"{module}/{place.name}{slot}"


def axis_of(fault: Fault, mesh: Mesh) -> str:
    """The axis of the mesh along which the process group of a collective lies."""
    if fault.axis is not None:
        return fault.axis
    everybody = tuple(range(len(mesh)))
    along = [axis for axis in AXES if mesh.ranks_along(axis, 0) == everybody]
    if fault.place.slot != "default_pg" or not along:
        raise ValueError(
            f"along which axis of the mesh the process group of {fault.at!r} lies is not known; "
            f"say it by axis, one of {', '.join(AXES)}"
        )
    return along[0]
