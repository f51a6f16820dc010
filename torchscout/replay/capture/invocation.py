"""One captured module call, as data that can be sent to the peers (paper, section 6.1.1).

Tensors and random states are broadcast. Plain values (numbers, strings, None) come with the description.
Any other argument stays the peer's own and must look alike everywhere, as must the mesh of a DTensor and
the attention that a block around the call has put in place.

``RowResize`` makes a captured call of experts over for other numbers of rows (section 6.2, "Online
replay"). Rows are taken in turn from those that were captured, so that an expert sees real activations at
any shape. An expert that received no row in that step gets random ones, so that an unpopular expert is
checked too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchscout.errors import ReplayError
from torchscout.experts.coverage import Rows
from torchscout.replay.capture.broadcast import DTensorLayout, captured, densely, described, refuse, room_for
from torchscout.replay.capture.context import Attention, RngState, autocast_now
from torchscout.utils._torch import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Invocation", "RowResize", "is_floating"]

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
    randomness: RngState
    """Before the forward pass."""
    attention: Attention
    """This rank's own, in training's call."""
    outputs: dict[int, DTensorLayout] = field(default_factory=dict)
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
        return cls(kept, mask, spec, autocast_now(device), RngState.now(device), Attention.now())

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
            RngState({name: torch.empty(0, dtype=torch.uint8, device="cpu") for name in call["random"]}),
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
            randomness=RngState(states),
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

    layout: DTensorLayout | None = None
    """Of a DTensor."""


def _kept(place: int, leaf: Any, *, keep: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if (found := _hiding(place, leaf)) is not None:
            raise ReplayError(found)
        return leaf
    if keep:
        return captured(leaf)
    refuse(leaf)
    return _Left(DTensorLayout.of(leaf))


def _layout(told: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> DTensorLayout | None:
    return None if "layout" not in told else DTensorLayout.found(told["layout"], meshes)


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
    layout = own.layout if isinstance(own, _Left) else DTensorLayout.of(own)
    try:
        room = room_for(told, device, layout)
    except ReplayError as error:
        raise ReplayError(f"argument {place}: {error}") from error
    arriving = DTensorLayout.of(room)
    if layout is not None and arriving is not None and layout.placements != arriving.placements:
        here, there = layout.placements, arriving.placements
        raise ReplayError(f"argument {place} is placed as {here} here and as {there} on the source")
    return room


@dataclass(frozen=True, slots=True)
class RowResize:
    """What a router might have sent."""

    rows: Rows

    def require(self, call: Invocation) -> None:
        """A ``ReplayError`` says why it cannot be made of a call, whose values must have been kept."""
        form = _form(call)
        if len(self.rows) != form.experts:
            raise ReplayError(f"its call is for {form.experts} experts, the shape for {len(self.rows)}")

    def applied(self, call: Invocation) -> Invocation:
        """The call with this many rows for each expert."""
        self.require(call)
        form, wanted = _form(call), sum(self.rows)

        def made_over(leaf: Any) -> Any:
            is_routed = is_floating(leaf) and leaf.dim() and leaf.shape[0] == form.captured
            return _repeated(leaf, form.total, wanted) if is_routed else leaf

        leaves = [made_over(leaf) for leaf in call.leaves]
        for place, count in zip(form.counts, form.spelled(self.rows), strict=True):
            leaves[place] = count
        gradients = {place: made_over(each) for place, each in call.gradients.items()}
        return replace(call, leaves=leaves, gradients=gradients)


@dataclass(frozen=True, slots=True)
class _Form:
    """What a call's arguments are."""

    captured: int
    """Rows of the activations; frameworks may pad them."""
    total: int
    """Those that belong to an expert."""
    experts: int
    counts: range
    """The places of the arguments that say how many rows are whose; none for a single expert."""
    like: torch.Tensor | None
    """Those counts, where they are a tensor."""

    def spelled(self, rows: Rows) -> Sequence[Any]:
        """Counts as this call gives them."""
        if not self.counts:
            return ()
        return rows if self.like is None else [self.like.new_tensor(rows)]


def _form(call: Invocation) -> _Form:
    activations = next((leaf for leaf in call.leaves if is_floating(leaf) and leaf.dim() >= 2), None)
    if activations is None:
        raise ReplayError("no argument of it has rows of activations")
    captured = int(activations.shape[0])
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 1 and _is_whole(leaf):
            total = int(leaf.sum())
            if total <= captured:
                return _Form(captured, total, leaf.numel(), range(place, place + 1), leaf)
    numbers = [place for place, leaf in enumerate(call.leaves) if type(leaf) is int]
    counts = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    if numbers == [*counts] and numbers and sum(call.leaves[place] for place in numbers) == captured:
        return _Form(captured, captured, len(numbers), counts, None)
    return _Form(captured, captured, 1, range(0), None)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _repeated(tensor: torch.Tensor, available: int, wanted: int) -> torch.Tensor:
    """The first ``available`` rows over and over, until there are ``wanted``; random ones if none is."""
    if not available:
        generator = torch.Generator().manual_seed(wanted)  # the same on all peers
        drawn = torch.randn(wanted, *tensor.shape[1:], generator=generator, device="cpu")
        return drawn.to(device=tensor.device, dtype=tensor.dtype)
    return tensor[torch.arange(wanted, device=tensor.device) % available]
