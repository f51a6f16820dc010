"""Sets up training's conditions for a replay, and restores everything afterwards (paper, section 6.1.1).

Autocast and attention are as in training's call, kernels are deterministic, and random numbers are the same
on every peer. After a replay all random streams of the process are restored, including NumPy's and Python's,
and so is the module: buffers are replaced by copies during the replay, and counters, caches and lists among
its attributes are reset, as are objects that hold tensors, such as the scales of a quantization. Objects of
other classes are not inspected. Parameters are not copied: a forward pass that writes to them is refused if
that is detected.

In a ``context_parallel`` block ``scaled_dot_product_attention`` is replaced by a function that exchanges keys
and values among ranks. A replay happens after the block and would attend to this rank's tokens only, so the
function is captured with the call and restored for its replay.

[Note: strict deterministic algorithms] With ``warn_only=True`` every fused attention backward stays
nondeterministic, and healthy ranks differ. So replay uses ``warn_only=False``, with which an operator without
a deterministic version raises. Such a pass is repeated with ``warn_only=True``, which still selects
deterministic versions where they exist, and its results are marked as not repeatable. All ranks repeat it
together after a vote, since a layer may communicate; see ``replayer``. Some versions of cuBLAS raise for
every matrix product without ``CUBLAS_WORKSPACE_CONFIG``. Products on one stream do repeat, so their results
are not marked; comparing finds those that do not.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchscout.errors import ReplayError
from torchscout.utils._torch import plain_attention, set_deterministic

__all__ = [
    "Attention",
    "Determinism",
    "RngState",
    "autocast_as",
    "autocast_now",
    "buffers_of",
    "deterministic",
    "disturbed_by_cudnn",
    "preserved",
    "preserved_rng",
    "refusal",
    "register_tracker",
    "seeded",
]


class RngTracker(Protocol):
    """Random streams of a framework, such as those for model parallelism."""

    def get_states(self) -> Mapping[str, torch.Tensor]:
        """Return the state of each stream, in the format of ``torch.get_rng_state``."""
        ...

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None: ...


_trackers: dict[str, RngTracker] = {}


def register_tracker(name: str, tracker: RngTracker) -> Callable[[], None]:
    """Let replay align and restore these streams, too. Return a function that undoes the registration.

    Raises ``ValueError`` for an invalid name.
    """
    if not name or "/" in name:
        raise ValueError(f"the name of a random tracker must be nonempty and contain no '/', got {name!r}")
    if name in _trackers:
        raise ValueError(f"a random tracker named {name!r} is already registered")
    _trackers[name] = tracker

    def unregister() -> None:
        if _trackers.get(name) is tracker:
            del _trackers[name]

    return unregister


@dataclass(frozen=True, slots=True)
class RngState:
    """The state of every random stream that a layer may use."""

    states: Mapping[str, torch.Tensor]
    """Bytes in host memory, by ``cpu``, the type of the accelerator, or ``TRACKER/STREAM``."""

    @classmethod
    def now(cls, device: torch.device) -> RngState:
        states = {"cpu": torch.get_rng_state()}
        if device.type != "cpu":
            states[device.type] = torch.get_device_module(device).get_rng_state(device).cpu()
        for name, tracker in _trackers.items():
            streams = tracker.get_states()
            states |= {f"{name}/{stream}": state.cpu().clone() for stream, state in streams.items()}
        return cls(states)

    def apply(self, device: torch.device) -> None:
        """Set all random streams of this process."""
        torch.set_rng_state(self.states["cpu"])
        if device.type in self.states and device.type != "cpu":
            module, wanted = torch.get_device_module(device), self.states[device.type].cpu()
            if not torch.equal(module.get_rng_state(device).cpu(), wanted):  # see ``disturbed_by_cudnn``
                module.set_rng_state(wanted, device)
        for name, tracker in _trackers.items():
            prefix, states = f"{name}/", self.states.items()
            tracker.set_states({key[len(prefix) :]: each for key, each in states if key.startswith(prefix)})
        # The states of Python and NumPy are not tensors; a seed that all peers share is enough.
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)

    @property
    def seed(self) -> int:
        """A seed for streams whose states are not sent."""
        return xxhash.xxh3_64_intdigest(self.states["cpu"].numpy().tobytes())


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Restore all random streams after this block."""
    torch_states, python_state, numpy_state = RngState.now(device), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch_states.apply(device)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def disturbed_by_cudnn(model: torch.nn.Module) -> str | None:
    """Return why nothing of this model may be replayed, if a replay would change its dropout; else None.

    For recurrent layers with dropout, cuDNN keeps its own random state. PyTorch creates a new one from the
    device's stream whenever the state of that stream has been set, even to the same value.
    """
    for name, each in model.named_modules():
        is_drawing = isinstance(each, torch.nn.RNNBase) and each.dropout and each.num_layers > 1
        if is_drawing and any(weight.is_cuda for weight in each.parameters()):
            return f"{name or 'the model'} has dropout whose random state in cuDNN a replay would reset"
    return None


