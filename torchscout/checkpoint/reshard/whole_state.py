"""Describes the state of a whole job from the headers of all ranks' shards (paper, section 9).

No tensor is read. For each tensor the shards say which rank holds which part; for everything else, whether
all ranks hold the same. State that a framework distributes without a description is refused: Megatron's
tensor-parallel weights and DeepSpeed's flat buffers are plain tensors that differ between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchscout.checkpoint.reshard.parts import Part, is_covered, parts_of, whole_part
from torchscout.checkpoint.storage.shard_format import Entry, Header
from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.collect import walk
from torchscout.state.encoding import decode
from torchscout.state.layout import dtype_named
from torchscout.utils.text import listed

__all__ = ["Key", "RankValue", "StoredPart", "WholeState", "WholeTensor", "describe", "public_name"]

Key = tuple[Any, ...]
"""``("parameters", name)``, ``("slots", optimizer, name)`` and so on; names are public."""
_TENSORS = ("parameters", "masters", "buffers", "caches")
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"
_WHY = (
    "Its framework distributes it in a way that the checkpoint does not describe, as Megatron and DeepSpeed "
    "do, so only the same layout can load it"
)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What one rank holds of a tensor."""

    rank: int
    entry: Entry
    parts: tuple[Part, ...]


@dataclass(slots=True)
class WholeTensor:
    """A tensor of the whole job and where its parts are stored."""

    title: str
    dtype: str
    shape: tuple[int, ...]
    is_distributed: bool
    """Whether it was a DTensor."""
    device: str | None
    """Its device's type, if that was not its parameter's."""
    stored: list[StoredPart] = field(default_factory=list)

    def distinct(self) -> list[list[StoredPart]]:
        """The stored parts, those with the same bytes of the same elements together."""
        found: dict[tuple[Part, ...], list[StoredPart]] = {}
        for each in self.stored:
            if each.parts:
                found.setdefault(each.parts, []).append(each)
        return list(found.values())

    @property
    def differing(self) -> tuple[int, int] | None:
        """Two ranks that hold different bytes of the same elements; None if all agree."""
        for copies in self.distinct():
            for each in copies:
                if each.entry.digest != copies[0].entry.digest:
                    return copies[0].rank, each.rank
        return None

    def check(self) -> None:
        """Raise ``CheckpointError`` unless the parts are the whole tensor, the same in all copies."""
        parts = [part for copies in self.distinct() for part in copies[0].parts]
        if not is_covered(self.shape, parts):
            raise CheckpointError(f"{self.title}: its parts are not the whole tensor of shape {self.shape}")
        if (ranks := self.differing) is not None and self.is_distributed:
            raise CheckpointError(f"{self.title} differs between ranks {ranks[0]} and {ranks[1]}")
        if ranks is not None:
            raise CheckpointError(
                f"{self.title} is a plain tensor that differs between ranks {ranks[0]} and {ranks[1]}. {_WHY}"
            )


@dataclass(frozen=True, slots=True)
class RankValue:
    """A value that is not distributed, as one rank has encoded it."""

    document: Any
    stored: dict[str, StoredPart]
    """Its tensors and arrays, by the name that the document refers to."""

    def is_same(self, other: RankValue) -> bool:
        """Whether another rank has the same value, bit by bit."""
        return bool(self.document == other.document) and self._digests() == other._digests()

    def decoded(self, read: Callable[[Sequence[StoredPart]], torch.Tensor]) -> Any:
        """The value; raises ``DamagedError``."""
        return decode(self.document, {name: read([each]) for name, each in self.stored.items()})

    def _digests(self) -> dict[str, str]:
        return {name: each.entry.digest for name, each in self.stored.items()}


@dataclass(slots=True)
class WholeState:
    """The state of all ranks. Tensors in ``trees`` are placeholders; ``tensors`` describes them."""

    world_size: int
    mesh: str
    trees: dict[Key, Any] = field(default_factory=dict)
    tensors: dict[Key, dict[str, WholeTensor]] = field(default_factory=dict)
    """By key, and by the path within the tree of that key."""
    classes: list[str] = field(default_factory=list)
    """Of the optimizers, without the wrappers of ``ZeroRedundancyOptimizer``."""
    groups: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Parameter names by optimizer and parameter group."""
    tied: dict[str, str] = field(default_factory=dict)
    """Further names of tied parameters."""
    common: dict[Key, RankValue] = field(default_factory=dict)
    """Random state, registered objects and extra state of modules, where all ranks have the same."""
    differing: list[Key] = field(default_factory=list)
    """Those of which ranks have different ones."""
    notes: list[str] = field(default_factory=list)
    """Choices that were made where ranks hold different state, in words."""

    def named(self, kind: str) -> dict[str, WholeTensor]:
        """All tensors of one kind: ``parameters``, ``buffers``, ``masters`` or ``caches``."""
        return {key[1]: found[""] for key, found in self.tensors.items() if key[0] == kind and "" in found}

    def keys(self, kind: str) -> list[Key]:
        return [key for key in self.trees if key[0] == kind]


def public_name(name: str, wrappers: Sequence[str]) -> str:
    """A parameter's name without what DDP, ``torch.compile`` and activation checkpointing add to it."""
    parts = name.split(".")
    left = [each for place, each in enumerate(parts) if ".".join(parts[: place + 1]) not in wrappers]
    return ".".join(left)


