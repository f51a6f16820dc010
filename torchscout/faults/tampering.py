"""Comes by a rank's collectives before they are issued, and lets call effects replace them (paper, 7).

A dispatch mode of PyTorch's stands above the kernels that ``evidence.collectives`` registers: what a rank
issues instead is what everybody else hears of. It is on only during a step in which something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchscout.evidence.call import Call, Operator, operators
from torchscout.faults.call_effects import CallEffect, Issue, done
from torchscout.faults.planned import Fault

__all__ = ["Tampering"]

_FUNCTIONAL = "_c10d_functional"
"""Operators that issue collectives from within: those of DTensor, of expert and context parallelism."""
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
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
