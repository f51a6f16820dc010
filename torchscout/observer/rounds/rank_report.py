"""What an observer reports about its trainer in a round (paper, section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchscout.decision.progress import CommGroup, Phase, Progress, RankStatus

__all__ = ["RankReport"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What an observer reports about its trainer in a round."""

    status: RankStatus
    lines: tuple[CommGroup, ...]
    """Everything that the rank communicates on."""
    moving: bool = False
    """It has just published something, so it is not silent, whatever it waits for."""
    excused: bool = False
    """It is paused, or within the allowance for its phase: its silence means nothing yet."""
    gone_seconds: float | None = None
    """How long ago the trainer was seen to have ended early."""
    was_killed: bool = False
    """The trainer was ended by SIGKILL, which nothing inside it sends when it loses a peer."""
    stalled: Progress | None = None
    """Its progress during a stall that was too long and ended shortly before: a watchdog may have ended
    trainers because of it."""
    is_pressed: bool = False
    """It has used most of the time that the communication library allows, which will soon end it."""
    has_timed_out: bool = False
    """It has used all of that time, now or a short time ago: what it has done since, or that it has ended, is
    a consequence."""
    is_restarting: bool = False
    """It exits so that the job can restart: if other ranks end after it, that is a consequence."""
    operations: Mapping[str, Any] | None = None
    """The operations that are open according to the trainer's Flight Recorder; see ``flight_recorder``."""
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """Recent duration of its input and its checkpoints."""
