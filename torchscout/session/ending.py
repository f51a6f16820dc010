"""How a session ended, and whether a later run recovered from the corruption that it found."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torchscout.decision.record import Incident, Manifestation, Resolved
from torchscout.decision.recorder import IncidentLog, JsonlRecorder
from torchscout.observer.record.directory import How
from torchscout.utils.private_files import open_file
from torchscout.utils.text import listed

__all__ = ["add_run", "closing_line", "how_ended", "mark_recovered"]

_ASKED = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}


def how_ended(error: BaseException | None) -> How:
    """From the exception that ends the program, if any."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        if error.code in _ASKED:
            return "interrupted"
        return "failed" if error.code else "finished"
    # A generator that is not run to its end is closed by this one.
    return "finished" if error is None or isinstance(error, GeneratorExit) else "failed"


def closing_line(
    how: str, step: int, incidents: Sequence[Incident], certified: int | None, error: BaseException | None
) -> str:
    """What a rank says last."""
    counts = Counter(each.manifestation.value for each in incidents)
    told = f"incidents: {listed([f'{count} {kind}' for kind, count in sorted(counts.items())])}"
    by = "" if how != "failed" or error is None else f" by {type(error).__name__}: {error}"
    checked = "" if certified is None else f"; certified up to step {certified}"
    return f"{how} after step {step}{by}; {told if counts else 'no incidents'}{checked}"


_NAME = "runs.jsonl"


def add_run(checkpoints: Path, run_dir: Path) -> None:
    """From now on this run has the folder; ``OSError`` if that cannot be written down."""
    with os.fdopen(open_file(checkpoints / _NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file:
        file.write(json.dumps(str(run_dir)) + "\n")


def mark_recovered(checkpoints: Path, step: int) -> None:
    """All ranks have loaded a state of this step: what was found to be corrupt later than that is gone."""
    for run_dir in dict.fromkeys(_runs(checkpoints)):
        gone = [each for each in IncidentLog.read(run_dir).open_incidents if each.step > step]
        lines = JsonlRecorder(run_dir, 0)
        for each in gone:
            if each.manifestation is Manifestation.SDC:
                lines.record(
                    Resolved(
                        step=each.step,
                        ranks=each.ranks,
                        sentence=each.sentence,
                        stalled_seconds=0.0,
                        recovered=step,
                    )
                )
        lines.close()


def _runs(checkpoints: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        for line in (checkpoints / _NAME).read_text().splitlines():
            with suppress(ValueError):  # a line that a full disk has cut short
                if isinstance(found := json.loads(line), str):
                    yield Path(found)