def describe(headers: Sequence[Header]) -> WholeState:
    """Describe the state of a job from the headers of all its ranks, in rank order.

    Raises ``CheckpointError`` if its tensors cannot be put together.
    """
    identity = headers[0].identity
    state = WholeState(identity.world_size, identity.mesh)
    for header in headers:
        _Rank(header).add_to(state)
    _settle(state)
    return state


class _Rank:
    """One rank's contribution."""

    def __init__(self, header: Header) -> None:
        self._rank = header.identity.rank
        self._holders: list[torch.Tensor] = []
        self._entries: dict[int, Entry] = {}
        document = _fields(header.document)
        self._by_name = {entry.name: entry for entry in header.entries}
        self._values: dict[Key, Any] = {("rng",): document["rng"]}
        for kind in ("registered", "extra"):
            self._values |= {(kind, name): each for name, each in document[kind]["dict"]}
        self._layouts: dict[str, Any] = decode(document["layouts"], {})
        self._names: dict[str, Any] = decode(document.get("names", {"dict": []}), {})
        placeholders = {entry.name: self._placeholder(entry) for entry in header.entries}
        wanted = ("parameters", "restless", "masters", "buffers", "caches", "optimizers", "slots")
        self._tree = {name: _decoded(document[name], placeholders, name) for name in wanted}
        self._tree["parameters"] = {**self._tree["restless"], **self._tree["parameters"]}

    def add_to(self, state: WholeState) -> None:
        if owned := self._names.get("owned"):
            raise CheckpointError(
                f"rank {self._rank} holds {listed(map(repr, owned), most=3)} in a form of its framework's "
                f"own, such as flat buffers. {_WHY}"
            )
        for kind in _TENSORS:
            for name, tensor in self._tree[kind].items():
                self._add(state, (kind, self._public(name)), tensor, f"{kind}/{name!r}")
        state.tied |= {
            self._public(name): self._public(saved) for name, saved in self._names.get("tied", {}).items()
        }
        for key, document in self._values.items():
            self._add_value(state, key, document)
        optimizers = list(zip(self._tree["optimizers"], self._tree["slots"], strict=True))
        kept = [(place, each) for place, each in enumerate(optimizers) if each[0]["class"] != _ZERO]
        classes = [each["class"] for _, (each, _) in kept]
        if state.classes and classes != state.classes:
            raise CheckpointError(f"rank {self._rank} has optimizers {classes}, rank 0 has {state.classes}")
        state.classes = classes
        for number, (place, (settings, slots)) in enumerate(kept):
            self._add_optimizer(state, number, place, settings, slots)

    def _add_value(self, state: WholeState, key: Key, document: Any) -> None:
        stored = {
            name: StoredPart(self._rank, entry := self._by_name[name], whole_part(entry.shape))
            for name in _references(document)
        }
        value = RankValue(document, stored)
        path = f"registered/{key[-1]!r}"
        is_distributed = key[0] == "registered" and any(
            "whole" in layout for name, layout in self._layouts.items() if f"{name}/".startswith(f"{path}/")
        )
        if is_distributed or not state.common.setdefault(key, value).is_same(value):
            state.differing += [key] if key not in state.differing else []

    def _add_optimizer(self, state: WholeState, number: int, place: int, settings: Any, slots: Any) -> None:
        for index, group in enumerate(settings["groups"]):
            names = state.groups.setdefault((number, index), [])
            names += [each for each in map(self._public, group["params"]) if each not in names]
            path = f"optimizers/{place}/{index}"
            self._add(state, ("settings", number, index), group["settings"], path)
        for name, slot in slots["own"].items():
            path = f"slots/{place}/{name!r}"
            self._add(state, ("slots", number, self._public(name)), slot, path, name)
        if slots["others"]:
            self._add(state, ("others", number), slots["others"], f"slots/{place}")

    def _add(self, state: WholeState, key: Key, tree: Any, path: str, parameter: str | None = None) -> None:
        """Add a tree of tensors and values, which must be alike on all ranks that have it."""
        found = state.tensors.setdefault(key, {})
        if _skeleton(state.trees.setdefault(key, tree)) != _skeleton(tree):
            if key[0] == "settings":
                raise CheckpointError(f"the settings of optimizer {key[1]} differ between ranks")
            raise CheckpointError(f"{_title(key)} has other entries on rank {self._rank} than on other ranks")

        def note(tensor: torch.Tensor, _: Any, place: str) -> torch.Tensor:
            self._add_tensor(
                found, tensor, place, f"{_title(key)}{place}", self._whole(path + place, parameter)
            )
            return tensor

        walk(tree, "", note)

    def _whole(self, path: str, parameter: str | None) -> tuple[dict[str, Any] | None, str | None]:
        """How the tensor at this path was distributed, and its device if it has one of its own."""
        layout = self._layouts.get(path) or {}
        whole = layout.get("whole")
        if whole == "parameter":
            paths = (f"parameters/{parameter!r}", f"masters/{parameter!r}")
            whole = next(self._layouts[each]["whole"] for each in paths if each in self._layouts)
        return whole, layout.get("device")

    def _add_tensor(
        self,
        found: dict[str, WholeTensor],
        tensor: torch.Tensor,
        place: str,
        title: str,
        layout: tuple[dict[str, Any] | None, str | None],
    ) -> None:
        entry, (whole, device) = self._entries[id(tensor)], layout
        shape = entry.shape if whole is None else tuple(whole["shape"])
        known = found.setdefault(place, WholeTensor(title, entry.dtype, shape, whole is not None, device))
        if (known.dtype, known.shape, known.is_distributed) != (entry.dtype, shape, whole is not None):
            raise CheckpointError(
                f"{title} is {entry.dtype} of shape {shape} on rank {self._rank}, and {known.dtype} of shape "
                f"{known.shape} on other ranks. {_WHY}"
            )
        try:
            parts = whole_part(shape) if whole is None else parts_of(whole)
        except CheckpointError as error:
            raise CheckpointError(f"{title} {error}") from None
        if sum(part.elements for part in parts) != math.prod(entry.shape):
            raise DamagedError(f"{title} has shape {entry.shape} on rank {self._rank}, unlike its layout")
        known.stored.append(StoredPart(self._rank, entry, parts))

    def _placeholder(self, entry: Entry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")
        self._holders.append(tensor)
        self._entries[id(tensor)] = entry
        return tensor

    def _public(self, name: str) -> str:
        return public_name(name, self._names.get("wrappers", ()))


def _settle(state: WholeState) -> None:
    """Check every tensor. Buffers that differ between ranks are taken from the lowest rank that has them."""
    for name, whole in state.named("caches").items():
        if whole.differing is not None:  # modules compute them again
            del state.tensors["caches", name], state.trees["caches", name]
    for whole in state.named("buffers").values():
        if whole.differing is not None and not whole.is_distributed:
            whole.stored = whole.stored[:1]
            rank = whole.stored[0].rank
            state.notes.append(f"{whole.title} differs between ranks; rank {rank}'s is used")
    for found in state.tensors.values():
        for whole in found.values():
            whole.check()
    for key in state.differing:
        state.common.pop(key, None)


def _skeleton(tree: Any) -> Any:
    """A tree with paths in place of its tensors."""
    return walk(tree, "", lambda _, __, place: place)


def _fields(document: Any) -> dict[str, Any]:
    """The parts of an encoded state, still encoded."""
    pairs = document.get("dict") if isinstance(document, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise DamagedError("the header is not that of a rank's state")
    fields = {key: value for key, value in pairs if isinstance(key, str)}
    if fields.get("schema") != 1:
        raise CheckpointError(f"the shard has a state of schema {fields.get('schema')!r:.20}, expected 1")
    return fields


def _decoded(document: Any, placeholders: Mapping[str, torch.Tensor], what: str) -> Any:
    if "array" in _tags(document):
        raise CheckpointError(f"{what} of a rank's state hold a NumPy array, which has no place in a layout")
    return decode(document, placeholders)


def _tags(document: Any) -> set[str]:
    """The tags in an encoded value: see [Note: tagged JSON]."""
    inner = list(document.values()) if isinstance(document, dict) else document
    found = {*document} if isinstance(document, dict) else set()
    return found.union(*map(_tags, inner)) if isinstance(inner, list) else found


def _references(document: Any) -> Iterator[str]:
    """The names of the tensors and arrays in an encoded value."""
    if isinstance(document, dict):
        if "tensor" in document:
            yield document["tensor"]
        elif "array" in document:
            yield document["array"][2]
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from _references(each)


def _title(key: Key) -> str:
    kind, *rest = key
    titles = {
        "parameters": "parameter",
        "buffers": "buffer",
        "caches": "buffer",
        "masters": "optimizer tensor",
    }
    if kind in titles:
        return f"{titles[kind]} {rest[0]!r}"
    if kind == "slots":
        return f"state of optimizer {rest[0]} for {rest[1]!r}"
    return f"{'settings' if kind == 'settings' else 'other state'} of optimizer {rest[0]}"
