"""What a checkpoint holds of a rank, and putting it back (paper, sections 8 and 9).

Parameters, frozen ones too, and buffers, persistent or not; all that optimizers keep, and their settings;
random streams; what the user registered. Of distributed tensors, this rank's part. Gradients are not state:
a checkpoint is taken between an update and the next backward pass. Copying and keeping are for ``snapshot``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchscout.checkpoint import random_state, tree
from torchscout.checkpoint.holdings import Holdings, Stateful, title_of
from torchscout.checkpoint.placing import CPU, layout_of, local_of
from torchscout.checkpoint.restoring import restore
from torchscout.checkpoint.walking import walk
from torchscout.errors import CheckpointError

__all__ = [
    "OURS",
    "Note",
    "State",
    "Stateful",
    "collect",
    "expected_bytes",
    "note",
    "parameter_of",
    "refuse_what_cannot_be_kept",
    "restore",
]

OURS = "torchscout/"
"""What SCOUT itself registers is named so; its tensors never change."""
_LIVE = ("parameters/", "masters/", "slots/", f"registered/{OURS}")
_USUAL_SLOTS = 2


def parameter_of(name: str) -> tuple[str, str] | None:
    """The parameter that a tensor of this name is, or is kept for, and in the second case the slot's name.

    None of a tensor that replicas hold no copies of.
    """
    part, _, rest = name.partition("/")
    if part == "parameters":
        return rest, ""
    if part != "slots":
        return None
    _, _, parameter, *slot = [*rest.split("/"), "", ""]
    return parameter, "/".join(filter(None, slot))


@dataclass(frozen=True, slots=True)
class State:
    """A rank's state at one instant: all that is no tensor is copied, the tensors are training's own."""

    document: Any
    """What ``tree.decode`` needs, with the tensors, to give the tree that ``restore`` takes."""
    live: Mapping[str, torch.Tensor]
    """Changed by the next optimizer update at the earliest; until then they may be copied."""
    prompt: Mapping[str, torch.Tensor]
    """May change as soon as training goes on, and are to be copied before."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.prompt, **self.live}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


# [Note: where a step ends]
#
# A checkpoint lies between two steps, and a step does not end with the optimizer's update: schedulers and
# scalers are told of it after that. But a loader may have gone on to the next batch before anything of the
# next step is seen. So what a loader draws from, its position and the random streams, is noted right after
# the update, and everything else when the next step begins. Whatever can be iterated over counts as a loader.


@dataclass(frozen=True, slots=True)
class Note:
    """What is taken right after an update: see [Note: where a step ends]."""

    rng: Any
    positions: Mapping[str, Any]
    """What loaders said, by the name they are registered under."""


def note(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    registered: Mapping[str, Stateful],
    owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Note:
    held = Holdings(model, optimizers, registered, owned)
    loaders = {name: each for name, each in registered.items() if _is_loader(each)}
    return Note(
        random_state.now(held.tensors),
        {name: copy.deepcopy(each.state_dict()) for name, each in loaders.items()},
    )


def _is_loader(stateful: Stateful) -> bool:
    return hasattr(stateful, "__iter__")


def refuse_what_cannot_be_kept(name: str, stateful: Stateful) -> None:
    """Try to encode its state now; a ``ValueError`` names the place in it that a checkpoint cannot keep.

    Loaders are not asked: some of them begin to iterate when they are.
    """
    if _is_loader(stateful):
        return
    try:
        tree.encode({name: _Taken().tree(stateful.state_dict(), name)})
    except CheckpointError as error:
        raise ValueError(f"the state registered as {name!r} cannot be kept: {error}") from error


def collect(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    registered: Mapping[str, Stateful],
    noted: Note | None = None,
    owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> State:
    """The state as it is now, but for what was noted; a ``CheckpointError`` names what cannot be kept."""
    held, taken = Holdings(model, optimizers, registered, owned), _Taken()
    noted = noted or note(model, optimizers, registered, owned)
    found = {
        "schema": 1,
        "rng": noted.rng,
        "registered": {
            name: taken.tree(
                noted.positions[name] if name in noted.positions else each.state_dict(),
                f"registered/{name!r}",
            )
            for name, each in registered.items()
        },
        "extra": {name: each.get_extra_state() for name, each in held.extra.items()},
        "buffers": taken.each("buffers", held.buffers),
        "caches": {name: taken.tree(each, f"caches/{name!r}") for name, each in held.caches.items()},
        "restless": taken.each("parameters", {name: held.parameters[name] for name in held.restless}),
        "optimizers": [_settings(each, held, taken, place) for place, each in enumerate(held.optimizers)],
        # From here on live ones; a tensor that is in both halves belongs to the first.
        "parameters": taken.each(
            "parameters", {name: each for name, each in held.parameters.items() if name not in held.restless}
        ),
        "masters": taken.each("masters", held.masters),
        "slots": [_slots(each, held, taken, place) for place, each in enumerate(held.optimizers)],
        "layouts": taken.layouts,
    }
    document, tensors = tree.encode(found)
    live = {name: each for name, each in tensors.items() if name.startswith(_LIVE)}
    return State(document, live, {name: each for name, each in tensors.items() if name not in live})


def expected_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> int:
    """About what a checkpoint will take, also before the first update: Adam's two slots are assumed then."""
    held = Holdings(model, optimizers, {}, owned)
    total = sum(local_of(each).nbytes for each in held.tensors)
    for optimizer in held.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slots = optimizer.state.get(parameter)
                total += _slot_bytes(slots) if slots else _USUAL_SLOTS * local_of(parameter).nbytes
    return total


def _slot_bytes(slots: Any) -> int:
    return sum(each.nbytes for each in tree.encode(_Taken().tree(slots, "")).tensors.values())


class _Taken:
    """Trees with local tensors in them, and how those lie."""

    def __init__(self) -> None:
        self.layouts: dict[str, Any] = {}

    def each(self, part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors for which there will be a place; each is at home where it is."""
        return {name: self._tensor(each, f"{part}/{name!r}", each.device) for name, each in tensors.items()}

    def tree(self, value: Any, path: str, parameter: torch.Tensor | None = None) -> Any:
        """``parameter`` is the one that all of it is kept for."""
        home = CPU if parameter is None else parameter.device
        return walk(value, path, lambda each, _, place: self._tensor(each, place, home, parameter))

    def _tensor(
        self,
        tensor: torch.Tensor,
        path: str,
        home: torch.device,
        parameter: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (layout := layout_of(tensor, home, parameter)) is not None:
            self.layouts[path] = layout
        return local_of(tensor)


def _settings(optimizer: torch.optim.Optimizer, held: Holdings, taken: _Taken, place: int) -> dict[str, Any]:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        first = next(iter(group["params"]), None)
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            {
                "params": [held.names[id(parameter)] for parameter in group["params"]],
                "settings": taken.tree(values, f"optimizers/{place}/{number}", first),
            }
        )
    return {"class": title_of(optimizer), "groups": groups}


def _slots(optimizer: torch.optim.Optimizer, held: Holdings, taken: _Taken, place: int) -> dict[str, Any]:
    own, others = held.slots(optimizer)
    updated = held.updated
    return {
        "own": {
            name: taken.tree(value, f"slots/{place}/{name!r}", updated[name]) for name, value in own.items()
        },
        "others": taken.tree(others, f"slots/{place}"),
    }
