"""The conditions under which a call is replayed, and everything that must be as before afterwards (paper,
section 6.1.1).

Autocast and attention are as in training's own call, kernels are deterministic, random numbers are the
same on every peer. Around a replay every random stream of this process is restored, those of NumPy and
Python included, and so is the module: buffers are exchanged for copies, and counters, caches and lists
that it keeps as plain attributes are put back. Objects of other classes are not looked into. Parameters
are not copied: a forward pass that writes to them is refused where that can be known.

In a ``context_parallel`` block ``scaled_dot_product_attention`` is another function, which passes keys and
values around. A replay comes after the block, and would attend to this rank's tokens alone, so the
function is captured with a call and put in place again around its replay.

[Note: strict deterministic algorithms] With ``warn_only=True`` every fused attention backward stays
nondeterministic, so that healthy ranks differ. Hence replay asks for ``warn_only=False``, under which an
operator without a deterministic version raises. A pass that raises so is replayed again with
``warn_only=True``, which still picks deterministic versions where there are any, and what it computes is
marked as not repeatable. The replay is made again by all ranks together, after a vote, since a layer may
communicate; see ``replayer``. cuBLAS without ``CUBLAS_WORKSPACE_CONFIG`` raises too on some versions, for
every matrix product. Products on one stream do repeat, so that nothing is marked then: what does not repeat
all the same is found by comparing.
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
from types import ModuleType
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
    "RngTracker",
    "autocast_as",
    "autocast_now",
    "buffers_of",
    "deterministic",
    "disturbed_by_cudnn",
    "lend",
    "preserved",
    "refusal",
    "register_tracker",
    "unmoved",
]


class RngTracker(Protocol):
    """Random streams that a framework keeps by itself, such as model-parallel ones."""

    def get_states(self) -> Mapping[str, torch.Tensor]:
        """Every stream's state, as ``torch.get_rng_state`` would give it."""
        ...

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None: ...


_trackers: dict[str, RngTracker] = {}


def register_tracker(name: str, tracker: RngTracker) -> Callable[[], None]:
    """Let replay align and restore these streams too; what is returned takes the registration back."""
    if not name or "/" in name:
        raise ValueError(f"a random tracker needs a name without '/', got {name!r}")
    if name in _trackers:
        raise ValueError(f"a random tracker named {name!r} is registered already")
    _trackers[name] = tracker
    return lambda: _forget(name, tracker)


def _forget(name: str, tracker: RngTracker) -> None:
    if _trackers.get(name) is tracker:
        del _trackers[name]


@dataclass(frozen=True, slots=True)
class RngState:
    """The state of every stream that a layer may draw from."""

    states: Mapping[str, torch.Tensor]
    """Bytes in host memory: ``cpu``, the accelerator's type, ``TRACKER/STREAM``."""

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
        """Let everything on this rank draw from here."""
        torch.set_rng_state(self.states["cpu"])
        if device.type in self.states and device.type != "cpu":
            module, wanted = torch.get_device_module(device), self.states[device.type].cpu()
            if not torch.equal(module.get_rng_state(device).cpu(), wanted):  # see ``disturbed_by_cudnn``
                module.set_rng_state(wanted, device)
        for name, tracker in _trackers.items():
            own = {key.partition("/")[2]: state for key, state in self.states.items() if _belongs(key, name)}
            tracker.set_states(own)
        # Python's and NumPy's states are no tensors; a seed that all peers share is enough.
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)

    @property
    def seed(self) -> int:
        """For streams whose states do not travel."""
        return xxhash.xxh3_64_intdigest(self.states["cpu"].numpy().tobytes())


@contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """Whatever is drawn in this block, training draws what it would have drawn without it."""
    torch_states, python_state, numpy_state = RngState.now(device), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch_states.apply(device)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def disturbed_by_cudnn(model: torch.nn.Module) -> str | None:
    """Why nothing of this model may be computed again, if its dropout would be another one afterwards.

    For recurrent layers with dropout cuDNN keeps a random state of its own. PyTorch makes a new one, with
    numbers from the device's stream, after anybody has set the state of that stream, even to what it was.
    """
    for name, each in model.named_modules():
        is_drawing = isinstance(each, torch.nn.RNNBase) and each.dropout and each.num_layers > 1
        if is_drawing and any(weight.is_cuda for weight in each.parameters()):
            return f"{name or 'the model'} has dropout whose random state in cuDNN a replay would reset"
    return None


