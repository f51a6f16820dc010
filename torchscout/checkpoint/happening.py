"""What a checkpoint gate is told, and what it answers (paper, section 8, algorithm 3). Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchscout.checkpoint.generation import Generation
from torchscout.decision.record import Manifestation

__all__ = [
    "Checked",
    "Effects",
    "Event",
    "Hung",
    "Lost",
    "Outcome",
    "Recovered",
    "Sealed",
    "WriteFailed",
    "Written",
]


class Outcome(str, Enum):
    """A check's, job-wide: that of all recipes due at a boundary, on all ranks."""

    HEALTHY = "healthy"
    STRAGGLER = "straggler"
    """Somebody is slow; the numbers are right."""
    NOT_CHECKED = "not_checked"
    """A result is missing on some rank."""
    REJECTED = "rejected"
    """Peers disagreed, and the cause is not known to be corruption."""
    SDC = "sdc"
    """Corruption was found in any comparison group."""

    @property
    def accepted(self) -> bool:
        return self in (Outcome.HEALTHY, Outcome.STRAGGLER)


@dataclass(frozen=True, slots=True)
class Checked:
    """A check right after the optimizer's update of this step is over."""

    step: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Hung:
    """The observers found that the job makes no progress at this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """Every rank has sealed its capture of this generation in memory."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Written:
    """Every rank has sealed its files of this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Some rank could not write its files of this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Lost:
    """Some rank's share of this generation cannot be had: never captured, gone, or damaged everywhere."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Recovered:
    """Every rank has loaded this generation and trains on from it."""

    generation: Generation | None
    """None if the job starts from its beginning, which is allowed only when nothing verified is left."""
    in_files: bool = False
    """Whether every rank has a file of it as well."""


Event = Checked | Hung | Sealed | Written | WriteFailed | Lost | Recovered


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What is to be done about an event, on every rank alike."""

    reason: str
    """Why, in words."""
    capture: Generation | None = None
    """Copy the state as it is now, under this name."""
    persist: Generation | None = None
    """Write this one to files, and report ``Written`` or ``WriteFailed``."""
    promote: Generation | None = None
    """This one is verified from here on."""
    retire: tuple[Generation, ...] = ()
    """Delete these wherever they lie."""
    retrieve: Manifestation | None = None
    """Training must stop and a checkpoint be chosen because of this failure."""
