"""``scout explain``: explains a hang from dumps of PyTorch's Flight Recorder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from torchscout.cli.console import AsJson, Output, exiting, print_report, refusing
from torchscout.cli.explain.dump_files import MOST_RANKS, DumpFile, DumpFilesError, files_in, read_files
from torchscout.decision.flight_recorder import Dump, State
from torchscout.decision.flight_recorder_diagnosis import Explanation
from torchscout.decision.flight_recorder_diagnosis import explain as explained
from torchscout.decision.flight_recorder_lines import WORLD, Operation
from torchscout.decision.progress import CommGroup
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import counted, ranks_in_words

__all__ = ["explain", "report", "screen"]

_MOST_GROUPS = 4
_MOST_STACKS = 3
_MOST_FRAMES = 6
_LIBRARY = "/torch/distributed/"
"""Frames between the user's call and the recorder."""
_HOURS_APART = 1.0


def report(found: Explanation, files: Sequence[DumpFile], *, size_is_known: bool) -> dict[str, Any]:
    """The document of ``--json``; ``size_is_known`` is False if the world size is a guess from the files."""
    incident = found.incident
    lines = _suspicious(found)
    return {
        "hang": found.has_hang,
        "sentence": found.sentence,
        "scope": None if incident is None else incident.scope.value,
        "ranks": [] if incident is None else list(incident.ranks),
        "action": None if incident is None else incident.action.value,
        "world_size": found.recording.world_size,
        "without_dump": list(found.absent),
        "groups": [_group(found, line) for line in lines[:_MOST_GROUPS]],
        "more_groups": max(0, len(lines) - _MOST_GROUPS),
        "last_operations": [_last(found, rank) for rank in _shown_ranks(found)],
        "dumps": [_file(each) for each in files],
        "notes": _notes(found, files, size_is_known),
    }


def screen(document: Mapping[str, Any]) -> str:
    """The report as text."""
    sentence = str(document["sentence"])
    parts: list[Table | str] = [sentence]
    for group in document["groups"]:
        parts += ["", _heading(group), _rows(group)]
    if document["more_groups"]:
        parts += ["", f"{counted(document['more_groups'], 'more group')}: see --json."]
    for last in document["last_operations"]:
        parts += ["", *_stack(last)]
    if document["notes"]:
        parts += ["", *document["notes"]]
    return stacked(parts)


def _suspicious(found: Explanation) -> list[CommGroup]:
    """The groups in which a rank waits or members differ; those of the named ranks come first."""
    suspects = set() if found.incident is None else set(found.incident.ranks)
    waiting = found.progresses.waiting
    lines = [line for key, line in found.recording.lines.items() if len(line.members) > 1 and waiting[key]]
    return sorted(lines, key=lambda line: (_number(found, line), suspects.isdisjoint(line.members), line.key))


def _number(found: Explanation, line: CommGroup) -> int:
    """The number of the earliest operation that members differ in or wait in."""
    seen: dict[int, set[int]] = {}
    for theirs in found.progresses.shown[line.key].values():
        for each in theirs:
            seen.setdefault(each.number, set()).add(each.fingerprint)
    differing = [number for number, fingerprints in seen.items() if len(fingerprints) > 1]
    waiting = found.progresses.waiting[line.key].values()
    entered = found.progresses.entered[line.key].values()
    return min([*differing, *waiting], default=max(entered, default=0))


def _group(found: Explanation, line: CommGroup) -> dict[str, Any]:
    number = _number(found, line)
    rows: dict[tuple[str, str, int | None], list[int]] = {}
    for rank in line.members:
        rows.setdefault(_row(found, line, rank, number), []).append(rank)
    return {
        "group": line.name,
        "point_to_point": line.pair,
        "members": list(line.members),
        "members_recorded": line.key not in found.recording.guessed,
        "number": number,
        "rows": [
            {"ranks": ranks, "operation": operation, "state": state, "last_number": last}
            for (operation, state, last), ranks in rows.items()
        ],
    }


def _row(found: Explanation, line: CommGroup, rank: int, number: int) -> tuple[str, str, int | None]:
    """Operation, state and last number of one member."""
    if rank in found.absent:
        return "", "no readable dump", None
    shown = found.recording.of(line.key, rank)
    last = max(shown, default=found.progresses.entered[line.key].get(rank, 0))
    operation = shown.get(number)
    if operation is not None:
        return operation.text, _state(operation, found), last
    return "", "not entered" if last < number else "no longer in the dump", last