def lend(stream: Any, seed: int) -> Callable[[], object] | None:
    """Let a stream that a module keeps for itself draw as on every peer.

    What is returned puts the stream back to where it was; None if this is no random stream.
    """
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


def _belongs(key: str, tracker: str) -> bool:
    return key.startswith(f"{tracker}/")


_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
# What is used of it; the interface is experimental.
_NAMES = ("_cp_options", "_disable_cp_dtensor_dispatcher", "_enable_cp_dtensor_dispatcher", "custom_ops")


@dataclass(frozen=True, slots=True)
class Attention:
    """What computes attention, at one moment on one rank."""

    function: Callable[..., Any]
    """What ``torch.nn.functional.scaled_dot_product_attention`` is."""
    is_ring: bool = False
    """Whether attention between DTensors goes around the ranks of a context-parallel group."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How it goes around."""

    @classmethod
    def now(cls) -> Attention:
        function = functional.scaled_dot_product_attention
        module = sys.modules.get(_MODULE)
        missing = [name for name in _NAMES if not hasattr(module, name)]
        if module is None or (missing and function is plain_attention):
            return cls(function)
        if missing:
            raise ReplayError(f"this PyTorch's context_parallel is not known: it has no {missing[0]}")
        is_ring = any(op in DTensor._op_dispatcher._custom_op_handlers for op in module.custom_ops)
        return cls(function, is_ring, dict(vars(module._cp_options)))

    def describe(self) -> dict[str, Any]:
        """What must be alike on all peers."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        options = {key: str(value) for key, value in self.options.items()} if self.is_ring else {}
        return {"function": name, "ring": self.is_ring, **options}

    def require(self, told: Mapping[str, Any]) -> None:
        """A ``ReplayError`` where the source's attention was another."""
        if (own := self.describe()) != told:
            raise ReplayError(f"attention is {own} here and {dict(told)} on the source")

    @contextmanager
    def again(self) -> Iterator[None]:
        """In this block attention is computed so, whatever computes it around the block."""
        around = Attention.now()
        self._take_place_of(around)
        try:
            yield
        finally:
            around._take_place_of(self)

    def _take_place_of(self, other: Attention) -> None:
        if self.function is not other.function:
            functional.scaled_dot_product_attention = self.function
        if self.options != other.options:
            vars(_module()._cp_options).update(self.options)
        if self.is_ring != other.is_ring:
            switch = "_enable_cp_dtensor_dispatcher" if self.is_ring else "_disable_cp_dtensor_dispatcher"
            getattr(_module(), switch)()


def _module() -> ModuleType:
    return sys.modules[_MODULE]


_OWN = frozenset(nn.Module().__dict__) - {"training"}  # what nn.Module itself keeps; buffers among it
_CONTAINERS = (list, dict, set, deque)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer by its dotted name, each once."""
    return dict(module.named_buffers())


def refusal(module: nn.Module) -> str | None:
    """Why a call of this module would change training, if it would."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            return f"{name or 'it'} renormalizes its weights in place (max_norm) whenever it is called"
    return None


@contextmanager
def preserved(module: nn.Module, buffers: Mapping[str, torch.Tensor], seed: int) -> Iterator[None]:
    """Call the module in this block as often as you like, with copies of ``buffers`` as its own.

    Random streams that the module keeps for itself draw from ``seed``, which peers share.
    """
    with ExitStack() as undo:
        _exchange_buffers(module, buffers, undo)
        _Memory(seed, undo).of_attributes(module)
        # Taken back first, while what it may write to is still the copies.
        for each in module.modules():
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                undo.callback(each.set_extra_state, copy.deepcopy(each.get_extra_state()))
        yield


def _exchange_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor], undo: ExitStack) -> None:
    """Under every name a buffer has, and those that the call adds are gone afterwards."""
    copies = {own: buffers[name].clone() for name, own in buffers_of(module).items()}
    for each in module.modules():
        undo.callback(_refill, each._buffers, each._buffers.copy())
        undo.callback(_refill, each._non_persistent_buffers_set, each._non_persistent_buffers_set.copy())
        exchanged = {name: copies.get(own, own) for name, own in each._buffers.items() if own is not None}
        each._buffers.update(exchanged)


