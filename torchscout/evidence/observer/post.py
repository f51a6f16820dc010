"""What an observer posts in a round, and its JSON form (paper, section 7). Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchscout.decision.progress import CommGroup, Phase, Process, Progress, RankStatus, Shared
from torchscout.evidence.observer.journal import Journal, line_text
from torchscout.evidence.observer.layout import LINES

__all__ = ["Post"]


@dataclass(frozen=True, slots=True)
class Post:
    """One rank's standing, and how its observer understands its silence."""

    standing: RankStatus
    lines: tuple[CommGroup, ...]
    """Everything the rank communicates on."""
    moving: bool = False
    """It published something a moment ago: not silent, whatever it waits for."""
    excused: bool = False
    """It is paused, or within the allowance for what it is doing: its silence means nothing yet."""
    gone_seconds: float | None = None
    """Since its trainer was seen to have ended before it finished."""
    was_killed: bool = False
    """Its trainer was ended by SIGKILL, which nothing in it sends when it loses a peer."""
    stalled: Progress | None = None
    """What it showed while it stood still for too long, if that was shortly before: a watchdog may have ended
    trainers for it."""
    is_pressed: bool = False
    """It has waited for most of the time that the library allows, which will soon end it."""
    has_timed_out: bool = False
    """It has waited for all of that time, now or a short time ago: what it does since, or that it ends, is a
    consequence."""
    operations: Mapping[str, Any] | None = None
    """What the Flight Recorder of its trainer says is open; see ``flight_recorder``."""
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """What its input and its checkpoints take lately."""

    @property
    def is_still(self) -> bool:
        """Whether the trainer's stacks would tell something."""
        return not self.moving and self.standing.process is Process.RUNNING

    def to_json(self) -> dict[str, Any]:
        return {
            "standing": self.standing.to_json(),
            "lines": b"".join(map(line_text, self.lines)).decode(),
            "moving": self.moving,
            "excused": self.excused,
            "gone_seconds": self.gone_seconds,
            "was_killed": self.was_killed,
            "stalled": None if self.stalled is None else asdict(self.stalled),
            "is_pressed": self.is_pressed,
            "has_timed_out": self.has_timed_out,
            "operations": self.operations,
            "phase_seconds": {phase.value: seconds for phase, seconds in self.phase_seconds.items()},
        }

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], shared: Shared | None = None, size: int | None = None
    ) -> Post:
        """``shared`` by the posts of one round: what several say is kept once. ``size`` ranks there are."""
        shared = {} if shared is None else shared
        if document["lines"].count("\n") > LINES:
            raise ValueError(f"a rank communicates on {LINES} lines at most")
        for name, types in _TYPES.items():
            if type(document[name]) not in types:
                raise ValueError(f"{name} is {document[name]!r:.40}")
        return cls(
            standing=RankStatus.from_json(document["standing"], shared),
            lines=tuple([_line(text, shared, size) for text in document["lines"].splitlines()]),
            moving=document["moving"],
            excused=document["excused"],
            gone_seconds=document["gone_seconds"],
            was_killed=document["was_killed"],
            stalled=None if document["stalled"] is None else Progress.from_json(document["stalled"], shared),
            is_pressed=document["is_pressed"],
            has_timed_out=document["has_timed_out"],
            operations=document["operations"],
            phase_seconds={
                Phase(name): float(seconds) for name, seconds in document["phase_seconds"].items()
            },
        )


_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("moving", "excused", "was_killed", "is_pressed", "has_timed_out"), (bool,)),
    "gone_seconds": (int, float, type(None)),
    "operations": (dict, type(None)),
}


def _line(text: str, shared: Shared, size: int | None) -> CommGroup:
    if text not in shared:
        journal = Journal(size)
        journal.extend(text.encode())
        (shared[text],) = journal.lines
    line: CommGroup = shared[text]
    return line
