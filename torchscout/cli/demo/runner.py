"""Starts, disturbs and restarts the demo's job; its live view and its report."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchscout.campaign.grading import Grade, grade
from torchscout.checkpoint.selection import SweepResult
from torchscout.cli.demo.job import Began, Ended, train, train_alone
from torchscout.cli.demo.scenario import STEPS, Kind, Scenario
from torchscout.decision.record import Incident, Manifestation
from torchscout.decision.recorder import IncidentLog
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import LiveRanks, run_ranks
from torchscout.utils.text import wrapped

__all__ = ["Attempt", "Lines", "Picture", "Played", "View", "play", "report_of", "screen", "view_for"]

_SECONDS = 120.0
"""What any single step may take."""
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Attempt:
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

    lives: list[Attempt]
    fired: list[dict[str, Any]]
    incidents: list[Incident]
    grade: Grade
    recovered: bool
    """Whether the job ended bitwise as one that was never disturbed."""
    status: dict[str, Any]


def play(stage: Scenario, planned: Mapping[Kind, FaultPlan], run_dir: Path, view: View) -> Played:
    reports, lives, incidents = IncidentLog(run_dir, strict=True), list[Attempt](), list[Incident]()
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
    stage: Scenario, faults: FaultPlan, run_dir: Path, view: View, heard: tuple[IncidentLog, list[Incident]]
) -> tuple[Attempt, list[Ended]]:
    with LiveRanks(train, stage.ranks, stage, faults, run_dir) as ranks:
        began: list[Began] = ranks.ask("begin", timeout=_SECONDS)
        life = Attempt(began[0].resumed, step=began[0].resumed["step"])
        if life.step:
            view.say(f"resumed    {life.resumed['reason']}")
        while life.step < STEPS:
            ranks.tell("step")
            if _hangs(ranks, view, heard):
                _end_observers(began)  # first: they would report that their trainers are killed
                ranks.close(timeout_seconds=0.0)
                view.say("stopped    the job is hung; stopping it")
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


def _hangs(ranks: LiveRanks, view: View, heard: tuple[IncidentLog, list[Incident]]) -> bool:
    """Whether the step comes to no end, and is known not to."""
    deadline = time.monotonic() + _SECONDS
    while not ranks.have_answered(_POLL_SECONDS) and time.monotonic() < deadline:
        if any(each.manifestation is Manifestation.HANG for each in _listen(view, heard)):
            return True
    return False


def _listen(view: View, heard: tuple[IncidentLog, list[Incident]]) -> Sequence[Incident]:
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


_TOLD = 14
"""Sentences that are kept for below the table."""
_FRAME = 5
"""Lines of the table besides its rows: title, heads and borders."""
_FEWEST = 4
"""Rows of the table, however low the terminal is."""
_SENTENCES = 6
"""Lines below the table that are kept free for what is said."""
_INDENT = " " * 11
"""As wide as the word that a line begins with."""


class View(Protocol):
    """A narrator. Ranks are told of by number."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None: ...

    def stepped(self, step: int, loss: float) -> None: ...

    def mark(self, ranks: Sequence[int], what: str) -> None:
        """Something is known about these."""
        ...

    def clear(self) -> None:
        """New processes: nothing is known about them."""
        ...


def view_for(stage: Scenario) -> View:
    """On standard error, so that standard output is free for a document."""
    console = Console(stderr=True)
    return Picture(stage, console) if console.is_terminal else Lines()


