"""How a session ended, and whether a later run recovered from the corruption that it found."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchscout.decision.types import Incident, Manifestation, Resolved
from torchscout.run.folder import RUNS_FILE, How
from torchscout.run.reader import IncidentLog, runs_of
from torchscout.run.writer import record_one
from torchscout.utils.private_files import open_file
from torchscout.utils.text import listed, named

__all__ = ["add_run", "closing_line", "failure", "how_ended", "mark_recovered", "why_ended"]

_INTERRUPTED = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}


def how_ended(error: BaseException | None) -> How:
    """Classify the exception that ends the program, if any."""
    if isinstance(error, SystemExit):
        if error.code in _INTERRUPTED:
            return "interrupted"
        return "failed" if error.code else "finished"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    # A generator that does not run to its end is closed by GeneratorExit.
    return "finished" if error is None or isinstance(error, GeneratorExit) else "failed"


def why_ended(error: BaseException | None) -> str:
    """Return the exception in words; empty if the program has finished."""
    words = "" if how_ended(error) == "finished" else f"{type(error).__name__}: {error}"
    return words.removesuffix(": ")


def failure(tolerated: BaseException | None) -> BaseException | None:
    """Return the exception that is ending the program, if there is one; called from any thread.

    It has reached the interpreter, or the main thread is still cleaning up after it, which may block.
    ``tolerated`` is an exception that the program was already handling while it trained. Of those that it
    handles, only a ``RuntimeError`` counts, which is what communication and devices raise: a ``KeyError`` or
    a timeout is often handled by going on.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        handled: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        if error is tolerated or not isinstance(error, RuntimeError):
            return None
    return error if how_ended(error) == "failed" else None


def closing_line(
    how: str,
    step: int,
    incidents: Sequence[Incident],
    certified: int | None,
    why: str = "",
    *,
    unwatched: Sequence[int] = (),
    is_verdict_due: bool = False,
) -> str:
    """The last line of a rank's log; ``unwatched`` ranks have lost their observer."""
    counts = Counter(each.manifestation.value for each in incidents)
    found = listed([f"{count} {kind}" for kind, count in sorted(counts.items())])
    by = f" by {why}" if why else ""
    checked = "" if certified is None else f"; certified up to step {certified}"
    known = f"incidents: {found}" if found else "no incidents"
    doubts = []
    if unwatched:
        were = "was" if len(unwatched) == 1 else "were"
        doubts.append(f"{named(unwatched)} {were} not watched for hangs to the end")
    if is_verdict_due:
        doubts.append("a diagnosis is under way")
    if doubts:
        known = f"{known}, perhaps more" if found else "incidents are not known"
        known = f"{known}, because {listed(doubts)}"
    return f"{how} after step {step}{by}; {known}{checked}"


def add_run(checkpoints: Path, run_dir: Path) -> None:
    """Record in the checkpoint folder that this run uses it; raises ``OSError`` if that fails."""
    with os.fdopen(open_file(checkpoints / RUNS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file:
        file.write(json.dumps(str(run_dir)) + "\n")


def mark_recovered(checkpoints: Path, step: int) -> list[Resolved]:
    """Mark corruption that earlier runs found after this step as resolved: all ranks have loaded the state of
    this step. Return what was marked."""
    marked = []
    for run_dir in runs_of(checkpoints):
        for reported in IncidentLog.read(run_dir).reported:
            each, is_open = reported.incident, reported.end is None
            if is_open and each.step > step and each.manifestation is Manifestation.SDC:
                end = Resolved(
                    incident=each.id,
                    step=each.step,
                    ranks=each.ranks,
                    sentence=each.sentence,
                    stalled_seconds=0.0,
                    recovered=step,
                    hosts=each.hosts,
                    manifestation=each.manifestation,
                    scope=each.scope,
                )
                record_one(run_dir, 0, end)
                marked.append(end)
    return marked
