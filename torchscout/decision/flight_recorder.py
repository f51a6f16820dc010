"""Reads one dump of PyTorch's Flight Recorder (paper, section 7).

A dump is a dictionary, as ``torch._C._distributed_c10d._dump_nccl_trace`` and ``_dump_fr_trace`` pickle it
and their ``_json`` forms write it. Its keys differ between releases, and a file may be damaged, so entries
that are not as expected are left out and counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Dump", "Entry", "State", "launch_of", "read_dump"]

MOST_ENTRIES = 1_000_000
_MOST_FRAMES = 32
_MOST_TENSORS = 100_000
_MOST_CHARACTERS = 500
_SHOWN_SHAPES = 2

_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Bool": "bool",
    "BFloat16": "bfloat16",
}
_SAME_AS = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}
"""Different calls of the same operation."""
_BY_OUTPUT = ("all_gather", "ALLGATHER", "scatter", "recv")
"""Operations whose callers agree on the size of the output. For all others it is the size of the input."""
_WITHOUT_SIZE = ("all_to_all", "barrier", "coalesced")
_ENDS_EARLY = ("broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter")
"""Operations that a member may complete before all members have issued them."""
_PAIR = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")


class State(str, Enum):
    """The state of an operation when the dump was made."""

    SCHEDULED = "scheduled"
    """Issued by the host."""
    STARTED = "started"
    """Begun on the device. Recorded only where collectives are timed (``TORCH_NCCL_ENABLE_TIMING=1``)."""
    COMPLETED = "completed"
    RETIRED = "retired"
    """Completed or failed; Gloo does not record which."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation that a rank has issued."""

    record: int
    """Its index among all operations of the rank."""
    group: str
    """The process group's name."""
    description: str
    """The purpose of the group; empty if not set."""
    backend: str
    operation: str
    """``all_reduce``, ``send``, ...; ``coalesced`` for the launch of the operations recorded before it."""
    collective: int
    """Its number among the collectives of the group, from 1; coalesced operations share one."""
    transfer: int
    """Its number among the rank's sends and receives in the group, from 1; coalesced ones share one."""
    is_transfer: bool
    """A send or a receive, or the launch of several."""
    ends: tuple[int, int] | None
    """Source and destination of a send or receive, as positions in the group."""
    agreed: tuple[object, ...]
    """What all callers must have in common: the operation, its dtypes and the number of elements."""
    text: str
    """For display: ``all_reduce float32[1024]``."""
    state: State
    was_started: bool
    """Whether the time of its start was recorded."""
    created: int
    """When it was issued, in nanoseconds since the epoch; 0 if not recorded."""
    frames: tuple[str, ...]
    """The Python stack that issued it, innermost first."""

    @property
    def needs_all(self) -> bool:
        """Whether no member completes it before all have issued it."""
        return not self.is_transfer and self.operation not in _ENDS_EARLY


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank."""

    rank: int
    entries: tuple[Entry, ...]
    """Oldest first."""
    groups: Mapping[str, tuple[int, ...]]
    """Name -> global ranks, for groups whose members were recorded. Gloo records none."""
    descriptions: Mapping[str, str]
    """Name -> purpose, for the same groups."""
    enqueued: Mapping[int, int]
    """``pg_id`` of a process group -> number of the last collective that was issued."""
    ids: Mapping[str, int]
    """Name -> ``pg_id``, for groups that have entries."""
    unreadable: int
    """Entries that could not be read."""

    @property
    def has_lost_entries(self) -> bool:
        """Whether older operations are missing: the buffer was full, or only open ones were dumped."""
        records = [entry.record for entry in self.entries]
        return bool(records) and records != list(range(len(records)))


def read_dump(rank: int, document: object) -> Dump:
    """Read the dump of ``rank``; raises ``ValueError`` if ``document`` is not a dump."""
    if not isinstance(document, Mapping):
        raise ValueError(f"a dump is a dictionary, not a {type(document).__name__}")
    if not {"entries", "pg_config", "pg_status"} & document.keys():
        raise ValueError("not a dump of the Flight Recorder: it has neither entries nor pg_config")
    raw = document.get("entries", [])  # missing if there are none
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise ValueError(f"entries must be a list, not a {type(raw).__name__}")
    if len(raw) > MOST_ENTRIES:
        raise ValueError(f"a dump may have {MOST_ENTRIES:,} entries at most, not {len(raw):,}")
    entries: list[Entry] = []
    ids: dict[str, int] = {}
    unreadable = 0
    for each in raw:
        if (entry := _readable(each)) is None:
            unreadable += 1
        else:
            ids[entry.group] = each["pg_id"] if isinstance(each.get("pg_id"), int) else -1
            entries.append(entry)
    if unreadable and not entries:
        raise ValueError(f"none of its {unreadable} entries can be read")
    entries = _without_launched(sorted(entries, key=lambda entry: entry.record))
    config = _named(document.get("pg_config"))
    return Dump(
        rank=rank,
        entries=tuple(entries),
        groups={name: members for name, each in config.items() if (members := _members(each.get("ranks")))},
        descriptions={name: _description(each.get("desc")) for name, each in config.items()},
        enqueued=_enqueued(document.get("pg_status")),
        ids=ids,
        unreadable=unreadable,
    )


def _readable(raw: Any) -> Entry | None:
    try:
        return _entry(raw)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def launch_of(entry: Entry) -> tuple[str, bool, int]:
    """Return a key that operations launched together have in common."""
    return entry.group, entry.is_transfer, entry.transfer if entry.is_transfer else entry.collective


def _without_launched(entries: list[Entry]) -> list[Entry]:
    """Leave out operations that look open although their launch has completed.

    Operations that are launched together stay "scheduled" forever. The entry after them, their launch, has
    their state, and a dump of open operations does not contain it once it has completed.
    """
    if any(entry.state in (State.COMPLETED, State.RETIRED) for entry in entries):
        return entries
    if [entry.record for entry in entries] == list(range(len(entries))):
        return entries
    launches = {launch_of(entry) for entry in entries if entry.operation == "coalesced"}
    count = Counter(launch_of(entry) for entry in entries)

    def may_be_over(entry: Entry) -> bool:
        is_part = entry.is_transfer or count[launch_of(entry)] > 1
        return is_part and launch_of(entry) not in launches and entry.state is State.SCHEDULED

    return [entry for entry in entries if not may_be_over(entry)]


def _entry(raw: Mapping[str, Any]) -> Entry:
    backend, _, title = _words(raw["profiling_name"]).rpartition(":")
    name = title.split(" ")[0]
    operation = _SAME_AS.get(name, name)
    group, description = raw["process_group"]
    found = _PAIR.fullmatch(title)
    ends = None
    if found is not None:
        mine, peer = int(found[2]), int(found[4])
        ends = (mine, peer) if found[1] == "send" else (peer, mine)
    sizes = {side: _shapes(raw.get(f"{side}_sizes")) for side in ("input", "output")}
    side = "output" if operation.startswith(_BY_OUTPUT) else "input"
    dtypes = tuple(_words(each) for each in (raw.get(f"{side}_dtypes") or ())[:_MOST_TENSORS])
    common = "transfer" if ends else operation
    numbers = () if operation.startswith(_WITHOUT_SIZE) else (sum(map(math.prod, sizes[side])),)
    return Entry(
        record=_number(raw["record_id"]),
        group=_words(group),
        description=_description(description),
        backend=backend,
        operation=operation,
        collective=_number(raw["collective_seq_id"] if "collective_seq_id" in raw else raw["seq_id"]),
        transfer=_number(raw.get("p2p_seq_id", 0)),
        is_transfer=ends is not None or bool(raw.get("is_p2p", False)),
        ends=ends,
        agreed=(common, tuple(sorted(set(dtypes))), *numbers),
        text=_text(operation, dtypes, sizes[side]),
        state=_state(raw, backend),
        was_started=bool(raw.get("time_discovered_started_ns")),
        created=_whole(raw.get("time_created_ns", 0)),
        frames=_frames(raw.get("frames", ())),
    )


def _state(raw: Mapping[str, Any], backend: str) -> State:
    state = State(raw["state"])
    # Gloo leaves the state at "scheduled".
    return State.RETIRED if backend == "gloo" and raw.get("retired") is True else state


def _text(operation: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    dtype = ", ".join(dict.fromkeys(_DTYPES.get(each, each.lower()) for each in dtypes[:_SHOWN_SHAPES]))
    shown = "".join(f"[{','.join(map(str, shape))}]" for shape in shapes[:_SHOWN_SHAPES])
    more = f" and {len(shapes) - _SHOWN_SHAPES} more" if len(shapes) > _SHOWN_SHAPES else ""
    return " ".join(filter(None, (operation, dtype + shown + more)))


def _shapes(raw: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...]:
    shapes = list(raw or ())
    if len(shapes) > _MOST_TENSORS:
        raise ValueError("too many tensors")
    return tuple(tuple(_whole(size) for size in list(shape)[:64]) for shape in shapes)


def _frames(raw: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    frames = list(raw)[:_MOST_FRAMES]
    return tuple(
        f"{_words(each['filename'])}:{_whole(each['line'])} {_words(each['name'])}" for each in frames
    )


def _members(raw: object) -> tuple[int, ...]:
    """Read the ranks of a group, which are usually text: ``[0, 1, 2]``."""
    if isinstance(raw, str):
        if not re.fullmatch(r"[\[\]0-9, ]*", raw):
            return ()
        return tuple(int(each) for each in re.findall(r"\d{1,9}", raw))
    if isinstance(raw, list | tuple) and all(isinstance(each, int) for each in raw):
        return tuple(raw)
    return ()


def _enqueued(raw: object) -> dict[int, int]:
    counts = {}
    for key, status in _named(raw).items():
        last = status.get("last_enqueued_collective")
        if isinstance(last, str) and last[:9].isdecimal():  # as in JSON
            last = int(last[:9])
        if isinstance(last, int) and last >= 0 and key[:9].isdecimal():
            counts[int(key[:9])] = last
    return counts


def _named(raw: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(raw, Mapping):
        return {}
    return {
        _words(key): each for key, each in raw.items() if isinstance(key, str) and isinstance(each, Mapping)
    }


def _description(raw: object) -> str:
    return _words(raw) if isinstance(raw, str) and raw != "undefined" else ""


def _whole(raw: object) -> int:
    if not isinstance(raw, int) or not 0 <= raw < 1 << 63:
        raise ValueError("not a whole number")  # the value may be a structure of any size
    return raw


def _number(raw: object) -> int:
    """Read the number of an operation."""
    if (number := _whole(raw)) >= 1 << 31:
        raise ValueError("too many operations")
    return number


def _words(raw: object) -> str:
    """Return text that is safe to print on a terminal."""
    if not isinstance(raw, str):
        raise TypeError("not text")
    return "".join(each if each.isprintable() else "?" for each in raw[:_MOST_CHARACTERS])
