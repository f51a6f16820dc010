"""Every tensor of a rank's trained state by name: parameters, what optimizers keep for them, and buffers
(paper, section 5.2).

The names are those of surfaces: ``layer.2.up/weight``, and ``layer.2.up/weight.exp_avg`` for a slot. A
session has one table. Checks compare and watch its tensors, and checkpoints keep them, so that a name means
the same everywhere.

A program may replace any of them between two steps: an optimizer creates its slots in the first update, a
checkpoint is loaded, a storage is freed. So ``refresh`` compares each with the one that is there now, by
identity and address, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import torch

from torchscout.c3.fold import EXPONENTS
from torchscout.c3.signature import PendingSignatures, SignaturePlan
from torchscout.decision.ownership import Ownership
from torchscout.decision.types import Surface
from torchscout.utils._torch import inner_of, local_of

__all__ = ["Equality", "Kind", "Row", "StateTable", "StateView", "row_of", "with_inner"]


class Kind(str, Enum):
    """What a tensor is for."""

    PARAMETER = "parameter"
    """An optimizer updates it: a parameter, a shard of one, or a copy in higher precision."""
    SLOT = "slot"
    """An optimizer keeps it for a parameter."""
    BUFFER = "buffer"


class Equality(str, Enum):
    """Which other ranks hold an equal tensor of the same name."""

    VOTED = "voted"
    """The members of the vote that compares it in each check."""
    OWNED = "owned"
    """None: this rank holds a part, such as a shard."""
    BY_DESIGN = "by design"
    """None, as checks have learned: each replica has contents of its own."""
    PRIVATE = "private"
    """That is not known, because no check compares it."""


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
    kind: Kind = Kind.PARAMETER
    parameter: Surface = ""
    """Of a slot, the parameter that it belongs to."""

    @property
    def bytes(self) -> int:
        return self.local.numel() * self.local.element_size()

    @property
    def must_be_finite(self) -> bool:
        """Whether NaN or infinity in it is a defect: it is trained, so no mask, and has numbers here now."""
        is_frozen = isinstance(self.tensor, torch.nn.Parameter) and not self.tensor.requires_grad
        if is_frozen or self.kind is Kind.BUFFER:
            return False
        local = self.local
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.dtype not in EXPONENTS:
            return False
        if local.is_meta or local.layout is not torch.strided or not local.numel():
            return False
        return bool(local.untyped_storage().nbytes())  # FSDP and ZeRO free what they do not need

    @property
    def is_current(self) -> bool:
        """Whether it still has the same memory."""
        local = local_of(self.tensor)  # FSDP makes another tensor of the same memory in each step
        return _address_of(local) == self.address and local.shape == self.local.shape


def row_of(name: Surface, tensor: torch.Tensor, kind: Kind = Kind.PARAMETER, parameter: Surface = "") -> Row:
    local = local_of(tensor)
    return Row(name, tensor, local, _address_of(local), kind, parameter)


class StateTable:
    """All state that a rank trains, as it is now."""

    def __init__(
        self,
        parameters: Mapping[Surface, torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]] = tuple,
    ) -> None:
        """``parameters`` may be anything that optimizers update, such as shards or copies of parameters, and
        may change; what else they update is added. ``modules`` returns the model's modules, which have its
        buffers, by name."""
        self.ownership = Ownership()
        """What checks have learned about the state of replicas."""
        self.version = 0
        """Counts how often it was built."""
        self.rows: dict[Surface, Row] = {}
        """As of the last ``refresh``. Parameters come first, then slots, then buffers."""
        self._parameters = parameters
        self._count = 0
        """Of parameters that had names, when it was built."""
        self._modules = modules
        self._optimizers = [*with_inner(optimizers)]
        self._compared: set[Surface] = set()
        """Parameters that checks compare, with their slots."""
        self._owned: set[Surface] = set()
        """Those of which this rank holds a part."""
        self._read: list[tuple[torch.optim.Optimizer, Any, list[Any], list[int]]] = []
        """Each optimizer, its state, and the slots of each of its parameters with their number."""
        self._places: list[tuple[Mapping[str, Any], str, Row]] = []
        """Where each tensor was found, unless an optimizer's parameter group has it."""

    def view(self, parameters: Collection[Surface] | None = None) -> StateView:
        """Return these parameters with their slots; by default, everything."""
        return StateView(self, None if parameters is None else frozenset(parameters))

    def compare(self, parameters: Collection[Surface]) -> StateView:
        """Return the view of a check that compares these with what its peers hold."""
        self._compared.update(parameters)
        return self.view(parameters)

    def own(self, parameters: Collection[Surface]) -> StateView:
        """Return the view of a check that watches these, because no other rank holds them."""
        self._owned.update(parameters)
        return self.view(parameters)

    def equality(self, name: Surface) -> Equality:
        """Return which other ranks hold an equal tensor, as far as is known now."""
        row = self.rows.get(name)
        parameter = "" if row is None else row.parameter or name
        if parameter in self._owned:
            return Equality.OWNED
        if parameter not in self._compared:
            return Equality.PRIVATE
        is_owned = self.ownership.is_owned(parameter) or self.ownership.is_owned(name)
        return Equality.BY_DESIGN if is_owned else Equality.VOTED

    def refresh(self) -> bool:
        """Bring the table up to date; returns whether anything has changed."""
        is_built = self.version and len(self._parameters) == self._count
        if is_built and self._has_same_tensors() and self._has_same_memory():
            return False
        self._build()
        return True

    def _has_same_tensors(self) -> bool:
        for optimizer, state, every, sizes in self._read:
            if optimizer.state is not state or len(state) != len(every):
                return False
            for slots, known, size in zip(state.values(), every, sizes, strict=True):
                if slots is not known or _size(slots) != size:
                    return False
        return all(holder.get(key) is row.tensor for holder, key, row in self._places)

    def _has_same_memory(self) -> bool:
        # A plain tensor is looked at here: calls for thousands of rows would take longer than the rest.
        for row in self.rows.values():
            is_plain = row.tensor is row.local and row.address is not None
            if not (row.local.data_ptr() == row.address if is_plain else row.is_current):
                return False
        return True

    def _build(self) -> None:
        self.version += 1
        self._count, self._read, self._places = len(self._parameters), [], []
        names: dict[torch.Tensor, Surface] = {}
        for name, each in chain(sorted(self._parameters.items()), self._unnamed()):
            names.setdefault(each, name)
        self.rows = dict(self._parameter_rows(names))
        self.rows |= sorted(self._slot_rows(names))
        self.rows |= self._buffer_rows()

    def _unnamed(self) -> Iterator[tuple[Surface, torch.Tensor]]:
        """Yield everything that optimizers update, with names for what has none."""
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for index, each in enumerate(group["params"]):
                    yield f"optimizer.{number}/group.{place}.parameter.{index}", each

    def _parameter_rows(self, names: Mapping[torch.Tensor, Surface]) -> Iterator[tuple[Surface, Row]]:
        for each, name in names.items():
            row = row_of(name, each)
            yield self._placed(row, self._parameters, name) if name in self._parameters else (name, row)

    def _slot_rows(self, names: Mapping[torch.Tensor, Surface]) -> Iterator[tuple[Surface, Row]]:
        for optimizer in self._optimizers:
            state: dict[Any, Any] = optimizer.state
            every = [*state.values()]
            self._read.append((optimizer, state, every, [_size(each) for each in every]))
            for parameter, slots in state.items():
                name = names.get(parameter) if isinstance(parameter, torch.Tensor) else None
                for key, value in slots.items() if name is not None and isinstance(slots, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield self._placed(row_of(f"{name}.{key}", value, Kind.SLOT, name or ""), slots, key)

    def _buffer_rows(self) -> Iterator[tuple[Surface, Row]]:
        for path, module in self._modules():
            for key, value in module._buffers.items():
                if value is not None:
                    yield self._placed(row_of(f"{path}/{key}", value, Kind.BUFFER), module._buffers, key)

    def _placed(self, row: Row, holder: Mapping[str, Any], key: str) -> tuple[Surface, Row]:
        self._places.append((holder, key, row))
        return row.name, row


class StateView:
    """Some parameters of a table, with their slots, as they are now."""

    def __init__(self, table: StateTable, parameters: frozenset[Surface] | None) -> None:
        self.table = table
        self._chosen = parameters
        self._version = 0
        """Of the table, when the rows were chosen."""
        self._rows: dict[Surface, Row] = {}
        self._plan: tuple[Sequence[Surface], SignaturePlan] | None = None

    @property
    def rows(self) -> Mapping[Surface, Row]:
        if self._chosen is not None and not self._chosen:
            return {}
        self.table.refresh()
        if self._version != self.table.version:
            self._version, self._plan, chosen = self.table.version, None, self._chosen
            every = self.table.rows
            self._rows = (
                every
                if chosen is None
                else {name: row for name, row in every.items() if (row.parameter or name) in chosen}
            )
        return self._rows

    @property
    def parameters(self) -> Mapping[Surface, Row]:
        return self._of(Kind.PARAMETER)

    @property
    def slots(self) -> Mapping[Surface, Row]:
        return self._of(Kind.SLOT)

    def sign(self, names: Sequence[Surface], *, finite: bool = False) -> PendingSignatures:
        """Sign these tensors as they are now; with ``finite`` also look for NaN and infinity in them."""
        rows = self.rows
        if self._plan is None or self._plan[0] != names:
            self._plan = (list(names), SignaturePlan(rows[name].local for name in names))
        return self._plan[1].start(finite=finite)

    def _of(self, kind: Kind) -> dict[Surface, Row]:
        return {name: row for name, row in self.rows.items() if row.kind is kind}


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    """Yield these and the inner optimizer of a ``ZeroRedundancyOptimizer``, which has its slots."""
    for optimizer in optimizers:
        yield optimizer
        if (inner := inner_of(optimizer)) is not None:
            yield inner


def _address_of(local: torch.Tensor) -> int | None:
    try:
        return local.data_ptr()
    except RuntimeError:  # sparse, for example
        return None


def _size(slots: Any) -> int:
    return len(slots) if isinstance(slots, dict) else 0
