"""What the doctor says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Grade", "fail", "ok", "skipped", "warn"]


class Grade(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """A job runs, and does without something."""
    FAIL = "fail"
    """A job will not run, or not be protected as it was asked to be."""
    SKIPPED = "skipped"
    """Nothing was asked about it, or it could not be tried."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    name: str
    status: Grade
    what: str
    """What was seen."""
    fix: str | None = None
    """What to do about it."""


def ok(name: str, what: str) -> Finding:
    return Finding(name, Grade.OK, what)


def warn(name: str, what: str, fix: str) -> Finding:
    return Finding(name, Grade.WARN, what, fix)


def fail(name: str, what: str, fix: str) -> Finding:
    return Finding(name, Grade.FAIL, what, fix)


def skipped(name: str, what: str) -> Finding:
    return Finding(name, Grade.SKIPPED, what)
