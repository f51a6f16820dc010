"""One captured module call, as data that can be sent to peers (paper, section 6.1.1).

Tensors and random states are broadcast. Plain values (numbers, strings, None) are part of the description.
For any other argument each peer uses its own, which must look alike on all peers, as must the mesh of a
DTensor and the attention function in effect.

``RowResize`` changes a captured call of experts to other numbers of rows (section 6.2, "Online replay"). It
repeats the captured rows, so that an expert receives real activations at any shape. An expert that received
no row in the step gets random ones, so that it is checked too.
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
from torchscout.replay.capture.broadcast import DTensorLayout, as_dense, captured, described, refuse, room_for
from torchscout.replay.capture.context import Attention, RngState, autocast_now
from torchscout.utils._torch import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torchscout.utils.cuda_graphs import is_capturing

__all__ = ["Invocation", "Omitted", "RowResize", "is_floating", "tensors_in"]

_PLAIN = (bool, int, float, str, type(None))
_COUNTS = (torch.int32, torch.int64)


@dataclass(slots=True)
class Invocation:
    """Arguments, output gradients and surroundings of one call."""

    leaves: list[Any]
    """The flattened arguments. Tensors only if their values are kept."""
    requires_grad: list[bool]
    spec: TreeSpec
    """The tree structure of the arguments."""
    autocast: Mapping[str, str | None]
    randomness: RngState
    """The state before the forward pass."""
    attention: Attention
    """The attention function of training's call on this rank."""
    outputs: dict[int, DTensorLayout] = field(default_factory=dict)
    """Layouts on this rank of the DTensors among the output's tensors, by place."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of the output's tensors, by place."""
    replaced: tuple[int, ...] = ()
    """Places at which the output replaces its gradient, which was too large to send."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers before the forward pass, if it is known that they differ afterwards; usually empty."""
    is_made_up: bool = False
    """Whether it has the form of a call of training, but not its values."""
    problem: str | None = None
    """Why this call cannot be replayed, found after its forward pass."""

    @classmethod
    def of(cls, args: Any, kwargs: Any, device: torch.device, *, keep: bool) -> Invocation:
        """Capture a call; without ``keep``, all but the values of its tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        mask = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        kept = [_kept(place, leaf, keep=keep) for place, leaf in enumerate(leaves)]
        # The state of a generator cannot be read while a graph is captured.
        randomness = RngState({}) if is_capturing() else RngState.now(device)
        return cls(kept, mask, spec, autocast_now(device), randomness, Attention.now())

    @classmethod
    def from_description(
        cls, call: Mapping[str, Any], spec: TreeSpec, attention: Attention, meshes: Sequence[DeviceMesh]
    ) -> Invocation:
        """Return a call without the values of its tensors; DTensors are placed on these ``meshes``."""
        leaves = [
            Omitted(_layout(leaf["tensor"], meshes)) if "tensor" in leaf else leaf["plain"]
            for leaf in call["leaves"]
        ]
        layouts = {int(place): _layout(each, meshes) for place, each in call["gradients"].items()}
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
        """Return the call's arguments, with these tensors in place of its own."""
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
        """Allocate memory for the source's call; raise ``ReplayError`` if this rank's call differs."""
        if source["form"] != str(self.spec):
            raise ReplayError(f"arguments have a different structure than the source's: {self.spec}")
        leaves = [
            _room(place, leaf, description, device)
            for place, (leaf, description) in enumerate(zip(self.leaves, source["leaves"], strict=True))
        ]
        states = {name: room_for(each, device) for name, each in source["random"].items()}
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
                int(place): room_for(each, device, self.outputs.get(int(place)))
                for place, each in source["gradients"].items()
            },
            replaced=tuple(source.get("replaced", ())),
        )

    def hidden_tensors(self) -> str | None:
        """Return why it cannot be replayed, if an argument contains tensors after the call (a cache)."""
        objects = [each for each in enumerate(self.leaves) if not isinstance(each[1], torch.Tensor)]
        return next((reason for each in objects if (reason := _hidden_tensors(*each)) is not None), None)

    def densified(self) -> Invocation:
        """Return the same call with dense gradients; an expanded one is not dense."""
        return replace(self, gradients={place: as_dense(each) for place, each in self.gradients.items()})

    def tensors(self) -> list[torch.Tensor]:
        """Return everything to broadcast, in the same order on all peers."""
        inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return [*inputs, *self.gradients.values(), *self.randomness.states.values()]


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output, in order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True, slots=True)
class Omitted:
    """In place of a tensor whose values the source will send."""

    layout: DTensorLayout | None = None


