"""The state of a job now, from its run directory and the progress records of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from torchscout.decision.progress import Process, Progress
from torchscout.decision.types import Incident, Manifestation, Resolved
from torchscout.errors import TornRecordError
from torchscout.observer.record.directory import ProcessIdentity
from torchscout.observer.record.reader import ProgressReader
from torchscout.run.folder import End, RankEntry, read_ends, read_roster
from torchscout.run.reader import IncidentLog, Run
from torchscout.utils.procfs import boot_id
from torchscout.utils.text import named

__all__ = ["examined", "job_state", "standing"]

HEALTHY, SICK, UNKNOWN = 0, 1, 2
"""Exit statuses of ``scout status``."""
_WORST_FIRST = ("killed", "failed", "interrupted", "running", "elsewhere", "finished")
"""The state of a job is the first of these that any of its ranks is in."""
_RUNNING = {"running", "stopped", "paused"}


def examined(run_dir: Path) -> dict[str, Any]:
    """Return the report of ``scout status``; raises ``OSError`` or ``ValueError`` if this is no whole run."""
    entries, ends, log = read_roster(run_dir), read_ends(run_dir), IncidentLog.read(run_dir)
    incidents = [*starmap(_incident, log.entries)]
    if not entries:
        raise ValueError(f"{run_dir} is not the run directory of a job: it has no ranks/rank-0.json")
    return {
        "run_dir": str(run_dir),
        **job_state(entries, ends, incidents),
        "replay": Run(run_dir).replay(),
        "incidents": incidents,
        "decisions": [each.to_json() for each in log.decisions],
    }


def job_state(
    entries: Sequence[RankEntry], ends: Mapping[int, End], incidents: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state of the job and of each rank; of incidents, state and manifestation matter."""
    ranks = [standing(entry, ends.get(entry.rank)) for entry in entries]
    size = max((entry.size for entry in entries), default=0)
    missing = sorted({*range(size)} - {entry.rank for entry in entries})
    state = overall([rank["state"] for rank in ranks])
    return {
        "state": state,
        "exit_status": judged(state, ranks, incidents, missing),
        "sentence": sentence(state, ranks, incidents, missing),
        "ranks": ranks,
    }


def overall(states: Sequence[str]) -> str:
    """The job's state, from those of its ranks."""
    plain = {"running" if each in _RUNNING else each for each in states}
    return next((each for each in _WORST_FIRST if each in plain), "unknown")


def judged(
    state: str,
    ranks: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    missing: Sequence[int],
) -> int:
    """The exit status."""
    if state in {"killed", "failed"} or any(each["state"] == "open" for each in incidents):
        return SICK
    is_unknown = state == "unknown" or any(rank["state"].startswith("unknown") for rank in ranks)
    return UNKNOWN if is_unknown or missing else HEALTHY


def sentence(
    state: str,
    ranks: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    missing: Sequence[int],
) -> str:
    """The first line of the screen."""
    known = [rank["step"] for rank in ranks if rank.get("step") is not None]
    parts = [f"{state}, step {min(known)}" if known else state]
    if state in {"killed", "failed"}:
        parts[0] += f": {named([rank['rank'] for rank in ranks if rank['state'] == state])}"
    still_open = [each for each in incidents if each["state"] == "open"]
    if any(each["manifestation"] == Manifestation.SDC.value for each in still_open):
        parts.append("its state is corrupt and was not recovered")
    parts.append(f"{len(still_open) or 'no'} open incident{'s' * (len(still_open) != 1)}")
    if missing:
        parts.append(f"the state of {named(missing)} is unknown here: the run directory is not shared")
    return "; ".join(parts)


def standing(entry: RankEntry, end: End | None = None) -> dict[str, Any]:
    """The state of one rank, as far as it is visible from this machine."""
    line: dict[str, Any] = {name: getattr(entry, name) for name in ("rank", "host", "pid", "interface")}
    line["device_name"] = entry.device
    if end is not None and end.record == entry.record:
        return {**line, "state": end.how, "step": end.step, "inside": " ".join(end.why.split()) or None}
    if not entry.is_here:
        return {**line, "state": "elsewhere", "inside": f"run scout status on {entry.host}"}
    try:
        reader = ProgressReader(Path(entry.record))
        progress = reader.read()
    except FileNotFoundError:
        return {**line, "state": without_record(entry)}
    except TornRecordError:
        return {**line, "state": Process.RUNNING.value}
    except (OSError, ValueError) as error:  # of another user or version, or damaged
        return {**line, "state": f"unknown: {getattr(error, 'strerror', None) or error}"}
    last = progress.recent[-1] if progress.recent else None
    return {
        **line,
        "state": state_of(reader),
        "step": progress.step,
        "operation": progress.operation,
        "phase": progress.phase.value,
        "silent_seconds": round(progress.silent_seconds, 1),
        "inside": f"{last.text}, number {last.number}" if last and progress.at_communication else None,
        "device": device_of(progress),
    }


def state_of(reader: ProgressReader) -> str:
    """The state of a rank without an end marker: a trainer that is gone was killed before it wrote one."""
    if (process := reader.trainer()) is Process.GONE:
        return "finished" if reader.has_finished else "killed"
    return "paused" if reader.paused else process.value


def without_record(entry: RankEntry) -> str:
    """The state of a rank with neither an end marker nor a progress record."""
    if ProcessIdentity(entry.pid, entry.started, boot_id()).process() is Process.GONE:
        return "killed"
    # A session without an observer has no record; other sessions remove theirs when they close.
    return Process.RUNNING.value if entry.has_no_observer else "finished"


def device_of(progress: Progress) -> str | None:
    """How far the device is behind its host, if that is known."""
    behind = sum(progress.issued[line] - entered for line, entered in progress.entered.items())
    if behind:
        return f"{behind} operations behind"
    return {True: "busy", False: "idle", None: None}[progress.device_busy]


def _incident(item: Incident, end: Resolved | None) -> dict[str, Any]:
    state = "open" if end is None else end.state
    return {
        "id": item.id,
        "step": item.step,
        "launcher": item.launcher,
        "manifestation": item.manifestation.value,
        "sentence": item.sentence,
        "state": state,
        "resolved": state != "open",
        "recovered": None if end is None else end.recovered,
    }
