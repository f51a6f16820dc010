"""Every exception torchscout raises on purpose.

    ScoutError
    +-- ChannelError     peers could not exchange evidence: one is gone, late, or out of step
    +-- ObserverError    a trainer's observer could not be started, or does not answer
    +-- TornRecordError  a trainer publishes its progress faster than its observer can read

A user's mistake is a plain ``ValueError`` that names the offending value; a mistake of ours
is an ``AssertionError``.
"""

from __future__ import annotations

__all__ = ["ChannelError", "ObserverError", "ScoutError", "TornRecordError"]


class ScoutError(Exception):
    """Something torchscout could not do; training itself is unaffected."""


class ChannelError(ScoutError):
    """Peers could not exchange evidence."""


class ObserverError(ScoutError):
    """A trainer's observer could not be started, or does not answer."""


class TornRecordError(ScoutError):
    """No whole progress record could be read: its trainer is alive and busy, ask again."""
