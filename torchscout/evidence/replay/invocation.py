"""One captured module call, as data that can travel to the peers (paper, section 6.1.1).

Tensors and random states are broadcast, plain values (numbers, strings, None) come with the description,
and any other argument stays the peer's own and must look alike everywhere. So do the mesh of a DTensor, and
the attention that a block around the call has put in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from torchscout.errors import ReplayError
from torchscout.evidence.replay.alignment import captured, densely, described, refuse, room_for
from torchscout.evidence.replay.attention import Attention
from torchscout.evidence.replay.conditions import autocast_now
from torchscout.evidence.replay.layout import Layout
from torchscout.evidence.replay.randomness import Randomness

__all__ = ["Invocation", "is_floating"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class Invocation:
    """Arguments, output gradients and surroundings of one call."""

    leaves: list[Any]
    """The arguments, positional and by name, flattened. Tensors only where their values are kept."""
    requires_grad: list[bool]
    """Of each leaf."""
    spec: TreeSpec
    """How the leaves form the arguments."""
    autocast: Mapping[str, str | None]
    randomness: Randomness
    """Before the forward pass."""
    attention: Attention
    """This rank's own, in training's call."""
    outputs: dict[int, Layout] = field(default_factory=dict)
    """Of the DTensors among the output's tensors, by place: this rank's own."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """What backward brought to the output, by place among the output's tensors."""
    replaced: tuple[int, ...] = ()
    """Places at which the output itself stands in for its gradient, which was too large to send."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """The module's, as they were before the forward pass, where they are others after it; mostly none."""
    problem: str | None = None
    """Why this call cannot be replayed after all."""

    @classmethod
    def of(cls, args: Any, kwargs: Any, device: torch.device, *, keep: bool) -> Invocation:
        """Capture a call; without ``keep``, everything but the values of its tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        mask = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        kept = [_kept(place, leaf, keep=keep) for place, leaf in enumerate(leaves)]
        return cls(kept, mask, spec, autocast_now(device), Randomness.now(device), Attention.now())

    @classmethod
    def told(
        cls, call: Mapping[str, Any], spec: TreeSpec, attention: Attention, meshes: Sequence[DeviceMesh]
    ) -> Invocation:
        """A call that this rank knows from its description alone; ``meshes`` are those of this rank."""
        leaves = [
            _Left(_layout(told["tensor"], meshes)) if "tensor" in told else told["plain"]
            for told in call["leaves"]
        ]
        layouts = {int(place): _layout(told, meshes) for place, told in call["gradients"].items()}
        return cls(
            leaves,
            list(call["requires_grad"]),
            spec,
            call["autocast"],
            Randomness({name: torch.empty(0, dtype=torch.uint8, device="cpu") for name in call["random"]}),
            attention,
            {place: each for place, each in layouts.items() if each is not None},
            replaced=tuple(call.get("replaced", ())),
        )

    def arguments(self, tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, with these tensors in place of its own."""
        leaves = [tensors.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def describe(self) -> dict[str, Any]:
        return {
            "form": str(self.spec),
            "leaves": [_described(leaf) for leaf in self.leaves],
            "requires_grad": self.requires_grad,
            "autocast": dict(self.autocast),
            "attention": self.attention.describe(),
            "random": {name: described(state) for name, state in self.randomness.states.items()},
            "gradients": {str(place): described(each) for place, each in self.gradients.items()},
            "replaced": list(self.replaced),
        }

    def like(self, source: Mapping[str, Any], device: torch.device) -> Invocation:
        """Room for the source's call on this rank; a ``ReplayError`` says what is not alike."""
        if source["form"] != str(self.spec):
            raise ReplayError(f"arguments have another form than the source's: {self.spec}")
        leaves = [
            _room(place, leaf, told, device)
            for place, (leaf, told) in enumerate(zip(self.leaves, source["leaves"], strict=True))
        ]
        states = {name: room_for(told, device) for name, told in source["random"].items()}
        if states.keys() != self.randomness.states.keys():
            raise ReplayError(f"random streams are {sorted(self.randomness.states)}, not {sorted(states)}")
        self.attention.require(source["attention"])
        return replace(
            self,
            leaves=leaves,
            requires_grad=source["requires_grad"],
            autocast=source["autocast"],
            randomness=Randomness(states),
            gradients={
                int(place): room_for(told, device, self.outputs.get(int(place)))
                for place, told in source["gradients"].items()
            },
            replaced=tuple(source.get("replaced", ())),
        )

    def hiding(self) -> str | None:
        """Why it cannot be replayed, if the call has put tensors into an argument: a cache."""
        others = [each for each in enumerate(self.leaves) if not isinstance(each[1], torch.Tensor)]
        return next((why for each in others if (why := _hiding(*each)) is not None), None)

    def densified(self) -> Invocation:
        """The same, with every gradient as one block of memory: an expanded one is not."""
        return replace(self, gradients={place: densely(each) for place, each in self.gradients.items()})

    def tensors(self) -> list[torch.Tensor]:
        """All that is broadcast, in an order that peers share."""
        inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return [*inputs, *self.gradients.values(), *self.randomness.states.values()]


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True, slots=True)
class _Left:
    """In place of a tensor whose values are the source's to send."""

    layout: Layout | None = None
    """Of a DTensor."""


