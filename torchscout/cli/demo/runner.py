"""Runs the demo's job, with its live view and its report."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchscout.campaign.grading import Grade, grade
from torchscout.checkpoint.gate import SweepResult
from torchscout.cli.demo.job import PROGRESS, Ended, fired, has_fired, launch, train_alone
from torchscout.cli.demo.scenario import Kind, Scenario
from torchscout.decision.types import Decision, Failure, Incident
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import IncidentLog
from torchscout.testing.local_ranks import run_ranks, start_process
from torchscout.utils.text import wrapped

__all__ = ["Attempt", "Outcome", "Picture", "View", "play", "report_of", "screen", "view_for"]

_SECONDS = 180.0
"""How long nothing may happen."""
_POLL_SECONDS = 0.1
_ENDS = {Failure.SDC: "corrupted", Failure.HANG: "hung"}


@dataclass(slots=True)
class Attempt:
    """One start of the job, until it ends or is stopped."""

    resumed: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    end: str = "finished"
    """``finished``, or why it was restarted: ``corrupted`` or ``hung``."""
    step: int = 0
    """The last completed step."""


@dataclass(slots=True)
class Outcome:
    """The outcome of the demo."""

    attempts: list[Attempt]
    fired: list[dict[str, Any]]
    incidents: list[Incident]
    decisions: list[Decision]
    grade: Grade
    recovered: bool
    """Whether the job ended with bitwise the state of a job without faults."""
    status: dict[str, Any]


def play(scenario: Scenario, planned: Mapping[Kind, FaultPlan], run_dir: Path, view: View) -> Outcome:
    """Train until the job ends, restarts included, and compare with a job without faults."""
    here, there = Pipe(duplex=False)
    job = start_process(launch, scenario, planned, run_dir, there)
    there.close()
    narration = Narration(run_dir, view)
    ended: list[Ended] = []
    try:
        narration.follow(job.is_alive)
        with suppress(EOFError):  # it has failed
            ended = here.recv()
    finally:
        job.kill()
        job.join()
    if not ended:
        view.say(f"The job failed; its log is {run_dir}/ranks.log.")
    view.say("Repeating the training without faults and without torchscout, to compare.")
    alone = run_ranks(train_alone, scenario.ranks, scenario, timeout=_SECONDS)
    every = sum(planned.values(), FaultPlan())
    unfired = [kind.value for kind, each in planned.items() if not has_fired(each, run_dir)]
    failures = [failure for each in ended for failure in each.failures]
    incidents = narration.log.incidents
    return Outcome(
        narration.attempts,
        fired(run_dir),
        incidents,
        narration.log.decisions,
        grade(every.truth(scenario.mesh()), unfired=unfired, incidents=incidents, failures=failures),
        recovered=[each.state for each in ended] == alone,
        status=ended[0].status if ended else {},
    )


class Narration:
    """Follows the files of the run directory, and shows what happens."""

    def __init__(self, run_dir: Path, view: View) -> None:
        self.log = IncidentLog(run_dir)
        self.attempts: list[Attempt] = []
        self._view, self._path, self._position = view, run_dir / PROGRESS, 0
        self._decisions = 0
        """How many decisions have been shown."""

    def follow(self, goes_on: Callable[[], bool]) -> None:
        """Show what happens until the job has ended, or nothing has happened for too long."""
        deadline = time.monotonic() + _SECONDS
        while goes_on() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            if self._show_new():
                deadline = time.monotonic() + _SECONDS
        self._show_new()

    def _show_new(self) -> bool:
        """Show what was written since the last call; return whether there was anything."""
        incidents = [each.item for each in self.log.new() if isinstance(each.item, Incident)]
        for incident in incidents:
            self._view.say(f"reported   {incident.sentence}")
            self._view.mark(incident.ranks, f"{incident.manifestation.value}: {incident.records[0].surface}")
        decisions = self.log.decisions[self._decisions :]
        self._decisions += len(decisions)
        progress = self._new_progress()
        for each in progress:
            self._show_progress(each)
        for decision in decisions:
            self._view.say(f"decided    {decision.sentence}")
            if decision.is_carried_out:
                self.attempts[-1].end = _ENDS.get(decision.failure, decision.failure.value)
                self._view.clear()
                self._view.say("Restarting the job with new processes.")
        return bool(incidents or decisions or progress)

    def _show_progress(self, facts: dict[str, Any]) -> None:
        if "resumed" in facts:
            attempt = Attempt(facts["resumed"], step=facts["resumed"]["step"])
            self.attempts.append(attempt)
            if attempt.step:
                self._view.say(f"resumed    {attempt.resumed['reason']}")
            return
        attempt = self.attempts[-1]
        attempt.step = facts["step"]
        attempt.losses.append(facts["loss"])
        self._view.stepped(attempt.step, facts["loss"])

    def _new_progress(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            lines = [line for line in file if line.endswith(b"\n")]
            self._position += sum(map(len, lines))
            return [json.loads(line) for line in lines]
        return []


_KEPT_SENTENCES = 14
"""How many sentences are kept for display below the table."""
_FRAME = 5
"""Lines of the table besides its rows: title, heads and borders."""
_FEWEST = 4
"""Rows of the table in the lowest terminal."""
_SENTENCES = 6
"""Lines below the table that are reserved for sentences."""
_INDENT = " " * 11
"""As wide as the word that a line begins with."""


class View:
    """Narrates the demo on standard error, one line for each thing that happens."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def stepped(self, step: int, loss: float) -> None:
        self.say(f"step {step:2}   loss {loss:.4f}")

    def mark(self, ranks: Sequence[int], finding: str) -> None:
        """Show a finding about these ranks."""

    def clear(self) -> None:
        """Forget the findings: new processes have started."""


