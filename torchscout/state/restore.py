"""Restores a saved state completely, or not at all (paper, section 9).

First everything is checked. Then bytes are copied into existing tensors, so that references to them stay
valid; optimizer state that does not exist yet is created.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchscout.c3.signature import differing
from torchscout.errors import CheckpointError
from torchscout.state.collect import StateParts, class_name, devices_of, walk
from torchscout.state.layout import (
    CPU,
    LIKE_PARAMETER,
    distribution_of,
    fill,
    layout_of,
    name_of,
    placement_from_json,
    why_not_bytes,
)
from torchscout.utils._torch import local_of
from torchscout.utils.text import listed

__all__ = ["Restored", "random_state_mismatch", "require_as_saved", "restore", "restore_random_state"]

_MOST_REASONS = 8
_COMPARED = {
    "shape": "global shape",
    "mesh": "mesh",
    "axes": "mesh axes",
    "coordinate": "mesh coordinate",
    "placements": "placements",
}
"""What must be the same of a DTensor's distribution, with its title."""


class Restored(NamedTuple):
    """A tensor of a model or of an optimizer that was restored."""

    name: str
    tensor: torch.Tensor
    """This rank's part of it."""
    saved: torch.Tensor


def restore(parts: StateParts, tree: Any) -> list[Restored]:
    """Restore the state that ``collect`` returned, including the optimizers' settings.

    Raises ``CheckpointError`` if it does not fit, and then changes nothing. If a registered object raises,
    those before it are set back.
    """
    if not isinstance(tree, dict) or tree.get("schema") != 1:
        raise CheckpointError("this is not a rank's state, or is one of another version of torchscout")
    plan = _Plan(parts, tree["layouts"])
    plan.add_tensors("parameter", "parameters", {**tree["restless"], **tree["parameters"]}, parts.parameters)
    plan.add_tensors("buffer", "buffers", tree["buffers"], parts.buffers)
    plan.add_tensors("optimizer tensor", "masters", tree["masters"], parts.masters)
    plan.add_caches(tree["caches"])
    plan.add_optimizers(tree["optimizers"], tree["slots"])
    plan.add_objects(tree["registered"], tree["extra"])
    plan.refuse_if(random_state_mismatch(tree["rng"], parts.tensors))
    plan.carry_out()
    restore_random_state(tree["rng"], parts.tensors)
    return plan.restored


def require_as_saved(restored: Sequence[Restored], signatures: Mapping[int, str]) -> None:
    """Raise ``CheckpointError`` unless each tensor holds what was saved.

    ``signatures`` were recorded where it was captured, by the ``id`` of the saved tensor. So nothing between
    that device and this one has changed a bit. A tensor without one, or now on another kind of device, is
    compared with the bytes that were read.
    """
    readable = [
        each for each in restored if why_not_bytes(each.tensor) is None and not _is_freed(each.tensor)
    ]
    expected = [(signatures.get(id(each.saved)), each.saved) for each in readable]
    if wrong := differing([each.tensor for each in readable], expected):
        names = listed([readable[place].name for place in wrong], most=_MOST_REASONS)
        raise CheckpointError(f"the restored state is not what was saved: {names}")


def _is_freed(tensor: torch.Tensor) -> bool:
    return not tensor.untyped_storage().nbytes()


class _Load(NamedTuple):
    """State that only its owner can restore."""

    load: Callable[[Any], Any]
    state: Any
    before: Callable[[], Any]


