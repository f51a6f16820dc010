"""Plays the demo: a job is started, disturbed, stopped, and started again until it is done."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchscout.cli.campaign.grading import Grade, grade
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.demo.job import Began, Ended, train, train_alone
from torchscout.cli.demo.stage import STEPS, Kind, Stage
from torchscout.cli.demo.view import View
from torchscout.cli.local_ranks import LiveRanks, run_ranks
from torchscout.decision.record import Incident, Manifestation
from torchscout.faults.plan import FaultPlan

__all__ = ["Life", "Played", "play"]

_SECONDS = 120.0
"""What any single step may take."""
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Life:
    """One start of the job until its end."""

    resumed: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    end: str = "finished"
    """Or ``corrupted``, or ``hung``."""
    step: int = 0
    """The last that was done."""


@dataclass(slots=True)
class Played:
    """All that is to be told of it."""

    lives: list[Life]
    fired: list[dict[str, Any]]
    incidents: list[Incident]
    grade: Grade
    recovered: bool
    """Whether the job ended bitwise as one that was never disturbed."""
    status: dict[str, Any]


def play(stage: Stage, planned: Mapping[Kind, FaultPlan], run_dir: Path, view: View) -> Played:
    reports, lives, incidents = Reports(run_dir), list[Life](), list[Incident]()
    ended: list[Ended] = []
    while not ended and len(lives) <= len(planned):
        if lives:
            view.clear()
            view.say("The job is started again, by new processes.")
        faults = sum((each for each in planned.values() if not _has_fired(each, run_dir)), FaultPlan())
        life, ended = _live(stage, faults, run_dir, view, (reports, incidents))
        lives.append(life)
    view.say("The same training once more, undisturbed and without torchscout, to compare.")
    alone = run_ranks(train_alone, stage.ranks, stage, timeout=_SECONDS)
    every = sum(planned.values(), FaultPlan())
    unfired = [kind.value for kind, each in planned.items() if not _has_fired(each, run_dir)]
    failures = [failure for each in ended for failure in each.failures]
    return Played(
        lives,
        _fired(run_dir),
        incidents,
        grade(every.truth(stage.mesh()), unfired=unfired, incidents=incidents, failures=failures),
        recovered=[each.state for each in ended] == alone,
        status=ended[0].status if ended else {},
    )


def _live(
    stage: Stage, faults: FaultPlan, run_dir: Path, view: View, heard: tuple[Reports, list[Incident]]
) -> tuple[Life, list[Ended]]:
    with LiveRanks(train, stage.ranks, stage, faults, run_dir) as ranks:
        began: list[Began] = ranks.ask("begin", timeout=_SECONDS)
        life = Life(began[0].resumed, step=began[0].resumed["step"])
        if life.step:
            view.say(f"resumed    {life.resumed['reason']}")
        while life.step < STEPS:
            ranks.tell("step")
            if _hangs(ranks, view, heard):
                _end_observers(began)  # first: they would report that their trainers are killed
                ranks.close(patience_seconds=0.0)
                view.say("stopped    everybody waits for one that will not come: the job is ended")
                life.end = "hung"
                return life, []
            told = ranks.answers()
            life.step = told[0].step
            life.losses.append(told[0].loss)
            view.stepped(life.step, told[0].loss)
            _listen(view, heard)
            if any(each.poisoned for each in told):
                view.say("stopped    nothing that is computed from here on can be trusted")
                life.end = "corrupted"
                return life, []
        ended: list[Ended] = ranks.ask("end", timeout=_SECONDS)
        return life, ended


def _hangs(ranks: LiveRanks, view: View, heard: tuple[Reports, list[Incident]]) -> bool:
    """Whether the step comes to no end, and is known not to."""
    deadline = time.monotonic() + _SECONDS
    while not ranks.have_answered(_POLL_SECONDS) and time.monotonic() < deadline:
        if any(each.manifestation is Manifestation.HANG for each in _listen(view, heard)):
            return True
    return False


def _listen(view: View, heard: tuple[Reports, list[Incident]]) -> Sequence[Incident]:
    """What has been reported since."""
    reports, incidents = heard
    new = [each.item for each in reports.new() if isinstance(each.item, Incident)]
    for incident in new:
        view.say(f"reported   {incident.sentence}")
        view.mark(incident.ranks, f"{incident.manifestation.value}: {incident.records[0].surface}")
    incidents += new
    return new


def _end_observers(began: Sequence[Began]) -> None:
    for each in began:
        if each.observer is not None:
            with suppress(ProcessLookupError):
                os.kill(each.observer, signal.SIGKILL)


def _fired(run_dir: Path) -> list[dict[str, Any]]:
    """What was written down before it happened, in the order of steps."""
    lines = [
        line for path in sorted(run_dir.glob("injected-*.jsonl")) for line in path.read_text().splitlines()
    ]
    return sorted((json.loads(line) for line in lines), key=lambda each: (each["step"], each["rank"]))


def _has_fired(faults: FaultPlan, run_dir: Path) -> bool:
    happened = {(each["rank"], each["at"]) for each in _fired(run_dir)}
    return all((fault.rank, fault.at) in happened for fault in faults)