def seeded(stream: Any, seed: int) -> Callable[[], object] | None:
    """Seed a module's random stream. Return a function that restores it; None if it is no random stream."""
    if isinstance(stream, torch.Generator):
        before = stream.get_state()
        stream.manual_seed(seed)
        return lambda: stream.set_state(before)
    if isinstance(stream, random.Random):
        state = stream.getstate()
        stream.seed(seed)
        return lambda: stream.setstate(state)
    if isinstance(stream, np.random.Generator):
        bits = stream.bit_generator
        own = bits.state
        bits.state = type(bits)(seed).state
        return lambda: setattr(bits, "state", own)
    return None


_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
# The attributes that are used; the interface is experimental.
_NAMES = ("_cp_options", "_disable_cp_dtensor_dispatcher", "_enable_cp_dtensor_dispatcher", "custom_ops")


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention function in effect on one rank."""

    function: Callable[..., Any]
    """The value of ``torch.nn.functional.scaled_dot_product_attention``."""
    is_ring: bool = False
    """Whether attention between DTensors is ring attention in a context-parallel group."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ring attention."""

    @classmethod
    def now(cls) -> Attention:
        function = functional.scaled_dot_product_attention
        module = sys.modules.get(_MODULE)
        missing = [name for name in _NAMES if not hasattr(module, name)]
        if module is None or (missing and function is plain_attention):
            return cls(function)
        if missing:
            raise ReplayError(f"this version of context_parallel is not supported: it has no {missing[0]}")
        is_ring = any(op in DTensor._op_dispatcher._custom_op_handlers for op in module.custom_ops)
        return cls(function, is_ring, dict(vars(module._cp_options)))

    def describe(self) -> dict[str, Any]:
        """Return what must be equal on all peers."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        options = {key: str(value) for key, value in self.options.items()} if self.is_ring else {}
        return {"function": name, "ring": self.is_ring, **options}

    def require(self, source: Mapping[str, Any]) -> None:
        """Raise ``ReplayError`` if the source's description differs."""
        if (own := self.describe()) != source:
            raise ReplayError(f"attention is {own} here and {dict(source)} on the source")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute attention with this function in this block."""
        around = Attention.now()
        self._replace(around)
        try:
            yield
        finally:
            around._replace(self)

    def _replace(self, present: Attention) -> None:
        if self.function is not present.function:
            functional.scaled_dot_product_attention = self.function
        if self.options != present.options:
            vars(sys.modules[_MODULE]._cp_options).update(self.options)
        if self.is_ring != present.is_ring:
            switch = "_enable_cp_dtensor_dispatcher" if self.is_ring else "_disable_cp_dtensor_dispatcher"
            getattr(sys.modules[_MODULE], switch)()


_OWN = frozenset(nn.Module().__dict__) - {"training"}  # what nn.Module itself defines, such as buffers
_CONTAINERS = (list, dict, set, deque)
_MAX_STATE = 1 << 16
"""Elements of a tensor among a module's attributes that is taken from the source."""


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every buffer once, by its dotted name."""
    return dict(module.named_buffers())


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a replay takes from the source besides parameters: buffers, and small tensors among the
    module's attributes or in objects there, such as the scales of a quantization."""
    found = buffers_of(module)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                inside = vars(value) if _holds_tensors(value) else {"": value}
                kept = {f"{path}.{name}.{key}": each for key, each in inside.items() if _is_small(each)}
                found |= {key.strip("."): each for key, each in kept.items()}
    return found


def _is_small(value: Any) -> bool:
    """Whether it is a tensor that may be part of a state; a table of constants is larger."""
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    return is_plain and value.numel() <= _MAX_STATE and not (value.is_meta or value.is_inference())


