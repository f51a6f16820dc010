"""Takes this rank's state out of the state of a whole job, for a layout of its own (paper, section 9).

The result is what ``state.collect.collect`` would have returned in this layout, so that
``state.restore.restore`` checks and restores it as it does after a restart in the same layout.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchscout.checkpoint.reshard.parts import parts_of, whole_part
from torchscout.checkpoint.reshard.reader import ReadPart, assembled
from torchscout.checkpoint.reshard.whole_state import WholeState, WholeTensor, public_name
from torchscout.errors import CheckpointError
from torchscout.state.collect import (
    SCOUT_PREFIX,
    StateParts,
    class_name,
    is_loader,
    random_state,
    walk,
    wrappers_of,
)
from torchscout.state.layout import CPU, distribution_of, layout_of
from torchscout.state.restore import random_state_mismatch
from torchscout.utils._torch import inner_of, local_of
from torchscout.utils.text import listed

__all__ = ["LocalState", "local_state"]


@dataclass(frozen=True, slots=True)
class LocalState:
    """This rank's part, and what could not be taken over."""

    tree: dict[str, Any]
    """For ``restore``, with ``parts``."""
    parts: StateParts
    """The job's parts, without those that keep their present state."""
    restored: tuple[str, ...]
    """In words, the same on every rank of a job whose ranks register the same objects."""
    not_restored: tuple[str, ...]


def local_state(state: WholeState, parts: StateParts, read: ReadPart, world_size: int) -> LocalState:
    """This rank's part of the whole state. Raises ``CheckpointError`` if it does not fit, or is damaged."""
    return _Local(state, parts, read).build(world_size)


