"""The progress of ranks, from which a hang is diagnosed (paper, section 7).

Plain data with a JSON form, which observers exchange.

A *line* is what communication is counted on: a process group, or one direction of point-to-point traffic
``(source, destination, tag)``, which has two members. A rank issues number ``n`` on a line when it is about
to enter the ``n``-th operation, counted from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

__all__ = ["CommGroup", "IssuedOp", "Phase", "Process", "Progress", "RankStatus"]


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
    """A line of communication."""

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

    line: str
    number: int
    fingerprint: int
    """Equal for healthy members: operation, dtype, fixed shape, reduction, root."""
    digest: int
    """Order-sensitive hash of all fingerprints on this line up to this one."""
    text: str
    """The fingerprint for display: ``all_reduce float32[1024] sum``."""
    sends: tuple[int, ...] | None = None
    """Elements of an all-to-all for each member, in group order; they need not be equal, but must match."""
    receives: tuple[int, ...] | None = None
    """Elements of an all-to-all expected from each member."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The published progress of one trainer."""

    rank: int
    step: int
    operation: int
    """Publications since the step began; (step, operation) orders all of them."""
    phase: Phase
    issued: Mapping[str, int]
    """Line -> how many operations this rank has issued on it."""
    recent: tuple[IssuedOp, ...]
    """The last operations, oldest first, over all lines."""
    at_communication: bool
    """Whether the newest of ``recent`` is the last publication of the rank."""
    silent_seconds: float
    """Since the last publication, by the clock of the rank's own machine."""
    device_step: int | None = None
    """The last step that the accelerator has finished; None if unknown."""
    entered: Mapping[str, int] = field(default_factory=dict)
    """Line -> the last operation that the accelerator has reached, if known. Over NCCL the host issues
    operations long before its device enters them."""
    device_busy: bool | None = None
    """Whether the accelerator has work left; None if unknown."""
    captured: int = 0
    """Operations captured in CUDA graphs, whose replays publish nothing."""

    @property
    def coordinate(self) -> tuple[int, int]:
        return self.step, self.operation

    @property
    def inside(self) -> IssuedOp | None:
        """The operation that the rank seems to be in: the last one that its busy device has reached or, on
        the host, the last one that it published."""
        if self.entered and self.device_busy:
            reached = (
                each for each in reversed(self.recent) if each.number <= self.entered.get(each.line, 0)
            )
            return next(reached, None)
        is_on_host = self.at_communication and self.recent and self.recent[-1].line not in self.entered
        return self.recent[-1] if is_on_host else None

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Progress:
        """Raises ``LookupError``, ``TypeError`` or ``ValueError`` if this is not progress."""
        _require(line, _PROGRESS)
        for counts in (line["issued"], line.get("entered", {})):
            if not all(_is_int64(count) for count in counts.values()):
                raise ValueError(f"operations must be counted by integers, got {counts!r:.80}")
        recent = tuple([_issued(each) for each in line["recent"]])
        return cls(**{**line, "phase": Phase(line["phase"]), "recent": recent})


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The report of one rank's observer in a round."""

    rank: int
    process: Process
    progress: Progress | None
    """None if the trainer died before it published anything."""
    waiting: bool | None = None
    """Whether the trainer's stack shows it waiting for a communication; None without a stack."""
    stack: str = ""
    """Python stacks of the trainer, most recent call first."""
    doing: str = ""
    """What the rank was last doing, in words, if its progress has no phases (in dumps)."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RankStatus:
        _require(line, _STANDING)
        progress = line["progress"]
        return cls(
            rank=line["rank"],
            process=Process(line["process"]),
            progress=None if progress is None else Progress.from_json(progress),
            waiting=line["waiting"],
            stack=line["stack"],
            doing=line.get("doing", ""),
        )


_Types = Mapping[str, tuple[type, ...]]
_INT, _TEXT, _BOOL, _NUMBER = (int,), (str,), (bool,), (int, float)
_MAYBE = (type(None),)

# Reports with other types are rejected: the diagnosis of many ranks must not fail because of one of them.
_STANDING: _Types = {"rank": _INT, "waiting": (*_BOOL, *_MAYBE), "stack": _TEXT}
_PROGRESS: _Types = {
    **dict.fromkeys(("rank", "step", "operation"), _INT),
    "issued": (dict,),
    "recent": (list, tuple),
    "at_communication": _BOOL,
    "silent_seconds": _NUMBER,
}
_LATER: _Types = {
    "device_step": (*_INT, *_MAYBE),
    "entered": (dict,),
    "device_busy": (*_BOOL, *_MAYBE),
    "captured": _INT,
    "doing": _TEXT,
}
"""Optional keys."""
_ISSUED: _Types = {
    **dict.fromkeys(("line", "text"), _TEXT),
    **dict.fromkeys(("number", "fingerprint", "digest"), _INT),
}


def _require(line: Mapping[str, Any], types: _Types) -> None:
    """Raise ``ValueError`` for another type; unlike ``isinstance``, True is not an integer."""
    for name, value in line.items():
        if (expected := types.get(name) or _LATER.get(name)) is None:
            continue
        # Hashes are unsigned, and only compared. The diagnosis has all other integers in arrays.
        is_large = type(value) is int and name not in ("fingerprint", "digest") and not _is_int64(value)
        if type(value) not in expected or is_large:
            raise ValueError(f"{name} is {value!r:.40}")


def _is_int64(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _issued(line: Mapping[str, Any]) -> IssuedOp:
    _require(line, _ISSUED)
    return IssuedOp(**{**line, **_splits(line)})


def _splits(issued: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    splits = {name: None if issued[name] is None else tuple(issued[name]) for name in ("sends", "receives")}
    if not all(_is_int64(size) for each in splits.values() for size in each or ()):
        raise ValueError(f"splits must be integers, got {splits!r:.80}")
    return splits
