"""What observers report of their trainers in a round, from which a hang is diagnosed (paper, section 7).

Operations are numbered per ``CommGroup``: one process group, or one ``(source, destination, tag)`` of
point-to-point traffic, which has two members. A rank issues number ``n`` of a group when it is about to enter
the ``n``-th operation there, counted from 1.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal

__all__ = ["CommGroup", "How", "IssuedOp", "Phase", "Process", "Progress", "RankReport", "Window"]

How = Literal["killed", "failed", "asked", "unknown"]
"""How a trainer ended early: by SIGKILL, by an error or another signal, by a request such as SIGTERM, or
nobody knows, because another process has already taken its exit status."""


class Phase(str, Enum):
    """What a trainer is doing."""

    START = "start"
    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT_READ = "checkpoint_read"
    CHECKPOINT_WRITE = "checkpoint_write"
    EVALUATION = "evaluation"
    IDLE = "idle"

    @property
    def in_words(self) -> str:
        return self.value.replace("_", " ")


class Process(str, Enum):
    """The state of a trainer's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """Stopped by a signal or a debugger."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class CommGroup:
    """A process group, or one direction of the messages between two ranks."""

    key: str
    """The same on every member, unique in the job."""
    members: tuple[int, ...]
    """Global ranks; for point-to-point the source, then the destination."""
    name: str
    """For display: the group's description, or ``2 -> 3``."""
    pair: bool = False
    """Whether it is point-to-point: source and destination issue different operations that match."""
    timeout: float | None = None
    """Seconds after which the library ends ranks that wait in an operation, where that is known."""

    @property
    def in_words(self) -> str:
        return self.name if self.pair else f"group {self.name}"


@dataclass(frozen=True, slots=True)
class IssuedOp:
    """One operation, published before it is entered."""

    group: str
    """The key of its ``CommGroup``."""
    number: int
    fingerprint: int
    """Equal for healthy members: operation, dtype, number of elements, reduction, root."""
    digest: int
    """Order-sensitive hash of all fingerprints of this group up to this one."""
    text: str
    """The fingerprint for display: ``all_reduce float32[1024] sum``."""
    sends: tuple[int, ...] | None = None
    """Elements of an all-to-all for each member, in group order; they need not be equal, but must match."""
    receives: tuple[int, ...] | None = None
    """Elements of an all-to-all expected from each member."""


class Window(Sequence[IssuedOp]):
    """The last operations that a rank has issued, oldest first, over all groups."""

    def __init__(self, operations: Sequence[IssuedOp] = ()) -> None:
        self._operations = operations

    @cached_property
    def newest(self) -> tuple[str, int] | None:
        """Group and number of the last operation."""
        return (self._operations[-1].group, self._operations[-1].number) if self._operations else None

    @cached_property
    def digests(self) -> Mapping[str, int]:
        """Group -> the digest of its last operation."""
        return {each.group: each.digest for each in self._operations}

    @cached_property
    def last_numbers(self) -> Mapping[str, int]:
        """Group -> the number of its last operation."""
        return {each.group: each.number for each in self}

    def has_splits(self, group: str) -> bool:
        """Whether an operation of this group has splits."""
        return any(each.sends is not None for each in self.of(group))

    def of(self, group: str) -> list[IssuedOp]:
        """Return the operations of one group."""
        return [each for each in self if each.group == group]

    def last_entered(self, entered: Mapping[str, int]) -> tuple[str, int] | None:
        """Return group and number of the last operation that the device has reached."""
        for each in reversed(self):
            if each.number <= entered.get(each.group, -1):
                return each.group, each.number
        return None

    def __getitem__(self, place: Any) -> Any:
        return self._operations[place]

    def __len__(self) -> int:
        return len(self._operations)

    def __iter__(self) -> Iterator[IssuedOp]:
        return iter(self._operations)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Window) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Window({[*self]!r})"


