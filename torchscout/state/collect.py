"""Collects a rank's state for a checkpoint (paper, sections 8 and 9).

Parameters, including frozen ones, and all buffers; optimizer state and settings; the random state of
PyTorch, devices, NumPy and Python; registered objects. Of distributed tensors, this rank's part. Names come
from the model, so they are the same after a restart. Gradients are not included, because a checkpoint is
taken between an update and the next backward pass. ``snapshot`` copies the state.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torchscout.c3.signature import PendingSignatures, SignaturePlan
from torchscout.decision.types import Surface
from torchscout.errors import CheckpointError
from torchscout.state.encoding import encode
from torchscout.state.layout import CPU, layout_of
from torchscout.state.table import Kind, Row, StateTable, StateView, with_inner
from torchscout.utils._torch import local_of

__all__ = [
    "SCOUT_PREFIX",
    "Note",
    "State",
    "StateParts",
    "Stateful",
    "class_name",
    "collect",
    "devices_of",
    "expected_bytes",
    "is_loader",
    "note",
    "put_at_rest",
    "random_state",
    "require_storable",
    "walk",
    "wrappers_of",
]


def walk(value: Any, path: str, replace: Callable[[torch.Tensor, Any, str], Any], other: Any = None) -> Any:
    """Copy a tree with its tensors replaced.

    A second tree, of any shape, is walked along. ``replace`` is called with a tensor, the value in its place
    in the other tree, and its path.
    """
    if isinstance(value, torch.Tensor):
        return replace(value, other, path)
    if type(value) in (dict, OrderedDict):
        walked = copy.copy(value)  # keeps its order
        for key, each in value.items():
            own = other.get(key) if isinstance(other, dict) else None
            walked[key] = walk(each, f"{path}/{key!r}", replace, own)
        return walked
    if type(value) is deque:
        items = walk(list(value), path, replace, list(other) if isinstance(other, deque) else None)
        return deque(items, value.maxlen)
    if type(value) in (list, tuple):
        is_alike = isinstance(other, list | tuple) and len(other) == len(value)
        owns = other if is_alike else [None] * len(value)
        return type(value)(
            walk(each, f"{path}/{index}", replace, owns[index]) for index, each in enumerate(value)
        )
    return value


class Stateful(Protocol):
    """An object that a user registers, such as a scheduler, a gradient scaler or a loader with a position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class StateParts:
    """A model, its optimizers and registered objects, each part by name."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        registered: Mapping[str, Stateful] = MappingProxyType({}),
        owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
        table: StateTable | None = None,
    ) -> None:
        """``owned`` tensors replace the parameters of the same names, or are added: a framework may give the
        model whole parameters, or none, where a rank owns a part. ``table`` names the tensors; by default the
        parts have a table of their own."""
        put_at_rest(model)
        self.model = model
        self.optimizers = [*with_inner(optimizers)]
        self.registered = registered
        self.parameters: dict[str, torch.Tensor] = {
            name: owned.get(name, each) for name, each in model.named_parameters()
        }
        self.changed_in_forward = _changed_in_forward(model)
        """Names of parameters that a forward pass changes."""
        self.buffers, self.caches = _buffers(model)
        """Persistent and non-persistent buffers."""
        self.extra = {name: each for name, each in model.named_modules() if _has_extra_state(each)}
        """Modules with extra state."""
        self.owned = sorted(owned)
        """Names of tensors that a framework keeps in a form of its own, such as flat buffers."""
        self.masters = {name: each for name, each in owned.items() if name not in self.parameters}
        """Tensors that optimizers update and that are not parameters, such as copies in higher precision."""
        self.names = {id(tensor): name for name, tensor in self.updated.items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for place, tensor in enumerate(group["params"]):
                    name = f"optimizer {number} group {index} parameter {place}"
                    if id(tensor) not in self.names:
                        self.names[id(tensor)] = name
                        self.masters[name] = tensor
        self.view = (StateTable(self.updated, optimizers) if table is None else table).view()
        self._still: _Still | None = None

    @property
    def updated(self) -> dict[str, torch.Tensor]:
        """All tensors that an optimizer may have slots for."""
        return self.parameters | self.masters

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.updated.values(), *self.buffers.values(), *self.caches.values()]

    def slots(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[Any, Any]]:
        """The optimizer's state by parameter name, and its other state. Raises ``CheckpointError``."""
        own: dict[str, Any] = {}
        others: dict[Any, Any] = {}
        state: dict[Any, Any] = optimizer.state  # some use other keys than tensors
        for key, value in state.items():
            if not isinstance(key, torch.Tensor):
                others[key] = value
            elif id(key) in self.names:
                own[self.names[id(key)]] = value
            else:
                raise CheckpointError(
                    f"{class_name(optimizer)} has state for a tensor of shape {tuple(key.shape)} "
                    "that is neither a parameter of the model nor in its parameter groups"
                )
        return own, others

    def still(self) -> _Still:
        """Return what is encoded once for all captures until a tensor is replaced."""
        rows = self.view.rows
        if self._still is None or self._still.rows is not rows:
            self._still = _Still.of(self, rows)
        return self._still