def _kept(place: int, leaf: Any, *, keep: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if (found := _hiding(place, leaf)) is not None:
            raise ReplayError(found)
        return leaf
    if keep:
        return captured(leaf)
    refuse(leaf)
    return _Left(Layout.of(leaf))


def _layout(told: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> Layout | None:
    return None if "layout" not in told else Layout.found(told["layout"], meshes)


def _hiding(place: int, leaf: Any) -> str | None:
    """What is wrong with an argument that has tensors of this rank's own in it."""
    if not _hides_tensors(leaf, set()):
        return None
    what = f"argument {place} is a {type(leaf).__name__} that holds tensors, which cannot travel with it"
    return f"{what}; a Hugging Face model makes none if config.use_cache is False"


def _hides_tensors(leaf: Any, seen: set[int]) -> bool:
    """However deep. A module's do not count: they are copies that peers hold too."""
    if isinstance(leaf, torch.Tensor):
        return True
    if id(leaf) in seen or isinstance(leaf, nn.Module | type | DeviceMesh):
        return False
    seen.add(id(leaf))
    inside = [each for each in tree_leaves(leaf) if each is not leaf]
    return any(_hides_tensors(each, seen) for each in [*inside, *getattr(leaf, "__dict__", {}).values()])


def _described(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, torch.Tensor):
        return {"tensor": described(leaf)}
    if isinstance(leaf, _Left):
        return {"tensor": None}
    if type(leaf) in _PLAIN:  # an Enum is an int too, and would arrive as that alone
        return {"plain": leaf}
    text = repr(leaf)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return {"object": kind if " at 0x" in text else f"{kind} {text}"[:1000]}


def _room(place: int, own: Any, told: Mapping[str, Any], device: torch.device) -> Any:
    """This rank's leaf for the source's: room for a tensor, the same plain value, its own object."""
    if "tensor" in told:
        return _room_for_tensor(place, own, told["tensor"], device)
    if "plain" in told:
        return told["plain"]
    if _described(own) != told:
        raise ReplayError(f"argument {place} is {_described(own)} here and {dict(told)} on the source")
    return own


def _room_for_tensor(place: int, own: Any, told: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    layout = own.layout if isinstance(own, _Left) else Layout.of(own)
    try:
        room = room_for(told, device, layout)
    except ReplayError as error:
        raise ReplayError(f"argument {place}: {error}") from error
    arriving = Layout.of(room)
    if layout is not None and arriving is not None and layout.placements != arriving.placements:
        here, there = layout.placements, arriving.placements
        raise ReplayError(f"argument {place} is placed as {here} here and as {there} on the source")
    return room
