"""Which runs had a checkpoint folder, so that corruption they found can be marked as recovered from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchscout.decision import recorder
from torchscout.decision.record import Incident, Manifestation, Resolved
from torchscout.decision.recorder import JsonlRecorder, Stamped
from torchscout.utils.private_files import open_file

__all__ = ["add_run", "mark_recovered", "unresolved"]

_NAME = "runs.jsonl"


def add_run(checkpoints: Path, run_dir: Path) -> None:
    """From now on this run has the folder; ``OSError`` if that cannot be written down."""
    with os.fdopen(open_file(checkpoints / _NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file:
        file.write(json.dumps(str(run_dir)) + "\n")


def mark_recovered(checkpoints: Path, step: int) -> None:
    """All ranks have loaded a state of this step: what was found to be corrupt later than that is gone."""
    for run_dir in dict.fromkeys(_runs(checkpoints)):
        gone = [each for each in unresolved(run_dir) if each.step > step]
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


def unresolved(run_dir: Path) -> list[Incident]:
    """The incidents of a run that are open."""
    path = run_dir / "incidents.jsonl"
    lines = list(recorder.read(path)) if path.exists() else []
    items = [line.item for line in lines if isinstance(line, Stamped)]
    resolved = {item.sentence for item in items if isinstance(item, Resolved)}
    return [item for item in items if isinstance(item, Incident) and item.sentence not in resolved]


def _runs(checkpoints: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        for line in (checkpoints / _NAME).read_text().splitlines():
            with suppress(ValueError):  # a line that a full disk has cut short
                if isinstance(found := json.loads(line), str):
                    yield Path(found)