def _state(operation: Operation, found: Explanation) -> str:
    if operation.entry.backend == "gloo":
        return "completed or failed" if operation.state is State.RETIRED else "not completed"
    if operation.state is not State.SCHEDULED:
        return str(operation.state.value)
    return "scheduled, not started on its device" if found.recording.times_starts else "scheduled"


def _shown_ranks(found: Explanation) -> list[int]:
    """The named ranks that have a dump: their last operations are shown."""
    if found.incident is None:
        return []
    return [rank for rank in found.incident.ranks if rank not in found.absent][:_MOST_STACKS]


def _last(found: Explanation, rank: int) -> dict[str, Any]:
    last = found.recording.last(rank)
    if last is None:
        return {"rank": rank, "operation": None}
    line, operation = last
    return {
        "rank": rank,
        "operation": operation.text,
        "number": operation.number,
        "group": found.recording.lines[line].name,
        "state": _state(operation, found),
        "frames": list(operation.entry.frames),
    }


def _file(each: DumpFile) -> dict[str, Any]:
    entries = None if each.dump is None else len(each.dump.entries)
    return {"rank": each.rank, "file": str(each.path), "entries": entries, "problem": each.problem}


def _notes(found: Explanation, files: Sequence[DumpFile], size_is_known: bool) -> list[str]:
    notes = [f"{each.path}: {each.problem}." for each in files if each.problem]
    dumps = {each.path: each.dump for each in files if each.dump is not None}
    for path, dump in dumps.items():
        if dump.unreadable:
            total = dump.unreadable + len(dump.entries)
            notes.append(f"{path}: {dump.unreadable} of {total} entries could not be read.")
    if lost := [dump.rank for dump in dumps.values() if dump.has_lost_entries]:
        notes.append(
            f"Older operations of {ranks_in_words(lost)} are not in the dumps: the recorder's buffer was "
            "full, or only open operations were dumped. TORCH_FR_BUFFER_SIZE sets the size of the buffer."
        )
    if not size_is_known:
        notes.append(
            f"The dumps do not contain the job's world size; {found.recording.world_size} is assumed. "
            "If that is wrong, give --world-size."
        )
    if outdated := sorted(found.progresses.outdated):
        notes.append(
            f"Other ranks have completed operations with {ranks_in_words(outdated)} that its dump does not "
            "show: the dump is older than theirs, and the rank may have progressed since."
        )
    notes += _about_groups(found)
    notes += _about_time(dumps.values())
    if found.recording.is_on_device and not found.recording.times_starts:
        notes.append(
            "These dumps do not distinguish operations that a device has started from those that its host "
            'has only issued: both are "scheduled". TORCH_NCCL_ENABLE_TIMING=1 records the difference.'
        )
    return notes


def _about_groups(found: Explanation) -> list[str]:
    guessed = [line.name for key, line in found.recording.lines.items() if key in found.recording.guessed]
    notes = []
    if guessed and found.has_hang is not False:
        names = ", ".join(guessed[:3]) + (", ..." if len(guessed) > 3 else "")
        notes.append(
            f"The members of {counted(len(guessed), 'group')} ({names}) are not recorded. The ranks that "
            "used it are assumed to be all, so a member that never used it does not show as missing."
        )
    if found.has_hang is not False and not found.recording.is_on_device:
        notes.append("Gloo does not record sends and receives: a hang in one of them does not show here.")
    return notes


def _about_time(dumps: Iterable[Any]) -> list[str]:
    """Warn of files that may be from an earlier run, as where a killed rank has left none."""
    times = {dump.rank: [each.created for each in dump.entries if each.created] for dump in dumps}
    newest = {rank: max(created) for rank, created in times.items() if created}
    latest = max(newest.values(), default=0)
    if not (old := [rank for rank, time in newest.items() if latest - time > _HOURS_APART * 3600e9]):
        return []
    age = f"The newest operation of {ranks_in_words(old)} is more than an hour older than the others"
    return [f"{age}: its file may be from an earlier run."]


