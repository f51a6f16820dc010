"""One collective of the job: operation, group and arguments (paper, section 7.1).

Names and order of the arguments come from the schema of the ``c10d`` operator, so that this works with the
operators of any release.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchscout.utils._torch import OpOverload, operator_names

__all__ = ["POINT_TO_POINT", "SCOUT_GROUP", "Call", "Group", "Operator", "Splits", "operators", "set_members"]

SCOUT_GROUP = "torchscout"
"""The beginning of the description of SCOUT's own process groups."""
POINT_TO_POINT = ("send", "recv")
"""Operations between two members of a group."""

# The beginning of an operator's name, without outer underscores -> its operation. Variants (base, coalesced,
# into a tensor, from any source) are the same operation.
_OPERATIONS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "barrier",
    "recv": "recv",
    "reduce_scatter": "reduce_scatter",  # before its prefix "reduce"
    "reduce": "reduce",
    "scatter": "scatter",
    "send": "send",
}
_REDUCTIONS = {kind.value: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as plain data, without a reference to it."""

    name: str
    """The same on all members; unique among the groups of this process."""
    description: str
    """Its purpose, if the framework sets one: ``mesh_tp``, ``TENSOR_MODEL_PARALLEL_GROUP``."""
    rank: int
    """The position of this process in the group."""
    size: int
    members: tuple[int, ...] | None
    """Global ranks by position; None if ``torch.distributed`` does not know the group."""

    @property
    def is_scouts(self) -> bool:
        """Whether it is one of SCOUT's own groups."""
        return self.description.startswith(SCOUT_GROUP)


class Splits(NamedTuple):
    """Elements that an all-to-all sends to and receives from each member; i's sent[j] must be j's
    received[i]."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Call:
    """One collective. Ranks are positions in its group.

    Properties can be read only while listeners are called. Then the arguments are released, so that a call
    keeps no tensor alive.
    """

    __slots__ = ("_arguments", "_group", "_operator")

    def __init__(self, operator: Operator, arguments: tuple[Any, ...]) -> None:
        self._operator = operator
        self._arguments: tuple[Any, ...] | None = arguments
        self._group: Group | None = None

    def release(self) -> None:
        """Drop the arguments."""
        self._arguments = None

    @property
    def operation(self) -> str:
        """The operation without its variant, such as ``all_gather``."""
        return self._operator.operation

    @property
    def variant(self) -> str:
        """The name of the operator, such as ``allgather_into_tensor_coalesced_``."""
        return self._operator.name

    @property
    def group(self) -> Group:
        """The process group, which may be one of SCOUT's own."""
        if self._group is None:
            self._group = _described(self.process_group)
        return self._group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group object; keep it by weak reference only."""
        return dist.ProcessGroup.unbox(self._argument("process_group"))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first tensor; None for a barrier."""
        tensors = self.inputs or self.outputs
        return tensors[0].dtype if tensors else None

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of ``inputs``."""
        return tuple([tuple(tensor.shape) for tensor in self.inputs])

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of ``outputs``."""
        return tuple([tuple(tensor.shape) for tensor in self.outputs])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """``outputs`` or, without any, ``inputs``."""
        return self.outputs or self.inputs

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that this rank sends; empty for a barrier, a receive, and if only a root sends."""
        place = self._operator.given
        return [] if place is None else _flat(self._at(place))

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors that this rank receives; empty for a barrier, a send, and if only a root receives."""
        place = self._operator.got
        return [] if place is None else _flat(self._at(place))

    @property
    def device(self) -> torch.device | None:
        """The device of the operation; None if it has no tensor."""
        tensors = self.inputs or self.outputs
        if not tensors and (tensor := self._argument("tensor")) is not None:  # of a barrier
            return tensor.device  # type: ignore[no-any-return]
        return tensors[0].device if tensors else None

    @property
    def reduction(self) -> str | None:
        """Such as sum, avg or premul_sum; None without a reduction. Slow to read."""
        boxed = self._argument("reduce_op")
        return None if boxed is None else _REDUCTIONS[boxed.op()]

    @property
    def root(self) -> int | None:
        """The root of a broadcast, reduce, gather or scatter."""
        return self._argument("root_rank")  # type: ignore[no-any-return]

    @property
    def peer(self) -> int | None:
        """The peer of a send or receive; None otherwise, and for a receive from any source."""
        return self._argument("src" if self.operation == "recv" else "dst")  # type: ignore[no-any-return]

    @property
    def tag(self) -> int | None:
        """The tag of a send or receive."""
        return self._argument("tag")  # type: ignore[no-any-return]

    @property
    def splits(self) -> Splits | None:
        """The splits of an all-to-all."""
        if self.operation != "all_to_all":
            return None
        sent = self._split(self.inputs, self._argument("input_split_sizes"))
        return Splits(sent, self._split(self.outputs, self._argument("output_split_sizes")))

    @property
    def is_async(self) -> bool | None:
        """Whether the caller waits later; None for sends and receives, which have no such argument."""
        return self._argument("async_op")  # type: ignore[no-any-return]

    def _argument(self, name: str) -> Any:
        """Return the argument or its default; None if the operator has no such argument."""
        place = self._operator.places.get(name)
        return None if place is None else self._at(place)

    def _at(self, place: int) -> Any:
        assert self._arguments is not None, "a call can be read only while its listeners are called"
        # The dispatcher omits trailing arguments that have their default value.
        return self._arguments[place] if place < len(self._arguments) else self._operator.defaults[place]

    def _split(self, tensors: list[torch.Tensor], rows: list[int] | None) -> tuple[int, ...]:
        if rows is None:  # a tensor for each member
            return tuple(tensor.numel() for tensor in tensors)
        (whole,) = tensors
        if not rows:
            return (whole.numel() // self.group.size,) * self.group.size
        width = whole.numel() // max(1, whole.shape[0])
        return tuple(count * width for count in rows)


@dataclass(frozen=True, slots=True)
class Operator:
    """A ``c10d`` operator and its schema."""

    overload: OpOverload
    name: str
    operation: str
    places: dict[str, int]
    """Argument -> its position."""
    defaults: tuple[Any, ...]
    given: int | None
    """The position of the tensors that a rank sends."""
    got: int | None
    """The position of the tensors that it receives; the same if the operator works in place."""

    @classmethod
    def of(cls, overload: OpOverload) -> Operator:
        arguments = overload._schema.arguments
        name = overload._schema.name.removeprefix("c10d::")
        bare = name.strip("_")
        operation = next((word for start, word in _OPERATIONS.items() if bare.startswith(start)), bare)
        tensors = {a.name: place for place, a in enumerate(arguments) if "Tensor" in str(a.type)}
        in_place = tensors.get("tensors")
        return cls(
            overload,
            name,
            operation,
            places={argument.name: place for place, argument in enumerate(arguments)},
            defaults=tuple(argument.default_value for argument in arguments),
            given=None if operation == "recv" else _position_of("input", tensors, in_place),
            got=None if operation == "send" else _position_of("output", tensors, in_place),
        )


@cache
def operators() -> tuple[Operator, ...]:
    """Return every ``c10d`` operator of this release that works on a process group."""
    found = []
    for name in operator_names():
        if name.startswith("c10d::"):
            packet, _, overload = name.removeprefix("c10d::").partition(".")
            found.append(Operator.of(getattr(getattr(torch.ops.c10d, packet), overload or "default")))
    return tuple(operator for operator in found if "process_group" in operator.places)


_groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()


def _described(group: dist.ProcessGroup) -> Group:
    if known := _groups.get(group):
        return known
    try:
        members = tuple(dist.get_process_group_ranks(group))
    except KeyError:
        members = None
    described = Group(group.group_name, group.group_desc, group.rank(), group.size(), members)
    if members is not None:  # otherwise it may not be complete yet
        _groups[group] = described
    return described


def set_members(group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
    """Make the members of a group known that ``torch.distributed`` does not list."""
    _groups[group] = Group(group.group_name, group.group_desc, group.rank(), group.size(), members)


def _position_of(prefix: str, places: dict[str, int], otherwise: int | None) -> int | None:
    return next((place for name, place in places.items() if name.startswith(prefix)), otherwise)


def _flat(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument that is a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value and isinstance(value[0], list):
        return [tensor for inner in value for tensor in inner]
    tensors: list[torch.Tensor] = value
    return tensors