@dataclass(frozen=True, slots=True)
class Progress:
    """The published progress of one trainer."""

    rank: int
    step: int
    operation: int
    """Publications since the step began; (step, operation) orders all of them."""
    phase: Phase
    issued: Mapping[str, int]
    """Group -> how many operations this rank has issued there."""
    recent: Window
    at_communication: bool
    """Whether the newest of ``recent`` is the last publication of the rank."""
    silent_seconds: float
    """Since the last publication, by the clock of the rank's own machine."""
    device_step: int | None = None
    """The last step that the accelerator has finished; None if unknown."""
    entered: Mapping[str, int] = field(default_factory=dict)
    """Group -> the last operation that the accelerator has reached, if known. Over NCCL the host issues
    operations long before its device enters them."""
    device_busy: bool | None = None
    """Whether the accelerator has work left; None if unknown."""
    captured: int = 0
    """Operations captured in CUDA graphs, whose replays publish nothing."""

    @property
    def coordinate(self) -> tuple[int, int]:
        return self.step, self.operation

    @property
    def inside(self) -> tuple[str, int] | None:
        """Group and number of the operation that the rank seems to be in: the last one that its busy device
        has reached or, on the host, the last one that it published."""
        newest = self.recent.newest
        is_behind = newest is not None and newest[1] > self.entered.get(newest[0], newest[1])
        if self.entered and (self.device_busy or (self.device_busy is None and is_behind)):
            return self.recent.last_entered(self.entered)
        if newest is None or not self.at_communication or newest[0] in self.entered:
            return None
        return newest

    def to_json(self) -> dict[str, Any]:
        """Return the progress as JSON."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        recent = [
            {each.name: getattr(issued, each.name) for each in fields(issued)} for issued in self.recent
        ]
        return {**own, "phase": self.phase.value, "recent": recent}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Progress:
        """Raises ``LookupError``, ``TypeError`` or ``ValueError`` if this is not progress."""
        _require(line, _PROGRESS)
        for counts in (line["issued"], line.get("entered", {})):
            if not all(_is_int64(count) for count in counts.values()):
                raise ValueError(f"operations must be counted by integers, got {counts!r:.80}")
        recent = Window([_issued(each) for each in line["recent"]])
        return cls(**{**line, "phase": Phase(line["phase"]), "recent": recent})


@dataclass(frozen=True, slots=True)
class RankReport:
    """What an observer reports of its trainer in a round."""

    rank: int
    process: Process = Process.RUNNING
    progress: Progress | None = None
    """None if the trainer died before it published anything."""
    groups: Sequence[CommGroup] = ()
    """Everything that the rank communicates in."""
    waiting: bool | None = None
    """Whether the trainer's stack shows it waiting for a communication; None without a stack, or if the stack
    does not tell."""
    stack: str = ""
    """Python stacks of the trainer: the main thread first, and in each the most recent call first."""
    doing: str = ""
    """What the rank was last doing, in words, if its progress has no phases (in dumps)."""
    moving: bool = False
    """It has just published something, so it is not silent, whatever it waits for."""
    excused: bool = False
    """It is paused, or within the allowance for its phase: its silence means nothing yet."""
    gone_seconds: float | None = None
    """How long ago the trainer was seen to have ended early."""
    how: How | None = None
    """How it ended, if it did so early."""
    wait_status: int | None = None
    """The status that its parent was given, as ``os.waitpid`` returns it, if it is known."""
    why: str = ""
    """The exception, or what is known of a lack of memory."""
    stalled: Progress | None = None
    """Its progress during a wait that was too long and is over: a watchdog may have ended it because of
    that."""
    near_timeout: bool = False
    """It has waited at least 85% of its process group's timeout; the watchdog will soon end it."""
    has_timed_out: bool = False
    """It has used all of that time, now or a short time ago: what it has done since, or that it has ended, is
    a consequence."""
    is_restarting: bool = False
    """It exits so that the job can restart: if other ranks end after it, that is a consequence."""
    is_incomplete: bool = False
    """Its record may lack operations: there was no room for them, or an error of ours has ended it."""
    operations: Mapping[str, Any] | None = None
    """The operations that are open according to the trainer's Flight Recorder."""
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """Recent durations of its input and its checkpoints."""

    @property
    def ended(self) -> str:
        """How its process ended, in words."""
        status, why = self.wait_status, f" ({self.why})" if self.why else ""
        if self.how is None or (status is None and self.how == "unknown"):
            return f"has ended in an unknown way{why}"
        if status is None:
            return f"failed{why}" if self.how == "failed" else "was terminated"
        if status & 0x7F:
            return f"was {'killed' if self.how == 'killed' else 'ended'} by {status_in_words(status)}{why}"
        return f"{'failed' if status else 'ended'} with {status_in_words(status)}{why}"


def status_in_words(wait_status: int) -> str:
    """Return ``SIGKILL`` or ``exit status 1``."""
    if not (number := wait_status & 0x7F):
        return f"exit status {wait_status >> 8}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_Types = Mapping[str, tuple[type, ...]]
_INT, _TEXT, _BOOL = (int,), (str,), (bool,)
_MAYBE = (type(None),)

# Reports with other types are rejected: the diagnosis of many ranks must not fail because of one of them.
_PROGRESS: _Types = {
    **dict.fromkeys(("rank", "step", "operation", "captured"), _INT),
    **dict.fromkeys(("issued", "entered"), (dict,)),
    "recent": (list, tuple),
    "at_communication": _BOOL,
    "silent_seconds": (int, float),
    "device_step": (*_INT, *_MAYBE),
    "device_busy": (*_BOOL, *_MAYBE),
}
_ISSUED: _Types = {
    **dict.fromkeys(("group", "text"), _TEXT),
    **dict.fromkeys(("number", "fingerprint", "digest"), _INT),
}


def _require(line: Mapping[str, Any], types: _Types) -> None:
    """Raise ``ValueError`` for another type; unlike ``isinstance``, True is not an integer."""
    for name, value in line.items():
        if (expected := types.get(name)) is None:
            continue
        # Hashes are unsigned, and only compared.
        is_large = type(value) is int and name not in ("fingerprint", "digest") and not _is_int64(value)
        if type(value) not in expected or is_large:
            raise ValueError(f"{name} is {value!r:.40}")


def _is_int64(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _issued(line: Mapping[str, Any]) -> IssuedOp:
    _require(line, _ISSUED)
    splits = {name: None if line[name] is None else tuple(line[name]) for name in ("sends", "receives")}
    if not all(_is_int64(size) for each in splits.values() for size in each or ()):
        raise ValueError(f"splits must be integers, got {splits!r:.80}")
    return IssuedOp(**{**line, **splits})
