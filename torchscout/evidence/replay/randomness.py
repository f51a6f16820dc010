"""Random numbers in replay: the same on every peer, training's own streams untouched (paper, 6.1.1).

A state is captured before a layer's forward pass and travels with its input. Around a replay every
stream of this process is put back to where it was, those of NumPy and Python included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

__all__ = ["Randomness", "Tracker", "disturbed_by_cudnn", "lend", "register_tracker", "unmoved"]


class Tracker(Protocol):
    """Random streams that a framework keeps by itself, such as model-parallel ones."""

    def get_states(self) -> Mapping[str, torch.Tensor]:
        """Every stream's state, as ``torch.get_rng_state`` would give it."""
        ...

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None: ...


_trackers: dict[str, Tracker] = {}


def register_tracker(name: str, tracker: Tracker) -> Callable[[], None]:
    """Let replay align and restore these streams too; what is returned takes the registration back."""
    if not name or "/" in name:
        raise ValueError(f"a random tracker needs a name without '/', got {name!r}")
    if name in _trackers:
        raise ValueError(f"a random tracker named {name!r} is registered already")
    _trackers[name] = tracker
    return lambda: _forget(name, tracker)


def _forget(name: str, tracker: Tracker) -> None:
    if _trackers.get(name) is tracker:
        del _trackers[name]


@dataclass(frozen=True, slots=True)
class Randomness:
    """The state of every stream that a layer may draw from."""

    states: Mapping[str, torch.Tensor]
    """Bytes in host memory: ``cpu``, the accelerator's type, ``TRACKER/STREAM``."""

    @classmethod
    def now(cls, device: torch.device) -> Randomness:
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
    torch_states, python_state, numpy_state = Randomness.now(device), random.getstate(), np.random.get_state()
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
