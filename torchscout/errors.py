"""Every exception torchscout raises on purpose.

    ScoutError
    +-- CatalogError
    +-- ChannelError
    +-- CheckpointError
    |   +-- DamagedError      (also a ValueError)
    |   +-- UnavailableError
    +-- ObserverError
    +-- ReplayError
    +-- RestartPlanError
    +-- TornRecordError

Invalid arguments raise a plain ``ValueError`` with the value; a bug in torchscout an ``AssertionError``.
"""

from __future__ import annotations

__all__ = [
    "CatalogError",
    "ChannelError",
    "CheckpointError",
    "DamagedError",
    "ObserverError",
    "ReplayError",
    "RestartPlanError",
    "ScoutError",
    "TornRecordError",
    "UnavailableError",
    "describe_error",
]


class ScoutError(Exception):
    """torchscout could not do something; training itself is not affected."""


class CatalogError(ScoutError):
    """A catalog of expert shapes cannot be used: it is damaged, no catalog, or made for something else."""


class ChannelError(ScoutError):
    """Peers could not exchange evidence: one of them is gone, late or out of step."""


class CheckpointError(ScoutError):
    """State could not be saved or cannot be restored."""


class DamagedError(CheckpointError, ValueError):
    """Stored bytes are not those that were sealed, or not a checkpoint; they must not be loaded."""


class UnavailableError(CheckpointError):
    """There is no generation that may be loaded and that is complete on every rank."""

    def __init__(self, reason: str, ways_out: str = "") -> None:
        super().__init__(f"{reason} {ways_out}".strip())
        self.reason = reason


class ObserverError(ScoutError):
    """A trainer's observer could not be started or does not answer."""


class ReplayError(ScoutError):
    """Some work cannot be replayed; the message becomes the reason of a ``not_checked`` record."""


class RestartPlanError(ScoutError):
    """The plan that an earlier run left for this one is damaged, or is not this user's."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"cannot use the restart plan {path}: {reason}")


class TornRecordError(ScoutError):
    """The trainer kept publishing while its progress record was read. It is alive; read again."""


def describe_error(error: Exception) -> str:
    """The message of an exception, with its type unless it is a ``ScoutError``."""
    return str(error) if isinstance(error, ScoutError) else f"{type(error).__name__}: {error}"
