"""Carries a plan of faults out through PyTorch's public hooks, and counts what fired.

The code under test has no branch for faults: an unarmed job and an armed one run the same code.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torchscout.evidence.hearing import is_inert
from torchscout.faults.call_effects import CallEffect
from torchscout.faults.check import module_at, tensor_at
from torchscout.faults.fault import Faults
from torchscout.faults.listening import Ear
from torchscout.faults.place import Kind
from torchscout.faults.planned import Fault
from torchscout.faults.process_effects import ProcessEffect
from torchscout.faults.tampering import Tampering
from torchscout.faults.tensor_effects import TensorEffect
from torchscout.integration.modules import is_called

__all__ = ["Firing", "Injector"]

_HOOKS: Mapping[str, Callable[[torch.nn.Module, Callable[[Any], None]], RemovableHandle]] = {
    "input": lambda module, act: module.register_forward_pre_hook(lambda _, args: act(args)),
    "forward": lambda module, act: module.register_forward_pre_hook(lambda _, args: act(args)),
    "output": lambda module, act: module.register_forward_hook(lambda _, __, out: act(out)),
    "grad_output": lambda module, act: module.register_full_backward_pre_hook(lambda _, g: act(g)),
    "backward": lambda module, act: module.register_full_backward_pre_hook(lambda _, g: act(g)),
    "grad_input": lambda module, act: module.register_full_backward_hook(lambda _, g, __: act(g)),
}
_Batch = TypeVar("_Batch")


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
        self._masked: Counter[Fault] = Counter()
        """How often a fault came to its place and changed nothing there."""
        self._rank, self._model, self._optimizer, self._log = rank, model, optimizer, log
        self._mine = faults.of(rank).planned
        self._is_updated = False
        """Whether the optimizer has run in this step."""
        self._handles: list[RemovableHandle | Ear] = []
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        """What is due just before and just after the optimizer runs."""
        replacing = [fault for fault in self._mine if isinstance(fault.effect, CallEffect)]
        self._tampering = Tampering(replacing, self._is_replaced)
        for fault in self._mine:
            if isinstance(fault.effect, ProcessEffect):
                fault.effect.prepare()
            self._hook(fault)
        # Before all other hooks: FSDP gathers a model's parameters in one, and that belongs to the step.
        for called in [model] if is_called(model) else model.children():
            self._handles.append(called.register_forward_pre_hook(self._next_begins, prepend=True))
        self._handles.append(optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(optimizer.register_step_post_hook(self._after_update))
        self._tampering.begin(self.step)

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()

    @property
    def unfired(self) -> list[Fault]:
        """Faults of this rank that have not happened in any step: a test must not pass with one."""
        return [fault for fault in self._mine if fault not in self._happened]

    def report(self) -> dict[str, Any]:
        """What became of this rank's share, as plain data."""
        return {
            "rank": self._rank,
            "planned": len(self._mine),
            "fired": [asdict(firing) for firing in self.fired],
            "unfired": [fault.at for fault in self.unfired],
            "masked": {fault.at: count for fault, count in self._masked.items()},
        }

    def disarm(self) -> None:
        self._tampering.end()
        while self._handles:
            self._handles.pop().remove()

    def input(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """The same batches; whatever is planned for fetching them happens meanwhile."""
        for batch in batches:
            self._pass("input", self.step + self._is_updated)
            yield batch

    @contextmanager
    def checkpoint_io(self, kind: Literal["read", "write"]) -> Iterator[None]:
        """What is planned for reading or writing checkpoints happens here."""
        self._pass(f"checkpoint_{kind}", self.step)
        yield

    def _hook(self, fault: Fault) -> None:
        place, act = fault.place, partial(self._fire, fault)
        if place.kind is Kind.STEP:
            self._before.append(partial(act, ()))
        elif place.kind is Kind.COLLECTIVE and not isinstance(fault.effect, CallEffect):
            self._handles.append(Ear(fault, act))
        elif place.kind is Kind.PASS:
            self._handles.append(_HOOKS[place.name](module_at(place, self._model), act))
        elif place.kind is Kind.GRADIENT:
            register: Callable[..., RemovableHandle] = tensor_at(place, self._model).register_hook
            self._handles.append(register(act))
        elif place.kind is Kind.STATE:
            tensor = tensor_at(place, self._model)
            moment = self._before if place.slot == "grad" else self._after
            moment.append(lambda: act(self._held(tensor, place.slot)))

    def _next_begins(self, *_: Any) -> None:
        """A step ends when the next one begins: what is replayed between them belongs to the first."""
        if self._is_updated and not is_inert():
            self.step, self._is_updated = self.step + 1, False
            self._tampering.begin(self.step)
        for handle in self._handles:
            if isinstance(handle, Ear):
                handle.step_begins()

    def _before_update(self, *_: Any) -> None:
        self._next_begins()
        for act in self._before:
            act()

    def _after_update(self, *_: Any) -> None:
        self._is_updated = True
        self._tampering.end()
        for act in self._after:
            act()

    def _pass(self, phase: str, step: int) -> None:
        for fault in self._mine:
            if fault.place.kind is Kind.PHASE and fault.place.name == phase:
                self._fire(fault, (), step)

    def _is_due(self, fault: Fault, step: int) -> bool:
        """Whether its step has come, and within it its call."""
        call = self._passes[fault, step]
        self._passes[fault, step] += 1
        return step in fault.when and (fault.calls is None or call in fault.calls)

    def _is_replaced(self, fault: Fault) -> bool:
        is_due = self._is_due(fault, self.step)
        if is_due:
            self._count(fault, repr(fault.effect), self.step)
        return is_due

    def _fire(self, fault: Fault, tensors: Any, step: int | None = None) -> None:
        step = self.step if step is None else step
        if not self._is_due(fault, step):
            return
        found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        if isinstance(fault.effect, ProcessEffect):
            self._count(fault, repr(fault.effect), step)  # first: the process may not come back from it
            fault.effect.happen()
        elif found and isinstance(fault.effect, TensorEffect):
            told = fault.effect.corrupt(found[0])
            if told is None:
                self._masked[fault] += 1
            else:
                self._count(fault, told, step)

    def _count(self, fault: Fault, detail: str, step: int) -> None:
        firing = Firing(self._rank, fault.at, step, detail, time.monotonic())
        self.fired.append(firing)
        self._happened.add(fault)
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(json.dumps(asdict(firing)) + "\n")

    def _held(self, tensor: torch.Tensor, slot: str) -> Any:
        if not slot:
            return tensor
        return tensor.grad if slot == "grad" else self._optimizer.state[tensor].get(slot)
