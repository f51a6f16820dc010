"""Carries out a plan of faults through PyTorch's public hooks, and counts the faults that happened.

The code under test has no branch for faults: it is the same with and without an injector. A listener of
``collectives`` delays collectives and changes their results. Replacing a collective needs a dispatch mode
above the kernels that ``collectives`` registers, so that all other listeners see what the rank issues
instead; the mode is active only in steps with such a fault.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchscout.adapters.modules import is_called
from torchscout.collectives.call import Call, Operator, operators
from torchscout.collectives.interceptor import Handle, Pending, listen
from torchscout.faults.effects import CallEffect, Issue, ProcessEffect, StayInside, TensorEffect, done
from torchscout.faults.fault import Fault, SiteKind
from torchscout.faults.plan import FaultPlan, module_at, tensor_at
from torchscout.utils._torch import DispatchKey, DispatchKeySet, TorchDispatchMode, tree_leaves
from torchscout.utils.reentrancy import in_own_work

__all__ = ["CollectiveFaults", "Firing", "Injector", "Tampering"]


class CollectiveFaults:
    """Listens to collectives, and applies one fault at its site."""

    def __init__(self, fault: Fault, happen: Callable[[Any], None]) -> None:
        self._place, self._happen = fault.place, happen
        self._is_after = isinstance(fault.effect, TensorEffect)
        """Corruption changes the collective's output; a delay comes before the rank enters it."""
        self._is_inside = isinstance(fault.effect, StayInside)
        self._handle: Handle | None = None if self._is_inside else listen(self, outermost=True)

    def step_begins(self) -> None:
        """Register as the last listener: a rank that is stuck inside has published that it enters."""
        if self._is_inside:
            self.remove()
            self._handle = listen(self)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def before(self, call: Call) -> None:
        if not self._is_after and self._is_here(call):
            self._happen(())

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:  # noqa: ARG002
        if self._is_after and self._is_here(call):
            if pending is not None:
                pending.wait()
            self._happen(call.tensors)

    def _is_here(self, call: Call) -> bool:
        return (call.operation, call.group.description) == (self._place.name, self._place.slot)


_FUNCTIONAL = "_c10d_functional"
"""The namespace of operators that issue collectives: of DTensor, and of expert and context parallelism."""
_BELOW = DispatchKeySet(DispatchKey.CPU)
"""These operators have one kernel each, for all devices."""