class Lines:
    """One line for each thing that happens."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def stepped(self, step: int, loss: float) -> None:
        self.say(f"step {step:2}   loss {loss:.4f}")

    def mark(self, ranks: Sequence[int], what: str) -> None:
        """What is known was said."""

    def clear(self) -> None:
        """So was this."""


class Picture:
    """The ranks as a table, and below it what was said last: as much of both as the terminal is high."""

    def __init__(self, stage: Scenario, console: Console) -> None:
        self._stage, self._console = stage, console
        self._step, self._loss = 0, ""
        self._marks: dict[int, str] = {}
        self._earlier: dict[int, str] = {}
        """What was known of ranks whose processes have been replaced."""
        self._said: deque[str] = deque(maxlen=_TOLD)
        self._live = Live(self._drawn(), console=console, refresh_per_second=8)

    def __enter__(self) -> Picture:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._said.append(line)
        self._draw()

    def stepped(self, step: int, loss: float) -> None:
        self._step, self._loss = step, f"{loss:.4f}"
        self._draw()

    def mark(self, ranks: Sequence[int], what: str) -> None:
        self._marks.update(dict.fromkeys(ranks, what))
        self._draw()

    def clear(self) -> None:
        self._earlier |= self._marks
        self._marks.clear()
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._drawn())

    def _drawn(self) -> Group:
        table = Table(title=f"step {self._step}   loss {self._loss}", title_justify="left")
        for heading in ("rank", "place", "what is known"):
            table.add_column(heading)
        shown = self._shown(max(_FEWEST, self._console.height - _FRAME - _SENTENCES))
        for rank in shown:
            table.add_row(str(rank), self._stage.place_of(rank), self._known(rank))
        if left := self._stage.ranks - len(shown):
            table.add_row("...", f"{left} more", Text("healthy", style="green"))
        height = _FRAME + len(shown) + bool(left)
        return Group(table, *self._sentences(max(1, self._console.height - height - 1)))

    def _shown(self, most: int) -> list[int]:
        """The ranks of the table, in order; where not all fit, those of which something is known first."""
        ranks = range(self._stage.ranks)
        if len(ranks) <= most:
            return [*ranks]
        order = sorted(ranks, key=lambda rank: (rank not in self._marks, rank not in self._earlier, rank))
        return sorted(order[: most - 1])

    def _known(self, rank: int) -> Text:
        if rank in self._marks:
            return Text(self._marks[rank], style="bold red")
        if rank in self._earlier:
            return Text(f"was {self._earlier[rank]}", style="yellow")
        return Text("healthy", style="green")

    def _sentences(self, most: int) -> list[Text]:
        """The last of what was said that has room in so many lines; wrapped between words."""
        lines = [
            line
            for said in self._said
            for line in textwrap.wrap(said, self._console.width, subsequent_indent=_INDENT) or [""]
        ]
        return [Text(line) for line in lines[-most:]]


_SWEPT = {
    SweepResult.CLEAN: "before it went on, every layer and update was replayed: clean",
    SweepResult.SDC: "before it went on, every layer and update was replayed: corruption",
    SweepResult.COULD_NOT_RUN: "before it went on, not every layer and update could be replayed",
}


def report_of(played: Played, run_dir: Path) -> dict[str, Any]:
    """What was done to the job, what was found, and whether the two are the same."""
    return {
        "exact": played.grade.passed,
        "reason": played.grade.reason,
        "recovered": played.recovered,
        "injected": played.fired,
        "incidents": [each.to_json() for each in played.incidents],
        "lives": [asdict(each) for each in played.lives],
        "status": played.status,
        "run_dir": str(run_dir),
    }


def screen(played: Played, run_dir: Path) -> str:
    lines = ["", *_injected(played.fired)]
    for incident in played.incidents:
        lines += _named(incident)
    if not played.incidents:
        lines.append("named      nobody: the replicas agreed on all they computed and held")
    lines += _checked(played)
    lines += [line for life in played.lives for line in _lived(life)]
    lines.append(f"evidence   {run_dir}/incidents.jsonl and records/")
    outcome = "Exactly what was injected was named."
    if not played.grade.passed:
        outcome = f"This is NOT what was injected: {played.grade.reason}."
    state = "The job ended with bitwise the state of one that was never disturbed."
    if not played.recovered:
        state = "The job did NOT end with the state of one that was never disturbed."
    return "\n".join(map(wrapped, [*lines, "", outcome, state]))


def _injected(fired: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A fault that repeats is told once."""
    by_rank = sorted(fired, key=lambda each: (each["detail"], each["rank"], each["step"]))
    found = []
    for (detail, rank), alike in groupby(by_rank, lambda each: (each["detail"], each["rank"])):
        each = list(alike)
        first, last = each[0]["step"], each[-1]["step"]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        places = sorted({one["at"] for one in each})
        place = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        found.append((first, f"injected   {steps}, rank {rank}, {place}: {detail}"))
    return (line for _, line in sorted(found))


def _named(incident: Incident) -> list[str]:
    named = ", ".join(f"rank {rank}" for rank in incident.ranks)
    record = incident.records[0]
    what = f"{incident.manifestation.value} of {named}"
    lines = [f"named      step {incident.step}, {what}, {record.surface}", f"           {incident.sentence}"]
    if record.verdict is not None and len(record.peers) == len(record.verdict.evidence):
        votes = zip(record.peers, record.verdict.evidence, strict=True)
        lines += [f"           rank {peer}: {_shown(value)}" for peer, value in votes]
    return lines


def _shown(value: Any) -> str:
    return f"{value:.1f} ms" if isinstance(value, float) else str(value)


def _checked(played: Played) -> list[str]:
    if not played.status:
        return []
    replay = played.status["replay"]
    visited = {name: each for name, each in replay["coverage"].items() if not name.endswith("census")}
    checked = ", ".join(f"{each['targets']} {name}" for name, each in visited.items())
    return [f"checked    after every step: all state, and in turn {checked}"]


def _lived(life: Attempt) -> list[str]:
    began = life.resumed["step"]
    lines = []
    if began:
        lines.append(f"resumed    after step {began}: {life.resumed['reason']}")
    if life.resumed["swept"]:
        lines.append(f"swept      {_SWEPT[life.resumed['swept']]}")
    losses = " ".join(f"{loss:.2f}" for loss in life.losses)
    ends = {"finished": "to the end", "corrupted": "until it was found corrupt", "hung": "until it hung"}
    lines.append(f"trained    from step {began + 1} {ends[life.end]}; loss {losses}")
    return lines
