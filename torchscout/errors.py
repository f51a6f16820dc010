"""Every exception torchscout raises on purpose.

    ScoutError
    +-- CatalogError     a catalog of expert shapes is damaged, not ours, or does not hold here any more
    +-- ChannelError     peers could not exchange evidence: one is gone, late, or out of step
    +-- CheckpointError  state could not be kept, or cannot be restored, and why
    |   +-- DamagedError stored bytes are not what was sealed, or were never a checkpoint (a ValueError too)
    |   +-- UnavailableError  no generation that may be loaded can be had whole on every rank
    +-- ObserverError    a trainer's observer could not be started, or does not answer
    +-- ReplayError      replay cannot repeat this work, and why
    +-- TornRecordError  a trainer publishes its progress faster than its observer can read

A user's mistake is a plain ``ValueError`` that names the offending value; a mistake of ours
is an ``AssertionError``.
"""

from __future__ import annotations

__all__ = [
    "CatalogError",
    "ChannelError",
    "CheckpointError",
    "DamagedError",
    "ObserverError",
    "ReplayError",
    "ScoutError",
    "TornRecordError",
    "UnavailableError",
    "describe_error",
]


class ScoutError(Exception):
    """Something torchscout could not do; training itself is unaffected."""


class CatalogError(ScoutError):
    """A catalog of expert shapes cannot be used: damaged, not ours, or made for something else."""


class ChannelError(ScoutError):
    """Peers could not exchange evidence."""


class CheckpointError(ScoutError):
    """State could not be kept, or cannot be restored."""


class DamagedError(CheckpointError, ValueError):
    """Stored bytes are not what was sealed, or were never a checkpoint; nothing of them may be loaded."""


class UnavailableError(CheckpointError):
    """Of no generation that may be loaded does every rank find its state."""


class ObserverError(ScoutError):
    """A trainer's observer could not be started, or does not answer."""


class ReplayError(ScoutError):
    """This work cannot be replayed here; the text is the reason of a ``not_checked`` record."""


class TornRecordError(ScoutError):
    """No whole progress record could be read: its trainer is alive and busy, ask again."""


def describe_error(error: Exception) -> str:
    """An exception in one line: a reason of ours as it stands, anybody else's with its kind."""
    return str(error) if isinstance(error, ScoutError) else f"{type(error).__name__}: {error}"