def _kept(place: int, leaf: Any, *, keep: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if (found := _hidden_tensors(place, leaf)) is not None:
            raise ReplayError(found)
        return leaf
    if keep:
        return captured(leaf)
    refuse(leaf)
    return Omitted(DTensorLayout.of(leaf))


def _layout(description: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> DTensorLayout | None:
    return DTensorLayout.found(description["layout"], meshes) if "layout" in description else None


def _hidden_tensors(place: int, leaf: Any) -> str | None:
    """Return a description of an argument that contains tensors of this rank, or None."""
    if not _has_tensors(leaf, set()):
        return None
    argument = (
        f"argument {place} is a {type(leaf).__name__} that contains tensors, which cannot be sent with it"
    )
    return f"{argument}; set config.use_cache=False in a Hugging Face model"


def _has_tensors(leaf: Any, seen: set[int]) -> bool:
    """At any depth. Those of modules do not count: peers have them, too."""
    if isinstance(leaf, torch.Tensor):
        return True
    if id(leaf) in seen or isinstance(leaf, nn.Module | type | DeviceMesh):
        return False
    seen.add(id(leaf))
    inside = [each for each in tree_leaves(leaf) if each is not leaf]
    return any(_has_tensors(each, seen) for each in [*inside, *getattr(leaf, "__dict__", {}).values()])


def _described(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, torch.Tensor):
        return {"tensor": described(leaf)}
    if isinstance(leaf, Omitted):
        return {"tensor": None}
    if type(leaf) in _PLAIN:  # not isinstance: an IntEnum would arrive as an int
        return {"plain": leaf}
    text = repr(leaf)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return {"object": kind if " at 0x" in text else f"{kind} {text}"[:1000]}


def _room(place: int, own: Any, source: Mapping[str, Any], device: torch.device) -> Any:
    """Return this rank's leaf: memory for a tensor, the source's plain value, or this rank's own object."""
    if "tensor" in source:
        return _room_for_tensor(place, own, source["tensor"], device)
    if "plain" in source:
        return source["plain"]
    if _described(own) != source:
        raise ReplayError(f"argument {place} is {_described(own)} here and {dict(source)} on the source")
    return own


def _room_for_tensor(place: int, own: Any, source: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    layout = own.layout if isinstance(own, Omitted) else DTensorLayout.of(own)
    try:
        room = room_for(source, device, layout)
    except ReplayError as error:
        raise ReplayError(f"argument {place}: {error}") from error
    arriving = DTensorLayout.of(room)
    if layout is not None and arriving is not None and layout.placements != arriving.placements:
        here, there = layout.placements, arriving.placements
        raise ReplayError(f"argument {place} is placed as {here} here and as {there} on the source")
    return room


@dataclass(frozen=True, slots=True)
class RowResize:
    """Numbers of rows that a router might have sent to each expert."""

    rows: Rows

    def require(self, call: Invocation) -> None:
        """Raise ``ReplayError`` if the call, whose values must have been kept, cannot be resized."""
        form = _form(call)
        if len(self.rows) != form.experts:
            raise ReplayError(f"its call has {form.experts} experts, the shape {len(self.rows)}")

    def applied(self, call: Invocation) -> Invocation:
        """Return the call with these numbers of rows."""
        self.require(call)
        form, wanted = _form(call), sum(self.rows)

        def resized(leaf: Any) -> Any:
            is_routed = is_floating(leaf) and leaf.dim() and leaf.shape[0] == form.captured
            return _repeated(leaf, form.total, wanted) if is_routed else leaf

        leaves = [resized(leaf) for leaf in call.leaves]
        for place, count in zip(form.counts, form.arguments(self.rows), strict=True):
            leaves[place] = count
        gradients = {place: resized(each) for place, each in call.gradients.items()}
        return replace(call, leaves=leaves, gradients=gradients)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a call passes rows to experts."""

    captured: int
    """Rows of the activations, including padding."""
    total: int
    """Rows without padding."""
    experts: int
    counts: range
    """Places of the arguments with the number of rows of each expert; none for a single expert."""
    like: torch.Tensor | None
    """The counts, if they are a tensor."""

    def arguments(self, rows: Rows) -> Sequence[Any]:
        """Return the counts in the form of this call."""
        if not self.counts:
            return ()
        return rows if self.like is None else [self.like.new_tensor(rows)]


def _form(call: Invocation) -> _Form:
    activations = next((leaf for leaf in call.leaves if is_floating(leaf) and leaf.dim() >= 2), None)
    if activations is None:
        raise ReplayError("none of its arguments has rows of activations")
    captured = int(activations.shape[0])
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 1 and leaf.dtype in _COUNTS:
            total = int(leaf.sum())
            if total <= captured:
                return _Form(captured, total, leaf.numel(), range(place, place + 1), leaf)
    numbers = [place for place, leaf in enumerate(call.leaves) if type(leaf) is int]
    counts = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    if numbers == [*counts] and numbers and sum(call.leaves[place] for place in numbers) == captured:
        return _Form(captured, captured, len(numbers), counts, None)
    return _Form(captured, captured, 1, range(0), None)


def _repeated(tensor: torch.Tensor, available: int, wanted: int) -> torch.Tensor:
    """Repeat the first ``available`` rows until there are ``wanted``; random rows if there are none."""
    if not available:
        generator = torch.Generator().manual_seed(wanted)  # the same on all peers
        drawn = torch.randn(wanted, *tensor.shape[1:], generator=generator, device="cpu")
        return drawn.to(device=tensor.device, dtype=tensor.dtype)
    return tensor[torch.arange(wanted, device=tensor.device) % available]
