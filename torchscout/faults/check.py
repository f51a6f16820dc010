"""Refuses a plan that cannot be carried out, or that nobody could see, before anything starts.

Each refusal names the fault and what there is instead. What a model looks like on other ranks, as in a
pipeline, is not known here: there each rank checks its own faults, ``faults.of(rank)``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchscout.decision.record import Manifestation
from torchscout.evidence.call import POINT_TO_POINT, operators
from torchscout.faults.call_effects import CallEffect
from torchscout.faults.place import FIRST, Kind, Place
from torchscout.faults.process_effects import StayInside
from torchscout.faults.surfaces import surface_of
from torchscout.faults.tensor_effects import TensorEffect
from torchscout.faults.truth import peers_of
from torchscout.mesh import Mesh

if TYPE_CHECKING:
    from torchscout.faults.planned import Fault

__all__ = ["check", "module_at", "tensor_at"]

_MOMENTS = ("forward", "backward")
_TIMED = (Kind.PASS, Kind.PHASE, Kind.COLLECTIVE)
_HANGS = ("issued/", "fingerprint/", "digest/", "splits/", "deadlock", "process")
_Named = TypeVar("_Named")


def check(faults: Iterable[Fault], mesh: Mesh | int, model: nn.Module) -> None:
    """A ``ValueError`` for the first fault that is impossible in a job like this."""
    size = mesh if isinstance(mesh, int) else len(mesh)
    for fault in faults:
        if fault.rank >= size:
            raise ValueError(f"{_said(fault)}: the job has ranks 0 to {size - 1}")
        _check_effect(fault)
        _check_place(fault, model)
        _check_surface(fault)
        if isinstance(mesh, Mesh):
            _check_visibility(fault, mesh)


def module_at(place: Place, model: nn.Module) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return _named(place.module, modules, "module")


def tensor_at(place: Place, model: nn.Module) -> torch.Tensor:
    """The parameter, or the buffer."""
    known: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return _named(place.tensor, known, "parameter")


def _check_effect(fault: Fault) -> None:
    """Whether such a thing can happen at such a place."""
    kind, name = fault.place.kind, fault.place.name
    if isinstance(fault.effect, TensorEffect):
        if kind in (Kind.STEP, Kind.PHASE) or (kind is Kind.PASS and name in _MOMENTS):
            raise ValueError(f"{_said(fault)}: there is no tensor at a moment; say which of its tensors")
        if kind is Kind.COLLECTIVE and name in POINT_TO_POINT:
            # Gloo's receives can be waited for once, and their caller does so.
            raise ValueError(f"{_said(fault)}: what one rank sends another cannot be made wrong")
    elif isinstance(fault.effect, CallEffect | StayInside):
        if kind is not Kind.COLLECTIVE:
            raise ValueError(f"{_said(fault)}: this happens to a collective, such as all_reduce@GROUP")
    elif fault.manifestation is Manifestation.STRAGGLER and kind not in _TIMED:
        raise ValueError(
            f"{_said(fault)}: shows on no surface, since nothing times that place by itself; "
            "delay MODULE/forward, MODULE/backward, a collective, input or checkpoint_write"
        )


def _check_place(fault: Fault, model: nn.Module) -> None:
    """Whether the model has it, and the effect fits what is there."""
    place = fault.place
    if place.kind is Kind.COLLECTIVE:
        known = {operator.operation: None for operator in operators()}
        _named(place.name, known, "collective", owner="PyTorch")
    elif place.kind is Kind.PASS:
        module_at(place, model)
    elif place.kind in (Kind.GRADIENT, Kind.STATE):
        tensor = tensor_at(place, model)
        has_its_shape = place.slot in ("", "grad", "gradient")
        is_here = not isinstance(tensor, DTensor) and not tensor.is_meta
        if has_its_shape and is_here and isinstance(fault.effect, TensorEffect):
            try:
                fault.effect.corrupt(tensor.detach().clone())
            except ValueError as error:
                raise ValueError(f"{_said(fault)}: {error}") from error


def _check_surface(fault: Fault) -> None:
    """Whether what the plan expects is what a detector of this kind of failure reports."""
    surfaces = fault.shown.surface.split("|") if fault.shown.surface is not None else []
    for surface in surfaces:
        fits = {
            Manifestation.STRAGGLER: surface.startswith("time/"),
            Manifestation.HANG: surface.startswith(_HANGS),
            Manifestation.SDC: "/" in surface and not surface.startswith(("time/", *_HANGS)),
        }[fault.manifestation]
        if not fits:
            raise ValueError(f"{_said(fault)}: no {fault.manifestation.value} shows on {surface!r}")


def _check_visibility(fault: Fault, mesh: Mesh) -> None:
    surface_of(fault, mesh)
    is_causal = fault.manifestation is Manifestation.HANG or fault.place.kind is Kind.COLLECTIVE
    if not is_causal and not peers_of(fault, mesh).can_compare:
        raise ValueError(f"{_said(fault)}: rank {fault.rank} has no peer to be compared with in this mesh")
    is_computed = fault.manifestation is Manifestation.SDC and fault.place.kind in (Kind.PASS, Kind.GRADIENT)
    if is_computed and fault.calls == FIRST:
        raise ValueError(
            f"{_said(fault)}: hits training's own pass alone, and nothing is left that replicas disagree "
            "about; calls=range(1, 200) are those of replay, None are all"
        )


def _said(fault: Fault) -> str:
    return f"{fault.effect} on rank {fault.rank} at {fault.at!r}"


def _named(name: str, known: Mapping[str, _Named], kind: str, owner: str = "the model") -> _Named:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:3]
        raise ValueError(f"{owner} has no {kind} {name!r}; there is {', '.join(map(repr, near))}")
    return known[name]
