"""Carries a plan of faults out through PyTorch's public hooks, and counts what fired.

The code under test has no branch for faults: an unarmed job and an armed one run the same code.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torchscout.faults.effects import ProcessEffect
from torchscout.faults.fault import Fault, Faults

__all__ = ["Firing", "Injector"]

_MOMENT = "step"
_Named = TypeVar("_Named")


@dataclass(frozen=True, slots=True)
class Firing:
    """One fault, seen to happen."""

    rank: int
    at: str
    step: int
    detail: str


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
        self._done: set[tuple[Fault, int]] = set()
        self._rank, self._model, self._optimizer, self._log = rank, model, optimizer, log
        self._mine = [fault for fault in faults if fault.rank == rank]
        self._handles: list[RemovableHandle] = []
        self._hook_everything()

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()

    @property
    def unfired(self) -> list[Fault]:
        """Faults of this rank that have not happened in any step: a test must not pass with one."""
        happened = {fault for fault, _ in self._done}
        return [fault for fault in self._mine if fault not in happened]

    def disarm(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook_everything(self) -> None:
        hooks = {
            "input": lambda module, act: module.register_forward_pre_hook(lambda _, args: act(args)),
            "forward": lambda module, act: module.register_forward_pre_hook(lambda _, args: act(args)),
            "output": lambda module, act: module.register_forward_hook(lambda _, __, out: act(out)),
            "grad_output": lambda module, act: module.register_full_backward_pre_hook(lambda _, g: act(g)),
            "backward": lambda module, act: module.register_full_backward_pre_hook(lambda _, g: act(g)),
            "grad_input": lambda module, act: module.register_full_backward_hook(lambda _, g, __: act(g)),
        }
        before: list[Callable[[], None]] = []
        after: list[Callable[[], None]] = []
        for fault in self._mine:
            path, _, what = fault.at.rpartition("/")
            if fault.at == _MOMENT:
                before.append(partial(self._fire, fault, ()))
            elif what in hooks:
                self._handles.append(hooks[what](self._module(path), partial(self._fire, fault)))
            else:
                name, _, slot = what.partition(".")
                find = partial(self._parameter_tensors, self._parameter(path, name), slot)
                moment = before if slot == "grad" else after
                moment.append(lambda fault=fault, find=find: self._fire(fault, find()))  # type: ignore[misc]
        self._optimizer_hooks(before, after)

    def _optimizer_hooks(self, before: list[Callable[[], None]], after: list[Callable[[], None]]) -> None:
        def before_step(*_: Any) -> None:
            for act in before:
                act()

        def after_step(*_: Any) -> None:
            for act in after:
                act()
            self.step += 1

        self._handles.append(self._optimizer.register_step_pre_hook(before_step))
        self._handles.append(self._optimizer.register_step_post_hook(after_step))

    def _fire(self, fault: Fault, tensors: Any) -> None:
        """Let the fault happen if its step has come and it has not happened in it yet."""
        if self.step not in fault.steps or (fault, self.step) in self._done:
            return
        if isinstance(fault.effect, ProcessEffect):
            self._count(fault, repr(fault.effect))  # first: the process may not come back from it
            fault.effect.happen()
        elif found := _tensors(tensors):
            self._count(fault, fault.effect.corrupt(found[0]))

    def _count(self, fault: Fault, detail: str) -> None:
        firing = Firing(self._rank, fault.at, self.step, detail)
        self.fired.append(firing)
        self._done.add((fault, self.step))
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _named(name: str, known: Mapping[str, _Named], kind: str) -> _Named:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:3]
        raise ValueError(f"the model has no {kind} {name!r}; there is {', '.join(map(repr, near))}")
    return known[name]
