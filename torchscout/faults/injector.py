"""Carries a plan of faults out through PyTorch's public hooks, and counts what fired.

The code under test has no branch for faults: an unarmed job and an armed one run the same code.
"""

from __future__ import annotations

import difflib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torchscout.evidence.call import Call
from torchscout.evidence.collectives import Handle, Pending, listen
from torchscout.evidence.hearing import is_inert
from torchscout.faults.effects import ProcessEffect
from torchscout.faults.fault import Fault, Faults

__all__ = ["Firing", "Injector"]

_MOMENT = "step"
_HOOKS: Mapping[str, Callable[[torch.nn.Module, Callable[[Any], None]], RemovableHandle]] = {
    "input": lambda module, act: module.register_forward_pre_hook(lambda _, args: act(args)),
    "forward": lambda module, act: module.register_forward_pre_hook(lambda _, args: act(args)),
    "output": lambda module, act: module.register_forward_hook(lambda _, __, out: act(out)),
    "grad_output": lambda module, act: module.register_full_backward_pre_hook(lambda _, g: act(g)),
    "backward": lambda module, act: module.register_full_backward_pre_hook(lambda _, g: act(g)),
    "grad_input": lambda module, act: module.register_full_backward_hook(lambda _, g, __: act(g)),
}
_Named = TypeVar("_Named")


@dataclass(frozen=True, slots=True)
class Firing:
    """One fault, seen to happen."""

    rank: int
    at: str
    step: int
    detail: str
    monotonic: float
    """When, by the machine's monotonic clock."""


class Injector:
    """One rank's share of the plan, armed until ``disarm`` or the end of the ``with`` block.

    ``log`` names a file that gets a JSON line for each firing, written before the effect, so
    that a rank that kills itself is still seen to have done it.
    """

    def __init__(
        self,
        faults: Faults,
        rank: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        log: Path | None = None,
    ) -> None:
        self.step = 1
        self.fired: list[Firing] = []
        self._passes: Counter[tuple[Fault, int]] = Counter()
        """How often each place was passed in each step."""
        self._happened: set[Fault] = set()
        self._rank, self._model, self._optimizer, self._log = rank, model, optimizer, log
        self._mine = [fault for fault in faults if fault.rank == rank]
        self._handles: list[RemovableHandle | Handle] = []
        self._hook_everything()

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()

    @property
    def unfired(self) -> list[Fault]:
        """Faults of this rank that have not happened in any step: a test must not pass with one."""
        return [fault for fault in self._mine if fault not in self._happened]

    def disarm(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook_everything(self) -> None:
        before: list[Callable[[], None]] = []
        after: list[Callable[[], None]] = []
        for fault in self._mine:
            path, _, what = fault.at.rpartition("/")
            name, _, slot = what.partition(".")
            act = partial(self._fire, fault)
            if fault.at == _MOMENT:
                before.append(partial(act, ()))
            elif "@" in fault.at:
                self._handles.append(listen(_Ear(fault.at, act)))
            elif what in _HOOKS:
                self._handles.append(_HOOKS[what](self._module(path), act))
            elif slot == "gradient":
                register: Callable[..., RemovableHandle] = self._parameter(path, name).register_hook
                self._handles.append(register(act))
            else:
                find = partial(self._parameter_tensors, self._parameter(path, name), slot)
                moment = before if slot == "grad" else after
                moment.append(lambda act=act, find=find: act(find()))  # type: ignore[misc]
        self._follow_steps(before, after)

    def _follow_steps(self, before: list[Callable[[], None]], after: list[Callable[[], None]]) -> None:
        """A step ends when the next one begins: what is replayed between them belongs to the first."""
        updated = False

        def next_begins(*_: Any) -> None:
            nonlocal updated
            if updated and not is_inert():
                self.step, updated = self.step + 1, False

        def before_update(*_: Any) -> None:
            next_begins()
            for act in before:
                act()

        def after_update(*_: Any) -> None:
            nonlocal updated
            updated = True
            for act in after:
                act()

        self._handles.append(self._model.register_forward_pre_hook(next_begins))
        self._handles.append(self._optimizer.register_step_pre_hook(before_update))
        self._handles.append(self._optimizer.register_step_post_hook(after_update))

    def _fire(self, fault: Fault, tensors: Any) -> None:
        """Let the fault happen if its step has come, and within it its call."""
        call = self._passes[fault, self.step]
        self._passes[fault, self.step] += 1
        if self.step not in fault.steps or not (fault.calls is None or call in fault.calls):
            return
        if isinstance(fault.effect, ProcessEffect):
            self._count(fault, repr(fault.effect))  # first: the process may not come back from it
            fault.effect.happen()
        elif found := _tensors(tensors):
            self._count(fault, fault.effect.corrupt(found[0]))

    def _count(self, fault: Fault, detail: str) -> None:
        firing = Firing(self._rank, fault.at, self.step, detail, time.monotonic())
        self.fired.append(firing)
        self._happened.add(fault)
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(json.dumps(asdict(firing)) + "\n")

    def _module(self, path: str) -> torch.nn.Module:
        modules: dict[str, torch.nn.Module] = dict(self._model.named_modules())
        return _named(path, modules, "module")

    def _parameter(self, path: str, name: str) -> torch.nn.Parameter:
        dotted = f"{path}.{name}" if path else name
        return _named(dotted, dict(self._model.named_parameters()), "parameter")

    def _parameter_tensors(self, parameter: torch.nn.Parameter, slot: str) -> Iterable[Any]:
        if not slot:
            return [parameter]
        if slot == "grad":
            return [parameter.grad]
        return [self._optimizer.state[parameter].get(slot)]


class _Ear:
    """Hears of collectives, and acts on what one of them has left in this rank's memory."""

    def __init__(self, at: str, act: Callable[[Any], None]) -> None:
        self._operation, _, self._description = at.partition("@")
        self._act = act

    def before(self, call: Call) -> None:
        """Nothing has moved yet."""

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:  # noqa: ARG002
        if call.operation == self._operation and call.group.description == self._description:
            if pending is not None:
                pending.wait()
            self._act(call.tensors)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _named(name: str, known: Mapping[str, _Named], kind: str) -> _Named:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:3]
        raise ValueError(f"the model has no {kind} {name!r}; there is {', '.join(map(repr, near))}")
    return known[name]