class Tampering(TorchDispatchMode):
    """Applies one rank's call effects. ``is_due`` is called once for each collective at a fault's site."""

    def __init__(self, faults: Sequence[Fault], is_due: Callable[[Fault], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._faults, self._is_due = faults, is_due
        self._postponed: Issue | None = None
        self._is_on = False

    def begin(self, step: int) -> None:
        """Activate the mode if a fault may happen in this step."""
        self.end()
        if any(step in fault.when for fault in self._faults):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True

    def end(self) -> None:
        if self._is_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False
        self._issue_postponed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again with its local tensors
        if func.namespace == _FUNCTIONAL:
            with self:  # intercept what the operator issues, not the operator itself
                return func.redispatch(_BELOW, *args, **(kwargs or {}))
        operator = _operators().get(func)
        if operator is None:
            return func(*args, **(kwargs or {}))
        call = Call(operator, args)
        if call.group.is_scouts:
            return func(*args)
        group = dist.ProcessGroup.unbox(args[operator.places["process_group"]])
        issue = Issue(call.operation, group, args, func, len(func._schema.returns) > 1)
        here = (call.operation, call.group.description)
        for fault in self._faults:
            if (fault.place.name, fault.place.slot) == here and self._is_due(fault):
                return self._replaced(fault, issue)
        result = func(*args)
        if self._postponed is not None:
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
            self._issue_postponed()
        return result

    def _replaced(self, fault: Fault, issue: Issue) -> Any:
        assert isinstance(fault.effect, CallEffect), "this mode has only call effects"
        result = fault.effect.replace(issue)
        if result is not None:
            return result
        self._postponed = issue
        return done(issue)

    def _issue_postponed(self) -> None:
        postponed, self._postponed = self._postponed, None
        if postponed is not None:
            postponed.call(*postponed.arguments)


@cache
def _operators() -> dict[Any, Operator]:
    return {operator.overload: operator for operator in operators()}


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
    """One occurrence of a fault."""

    rank: int
    at: str
    step: int
    detail: str
    monotonic: float
    """The time by the machine's monotonic clock."""


class Injector:
    """Carries out one rank's faults until ``disarm`` or the end of the ``with`` block.

    Each firing is written to the file ``log`` as a JSON line, before the effect on the process, so that a
    rank that kills itself leaves a trace.
    """

    def __init__(
        self,
        faults: FaultPlan,
        rank: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        log: Path | None = None,
    ) -> None:
        self.step = 1
        self.fired: list[Firing] = []
        self._passes: Counter[tuple[Fault, int]] = Counter()
        """Passes over each fault's site in each step."""
        self._happened: set[Fault] = set()
        self._masked: Counter[Fault] = Counter()
        """How often a fault changed nothing at its site."""
        self._rank, self._model, self._optimizer, self._log = rank, model, optimizer, log
        self._mine = faults.of(rank).planned
        self._is_updated = False
        """Whether the optimizer has run in this step."""
        self._handles: list[RemovableHandle | CollectiveFaults] = []
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        """Called just before and just after the optimizer step."""
        replacing = [fault for fault in self._mine if isinstance(fault.effect, CallEffect)]
        self._tampering = Tampering(replacing, self._is_replaced)
        for fault in self._mine:
            if isinstance(fault.effect, ProcessEffect):
                fault.effect.prepare()
            self._hook(fault)
        # Before all other hooks: FSDP gathers parameters in one of them, which belongs to the step.
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
        """Faults of this rank that have not happened. A test must not pass with one."""
        return [fault for fault in self._mine if fault not in self._happened]

    def report(self) -> dict[str, Any]:
        """What happened on this rank, as plain data."""
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
        """Yield the batches; faults at ``input`` happen while they are fetched."""
        for batch in batches:
            self._pass("input", self.step + self._is_updated)
            yield batch

    @contextmanager
    def checkpoint_io(self, kind: Literal["read", "write"]) -> Iterator[None]:
        """Let faults at ``checkpoint_read`` or ``checkpoint_write`` happen."""
        self._pass(f"checkpoint_{kind}", self.step)
        yield

    def _hook(self, fault: Fault) -> None:
        place, act = fault.place, partial(self._fire, fault)
        if place.kind is SiteKind.STEP:
            self._before.append(partial(act, ()))
        elif place.kind is SiteKind.COLLECTIVE and not isinstance(fault.effect, CallEffect):
            self._handles.append(CollectiveFaults(fault, act))
        elif place.kind is SiteKind.PASS:
            self._handles.append(_HOOKS[place.name](module_at(place, self._model), act))
        elif place.kind is SiteKind.GRADIENT:
            register: Callable[..., RemovableHandle] = tensor_at(place, self._model).register_hook
            self._handles.append(register(act))
        elif place.kind is SiteKind.STATE:
            tensor = tensor_at(place, self._model)
            moment = self._before if place.slot == "grad" else self._after
            moment.append(lambda: act(self._state(tensor, place.slot)))

    def _next_begins(self, *_: Any) -> None:
        """A step ends when the next one begins: replay in between belongs to the earlier step."""
        if self._is_updated and not in_own_work():
            self.step, self._is_updated = self.step + 1, False
            self._tampering.begin(self.step)
        for handle in self._handles:
            if isinstance(handle, CollectiveFaults):
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
            if fault.place.kind is SiteKind.PHASE and fault.place.name == phase:
                self._fire(fault, (), step)

    def _is_due(self, fault: Fault, step: int) -> bool:
        """Count a pass over the fault's site; return whether the fault happens in it."""
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
            self._count(fault, repr(fault.effect), step)  # first: the process may not survive
            fault.effect.happen()
        elif found and isinstance(fault.effect, TensorEffect):
            change = fault.effect.corrupt(found[0])
            if change is None:
                self._masked[fault] += 1
            else:
                self._count(fault, change, step)

    def _count(self, fault: Fault, detail: str, step: int) -> None:
        firing = Firing(self._rank, fault.at, step, detail, time.monotonic())
        self.fired.append(firing)
        self._happened.add(fault)
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(json.dumps(asdict(firing)) + "\n")

    def _state(self, tensor: torch.Tensor, slot: str) -> Any:
        if not slot:
            return tensor
        return tensor.grad if slot == "grad" else self._optimizer.state[tensor].get(slot)