@dataclass
class _Local:
    state: WholeState
    parts: StateParts
    read: ReadPart
    layouts: dict[str, Any] = field(default_factory=dict)
    restored: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)

    def build(self, world_size: int) -> LocalState:
        state, parts, read = self.state, self.parts, self.read
        self._wrappers = wrappers_of(parts.model)
        for kind, here in (("parameters", parts.parameters), ("buffers", parts.buffers)):
            self._require_names(kind, here)
        tree: dict[str, Any] = {
            "schema": 1,
            "restless": {},
            "parameters": self._tensors("parameters", parts.parameters),
            "buffers": self._tensors("buffers", parts.buffers),
            "masters": self._tensors("masters", parts.masters),
            "caches": self._tensors("caches", self._known_caches()),
        }
        tree |= self._optimizers()
        values = {name: self._values(name, getattr(parts, name)) for name in ("registered", "extra")}
        # With one rank before and several now, equal random state would be a coincidence.
        is_shared = ("rng",) in state.common and (state.world_size > 1 or world_size == 1)
        rng = state.common["rng",].decoded(read) if is_shared else random_state(parts.tensors)
        is_shared = is_shared and random_state_mismatch(rng, parts.tensors) is None
        (self.restored if is_shared else self.not_restored).append("random state")
        tree |= {"rng": rng if is_shared else random_state(parts.tensors), **values}
        tree["layouts"] = self.layouts
        kept = copy.copy(parts)
        kept.registered = {
            name: each for name, each in parts.registered.items() if name in values["registered"]
        }
        kept.extra = {name: each for name, each in parts.extra.items() if name in values["extra"]}
        restored = ("parameters", "buffers", "optimizer state", *self.restored)
        return LocalState(tree, kept, restored, tuple(self.not_restored))

    def _public(self, name: str) -> str:
        return public_name(name, self._wrappers)

    def _require_names(self, kind: str, here: Mapping[str, Any]) -> None:
        known = self.state.named(kind)
        if missing := [name for name in map(self._public, here) if name not in known]:
            raise CheckpointError(
                f"{kind} {listed(map(repr, missing), most=4)} are in this job but not in the checkpoint"
            )

    def _known_caches(self) -> dict[str, torch.Tensor]:
        """Buffers that are not part of ``state_dict``, as far as they have the same shape here."""
        known = self.state.named("caches")
        found = {name: known.get(self._public(name)) for name in self.parts.caches}
        here = self.parts.caches
        return {name: here[name] for name, each in found.items() if each and each.shape == here[name].shape}

    def _tensors(self, kind: str, here: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        known = self.state.named(kind)
        found = {}
        for name, tensor in here.items():
            if (public := self._public(name)) not in known:
                raise CheckpointError(f"{kind} {name!r} is in this job but not in the checkpoint")
            home = CPU if kind == "caches" else tensor.device  # as ``collect`` has it
            if (layout := layout_of(tensor, home)) is not None:
                self.layouts[f"{kind}/{name!r}"] = layout
            found[name] = self._part(known[public], tensor)
        return found

    def _part(self, whole: WholeTensor, like: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that is distributed as ``like`` is."""
        if tuple(like.shape) != whole.shape:
            raise CheckpointError(f"{whole.title} has shape {tuple(like.shape)}, had {whole.shape}")
        target = parts_of(distribution_of(like)) if isinstance(like, DTensor) else whole_part(whole.shape)
        return assembled(whole, target, local_of(like).shape, self.read)

    def _optimizers(self) -> dict[str, Any]:
        """Settings and slots; a ``ZeroRedundancyOptimizer`` has the settings of the one that it wraps."""
        here = self.parts.optimizers
        inner = [each for each in here if inner_of(each) is None]
        if (titles := [class_name(each) for each in inner]) != self.state.classes:
            raise CheckpointError(f"the optimizers are {titles}, were {self.state.classes}")
        settings, slots = [], []
        number = -1
        for place, optimizer in enumerate(here):
            wraps = inner_of(optimizer) is not None
            number += 0 if wraps else 1
            source = number + 1 if wraps else number
            settings.append(
                {"class": class_name(optimizer), "groups": self._groups(optimizer, source, place)}
            )
            own = {} if wraps else self._slots(optimizer, source, place)
            others = None if wraps else self._copied(("others", source), f"slots/{place}")
            slots.append({"own": own, "others": others or {}})
        return {"optimizers": settings, "slots": slots}

    def _groups(self, optimizer: torch.optim.Optimizer, number: int, place: int) -> list[dict[str, Any]]:
        count = sum(key[0] == number for key in self.state.groups)
        if count != len(optimizer.param_groups):
            raise CheckpointError(
                f"optimizer {number} has {len(optimizer.param_groups)} parameter groups, had {count}"
            )
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            names = [self.parts.names[id(each)] for each in group["params"]]
            known = self.state.groups[number, index]
            if moved := [name for name in names if self._public(name) not in known]:
                raise CheckpointError(
                    f"parameters {listed(map(repr, moved), most=4)} were not in group {index} of optimizer "
                    f"{number}"
                )
            settings = self._copied(("settings", number, index), f"optimizers/{place}/{index}")
            groups.append({"params": names, "settings": settings})
        return groups

    def _slots(self, optimizer: torch.optim.Optimizer, number: int, place: int) -> dict[str, Any]:
        found = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.parts.names[id(parameter)]
                key, path = ("slots", number, self._public(name)), f"slots/{place}/{name!r}"
                if key in self.state.trees:
                    found[name] = self._copied(key, path, self.parts.updated[name])
        return found

    def _copied(self, key: tuple[Any, ...], path: str, parameter: torch.Tensor | None = None) -> Any:
        """A tree with this rank's tensors; those of a parameter's shape are distributed as it is."""
        if key not in self.state.trees:
            return None
        tensors = self.state.tensors[key]

        def exchange(_: torch.Tensor, __: Any, place: str) -> torch.Tensor:
            whole, layout = tensors[place], {}
            if whole.device is not None:
                layout["device"] = whole.device
            is_like = parameter is not None and len(whole.shape) and whole.shape == tuple(parameter.shape)
            if is_like and isinstance(parameter, DTensor):
                layout["whole"] = "parameter"
            elif whole.is_distributed and isinstance(parameter, DTensor):
                raise CheckpointError(f"{whole.title} was distributed otherwise than its parameter")
            if layout:
                self.layouts[path + place] = layout
            if is_like and parameter is not None:
                return self._part(whole, parameter)
            return assembled(whole, whole_part(whole.shape), whole.shape, self.read)

        return walk(self.state.trees[key], "", exchange)

    def _values(self, kind: str, here: Mapping[str, Any]) -> dict[str, Any]:
        """What all ranks had in common; a data loader's position depends on the number of ranks."""
        found = {}
        for name, each in here.items():
            title = f"registered state {name!r}" if kind == "registered" else f"extra state of {name!r}"
            if name.startswith(SCOUT_PREFIX):
                continue
            if (kind, name) in self.state.common and not (kind == "registered" and is_loader(each)):
                found[name] = self.state.common[kind, name].decoded(self.read)
                self.restored.append(title)
            else:
                self.not_restored.append(title)
        return found
