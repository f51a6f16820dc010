"""`scout status`: where every rank of a job stands, read from the records of those on this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.cli.document import as_document
from torchscout.decision import recorder
from torchscout.decision.progress import Process, Progress
from torchscout.decision.record import Incident, Resolved
from torchscout.decision.recorder import Stamped
from torchscout.errors import TornRecordError
from torchscout.evidence.observer.progress_reader import ProgressReader
from torchscout.integration.roster import Entry, read_roster

__all__ = ["status"]


def status(
    run_dir: Annotated[Path, typer.Argument(help="The job's run directory, scout-run-...")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None,
) -> None:
    """Show where every rank of a job stands, and what was found wrong with it."""
    try:
        entries = read_roster(run_dir)
        incidents = open_incidents(run_dir)
    except (OSError, ValueError) as error:  # another user's run, or a damaged one
        raise typer.BadParameter(str(error), param_hint="RUN_DIR") from error
    if not entries:
        raise typer.BadParameter(
            f"{run_dir} holds no job: there is no ranks/rank-0.json", param_hint="RUN_DIR"
        )
    report = {"ranks": [standing(entry) for entry in entries], "incidents": incidents}
    as_document(report, screen(report), as_json=as_json, output=output)


def standing(entry: Entry) -> dict[str, Any]:
    """One rank, as far as it can be seen from here."""
    line: dict[str, Any] = {"rank": entry.rank, "host": entry.host, "pid": entry.pid}
    if entry.host != socket.gethostname():
        return {**line, "state": f"on {entry.host}: ask there"}
    try:
        reader = ProgressReader(Path(entry.record))
        progress = reader.read()
    except FileNotFoundError:
        return {**line, "state": "finished"}
    except TornRecordError:
        return {**line, "state": Process.RUNNING.value}
    except (OSError, ValueError) as error:  # another user's, of another version, or damaged
        return {**line, "state": f"unknown: {getattr(error, 'strerror', None) or error}"}
    last = progress.recent[-1] if progress.recent else None
    return {
        **line,
        "state": "paused" if reader.paused else reader.trainer().value,
        "step": progress.step,
        "operation": progress.operation,
        "phase": progress.phase.value,
        "silent_seconds": round(progress.silent_seconds, 1),
        "inside": f"{last.text}, number {last.number}" if last and progress.at_communication else None,
        "device": device_of(progress),
    }


def device_of(progress: Progress) -> str | None:
    """How far the device is behind its host, where that is known."""
    behind = sum(progress.issued[line] - entered for line, entered in progress.entered.items())
    if behind:
        return f"{behind} operations behind"
    return {True: "busy", False: "idle", None: None}[progress.device_busy]


def open_incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Incidents, each with whether it has been resolved."""
    path = run_dir / "incidents.jsonl"
    lines = recorder.read(path) if path.exists() else iter(())
    items = [line.item for line in lines if isinstance(line, Stamped)]
    resolved = {item.sentence for item in items if isinstance(item, Resolved)}
    return [
        {"step": item.step, "sentence": item.sentence, "resolved": item.sentence in resolved}
        for item in items
        if isinstance(item, Incident)
    ]


COLUMNS = {"silent_seconds": "silent s"}


def screen(report: dict[str, Any]) -> str:
    columns = ["rank", "host", "pid", "state", "step", "phase", "silent_seconds", "inside"]
    if any(rank.get("device") for rank in report["ranks"]):
        columns.append("device")
    heads = [COLUMNS.get(column, column) for column in columns]
    rows = [[shown(rank.get(column)) for column in columns] for rank in report["ranks"]]
    lines = aligned([heads, *rows])
    for incident in report["incidents"]:
        state = "resolved" if incident["resolved"] else "OPEN"
        lines.append(f"\n{state}, step {incident['step']}: {incident['sentence']}")
    return "\n".join(lines)


def shown(value: object) -> str:
    return "" if value is None else str(value)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
