"""Every exception torchscout raises on purpose.

    ScoutError
    +-- ChannelError     peers could not exchange evidence: one is gone, late, or out of step

A user's mistake is a plain ``ValueError`` that names the offending value; a mistake of ours
is an ``AssertionError``.
"""

from __future__ import annotations

__all__ = ["ChannelError", "ScoutError"]


class ScoutError(Exception):
    """Something torchscout could not do; training itself is unaffected."""


class ChannelError(ScoutError):
    """Peers could not exchange evidence."""