def view_for(scenario: Scenario) -> View:
    """A live table on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    return Picture(scenario, console) if console.is_terminal else View()


class Picture(View):
    """A live table of the ranks, and below it the last sentences, as far as the terminal has room."""

    def __init__(self, scenario: Scenario, console: Console) -> None:
        self._scenario, self._console = scenario, console
        self._step, self._loss = 0, ""
        self._marks: dict[int, str] = {}
        self._earlier: dict[int, str] = {}
        """Findings about processes that were replaced."""
        self._sentences: deque[str] = deque(maxlen=_KEPT_SENTENCES)
        self._live = Live(self._drawn(), console=console, refresh_per_second=8)

    def __enter__(self) -> Picture:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._sentences.append(line)
        self._draw()

    def stepped(self, step: int, loss: float) -> None:
        self._step, self._loss = step, f"{loss:.4f}"
        self._draw()

    def mark(self, ranks: Sequence[int], finding: str) -> None:
        self._marks.update(dict.fromkeys(ranks, finding))
        self._draw()

    def clear(self) -> None:
        self._earlier |= self._marks
        self._marks.clear()
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._drawn())

    def _drawn(self) -> Group:
        table = Table(title=f"step {self._step}   loss {self._loss}", title_justify="left")
        for heading in ("rank", "place", "finding"):
            table.add_column(heading)
        shown = self._shown(max(_FEWEST, self._console.height - _FRAME - _SENTENCES))
        for rank in shown:
            table.add_row(str(rank), self._scenario.place_of(rank), self._known(rank))
        if left := self._scenario.ranks - len(shown):
            table.add_row("...", f"{left} more", Text("healthy", style="green"))
        height = _FRAME + len(shown) + bool(left)
        return Group(table, *self._lines(max(1, self._console.height - height - 1)))

    def _shown(self, most: int) -> list[int]:
        """The ranks of the table, in order. If not all fit, ranks with findings take precedence."""
        ranks = range(self._scenario.ranks)
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

    def _lines(self, most: int) -> list[Text]:
        """The last ``most`` lines of the sentences, wrapped between words."""
        lines = [
            line
            for sentence in self._sentences
            for line in textwrap.wrap(sentence, self._console.width, subsequent_indent=_INDENT) or [""]
        ]
        return [Text(line) for line in lines[-most:]]


_SWEPT = {
    SweepResult.CLEAN: "every layer and update was replayed before training continued: clean",
    SweepResult.SDC: "every layer and update was replayed before training continued: corruption",
    SweepResult.COULD_NOT_RUN: "not every layer and update could be replayed before training continued",
}


def report_of(outcome: Outcome, run_dir: Path) -> dict[str, Any]:
    """The document of ``--json``: what was injected, what was found, and whether both agree."""
    return {
        "exact": outcome.grade.passed,
        "reason": outcome.grade.reason,
        "recovered": outcome.recovered,
        "injected": outcome.fired,
        "incidents": [each.to_json() for each in outcome.incidents],
        "decisions": [each.to_json() for each in outcome.decisions],
        "lives": [asdict(each) for each in outcome.attempts],
        "status": outcome.status,
        "run_dir": str(run_dir),
    }


def screen(outcome: Outcome, run_dir: Path) -> str:
    lines = ["", *_injected(outcome.fired)]
    for incident in outcome.incidents:
        lines += _named(incident)
    if not outcome.incidents:
        lines.append("named      no rank: the replicas agreed on all state and all results")
    lines += _checked(outcome)
    lines += [line for attempt in outcome.attempts for line in _described(attempt)]
    lines.append(f"evidence   {run_dir}/incidents/ and records/")
    named = "Exactly the injected faults were named."
    if not outcome.grade.passed:
        named = f"The injected faults were NOT named: {outcome.grade.reason}."
    state = "The job ended with bitwise the state of a job without faults."
    if not outcome.recovered:
        state = "The job did NOT end with the state of a job without faults."
    return "\n".join(map(wrapped, [*lines, "", named, state]))


def _injected(fired: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One line for each fault, however often it happened."""
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


def _checked(outcome: Outcome) -> list[str]:
    if not outcome.status:
        return []
    replay = outcome.status["replay"]
    state = ("replicated_state", "expert_state")
    visited = {name: each for name, each in replay["coverage"].items() if name not in state}
    checked = ", ".join(f"{name} ({each['targets']})" for name, each in visited.items())
    return [f"checked    after every step: all state, and one target in turn of {checked}"]


def _described(attempt: Attempt) -> list[str]:
    began = attempt.resumed["step"]
    lines = []
    if began:
        lines.append(f"resumed    after step {began}: {attempt.resumed['reason']}")
    if attempt.resumed["swept"]:
        lines.append(f"swept      {_SWEPT[attempt.resumed['swept']]}")
    losses = " ".join(f"{loss:.2f}" for loss in attempt.losses)
    ends = {"finished": "to the end", "corrupted": "until corruption was found", "hung": "until it hung"}
    lines.append(f"trained    from step {began + 1} {ends[attempt.end]}; loss {losses}")
    return lines
