"""One collective of the job, as the dispatcher sees it: operation, group, arguments (paper, section 7.1).

Read from the arguments of a ``c10d`` operator, whose names and order come from its schema, so
that no release's list of operators is written down here. Who sees calls is ``collectives``;
what healthy ranks must have in common in them is the fingerprint's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchscout.utils._torch import OpOverload, operator_names

__all__ = ["POINT_TO_POINT", "SCOUT_GROUP", "Call", "Group", "Operator", "Splits", "operators"]

SCOUT_GROUP = "torchscout"
"""How the description of every process group of SCOUT's own begins."""
POINT_TO_POINT = ("send", "recv")
"""Operations of two members of a group, and not of all."""

# What an operator's name begins with, its outer underscores aside, and what we call it: its
# variants (base, coalesced, into a tensor, from any source) are one operation to their group.
_OPERATIONS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "barrier",
    "recv": "recv",
    "reduce_scatter": "reduce_scatter",  # before its own prefix
    "reduce": "reduce",
    "scatter": "scatter",
    "send": "send",
}
_REDUCTIONS = {kind.value: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as plain data, which keeps nothing of the group alive."""

    name: str
    """The same on all members; unique among the groups that this process has."""
    description: str
    """Its role where the framework gives one: ``mesh_tp``, ``TENSOR_MODEL_PARALLEL_GROUP``."""
    rank: int
    """This process's place in the group."""
    size: int
    members: tuple[int, ...] | None
    """Global ranks by place; None where ``torch.distributed`` does not know the group."""

    @property
    def is_scouts(self) -> bool:
        """Whether it is one of SCOUT's own."""
        return self.description.startswith(SCOUT_GROUP)


class Splits(NamedTuple):
    """How many elements an all-to-all moves; what i sends to j must be what j receives from i."""

    sent: tuple[int, ...]
    """To each member, by place."""
    received: tuple[int, ...]
    """From each member, by place."""


class Call:
    """One collective. Ranks are places in its group.

    Arguments are read when asked for, and only until the listeners have heard of the call;
    it then lets go of them, so that keeping a call keeps no tensor alive.
    """

    __slots__ = ("_arguments", "_group", "_operator")

    def __init__(self, operator: Operator, arguments: tuple[Any, ...]) -> None:
        self._operator = operator
        self._arguments: tuple[Any, ...] | None = arguments
        self._group: Group | None = None

    def release(self) -> None:
        """Let go of the arguments."""
        self._arguments = None

    @property
    def operation(self) -> str:
        """Such as ``all_gather``: one of a dozen words, whatever the variant."""
        return self._operator.operation

    @property
    def variant(self) -> str:
        """The dispatcher's own name, such as ``allgather_into_tensor_coalesced_``."""
        return self._operator.name

    @property
    def group(self) -> Group:
        """SCOUT's own groups are no exception; their names tell them apart."""
        if self._group is None:
            self._group = _described(self.process_group)
        return self._group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself, for whoever communicates on it too; to be kept by weak reference only."""
        return dist.ProcessGroup.unbox(self._argument("process_group"))

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the first tensor; None for a barrier."""
        tensors = self._inputs() or self._outputs()
        return tensors[0].dtype if tensors else None

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what this rank gives; empty for a barrier, a receive, and where only a root gives."""
        return tuple([tuple(tensor.shape) for tensor in self._inputs()])

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what this rank gets; empty for a barrier, a send, and where only a root gets."""
        return tuple([tuple(tensor.shape) for tensor in self._outputs()])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this rank gets, or else what it gives: the very tensors. For faults; not to be kept."""
        return self._outputs() or self._inputs()

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What this rank gives: the very tensors, not to be kept; empty where it gives nothing."""
        return self._inputs()

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What this rank gets: the very tensors, not to be kept; empty where it gets nothing."""
        return self._outputs()

    @property
    def device(self) -> torch.device | None:
        """Where the operation runs, a barrier's too; None where no tensor says."""
        tensors = self._inputs() or self._outputs()
        if not tensors and (tensor := self._argument("tensor")) is not None:
            return tensor.device  # type: ignore[no-any-return]
        return tensors[0].device if tensors else None

    @property
    def reduction(self) -> str | None:
        """Such as sum, avg, premul_sum; None where nothing is reduced. The one costly thing to read."""
        boxed = self._argument("reduce_op")
        return None if boxed is None else _REDUCTIONS[boxed.op()]

    @property
    def root(self) -> int | None:
        """Of a broadcast, reduce, gather or scatter."""
        root: int | None = self._argument("root_rank")
        return root

    @property
    def peer(self) -> int | None:
        """Of a send or receive; None otherwise, and for a receive from anyone."""
        peer: int | None = self._argument("src" if self.operation == "recv" else "dst")
        return peer

    @property
    def tag(self) -> int | None:
        """Of a send or receive."""
        tag: int | None = self._argument("tag")
        return tag

    @property
    def splits(self) -> Splits | None:
        """Of an all-to-all."""
        if self.operation != "all_to_all":
            return None
        sent = self._split(self._inputs(), self._argument("input_split_sizes"))
        return Splits(sent, self._split(self._outputs(), self._argument("output_split_sizes")))

    @property
    def is_async(self) -> bool | None:
        """Whether the caller waits later; None for sends and receives, which do not say."""
        flag: bool | None = self._argument("async_op")
        return flag

    def _argument(self, name: str) -> Any:
        """The argument or its default; None where the operator takes none of that name."""
        place = self._operator.places.get(name)
        return None if place is None else self._at(place)

    def _at(self, place: int) -> Any:
        assert self._arguments is not None, "a call is readable only while its listeners hear of it"
        # The dispatcher leaves out trailing arguments that have their default value.
        return self._arguments[place] if place < len(self._arguments) else self._operator.defaults[place]

    def _inputs(self) -> list[torch.Tensor]:
        place = self._operator.given
        return [] if place is None else _flat(self._at(place))

    def _outputs(self) -> list[torch.Tensor]:
        place = self._operator.got
        return [] if place is None else _flat(self._at(place))

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
    """What a ``c10d`` operator's schema says."""

    overload: OpOverload
    name: str
    operation: str
    places: dict[str, int]
    """Where each argument stands."""
    defaults: tuple[Any, ...]
    given: int | None
    """Where the tensors stand that a rank gives."""
    got: int | None
    """Where those stand that it gets; the same place when the operator works in place."""

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
            given=None if operation == "recv" else _beginning("input", tensors, in_place),
            got=None if operation == "send" else _beginning("output", tensors, in_place),
        )


@cache
def operators() -> tuple[Operator, ...]:
    """Every ``c10d`` operator of this release that works on a process group."""
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
    if members is not None:  # otherwise it may still be in the making
        _groups[group] = described
    return described


def _beginning(start: str, places: dict[str, int], otherwise: int | None) -> int | None:
    return next((place for name, place in places.items() if name.startswith(start)), otherwise)


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument that is one, a list of them, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value and isinstance(value[0], list):
        return [tensor for inner in value for tensor in inner]
    tensors: list[torch.Tensor] = value
    return tensors
