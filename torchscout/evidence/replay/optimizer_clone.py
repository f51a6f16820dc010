"""One parameter's update as production does it, on copies (paper, section 6.1.1).

A ``Blueprint`` is an optimizer as it stands before its update, reduced to one parameter and without its
tensors; any rank that has those can build the optimizer from it. Nothing here knows why an update is
repeated, or on which ranks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchscout.errors import ReplayError
from torchscout.evidence.replay.alignment import captured, is_dense
from torchscout.evidence.replay.guard import guarded
from torchscout.evidence.replay.optimizer_settings import Place, Settings, Taken, put_back, spelled
from torchscout.evidence.replay.randomness import unmoved

__all__ = ["FAILURES", "Blueprint", "Parts", "blueprint_of", "build", "give_gradient", "group_of", "update"]

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    ReplayError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an optimizer of any origin may raise when it is read or stepped outside of its training."""

_SEED = 0x5C007
# A clone has its own state and groups, and its class's step: what a scheduler puts there steps the original.
_REPLACED = ("state", "param_groups", "step")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an optimizer holds for one parameter, or for a slice of it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: Settings


@dataclass(frozen=True, slots=True)
class Blueprint:
    """An optimizer of one parameter without its tensors; the first two are parameter and gradient."""

    kind: type[Optimizer]
    attributes: Settings
    hooks: tuple[str, ...]
    """The attributes that hold hooks; a clone has none."""
    group: Settings
    state: Settings
    shared: Settings
    """What ``Optimizer.state`` keeps under names instead of parameters."""
    names: tuple[str, ...]
    """The tensors' names, by place."""

    @property
    def slots(self) -> list[str]:
        """The tensors among the parameter's state."""
        return [name for name, value in self.state.items() if isinstance(value, Place)]

    def settings(self) -> dict[str, str]:
        """All that is no tensor, spelled alike on every rank that has the same."""
        parts = {
            "attribute": self.attributes,
            "group": self.group,
            "state": self.state,
            "shared": self.shared,
        }
        return {f"{part} {key}": spelled(parts[part][key]) for part in parts for key in parts[part]}


def blueprint_of(
    optimizer: Optimizer, parameter: torch.Tensor, parts: Parts
) -> tuple[Blueprint, list[torch.Tensor]]:
    """The blueprint, and the tensors that belong into it: training's own, to be copied.

    What an optimizer keeps besides tensors and plain values is left out: its process group, its generator,
    an optimizer inside it. A clone that needs such a thing fails instead of changing training.
    """
    attributes = vars(optimizer)
    hooks = tuple(name for name in attributes if name.startswith("_optimizer_") and name.endswith("_hooks"))
    own = {name: attributes[name] for name in attributes.keys() - {*hooks, *_REPLACED}}
    everything: dict[Any, Any] = optimizer.state
    taken = Taken()
    taken.take(parts.parameter, "parameter")
    taken.take(parts.gradient, "gradient")
    blueprint = Blueprint(
        kind=type(optimizer),
        attributes=taken.take_possible(own, "attribute"),
        hooks=hooks,
        group=taken.take_possible(_settings_of(optimizer, parameter), "group"),
        state=taken.take_all(parts.state, "state"),
        shared=taken.take_possible(
            {key: everything[key] for key in everything if type(key) is str}, "shared"
        ),
        names=tuple(taken.names),
    )
    # A copy is always dense, and what a peer describes must be what the source's copy is.
    return blueprint, [tensor if is_dense(tensor) else tensor.contiguous() for tensor in taken.tensors]


def build(blueprint: Blueprint, tensors: Sequence[torch.Tensor]) -> tuple[Optimizer, torch.nn.Parameter]:
    """An optimizer of its own copies of the tensors, with the gradient in place."""
    copies = [captured(tensor) for tensor in tensors]
    # Not copy.copy: it calls __setstate__, which writes defaults into the groups that it would share.
    clone: Optimizer = object.__new__(blueprint.kind)
    vars(clone).update(put_back(blueprint.attributes, copies))
    vars(clone).update({name: OrderedDict() for name in blueprint.hooks})
    # A differentiable update records itself, which a leaf that requires gradients does not permit.
    leaf = torch.nn.Parameter(copies[0], requires_grad=not clone.defaults.get("differentiable", False))
    give_gradient(leaf, copies[1])
    state: defaultdict[Any, Any] = defaultdict(dict, put_back(blueprint.shared, copies))
    if blueprint.state:
        state[leaf] = put_back(blueprint.state, copies)
    clone.state = state
    clone.param_groups = [{**put_back(blueprint.group, copies), "params": [leaf]}]
    return clone, leaf


def give_gradient(leaf: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if gradient.dtype != leaf.dtype:
        leaf.grad_dtype = gradient.dtype
    leaf.grad = gradient


def update(clone: Optimizer, device: torch.device) -> None:
    """One step, without the hooks around it, and with the same random numbers on every rank."""
    step: Callable[[Optimizer], Any] = type(clone).step
    while getattr(step, "hooked", False):  # torch's wrapper, which calls the hooks of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    with guarded(), torch.no_grad(), _own_randomness(device):
        step(clone)


def group_of(optimizer: Optimizer, parameter: torch.Tensor) -> Settings:
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return group
    if optimizer.param_groups and not any(group["params"] for group in optimizer.param_groups):
        # ZeRO shows its optimizer only what is being updated; in a sweep any settings do that peers share.
        return optimizer.param_groups[0]
    raise ReplayError("the optimizer no longer owns the parameter")


def _settings_of(optimizer: Optimizer, parameter: torch.Tensor) -> Settings:
    """The parameter's group without the lists that go parallel to its parameters."""
    return {
        key: value
        for key, value in group_of(optimizer, parameter).items()
        if key not in ("params", "param_names")
    }


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """For optimizers that round at random: all ranks draw alike."""
    with unmoved(device):
        torch.default_generator.manual_seed(_SEED)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(_SEED)
        yield