class _Memory:
    """What is to be put back, values within values included; each once."""

    def __init__(self, seed: int, undo: ExitStack) -> None:
        self._seed, self._undo = seed, undo
        self._known: set[int] = set()

    def of_attributes(self, module: nn.Module) -> None:
        for each in module.modules():
            plain = {name: value for name, value in vars(each).items() if name not in _OWN}
            self._undo.callback(_restore_attributes, each, plain)
            for value in plain.values():
                self._of(value)

    def _of(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, _CONTAINERS):
            self._undo.callback(_refill, value, value.copy())
        elif type(value) is torch.Tensor and not value.is_meta and not value.is_inference():
            self._undo.callback(_rewrite, value, value._version, value.detach().clone())
        elif (give_back := lend(value, self._seed)) is not None:
            self._undo.callback(give_back)
        if isinstance(value, (*_CONTAINERS, tuple)):
            for each in value.values() if isinstance(value, dict) else value:
                self._of(each)


def _restore_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    for name in [name for name in vars(module) if name not in _OWN and name not in attributes]:
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _rewrite(tensor: torch.Tensor, version: int, contents: torch.Tensor) -> None:
    """Only if it was changed: nothing of the user's is written to without need."""
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(contents)


def _refill(value: Any, contents: Any) -> None:
    if not _same(value, contents):
        value.clear()
        value.update(contents) if isinstance(value, dict | set) else value.extend(contents)


def _same(value: Any, contents: Any) -> bool:
    """Whether a container still holds the very same objects."""
    if isinstance(value, dict):
        return _same(list(value), list(contents)) and _same([*value.values()], [*contents.values()])
    return len(value) == len(contents) and all(map(is_, value, contents))


_RAISED = "use_deterministic_algorithms"
"""In the message of every operator that refuses to run."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""In the message of those that repeat on one stream, as replay runs them."""
_NO_ATTENTION = "No available kernel"
"""The message of attention whose user allows one backend only, if strict mode refuses that one: so cuDNN's,
whose forward pass repeats and whose backward pass does not."""
_PASSES = ("forward", "backward")


def autocast_now(device: torch.device) -> dict[str, str | None]:
    """For the CPU and the accelerator: the dtype that autocast uses, None where it is off."""
    return {
        kind: _name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        for kind in dict.fromkeys(("cpu", device.type))
    }


@contextmanager
def autocast_as(dtypes: Mapping[str, str | None]) -> Iterator[None]:
    with ExitStack() as contexts:
        for kind, dtype in dtypes.items():
            # Without its cache: a weight cast before the update would be used after it.
            chosen = None if dtype is None else getattr(torch, dtype)
            autocast = torch.autocast(kind, dtype=chosen, enabled=dtype is not None, cache_enabled=False)
            contexts.enter_context(autocast)
        yield


@dataclass(slots=True)
class Determinism:
    """Which passes of a module cannot run under strict deterministic algorithms, learned when they raise."""

    relaxed: set[str] = field(default_factory=set)
    """Passes that only warn, from the next replay on."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Passes whose results are not repeatable, each with what the operator said."""

    def learn(self, passed: str, error: RuntimeError) -> bool:
        """Whether the pass has failed for want of a deterministic operator, and can be replayed without."""
        message = str(error)
        if passed in self.relaxed:
            return False
        if _NO_ATTENTION in message:
            self.relaxed.update(_PASSES)
            self.lacking["backward"] = (
                "attention of the only backend that is allowed has no deterministic version"
            )
            return True
        if _RAISED not in message:
            return False
        self.relaxed.add(passed)
        if _CUBLAS not in message:
            self.lacking[passed] = message.partition(",")[0].strip()
        return True


@contextmanager
def deterministic(*, strict: bool = True) -> Iterator[None]:
    """Let kernels repeat themselves; every switch is put back. See [Note: strict deterministic algorithms].

    Not around compiled code: the mode is one of its guards, and other kernels would be compiled.
    """
    # Not torch.use_deterministic_algorithms: it imports the compiler, and sets the compiler's switch too.
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        with warnings.catch_warnings():
            # Of kernels that have no deterministic version: what they compute is marked, or found out about.
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            set_deterministic(True, warn_only=not strict)
            memory.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        set_deterministic(mode, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