def _heading(group: Mapping[str, Any]) -> str:
    what = "Point-to-point" if group["point_to_point"] else "Group"
    members = counted(len(group["members"]), "member")
    return f"{what} {group['group']}, {members}, operation number {group['number']}:"


def _rows(group: Mapping[str, Any]) -> Table:
    rows = [
        [
            ranks_in_words(row["ranks"]),
            row["state"],
            row["operation"] or "-",
            "-" if row["last_number"] is None else str(row["last_number"]),
        ]
        for row in group["rows"]
    ]
    return table(["", "state", "operation", "last number issued"], rows)


def _stack(last: Mapping[str, Any]) -> list[str]:
    if last["operation"] is None:
        return [f"Rank {last['rank']} has recorded no operation."]
    where = f"number {last['number']} of {last['group']}, {last['state']}"
    lines = [f"Rank {last['rank']}'s last operation: {last['operation']} {where}"]
    frames = [frame for frame in last["frames"] if _LIBRARY not in frame] or last["frames"]
    if not frames:
        return [*lines, "  The dump has no Python stack: pickled dumps have one, JSON dumps do not."]
    return [*lines, *(f"  {frame}" for frame in frames[:_MOST_FRAMES])]


def explain(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Dumps, one for each rank, or folders of dumps.")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="The job's ranks, if not in the dumps.")
    ] = None,
    rank_pattern: Annotated[
        str | None,
        typer.Option(
            help="A regular expression that finds the rank in a file name, with the rank as (\\d+)."
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Explain why a job hangs, from its Flight Recorder dumps.

    Works for jobs without torchscout. The exit status is 0 if the dumps show why the job hangs, or that it
    does not hang, and 1 if they do not show it.
    """
    with exiting(DumpFilesError):
        read = read_files(_existing(files), _pattern(rank_pattern))
        dumps = [each.dump for each in read if each.dump is not None]
        if not dumps:
            raise DumpFilesError(_unreadable(read))
        size, size_is_known = _world_size(read, dumps, world_size)
        found = explained(dumps, size)
    document = report(found, read, size_is_known=size_is_known)
    print_report(document, screen(document), as_json=as_json, output=output)
    raise typer.Exit(1 if found.has_hang is None else 0)


def _existing(files: Sequence[Path]) -> list[Path]:
    with refusing("FILES"):
        if missing := [path for path in files if not path.exists()]:
            raise ValueError(f"{missing[0]} does not exist")
        if not (found := files_in(files)):
            raise ValueError(f"there is no file in {', '.join(map(str, files))}")
    return found


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    with refusing("--rank-pattern"):
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise ValueError(f"{text!r} is not a regular expression: {error}") from error
        if pattern.groups < 1:
            raise ValueError(f"{text!r} has no parentheses around the rank, as in 'rank(\\d+)'")
    return pattern


def _unreadable(read: Sequence[DumpFile]) -> str:
    shown = "\n".join(f"  {each.path}: {each.problem}" for each in read[:10])
    more = f"\n  and {len(read) - 10} more" if len(read) > 10 else ""
    return f"none of these files is a readable dump of the Flight Recorder:\n{shown}{more}"


def _world_size(read: Sequence[DumpFile], dumps: Sequence[Dump], given: int | None) -> tuple[int, bool]:
    """The size of the group of all ranks, or else the largest known rank + 1; and whether it was recorded."""
    recorded: dict[int, int] = {}
    known = {each.rank for each in read}
    for dump in dumps:
        for name, members in dump.groups.items():
            known.update(members)
            if dump.descriptions.get(name) == WORLD:
                recorded[dump.rank] = len(members)
    if len(set(recorded.values())) > 1:
        sizes = {size: rank for rank, size in recorded.items()}
        shown = ", ".join(f"rank {rank} is one of {size}" for size, rank in sorted(sizes.items()))
        raise DumpFilesError(f"these dumps are of different jobs: {shown}; give the dumps of one job")
    size = given or next(iter(recorded.values()), max(known) + 1)
    if max(known) >= size or size > MOST_RANKS:
        raise DumpFilesError(
            f"these dumps are not of one job of {size} ranks: they are from, or mention, rank {max(known)}; "
            "give the dumps of one job, with its --world-size"
        )
    return size, bool(given or recorded)
