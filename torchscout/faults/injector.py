"""Carries out a plan of faults through PyTorch's public hooks, and counts what fired.

The code under test has no branch for faults: an unarmed job and an armed one run the same code. A listener
of ``collectives`` delays collectives and changes results. To replace a collective takes a dispatch mode
above the kernels that ``collectives`` registers, so that all other listeners see what the rank issues
instead; the mode is active only during steps in which such a fault is due.
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
    """Hears of the collectives at one fault's place, and lets it happen there."""

    def __init__(self, fault: Fault, happen: Callable[[Any], None]) -> None:
        self._place, self._happen = fault.place, happen
        self._is_after = isinstance(fault.effect, TensorEffect)
        """A wrong number is what the collective has left in memory; a late rank has not entered it."""
        self._is_inside = isinstance(fault.effect, StayInside)
        self._handle: Handle | None = None if self._is_inside else listen(self, outermost=True)

    def step_begins(self) -> None:
        """Who is stuck inside has told all others that it enters: it comes after every other listener."""
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
"""Operators that issue collectives from within: those of DTensor, of expert and context parallelism."""
_BELOW = DispatchKeySet(DispatchKey.CPU)
"""They have one kernel each, whatever the device."""


class Tampering(TorchDispatchMode):
    """The call effects of one rank. ``is_due`` is asked once for each collective at a fault's place."""

    def __init__(self, faults: Sequence[Fault], is_due: Callable[[Fault], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._faults, self._is_due = faults, is_due
        self._held: Issue | None = None
        self._is_on = False

    def begin(self, step: int) -> None:
        """Be on during a step in which something may happen, and in no other."""
        self.end()
        if any(step in fault.when for fault in self._faults):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True

    def end(self) -> None:
        if self._is_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False
        self._issue_held()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a distributed tensor first takes it apart, and its parts come here again
        if func.namespace == _FUNCTIONAL:
            with self:  # the operator is passed by, what it issues is not
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
        if self._held is not None:
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
            self._issue_held()
        return result

    def _replaced(self, fault: Fault, issue: Issue) -> Any:
        assert isinstance(fault.effect, CallEffect), "nothing else is given to this mode"
        result = fault.effect.replace(issue)
        if result is not None:
            return result
        self._held = issue
        return done(issue)

    def _issue_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.go_on(*held.arguments)


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
        """How often each place was passed in each step."""
        self._happened: set[Fault] = set()
        self._masked: Counter[Fault] = Counter()
        """How often a fault came to its place and changed nothing there."""
        self._rank, self._model, self._optimizer, self._log = rank, model, optimizer, log
        self._mine = faults.of(rank).planned
        self._is_updated = False
        """Whether the optimizer has run in this step."""
        self._handles: list[RemovableHandle | CollectiveFaults] = []
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
            moment.append(lambda: act(self._held(tensor, place.slot)))

    def _next_begins(self, *_: Any) -> None:
        """A step ends when the next one begins: what is replayed between them belongs to the first."""
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