def put_at_rest(model: nn.Module) -> None:
    """Free what FSDP has gathered: the sharded parameters are saved and restored."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _buffers(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    every = dict(model.named_buffers())
    caches = {name: each for name, each in every.items() if name in transient}
    return {name: each for name, each in every.items() if name not in transient}, caches


_INNER = ("_orig_mod", "_checkpoint_wrapped_module")


def wrappers_of(model: nn.Module) -> list[str]:
    """Paths that DDP, ``torch.compile`` and activation checkpointing add to the names of a model."""
    inner = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in _INNER]
    parallel = [name for name, each in model.named_modules() if isinstance(each, DistributedDataParallel)]
    return [*inner, *(f"{name}.module" if name else "module" for name in parallel)]


def _tied(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, each with the name under which the parameter is saved."""
    first = {id(each): name for name, each in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(each)] for name, each in every if first[id(each)] != name}


def _changed_in_forward(model: nn.Module) -> set[str]:
    """Names of embeddings with ``max_norm``, which rescale their weights in every lookup."""
    weights = {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


SCOUT_PREFIX = "torchscout/"
"""Begins the names of SCOUT's own registered state, whose tensors never change."""
_LIVE = ("parameters/", "masters/", "slots/", f"registered/{SCOUT_PREFIX}")
"""Begin the paths of tensors that have no name in the table and do not change before the next update."""
_USUAL_SLOTS = 2


@dataclass(frozen=True, slots=True)
class State:
    """A rank's state at one moment. Tensors are those of training; everything else is copied."""

    document: Any
    """The tree that ``restore`` takes, without tensors, as ``encode`` returns it."""
    live: Mapping[str, torch.Tensor]
    """Tensors that do not change before the next optimizer update."""
    prompt: Mapping[str, torch.Tensor]
    """Tensors that may change as soon as training continues."""
    view: StateView | None = None
    rows: Mapping[Surface, Row] = field(default_factory=dict)
    """Those of the view when the state was collected."""

    def sign(self, names: Sequence[str], *, finite: bool = False) -> PendingSignatures:
        """Sign some of the live tensors, as they are now; see ``StateView.sign``."""
        if self.view is not None and self.view.rows.keys() >= {*names}:
            return self.view.sign(names, finite=finite)
        return SignaturePlan(self.live[name] for name in names).start(finite=finite)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.prompt, **self.live}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


# [Note: where a step ends]
#
# A checkpoint is taken between two steps, and a step does not end with the optimizer's update: schedulers and
# scalers are updated after it. But a loader may already fetch the next batch before the next step is seen to
# begin. So loaders' positions and the random state are recorded right after the update, and everything else
# when the next step begins. Any registered object that can be iterated over counts as a loader.


@dataclass(frozen=True, slots=True)
class Note:
    """State that is recorded right after an update: see [Note: where a step ends]."""

    rng: Any
    positions: Mapping[str, Any]
    """Loaders' states, by registered name."""


def note(parts: StateParts) -> Note:
    """Record the random state and the positions of registered loaders."""
    loaders = {name: each for name, each in parts.registered.items() if is_loader(each)}
    positions = {name: copy.deepcopy(each.state_dict()) for name, each in loaders.items()}
    return Note(random_state(parts.tensors), positions)