class _Plan:
    """What restoring would do, and what prevents it."""

    def __init__(self, parts: StateParts, layouts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._layouts = layouts
        self._reasons: list[str] = []
        """Why not to restore."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Existing tensors, each with the saved one to copy into it."""
        self.restored: list[Restored] = []
        """All tensors that are copied or made."""
        self._replaced: dict[int, torch.Tensor] = {}
        """What takes the place of saved tensors, by their id: a shared tensor stays shared."""
        self._loads: list[_Load] = []
        self._actions: list[Callable[[], object]] = []

    def refuse_if(self, reason: str | None) -> None:
        if reason is not None:
            self._reasons.append(reason)

    def carry_out(self) -> None:
        """Do it. Raises ``CheckpointError`` if anything does not fit, before anything is changed."""
        if self._reasons:
            more = len(self._reasons) - _MOST_REASONS
            listing = "; ".join(self._reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
            raise CheckpointError(f"the checkpoint does not fit this job: {listing}")
        # First what may fail, because it is the user's code.
        with ExitStack() as undo:
            for each in self._loads:
                undo.callback(each.load, copy.deepcopy(each.before()))
                each.load(each.state)
            undo.pop_all()
        for own, saved in self._copies:
            fill(own, saved)
        for action in self._actions:
            action()

    def add_tensors(
        self, what: str, part: str, saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy into existing tensors, which must have the same names, shapes and distribution."""
        for name in self._common_names(what, saved, own):
            tensor, local = saved[name], local_of(own[name])
            title = f"{what} {name!r}"
            if tensor.dtype != local.dtype:
                self.refuse_if(f"{title} is {name_of(local.dtype)}, was {name_of(tensor.dtype)}")
            elif tensor.shape != local.shape:
                self.refuse_if(f"{title} has shape {tuple(local.shape)}, had {tuple(tensor.shape)}")
            elif why := _distribution_mismatch(self._layouts.get(f"{part}/{name!r}"), own[name]):
                self.refuse_if(f"{title} {why}")
            else:
                self._copies.append((local, tensor))
                self.restored.append(Restored(title, local, tensor))
                self._replaced[id(tensor)] = own[name]

    def add_caches(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore non-persistent buffers, also if the module has none of this name or size yet."""
        modules = dict(self._parts.model.named_modules())
        for name, tensor in saved.items():
            owner, _, last = name.rpartition(".")
            own = self._parts.caches.get(name)
            if owner not in modules:
                self.refuse_if(f"buffer {name!r} is in the checkpoint but its module is not in this job")
            elif (buffer := self._fitted(tensor, own, f"caches/{name!r}")) is not own:
                self._actions.append(partial(_register, modules[owner], last, buffer))

    def add_optimizers(self, settings: Sequence[Any], slots: Sequence[Any]) -> None:
        optimizers = self._parts.optimizers
        if len(settings) != len(optimizers):
            self.refuse_if(f"there are {len(optimizers)} optimizers, there were {len(settings)}")
            return
        for place, optimizer in enumerate(optimizers):
            own, saved = class_name(optimizer), settings[place]["class"]
            if own != saved:
                self.refuse_if(f"optimizer {place} is a {own}, was a {saved}")
                continue
            self._add_groups(place, settings[place]["groups"])
            self._add_slots(place, slots[place])

    def _add_groups(self, place: int, saved: Sequence[Any]) -> None:
        groups = self._parts.optimizers[place].param_groups
        names = [[self._parts.names[id(each)] for each in group["params"]] for group in groups]
        if names != [group["params"] for group in saved]:
            self.refuse_if(
                f"the parameter groups of optimizer {place} have different parameters, or in another order"
            )
            return
        for number, group in enumerate(groups):
            first = next(iter(group["params"]), None)
            path = f"optimizers/{place}/{number}"
            settings = self._fitted(saved[number]["settings"], group, path, first)
            self._actions.append(partial(group.update, settings))

    def _add_slots(self, place: int, saved: Mapping[str, Any]) -> None:
        optimizer, updated = self._parts.optimizers[place], self._parts.updated
        own, others = self._parts.slots(optimizer)
        state: dict[Any, Any] = {}
        for name, slots in saved["own"].items():
            if name in updated:  # otherwise there is a reason already
                path = f"slots/{place}/{name!r}"
                state[updated[name]] = self._fitted(slots, own.get(name), path, updated[name])
        state.update(self._fitted(saved["others"], others, f"slots/{place}"))
        self._actions += [optimizer.state.clear, partial(optimizer.state.update, state)]

    def add_objects(self, registered: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Restore registered objects and extra state of modules."""
        for name in self._common_names("registered state", registered, self._parts.registered):
            owner, path, state = self._parts.registered[name], f"registered/{name!r}", registered[name]
            if any(key == path or key.startswith(f"{path}/") for key in self._layouts):
                state = walk(state, path, self._rebuilt_like, owner.state_dict())
            self._loads.append(_Load(owner.load_state_dict, state, owner.state_dict))
        for name in self._common_names("extra state of module", extra, self._parts.extra):
            module = self._parts.extra[name]
            self._loads.append(_Load(module.set_extra_state, extra[name], module.get_extra_state))

    def _common_names(self, what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """The names on both sides; any other name is a reason to refuse."""
        for name in saved:
            if name not in own:
                self.refuse_if(f"{what} {name!r} is in the checkpoint but not in this job")
        for name in own:
            if name not in saved:
                self.refuse_if(f"{what} {name!r} is in this job but not in the checkpoint")
        return [name for name in saved if name in own]

    def _fitted(self, saved: Any, own: Any, path: str, parameter: torch.Tensor | None = None) -> Any:
        """The saved tree, with tensors of the tree ``own`` wherever they fit and new ones elsewhere."""

        def replaced(tensor: torch.Tensor, present: Any, place: str) -> torch.Tensor:
            if id(tensor) not in self._replaced:
                if _fits(tensor, self._layouts.get(place), present, parameter):
                    self._copies.append((local_of(present), tensor))
                    self._replaced[id(tensor)] = present
                else:
                    self._replaced[id(tensor)] = self._rebuilt(tensor, place, parameter)
                self.restored.append(Restored(place, local_of(self._replaced[id(tensor)]), tensor))
            return self._replaced[id(tensor)]

        return walk(saved, path, replaced, own)

    def _rebuilt_like(self, tensor: torch.Tensor, present: Any, path: str) -> torch.Tensor:
        """A new tensor of the saved layout, on the mesh of the present one."""
        parameter = present if isinstance(present, torch.Tensor) else None
        return self._rebuilt(tensor, path, parameter) if path in self._layouts else tensor

    def _rebuilt(self, tensor: torch.Tensor, path: str, parameter: torch.Tensor | None) -> torch.Tensor:
        try:
            return _with_layout(tensor, self._layouts.get(path) or {}, parameter)
        except CheckpointError as error:
            self.refuse_if(f"{path} {error}")
            return tensor


def _register(module: nn.Module, name: str, buffer: torch.Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = buffer
    else:
        module.register_buffer(name, buffer, persistent=False)


def _distribution_mismatch(layout: Any, tensor: torch.Tensor) -> str | None:
    """How an existing tensor's distribution differs from the saved one; None if it does not."""
    saved = (layout or {}).get("whole")
    own = distribution_of(tensor) if isinstance(tensor, DTensor) else None
    if saved == own:
        return None
    if saved is None:
        return "was a plain tensor and is a DTensor"
    if own is None:
        return "was a DTensor and is a plain tensor"
    return "; ".join(
        f"has {title} {own[key]}, had {saved.get(key)}"
        for key, title in _COMPARED.items()
        if own[key] != saved.get(key)
    )


def _fits(saved: torch.Tensor, layout: Any, tensor: Any, parameter: torch.Tensor | None) -> bool:
    """Whether the saved bytes can be copied into an existing tensor, because its layout is the same."""
    if not isinstance(tensor, torch.Tensor):
        return False
    local, home = local_of(tensor), CPU if parameter is None else parameter.device
    own = (local.dtype, local.shape, layout_of(tensor, home, parameter))
    return own == (saved.dtype, saved.shape, layout)


def _with_layout(
    saved: torch.Tensor, layout: Mapping[str, Any], parameter: torch.Tensor | None
) -> torch.Tensor:
    """A new tensor with these bytes and the saved layout; ``parameter`` determines device and mesh.

    Raises ``CheckpointError`` if there is no such mesh.
    """
    home = CPU if parameter is None else parameter.device
    device = torch.device(layout["device"]) if "device" in layout else home
    local = _strided(saved, layout.get("strides"), device)
    if (distribution := layout.get("whole")) is None:
        return local
    if not isinstance(parameter, DTensor):
        raise CheckpointError("was a DTensor, but its parameter is not")
    own = distribution_of(parameter)
    if distribution == LIKE_PARAMETER:
        distribution = own
    if any(distribution[key] != own[key] for key in ("mesh", "axes", "coordinate")):
        raise CheckpointError(
            f"was on a mesh of {distribution['mesh']}, its parameter is on one of {own['mesh']}"
        )
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        [placement_from_json(each) for each in distribution["placements"]],
        run_check=False,
        shape=torch.Size(distribution["shape"]),
        stride=tuple(distribution["stride"]),
    )


def _strided(saved: torch.Tensor, strides: Sequence[int] | None, device: torch.device) -> torch.Tensor:
    """A copy with these strides; expanded dimensions are expanded again."""
    strides = saved.stride() if strides is None else strides
    sizes = [size if step else 1 for size, step in zip(saved.shape, strides, strict=True)]
    made = torch.empty_strided(sizes, strides, dtype=saved.dtype, device=device)
    # Elements that share memory, as in a sliding window, have the same bits.
    fill(made, saved[tuple(map(slice, sizes))])
    return made.expand(saved.shape) if 0 in strides else made


def random_state_mismatch(saved: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> str | None:
    """Why this random state cannot be restored here; None if it can."""
    devices = {kind: len(states) for kind, states in saved["devices"].items()}
    own = {kind: len(indices) for kind, indices in devices_of(tensors).items()}
    if devices == own:
        return None
    return f"random state was saved for devices {devices or 'none'}, but there are {own or 'none'}"


def restore_random_state(saved: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(saved["torch"])
    for kind, indices in devices_of(tensors).items():
        for index, state in zip(indices, saved["devices"][kind], strict=True):
            torch.get_device_module(kind).set_rng_state(state, index)
    np.random.set_state(saved["numpy"])
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
