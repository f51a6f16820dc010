"""Where every rank stands: what a hang is diagnosed from (paper, section 7).

Plain data, torch-free. The evidence floor writes and reads it through shared memory; here it
only has its shape and its JSON form, which travels over the observers' board.

A *line* is whatever communication is counted on: a process group, or one direction of
point-to-point traffic ``(source, destination, tag)``, which is a line of two members. Issuing
number ``n`` on a line means to be about to enter its ``n``-th operation, counted from 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from operator import itemgetter
from typing import Any

__all__ = ["CommGroup", "IssuedOp", "Phase", "Process", "Progress", "RankStatus", "Shared"]

Shared = dict[Hashable, Any]
"""What was read already, by the text or the values it is read from. The ranks of a job say much the same,
and a line that all of them are on would otherwise take the square of their number in memory."""


class Phase(str, Enum):
    """What a trainer is busy with."""

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
    """What the operating system says of a trainer."""

    RUNNING = "running"
    STOPPED = "stopped"
    """Stopped by a signal or a debugger."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class CommGroup:
    """Something communication is counted on."""

    key: str
    """The same on every member, unique in the job."""
    members: tuple[int, ...]
    """Global ranks; for point-to-point the source, then the destination."""
    name: str
    """For a person: the group's description, or ``2 -> 3``."""
    pair: bool = False
    """Point-to-point: source and destination issue different operations that match."""
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
    """The fingerprint for a person: ``all_reduce float32[1024] sum``."""
    sends: tuple[int, ...] | None = None
    """AllToAll: elements for each member, in group order; compared by compatibility, not equality."""
    receives: tuple[int, ...] | None = None
    """AllToAll: elements expected from each member."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one trainer has published."""

    rank: int
    step: int
    operation: int
    """Coordinates published since the step began; (step, operation) orders a rank's life."""
    phase: Phase
    issued: Mapping[str, int]
    """Line -> how many operations this rank has issued on it."""
    recent: tuple[IssuedOp, ...]
    """The last operations, oldest first, over all lines."""
    at_communication: bool
    """The last thing published is the newest of ``recent``: nothing of the rank was seen since."""
    silent_seconds: float
    """Since the last publication, by the clock of the rank's own machine."""
    device_step: int | None = None
    """The last step the accelerator is known to have finished; None where that is not known."""
    entered: Mapping[str, int] = field(default_factory=dict)
    """Line -> the last operation that the accelerator has come to, where operations run on one and that is
    known. Over NCCL the host issues operations long before its device enters them."""
    device_busy: bool | None = None
    """Whether the accelerator has work left; None where that is not known."""
    captured: int = 0
    """Operations that went into CUDA graphs; when those are replayed, nothing of them is published."""

    @property
    def coordinate(self) -> tuple[int, int]:
        return self.step, self.operation

    @property
    def inside(self) -> IssuedOp | None:
        """The operation that the rank seems to be in: what its device came to last and has not left, or, on
        the host, what it published last."""
        if self.entered and self.device_busy:
            reached = (
                each for each in reversed(self.recent) if each.number <= self.entered.get(each.line, 0)
            )
            return next(reached, None)
        is_on_host = self.at_communication and self.recent and self.recent[-1].line not in self.entered
        return self.recent[-1] if is_on_host else None

    @classmethod
    def from_json(cls, line: Mapping[str, Any], shared: Shared | None = None) -> Progress:
        """What is in ``shared`` already, and equal, is taken from there; the rest is added."""
        shared = {} if shared is None else shared
        _require(line, _PROGRESS)
        for counts in (line["issued"], line.get("entered", {})):
            if not all(type(count) is int for count in counts.values()):
                raise ValueError(f"operations are counted, got {counts!r:.80}")
        recent = tuple([_issued(each, shared) for each in line["recent"]])
        return cls(**{**line, "phase": Phase(line["phase"]), "recent": recent})


@dataclass(frozen=True, slots=True)
class RankStatus:
    """All that one rank's observer can say in a round."""

    rank: int
    process: Process
    progress: Progress | None
    """None when the trainer died before it published anything."""
    waiting: bool | None = None
    """Whether the trainer's stack shows it waiting for a communication; None where it gave no stack."""
    stack: str = ""
    """Python stacks of the trainer, most recent call first."""
    doing: str = ""
    """What the rank was last seen doing, in words, where its progress does not say: a dump has no phases."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any], shared: Shared | None = None) -> RankStatus:
        """What is in ``shared`` already, and equal, is taken from there; the rest is added."""
        _require(line, _STANDING)
        progress = line["progress"]
        return cls(
            rank=line["rank"],
            process=Process(line["process"]),
            progress=None if progress is None else Progress.from_json(progress, shared),
            waiting=line["waiting"],
            stack=line["stack"],
            doing=line.get("doing", ""),
        )


_Types = Mapping[str, tuple[type, ...]]
_INT, _TEXT, _BOOL, _NUMBER = (int,), (str,), (bool,), (int, float)
_MAYBE = (type(None),)

# What a peer sends has these types, or is refused: a diagnosis of many ranks must not fail over one of them.
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
"""What may be missing."""
_ISSUED: _Types = {
    **dict.fromkeys(("line", "text"), _TEXT),
    **dict.fromkeys(("number", "fingerprint", "digest"), _INT),
}


def _require(line: Mapping[str, Any], types: _Types) -> None:
    """``ValueError`` where something has another type; not ``isinstance``, since true is no number."""
    for name, value in line.items():
        expected = types.get(name) or _LATER.get(name)
        if expected is not None and type(value) not in expected:
            raise ValueError(f"{name} is {value!r:.40}")


def _issued(line: Mapping[str, Any], shared: Shared) -> IssuedOp:
    _require(line, _ISSUED)
    if line["sends"] is not None or line["receives"] is not None:
        return IssuedOp(**{**line, **_splits(line)})
    key = _without_splits(line)
    issued: IssuedOp | None = shared.get(key)
    if issued is None:
        issued = shared[key] = IssuedOp(**line)
    return issued


_without_splits = itemgetter("line", "number", "fingerprint", "digest", "text")


def _splits(issued: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    splits = {name: None if issued[name] is None else tuple(issued[name]) for name in ("sends", "receives")}
    if not all(type(size) is int for each in splits.values() for size in each or ()):
        raise ValueError(f"splits are numbers of elements, got {splits!r:.80}")
    return splits
