"""What is planned for collectives, short of replacing them: late, stuck, or with a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchscout.evidence.call import Call
from torchscout.evidence.collectives import Handle, Pending, listen
from torchscout.faults.planned import Fault
from torchscout.faults.process_effects import StayInside
from torchscout.faults.tensor_effects import TensorEffect

__all__ = ["Ear"]


class Ear:
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
