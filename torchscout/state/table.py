"""Every tensor of a rank's trained state by name: parameters and what optimizers keep for them (paper,
section 5.2).

The names are those of surfaces: ``layer.2.up/weight``, and ``layer.2.up/weight.exp_avg`` for a slot. Checks
compare and watch the tensors, and checkpoints keep them; both take them from this table, so that a name means
the same everywhere.

A program may replace any of them between two steps: an optimizer creates its slots in the first update, a
checkpoint is loaded, a storage is freed. So ``refresh`` compares each with the one that is there now, by
identity and address, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchscout.c3.signature import PendingSignatures, SignaturePlan
from torchscout.decision.types import Surface
from torchscout.utils._torch import inner_of

__all__ = ["Row", "StateTable", "row_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One tensor."""

    name: Surface
    tensor: torch.Tensor
    """As training holds it."""
    local: torch.Tensor
    """This rank's part of it: of a DTensor the local tensor, else the tensor itself."""
    address: int | None
    """Of the local tensor, when the row was made; None if it has no plain memory."""

    @property
    def bytes(self) -> int:
        return self.local.numel() * self.local.element_size()

    @property
    def is_current(self) -> bool:
        """Whether it still has the same memory."""
        local = _local_of(self.tensor)  # FSDP makes another tensor of the same memory in each step
        return _address_of(local) == self.address and local.shape == self.local.shape


def row_of(name: Surface, tensor: torch.Tensor) -> Row:
    local = _local_of(tensor)
    return Row(name, tensor, local, _address_of(local))


class StateTable:
    """Parameters, by name, and the slots of optimizers for them, as they are now."""

    def __init__(
        self, parameters: Mapping[Surface, torch.Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        """``parameters`` may be anything that optimizers update, such as shards or copies of parameters."""
        self._own = dict(sorted(parameters.items()))
        self._names = {each: name for name, each in self._own.items()}
        self._optimizers = [*_with_inner(optimizers)]
        self._parameters: dict[Surface, Row] = {}
        self._slots: dict[Surface, Row] = {}
        self._read: list[tuple[torch.optim.Optimizer, Any, list[Any], list[int]]] = []
        """Each optimizer, its state, and the slots of each of its parameters with their number."""
        self._places: list[tuple[dict[str, Any], str, Row]] = []
        """Where each slot was found."""
        self._plan: tuple[Sequence[Surface], SignaturePlan] | None = None

    @property
    def parameters(self) -> Mapping[Surface, Row]:
        self.refresh()
        return self._parameters

    @property
    def slots(self) -> Mapping[Surface, Row]:
        self.refresh()
        return self._slots

    @property
    def rows(self) -> dict[Surface, Row]:
        """Both."""
        self.refresh()
        return {**self._parameters, **self._slots}

    def sign(self, names: Sequence[Surface]) -> PendingSignatures:
        """Sign these tensors as they are now."""
        rows = self.rows
        if self._plan is None or self._plan[0] != names:
            self._plan = (list(names), SignaturePlan(rows[name].local for name in names))
        return self._plan[1].start()

    def refresh(self) -> bool:
        """Bring the table up to date; returns whether anything has changed."""
        if self._is_current():
            return False
        self._rebuild()
        return True

    def _is_current(self) -> bool:
        has_all = len(self._parameters) == len(self._own)
        return has_all and self._has_same_slots() and self._has_same_memory()

    def _has_same_slots(self) -> bool:
        for optimizer, state, every, sizes in self._read:
            if optimizer.state is not state or len(state) != len(every):
                return False
            for slots, known, size in zip(state.values(), every, sizes, strict=True):
                if slots is not known or _size(slots) != size:
                    return False
        return all(slots.get(key) is row.tensor for slots, key, row in self._places)

    def _has_same_memory(self) -> bool:
        # A plain tensor is looked at here: calls for thousands of rows would take longer than the rest.
        for row in chain(self._parameters.values(), self._slots.values()):
            is_plain = row.tensor is row.local and row.address is not None
            if not (row.local.data_ptr() == row.address if is_plain else row.is_current):
                return False
        return True

    def _rebuild(self) -> None:
        self._parameters = {name: row_of(name, each) for name, each in self._own.items()}
        slots: dict[Surface, Row] = {}
        self._read, self._places, self._plan = [], [], None
        for optimizer in self._optimizers:
            state: dict[Any, Any] = optimizer.state
            every = [*state.values()]
            self._read.append((optimizer, state, every, [_size(each) for each in every]))
            for parameter, kept in state.items():
                name = self._names.get(parameter) if isinstance(parameter, torch.Tensor) else None
                if name is not None and isinstance(kept, dict):
                    slots |= self._rows_of(name, kept)
        self._slots = dict(sorted(slots.items()))

    def _rows_of(self, parameter: Surface, kept: dict[str, Any]) -> Iterator[tuple[Surface, Row]]:
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                row = row_of(f"{parameter}.{key}", value)
                self._places.append((kept, key, row))
                yield row.name, row


def _with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    """With the inner optimizer of a ``ZeroRedundancyOptimizer``, which has its slots."""
    for optimizer in optimizers:
        yield optimizer
        if (inner := inner_of(optimizer)) is not None:
            yield inner


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # otherwise it would be a new tensor in the autograd graph
        local: torch.Tensor = tensor.to_local()
    return local


def _address_of(local: torch.Tensor) -> int | None:
    try:
        return local.data_ptr()
    except RuntimeError:  # sparse, for example
        return None


def _size(slots: Any) -> int:
    return len(slots) if hasattr(slots, "__len__") else 0