def refusal(module: nn.Module) -> str | None:
    """Return why a call of this module would change training; None if it would not."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            return f"{name or 'it'} renormalizes its weights in place (max_norm) in every call"
    return None


@contextmanager
def preserved(module: nn.Module, buffers: Mapping[str, torch.Tensor], seed: int) -> Iterator[None]:
    """Restore the module after this block, in which it uses copies of ``buffers``: see ``state_of``.

    Random streams among the module's attributes are seeded with ``seed``, which peers share.
    """
    with ExitStack() as undo:
        _replace_buffers(module, buffers, undo)
        _AttributeRestorer(seed, undo).save(module)
        own_buffers = buffers_of(module)
        with torch.no_grad():
            for name, own in state_of(module).items():
                if name in buffers and name not in own_buffers:
                    own.copy_(buffers[name])
        # Undone first, while buffers, which it may write to, are still the copies.
        for each in module.modules():
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                undo.callback(each.set_extra_state, copy.deepcopy(each.get_extra_state()))
        yield


def _replace_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor], undo: ExitStack) -> None:
    """Replace buffers under all their names; those that the call adds are removed afterwards."""
    copies = {own: buffers[name].clone() for name, own in buffers_of(module).items()}
    for each in module.modules():
        undo.callback(_refill, each._buffers, each._buffers.copy())
        undo.callback(_refill, each._non_persistent_buffers_set, each._non_persistent_buffers_set.copy())
        replaced = {name: copies.get(own, own) for name, own in each._buffers.items() if own is not None}
        each._buffers.update(replaced)


class _AttributeRestorer:
    """Saves the attributes of modules, at any depth of containers, and restores them on ``undo``."""

    def __init__(self, seed: int, undo: ExitStack) -> None:
        self._seed, self._undo = seed, undo
        self._known: set[int] = set()

    def save(self, module: nn.Module) -> None:
        for each in module.modules():
            plain = {name: value for name, value in vars(each).items() if name not in _OWN}
            self._undo.callback(_restore_attributes, each, plain)
            for value in plain.values():
                self._save(value)

    def _save(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, _CONTAINERS):
            self._undo.callback(_refill, value, value.copy())
        elif type(value) is torch.Tensor and not value.is_meta and not value.is_inference():
            self._undo.callback(_rewrite, value, value._version, value.detach().clone())
        elif (restore := seeded(value, self._seed)) is not None:
            self._undo.callback(restore)
        elif _holds_tensors(value):
            self._undo.callback(_refill, vars(value), vars(value).copy())
            for each in vars(value).values():
                self._save(each)
        if isinstance(value, (*_CONTAINERS, tuple)):
            for each in value.values() if isinstance(value, dict) else value:
                self._save(each)


def _holds_tensors(value: Any) -> bool:
    """Whether it is an object that keeps tensors, such as the scales of a quantization."""
    if isinstance(value, nn.Module | type | torch.Tensor | FunctionType | MethodType):
        return False
    return any(type(each) is torch.Tensor for each in getattr(value, "__dict__", {}).values())


def _restore_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    for name in [name for name in vars(module) if name not in _OWN and name not in attributes]:
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _rewrite(tensor: torch.Tensor, version: int, contents: torch.Tensor) -> None:
    """Write only if the tensor was changed."""
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(contents)


def _refill(value: Any, contents: Any) -> None:
    if not _same(value, contents):
        value.clear()
        value.update(contents) if isinstance(value, dict | set) else value.extend(contents)


def _same(value: Any, contents: Any) -> bool:
    """Whether a container has the same objects."""
    if isinstance(value, dict):
        return _same(list(value), list(contents)) and _same([*value.values()], [*contents.values()])
    return len(value) == len(contents) and all(map(is_, value, contents))


_RAISED = "use_deterministic_algorithms"
"""Part of the message of every operator that refuses to run."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""Part of the message of operators that do repeat on one stream, as replay runs them."""
_NO_ATTENTION = "No available kernel"
"""The message of attention if the user allows one backend only and strict mode refuses that one, such as
cuDNN's, whose forward pass repeats and whose backward pass does not."""
_PASSES = ("forward", "backward")


def autocast_now(device: torch.device) -> dict[str, str | None]:
    """Return autocast's dtype for the CPU and the accelerator; None where autocast is off."""
    return {
        kind: str(torch.get_autocast_dtype(kind))[6:] if torch.is_autocast_enabled(kind) else None
        for kind in dict.fromkeys(("cpu", device.type))
    }


@contextmanager
def autocast_as(dtypes: Mapping[str, str | None]) -> Iterator[None]:
    with ExitStack() as contexts:
        for kind, dtype in dtypes.items():
            # No cache: a weight that was cast before the update would be used after it.
            chosen = None if dtype is None else getattr(torch, dtype)
            autocast = torch.autocast(kind, dtype=chosen, enabled=dtype is not None, cache_enabled=False)
            contexts.enter_context(autocast)
        yield


@dataclass(slots=True)
class Determinism:
    """The passes of a module that have failed under strict deterministic algorithms."""

    relaxed: set[str] = field(default_factory=set)
    """Passes that are replayed with ``warn_only``."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Passes whose results are not repeatable, with the operator's message."""

    def learn(self, mode: str, error: RuntimeError) -> bool:
        """Return whether the pass failed for lack of a deterministic operator and can be repeated."""
        message = str(error)
        if mode in self.relaxed:
            return False
        if _NO_ATTENTION in message:
            self.relaxed.update(_PASSES)
            self.lacking["backward"] = "the only allowed attention backend has no deterministic version"
            return True
        if _RAISED not in message:
            return False
        self.relaxed.add(mode)
        if _CUBLAS not in message:
            self.lacking[mode] = message.partition(",")[0].strip()
        return True


@contextmanager
def deterministic(*, strict: bool = True) -> Iterator[None]:
    """Use deterministic kernels in this block. See [Note: strict deterministic algorithms].

    Not for compiled code: the mode is one of its guards, so it would be compiled again.
    """
    # Not torch.use_deterministic_algorithms: it imports the compiler, and sets the compiler's switch too.
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        with warnings.catch_warnings():
            # Kernels without a deterministic version warn; their results are marked, or found by comparing.
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            set_deterministic(True, warn_only=not strict)
            memory.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        set_deterministic(mode, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
