"""The state of a job now, from its run directory and the progress records of this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torchscout.decision.progress import Process, Progress
from torchscout.decision.types import Manifestation
from torchscout.errors import TornRecordError
from torchscout.observer.record.directory import ProcessIdentity
from torchscout.observer.record.reader import ProgressReader
from torchscout.run.folder import End, Heartbeat, RankEntry
from torchscout.run.reader import Run, is_run
from torchscout.utils.procfs import boot_id
from torchscout.utils.text import named, ranks_in_words, spans

__all__ = ["COLUMNS", "job_state", "overview", "standing", "state_of"]

HEALTHY, SICK, UNKNOWN = 0, 1, 2
"""Exit statuses of ``scout status``."""
_WORST_FIRST = ("killed", "failed", "interrupted", "running", "unknown", "finished")
"""The state of a job is the first of these that any of its ranks is in."""
_AS_THE_JOB = {"stopped": "running", "paused": "running"}
_ATTENTION = ("unknown", "killed", "failed", "stopped", "running", "paused", "interrupted")
"""States of the ranks that are listed, the most urgent first."""
_MOST_ROWS = 64
"""Ranks that are listed; the others are counted."""
COLUMNS = ("rank", "host", "pid", "state", "step", "phase", "silent_seconds", "inside", "device")
"""What is shown of a rank that is listed."""


def job_state(run: Run) -> dict[str, Any]:
    """Return the state of the job and of each rank."""
    last, ends = run.last_heartbeat(), {end.rank: end for end in run.ends}
    ranks = [standing(entry, ends.get(entry.rank), last) for entry in run.entries]
    size = max((entry.size for entry in run.entries), default=0)
    missing = sorted({*range(size)} - {entry.rank for entry in run.entries})
    states = {_AS_THE_JOB.get(state := state_of(rank), state) for rank in ranks}
    state = next((each for each in _WORST_FIRST if each in states), "unknown")
    is_sick = state in {"killed", "failed"} or any(each.end is None for each in run.incidents)
    is_unknown = not ranks or "unknown" in states or missing or run.unwatched or run.unread
    return {
        "state": state,
        "exit_status": SICK if is_sick else UNKNOWN if is_unknown else HEALTHY,
        "sentence": _sentence(state, ranks, run, last, missing),
        "ranks": ranks,
        "replay": run.replay(),
    }


def _sentence(
    state: str,
    ranks: Sequence[Mapping[str, Any]],
    run: Run,
    last: Heartbeat | None,
    missing: Sequence[int],
) -> str:
    """The first line of the screen."""
    if not ranks:
        return f"{run.run_dir} {'has no ranks yet' if is_run(run.run_dir) else 'is no run directory yet'}"
    known = [rank["step"] for rank in ranks if rank.get("step") is not None]
    parts = [f"{state}, step {min(known)}" if known else state]
    if state in {"killed", "failed"}:
        parts[0] += f": {named([rank['rank'] for rank in ranks if rank['state'] == state])}"
    if silent := [rank["rank"] for rank in ranks if not rank["is_here"] and rank["state"] == "unknown"]:
        since = "at all: there is no heartbeat" if last is None else f"since {_moment(last)}"
        parts.append(f"there was no heartbeat of {ranks_in_words(silent)} {since}")
    still_open = [each.incident for each in run.incidents if each.end is None]
    if any(each.manifestation is Manifestation.SDC for each in still_open):
        parts.append("its state is corrupt and was not recovered")
    parts.append(f"{len(still_open) or 'no'} open incident{'s' * (len(still_open) != 1)}")
    if run.unwatched:
        parts.append(f"not watched for hangs any more: {named(run.unwatched)}")
    if missing:
        parts.append(f"the state of {named(missing)} is unknown here: the run directory is not shared")
    return "; ".join(parts)


def _moment(last: Heartbeat) -> str:
    return f"{datetime.fromtimestamp(last.time).astimezone():%Y-%m-%d %H:%M:%S %z}, step {last.step}"


def standing(entry: RankEntry, end: End | None = None, last: Heartbeat | None = None) -> dict[str, Any]:
    """The state of one rank, as far as it is visible from this machine; ``end`` is that of its session."""
    line: dict[str, Any] = {name: getattr(entry, name) for name in ("rank", "host", "pid", "interface")}
    line |= {"device_name": entry.device, "is_here": entry.is_here}
    if end is not None:
        return {**line, "state": end.how, "step": end.step, "inside": " ".join(end.why.split()) or None}
    if entry.is_here:
        return line | _seen(entry)
    line["inside"] = f"run scout status on {entry.host}"
    if last is None or not last.is_fresh:
        return {**line, "state": "unknown"}
    return {**line, "state": "running", "step": last.step}


def _seen(entry: RankEntry) -> dict[str, Any]:
    """What the progress record of a rank on this machine says."""
    try:
        reader = ProgressReader(Path(entry.record))
        progress = reader.read()
    except FileNotFoundError:
        return {"state": without_record(entry)}
    except TornRecordError:
        return {"state": Process.RUNNING.value}
    except (OSError, ValueError) as error:  # of another user or version, or damaged
        return {"state": f"unknown: {getattr(error, 'strerror', None) or error}"}
    last = progress.recent[-1] if progress.recent else None
    return {
        "state": process_state(reader),
        "step": progress.step,
        "operation": progress.operation,
        "phase": progress.phase.value,
        "silent_seconds": round(progress.silent_seconds, 1),
        "inside": f"{last.text}, number {last.number}" if last and progress.at_communication else None,
        "device": device_of(progress),
    }


def process_state(reader: ProgressReader) -> str:
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


def overview(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a screen has room for: how many ranks are in each state, and the ranks that need attention
    most. Of a rank elsewhere that has not ended, and of one that has finished, there is nothing to say."""
    by_state, known, hosts = defaultdict[str, list[Mapping[str, Any]]](list), list[Any](), set[str]()
    for rank in sorted(job["ranks"], key=_attention):
        by_state[state_of(rank)].append(rank)
        if not rank["is_here"] and rank["state"] in {"running", "unknown"}:
            hosts.add(rank["host"])
        elif rank["state"] != "finished":
            known.append(rank)
    return {
        "state": job["state"],
        "sentence": job["sentence"],
        "states": [{"state": state, **_together(ranks)} for state, ranks in by_state.items()],
        "ranks": [{name: rank.get(name) for name in COLUMNS} for rank in known[:_MOST_ROWS]],
        "unlisted": max(0, len(known) - _MOST_ROWS),
        "hosts": sorted(hosts),
        "checks": None if job["replay"] is None else job["replay"]["sentence"],
    }


def _together(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [rank["step"] for rank in ranks if rank.get("step") is not None]
    return {
        "count": len(ranks),
        "ranks": spans(rank["rank"] for rank in ranks),
        "steps": [min(steps), max(steps)] if steps else None,
    }


def state_of(rank: Mapping[str, Any]) -> str:
    """The state without the reason why it is unknown."""
    state: str = rank["state"].partition(":")[0]
    return state


def _attention(rank: Mapping[str, Any]) -> tuple[int, float, int]:
    state = state_of(rank)
    place = _ATTENTION.index(state) if state in _ATTENTION else len(_ATTENTION)
    return place, -(rank.get("silent_seconds") or 0.0), rank["rank"]