def random_state(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The random state of PyTorch, of the devices that these tensors are on, of NumPy and Python.

    Generators that modules or loaders own are saved by whoever registers them.
    """
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "devices": {
            kind: [torch.get_device_module(kind).get_rng_state(index) for index in indices]
            for kind, indices in devices_of(tensors).items()
        },
        "numpy": np.random.get_state(legacy=False),
        # One array, because encoding 625 separate integers would dominate the time.
        "python": (version, np.array(words, dtype=np.uint64), gauss),
    }


def devices_of(tensors: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """Device indices by type, sorted: after a restart a rank may have other indices, in the same order."""
    found: dict[str, set[int]] = defaultdict(set)
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            found[device.type].add(device.index)
    return {kind: sorted(indices) for kind, indices in sorted(found.items())}


def is_loader(stateful: Stateful) -> bool:
    """Whether this object can be iterated over: see [Note: where a step ends]."""
    return hasattr(stateful, "__iter__")


def require_storable(name: str, stateful: Stateful) -> None:
    """Raise ``ValueError``, with the path in its state, if a checkpoint cannot store this object.

    Loaders are not checked, because some of them start iterating when asked for their state.
    """
    if is_loader(stateful):
        return
    try:
        encode({name: _Collector({}).tree(stateful.state_dict(), name)})
    except CheckpointError as error:
        raise ValueError(f"a checkpoint cannot store the state registered as {name!r}: {error}") from error


def collect(parts: StateParts, noted: Note | None = None) -> State:
    """Collect the current state, and what was ``noted`` before.

    Raises ``CheckpointError`` with the path of what cannot be stored.
    """
    still, noted = parts.still(), noted or note(parts)
    local = _Collector(still.locals)
    changed = {name: parts.parameters[name] for name in parts.changed_in_forward}
    registered = {
        name: noted.positions[name] if name in noted.positions else each.state_dict()
        for name, each in parts.registered.items()
    }
    found = {
        "schema": 1,
        "rng": noted.rng,
        "registered": {name: local.tree(each, f"registered/{name!r}") for name, each in registered.items()},
        "extra": {name: each.get_extra_state() for name, each in parts.extra.items()},
        "buffers": local.tensors("buffers", parts.buffers),
        "caches": {name: local.tree(each, f"caches/{name!r}") for name, each in parts.caches.items()},
        "restless": local.tensors("parameters", changed),
        "optimizers": [local.settings(parts, place) for place in range(len(parts.optimizers))],
    }
    if not still.has_slots:
        found["slots"] = [local.slots(parts, place) for place in range(len(parts.optimizers))]
    document, tensors = encode(found, still.names)
    layouts = {"dict": _pairs(encode(local.layouts).document) + still.layouts}
    document = {"dict": [*_pairs(document), ["layouts", layouts], *still.document]}
    moves = {still.names.get(id(local_of(each))) for each in changed.values()}
    tensors = {**tensors, **still.tensors}
    live = {name: each for name, each in tensors.items() if name not in moves and still.is_live(name)}
    prompt = {name: each for name, each in tensors.items() if name not in live}
    return State(document, live, prompt, parts.view, still.rows)


@dataclass(frozen=True, slots=True)
class _Still:
    """What changes only when a tensor is replaced: all but values and what may have any size."""

    rows: Mapping[Surface, Row]
    """The table's, when this was made."""
    locals: Mapping[int, torch.Tensor]
    """This rank's part of each tensor in the table, by the ``id`` of the tensor."""
    names: Mapping[int, Surface]
    """The name of each such part, by its ``id``."""
    document: list[list[Any]]
    """Keys and encoded values."""
    layouts: list[list[Any]]
    """The same of the layouts."""
    tensors: Mapping[str, torch.Tensor]
    has_slots: bool
    """Whether the slots of the optimizers are among it: all of them are tensors in the table."""

    @classmethod
    def of(cls, parts: StateParts, rows: Mapping[Surface, Row]) -> _Still:
        known = {id(row.tensor): row.local for row in rows.values()}
        names = {id(row.local): name for name, row in rows.items()}
        local, places = _Collector(known), range(len(parts.optimizers))
        lasting = {
            name: each for name, each in parts.parameters.items() if name not in parts.changed_in_forward
        }
        found: dict[str, Any] = {
            "parameters": local.tensors("parameters", lasting),
            "masters": local.tensors("masters", parts.masters),
            "names": {"wrappers": wrappers_of(parts.model), "tied": _tied(parts.model), "owned": parts.owned},
        }
        slots = [value for each in parts.optimizers for value in _slot_values(each)]
        has_slots = all(id(each) in known for each in slots)
        if has_slots:
            found["slots"] = [local.slots(parts, place) for place in places]
        document, tensors = encode(found, names)
        layouts = _pairs(encode(local.layouts).document)
        return cls(rows, known, names, _pairs(document), layouts, tensors, has_slots)

    def is_live(self, name: str) -> bool:
        """Whether a tensor of this name does not change before the next update."""
        row = self.rows.get(name)
        return name.startswith(_LIVE) if row is None else row.kind is not Kind.BUFFER


def _slot_values(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for parameter, slots in optimizer.state.items():
        is_plain = isinstance(parameter, torch.Tensor) and type(slots) is dict
        yield from slots.values() if is_plain else [slots]


def _pairs(document: Any) -> list[list[Any]]:
    """The keys and values of a dict, encoded."""
    pairs: list[list[Any]] = document["dict"]
    return pairs


def expected_bytes(parts: StateParts) -> int:
    """Estimate the size of a checkpoint; before the first update, two slots per parameter are assumed."""
    total = sum(local_of(each).nbytes for each in parts.tensors)
    for optimizer in parts.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slots = optimizer.state.get(parameter)
                total += _tensor_bytes(slots) if slots else _USUAL_SLOTS * local_of(parameter).nbytes
    return total + sum(
        _tensor_bytes(each.state_dict()) for each in parts.registered.values() if not is_loader(each)
    )


def _tensor_bytes(tree: Any) -> int:
    return sum(each.nbytes for each in encode(_Collector({}).tree(tree, "")).tensors.values())


class _Collector:
    """Replaces tensors by their local parts, and records their layouts."""

    def __init__(self, known: Mapping[int, torch.Tensor]) -> None:
        """``known`` local parts are used, by the ``id`` of the tensor."""
        self.layouts: dict[str, Any] = {}
        self._known = known

    def tensors(self, part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Local parts of tensors that exist in every job; their own device is their home."""
        return {name: self._local(each, f"{part}/{name!r}", each.device) for name, each in tensors.items()}

    def tree(self, value: Any, path: str, parameter: torch.Tensor | None = None) -> Any:
        """A tree with local tensors; ``parameter`` is the one that the tree belongs to, if any."""
        home = CPU if parameter is None else parameter.device
        return walk(value, path, lambda each, _, place: self._local(each, place, home, parameter))

    def settings(self, parts: StateParts, place: int) -> dict[str, Any]:
        optimizer, groups = parts.optimizers[place], []
        for number, group in enumerate(optimizer.param_groups):
            first = next(iter(group["params"]), None)
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append(
                {
                    "params": [parts.names[id(parameter)] for parameter in group["params"]],
                    "settings": self.tree(values, f"optimizers/{place}/{number}", first),
                }
            )
        return {"class": class_name(optimizer), "groups": groups}

    def slots(self, parts: StateParts, place: int) -> dict[str, Any]:
        own, others = parts.slots(parts.optimizers[place])
        updated, path = parts.updated, f"slots/{place}"
        return {
            "own": {name: self.tree(each, f"{path}/{name!r}", updated[name]) for name, each in own.items()},
            "others": self.tree(others, path),
        }

    def _local(
        self, tensor: torch.Tensor, path: str, home: torch.device, parameter: torch.Tensor | None = None
    ) -> torch.Tensor:
        if (layout := layout_of(tensor, home, parameter)) is not None:
            self.layouts[path] = layout
        known = self._known.get(id(tensor))
        return local_of(tensor) if known is None else known
