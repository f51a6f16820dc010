"""What healthy callers of a collective have in common, in words and in 64 bits (paper, section 7).

Values that differ legitimately are left out: the splits of an all-to-all obey a compatibility rule
of their own, a scatter's root gives what the others do not, and a shard's shape may be its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import xxhash

from torchscout.collectives.call import POINT_TO_POINT, Call, Group
from torchscout.decision.progress import CommGroup

__all__ = ["Fingerprint", "line_of", "read"]

# Where all callers must name the same shapes. A scatter is compared by what everybody gets, a
# gather by what everybody gives; an all-gather's output and a reduce-scatter's input are whole,
# while a rank's own part may be uneven.
_BY_OUTPUT = frozenset({"all_gather", "scatter", "recv"})
_ONE = (1,)
"""A number is a vector of one: stages of a DeepSpeed pipeline reduce their norms as either, together."""
_WITHOUT_SHAPE = frozenset({"all_to_all", "barrier"})


class Fingerprint(NamedTuple):
    """What callers must share, as read from a call; equal ones are one phrase."""

    operation: str
    dtype: Hashable
    shapes: tuple[tuple[int, ...], ...]
    reduction: str | None
    root: int | None

    @property
    def text(self) -> str:
        """For a person: ``all_reduce float32[1024] sum``, ``broadcast int64[2] from 0``."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        shapes = " ".join(f"[{','.join(map(str, shape))}]" for shape in self.shapes)
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(filter(None, (self.operation, dtype + shapes, self.reduction, root)))

    @property
    def number(self) -> int:
        return xxhash.xxh3_64_intdigest(self.text.encode())


def read(call: Call) -> Fingerprint:
    """The fingerprint of a call; both ends of a transfer have the same."""
    operation = call.operation
    if operation in _WITHOUT_SHAPE:
        return Fingerprint(operation, call.dtype, (), None, None)
    given = call.output_shapes if operation in _BY_OUTPUT else call.input_shapes
    shapes = tuple([shape or _ONE for shape in given])
    if operation in POINT_TO_POINT:
        return Fingerprint("transfer", call.dtype, shapes, None, None)
    return Fingerprint(operation, call.dtype, shapes, call.reduction, call.root)


def line_of(call: Call) -> CommGroup | None:
    """What the call is counted on; None for a receive from anyone, which matches no particular send."""
    group = call.group
    members = group.members or ()
    if call.operation not in POINT_TO_POINT:
        return CommGroup(_key(call), members, _name(group), timeout=_timeout(call))
    if call.peer is None or not members:
        return None
    places = (group.rank, call.peer) if call.operation == "send" else (call.peer, group.rank)
    source, destination = (members[place] for place in places)
    key = f"{_key(call)}/{source}>{destination}#{call.tag}"
    return CommGroup(
        key, (source, destination), f"{source} -> {destination}", pair=True, timeout=_timeout(call)
    )


def _timeout(call: Call) -> float | None:
    """Seconds after which the library gives up; SCOUT's own groups do not end anybody."""
    if call.group.is_scouts or call.device is None:
        return None
    try:
        options = call.process_group._get_backend(call.device).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without options, or of another device
        return None


def _key(call: Call) -> str:
    """The group's name alone need not be unique in the job: another group elsewhere may have it. And a group
    may have one backend for the host and one for devices, which count by themselves."""
    group, device = call.group, call.device
    members = ",".join(map(str, group.members or ()))
    where = "" if device is None or device.type == "cpu" else f"/{device.type}"
    return f"{group.name}@{xxhash.xxh3_64_hexdigest(members.encode())[:8]}{where}"


def _name(group: Group) -> str:
    described = group.description not in ("", "undefined")
    return group.description if described else f"group {group.name}"
