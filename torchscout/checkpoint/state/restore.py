"""Restores a saved state completely, or not at all (paper, section 9).

First everything is checked. Then bytes are copied into existing tensors, so that references to them stay
valid; optimizer state that does not exist yet is created.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchscout.checkpoint.state import random_state
from torchscout.checkpoint.state.tensor_layout import difference, fits, local_of, rebuilt
from torchscout.checkpoint.state.training_state import StateParts, title_of, walk
from torchscout.checkpoint.storage.encoding import fill, name_of
from torchscout.errors import CheckpointError

__all__ = ["restore"]

_MAX_OBJECTIONS = 8


def restore(parts: StateParts, tree: Any) -> None:
    """Restore the state that ``collect`` returned, including the optimizers' settings.

    Raises ``CheckpointError`` if it does not fit, and then changes nothing. If a registered object raises,
    those before it are set back.
    """
    if not isinstance(tree, dict) or tree.get("schema") != 1:
        raise CheckpointError("this is not a rank's state, or is one of another version of torchscout")
    plan = _Plan(tree["layouts"])
    _plan_model(plan, parts, tree)
    _plan_optimizers(plan, parts, tree)
    _plan_objects(plan, parts, tree)
    plan.objection(random_state.difference(tree["rng"], parts.tensors))
    plan.refuse()
    plan.carry_out()
    random_state.restore(tree["rng"], parts.tensors)


class _Load(NamedTuple):
    """State that only its owner can restore."""

    load: Callable[[Any], Any]
    state: Any
    before: Callable[[], Any]


class _Plan:
    """What restoring would do, and what prevents it."""

    def __init__(self, layouts: Mapping[str, Any]) -> None:
        self.layouts = layouts
        self._objections: list[str] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._known: dict[int, torch.Tensor] = {}
        self.loads: list[_Load] = []
        self.actions: list[Callable[[], object]] = []

    def objection(self, text: str | None) -> None:
        if text is not None:
            self._objections.append(text)

    def names(self, what: str, kept: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
        """The names on both sides; any other name is an objection."""
        for name in kept:
            if name not in here:
                self.objection(f"{what} {name!r} is in the checkpoint but not in this job")
        for name in here:
            if name not in kept:
                self.objection(f"{what} {name!r} is in this job but not in the checkpoint")
        return [name for name in kept if name in here]

    def fill(self, what: str, path: str, kept: torch.Tensor, here: torch.Tensor) -> None:
        """Plan to copy ``kept`` into an existing tensor."""
        local = local_of(here)
        if kept.dtype != local.dtype:
            self.objection(f"{what} is {name_of(local.dtype)}, was {name_of(kept.dtype)}")
        elif kept.shape != local.shape:
            self.objection(f"{what} has shape {tuple(local.shape)}, had {tuple(kept.shape)}")
        elif why := difference(self.layouts.get(path), here):
            self.objection(f"{what} {why}")
        else:
            self._copies.append((local, kept))
            self._known[id(kept)] = here

    def put_into(self, kept: Any, here: Any, path: str, parameter: torch.Tensor | None = None) -> Any:
        """The saved tree, with tensors of ``here`` wherever they fit and new ones elsewhere."""

        def exchange(tensor: torch.Tensor, own: Any, place: str) -> torch.Tensor:
            if id(tensor) not in self._known:  # a shared tensor stays shared
                self._known[id(tensor)] = self._place(tensor, own, place, parameter)
            return self._known[id(tensor)]

        return walk(kept, path, exchange, here)

    def made_as(self, kept: Any, here: Any, path: str) -> Any:
        """The saved tree with new tensors of the saved layout; ``here`` has their meshes."""

        def exchange(tensor: torch.Tensor, own: Any, place: str) -> torch.Tensor:
            known = own if isinstance(own, torch.Tensor) else None
            return tensor if place not in self.layouts else self._rebuild(tensor, place, known)

        return walk(kept, path, exchange, here)

    def _place(
        self, kept: torch.Tensor, here: Any, path: str, parameter: torch.Tensor | None
    ) -> torch.Tensor:
        layout = self.layouts.get(path)
        if fits(kept, layout, here, parameter):
            self._copies.append((local_of(here), kept))
            tensor: torch.Tensor = here
            return tensor
        return self._rebuild(kept, path, parameter)

    def _rebuild(self, kept: torch.Tensor, path: str, parameter: torch.Tensor | None) -> torch.Tensor:
        try:
            return rebuilt(kept, self.layouts.get(path), parameter)
        except CheckpointError as error:
            self.objection(f"{path} {error}")
            return kept

    def refuse(self) -> None:
        if self._objections:
            more = len(self._objections) - _MAX_OBJECTIONS
            listed = "; ".join(self._objections[:_MAX_OBJECTIONS]) + (
                f"; and {more} more" if more > 0 else ""
            )
            raise CheckpointError(f"the checkpoint does not fit this job: {listed}")

    def carry_out(self) -> None:
        # First what may fail, because it is the user's code.
        _load_all(self.loads)
        for here, kept in self._copies:
            fill(here, kept)
        for action in self.actions:
            action()


def _load_all(loads: Sequence[_Load]) -> None:
    before: list[tuple[_Load, Any]] = []
    try:
        for each in loads:
            before.append((each, copy.deepcopy(each.before())))
            each.load(each.state)
        before = []
    finally:
        for each, state in reversed(before):
            each.load(state)


def _plan_model(plan: _Plan, parts: StateParts, tree: Mapping[str, Any]) -> None:
    kinds = (
        ("parameter", "parameters", {**tree["restless"], **tree["parameters"]}, parts.parameters),
        ("buffer", "buffers", tree["buffers"], parts.buffers),
        ("optimizer tensor", "masters", tree["masters"], parts.masters),
    )
    for what, part, kept, here in kinds:
        for name in plan.names(what, kept, here):
            plan.fill(f"{what} {name!r}", f"{part}/{name!r}", kept[name], here[name])
    modules = dict(parts.model.named_modules())
    for name, kept in tree["caches"].items():
        owner, _, last = name.rpartition(".")
        if owner not in modules:
            plan.objection(f"buffer {name!r} is in the checkpoint but its module is not in this job")
            continue
        # A module may create or enlarge such a buffer later: then it gets the saved one.
        buffer = plan.put_into(kept, parts.caches.get(name), f"caches/{name!r}")
        if buffer is not parts.caches.get(name):
            plan.actions.append(partial(_register, modules[owner], last, buffer))


def _register(module: nn.Module, name: str, buffer: torch.Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = buffer
    else:
        module.register_buffer(name, buffer, persistent=False)


def _plan_optimizers(plan: _Plan, parts: StateParts, tree: Mapping[str, Any]) -> None:
    if len(tree["optimizers"]) != len(parts.optimizers):
        plan.objection(f"there are {len(parts.optimizers)} optimizers, there were {len(tree['optimizers'])}")
        return
    kept = zip(parts.optimizers, tree["optimizers"], tree["slots"], strict=True)
    for place, (optimizer, settings, slots) in enumerate(kept):
        if title_of(optimizer) != settings["class"]:
            plan.objection(f"optimizer {place} is a {title_of(optimizer)}, was a {settings['class']}")
            continue
        _plan_groups(plan, parts, optimizer, settings["groups"], place)
        _plan_slots(plan, parts, optimizer, slots, place)


def _plan_groups(
    plan: _Plan, parts: StateParts, optimizer: torch.optim.Optimizer, kept: Sequence[Any], place: int
) -> None:
    here = [[parts.names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    if here != [group["params"] for group in kept]:
        plan.objection(
            f"the parameter groups of optimizer {place} have different parameters, or in another order"
        )
        return
    for number, (group, own) in enumerate(zip(kept, optimizer.param_groups, strict=True)):
        first = next(iter(own["params"]), None)
        settings = plan.put_into(group["settings"], own, f"optimizers/{place}/{number}", first)
        plan.actions.append(partial(own.update, settings))


def _plan_slots(
    plan: _Plan, parts: StateParts, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], place: int
) -> None:
    updated, own = parts.updated, parts.slots(optimizer)
    state: dict[Any, Any] = {}
    for name, slots in kept["own"].items():
        if name in updated:  # otherwise it is an objection already
            parameter = updated[name]
            state[parameter] = plan.put_into(slots, own[0].get(name), f"slots/{place}/{name!r}", parameter)
    state.update(plan.put_into(kept["others"], own[1], f"slots/{place}"))
    plan.actions += [optimizer.state.clear, partial(optimizer.state.update, state)]


def _plan_objects(plan: _Plan, parts: StateParts, tree: Mapping[str, Any]) -> None:
    for name in plan.names("registered state", tree["registered"], parts.registered):
        each, path = parts.registered[name], f"registered/{name!r}"
        kept = tree["registered"][name]
        if any(key == path or key.startswith(f"{path}/") for key in plan.layouts):
            kept = plan.made_as(kept, each.state_dict(), path)
        plan.loads.append(_Load(each.load_state_dict, kept, each.state_dict))
    for name in plan.names("extra state of module", tree["extra"], parts.extra):
        module = parts.extra[name]
        plan.loads.append(_Load(module.set_extra_state, tree["extra"][name], module.get_extra_state))
