"""What is done about an incident: continue, restart, inspect, preflight, replace, or stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Finding, Row, cases, check, either, hang, wrong_today
from tests.scenarios.today import policy

MACHINES = ("a", "a", "b", "b")
"""Of ranks 0 to 3, unless a row says otherwise."""


@dataclass(frozen=True)
class Event:
    """An incident in the history of a job."""

    finding: Finding
    step: int
    machines: Sequence[str] = MACHINES
    """The machine of each rank at that time."""
    step_slowdown: float | None = None
    """For a slow rank: how much longer its replayed layer takes, 2.0 for twice as long."""
    input_or_storage: bool = False
    """For a slow rank: it is slow in a phase of the training loop, not in what was replayed."""
    undecided: bool = False
    """Nobody was named, since the evidence was not enough."""


class Done(NamedTuple):
    """What happens to the job: the action that is carried out, ``None`` if it is left as it is; and the
    machines that are taken out of it."""

    action: str | None
    machines: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """Incidents, oldest first; each was handled before the next one came. The answer is about the last."""

    events: Sequence[Event]
    act: Sequence[str] = ("restart", "replace")
    """What the user permits."""
    has_verified: bool = True


def after(*events: Event, **settings: object) -> History:
    return History(events, **settings)


LATE = hang([2], "rank", "restart")

ROWS = [
    Row(
        "a rank is late for the first time: restart, and keep the machines",
        given=after(Event(LATE, step=40)),
        must_come=Done("restart"),
    ),
    Row(
        "the same undecided divergence comes again after a restart: nobody was named, so nobody is replaced",
        given=after(
            Event(hang([0, 1, 2, 3], "process group", "restart"), step=40, undecided=True),
            Event(hang([0, 1, 2, 3], "process group", "restart"), step=60, undecided=True),
        ),
        must_come=either(Done("restart"), Done("stop")),
        wrong=wrong_today("observer P1", says=Done("replace", ("a", "b"))),
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_policy(row: Row):
    check(row, policy.done(row.given))
