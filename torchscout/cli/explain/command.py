"""``scout explain``: what a dump of PyTorch's Flight Recorder says about a hang."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from torchscout.cli.checkpoint.wording import counted, numbers_in_words, stacked, table
from torchscout.cli.console import as_document
from torchscout.cli.explain.dump_files import DumpFile, DumpFilesError, files_in, read_files
from torchscout.decision.hang.flight_recorder import Dump, State
from torchscout.decision.hang.flight_recorder_diagnosis import Explanation
from torchscout.decision.hang.flight_recorder_diagnosis import explain as explained
from torchscout.decision.hang.flight_recorder_lines import WORLD, Operation
from torchscout.decision.progress import CommGroup

__all__ = ["explain", "report", "screen"]

_MOST_GROUPS = 4
_MOST_STACKS = 3
_MOST_FRAMES = 6
_LIBRARY = "/torch/distributed/"
"""Frames between the user's call and the recorder."""
_HOURS_APART = 1.0


def report(found: Explanation, files: Sequence[DumpFile], *, size_is_known: bool) -> dict[str, Any]:
    """The document of ``--json``; the world size may be known, or be taken from the files."""
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
    """The same for a person."""
    parts: list[Table | str] = [str(document["sentence"])]
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
    """Lines on which somebody waits, or members differ; those of the ranks that are named first."""
    suspects = set() if found.incident is None else set(found.incident.ranks)
    lines = [line for key, line in found.recording.lines.items() if _is_suspicious(found, key, line)]
    return sorted(lines, key=lambda line: (_number(found, line), suspects.isdisjoint(line.members), line.key))


def _is_suspicious(found: Explanation, key: str, line: CommGroup) -> bool:
    return len(line.members) > 1 and bool(found.progresses.waiting[key])


def _number(found: Explanation, line: CommGroup) -> int:
    """The number that members differ in, or are waiting in; the earliest of several."""
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
    """Operation, state and last number, as one member shows them."""
    if rank in found.absent:
        return "", "no readable dump", None
    shown = found.recording.of(line.key, rank)
    last = max(shown, default=found.progresses.entered[line.key].get(rank, 0))
    operation = shown.get(number)
    if operation is not None:
        return operation.text, _state(operation, found), last
    return "", "not entered" if last < number else "not in the dump any more", last


def _state(operation: Operation, found: Explanation) -> str:
    if operation.entry.backend == "gloo":
        return "completed or failed" if operation.state is State.RETIRED else "not completed"
    if operation.state is not State.SCHEDULED:
        return str(operation.state.value)
    return "scheduled, not begun on its device" if found.recording.times_starts else "scheduled"


def _shown_ranks(found: Explanation) -> list[int]:
    """Whose last operation is shown: those that are named, and have a dump."""
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
            notes.append(f"{path}: {dump.unreadable} of {total} entries could not be understood.")
    if lost := [dump.rank for dump in dumps.values() if dump.has_lost_entries]:
        notes.append(
            f"Older operations of {_ranks(lost)} are not in the dumps: the recorder's buffer was full, or "
            "only open operations were dumped. TORCH_FR_BUFFER_SIZE sets how many are kept."
        )
    if not size_is_known:
        notes.append(
            f"The dumps do not say how many ranks the job had; {found.recording.world_size} are taken to be "
            "all. Otherwise give --world-size."
        )
    if outdated := sorted(found.progresses.outdated):
        notes.append(
            f"Others have completed operations with {_ranks(outdated)} that its dump does not show: it is "
            "older than theirs, and the rank may have come further."
        )
    notes += _about_groups(found)
    notes += _about_time(dumps.values())
    if found.recording.is_on_device and not found.recording.times_starts:
        notes.append(
            "These dumps do not tell what a device has begun from what its host has issued: both are "
            '"scheduled". TORCH_NCCL_ENABLE_TIMING=1 records it.'
        )
    return notes


def _about_groups(found: Explanation) -> list[str]:
    guessed = [line.name for key, line in found.recording.lines.items() if key in found.recording.guessed]
    notes = []
    if guessed and found.has_hang is not False:
        names = ", ".join(guessed[:3]) + (", ..." if len(guessed) > 3 else "")
        notes.append(
            f"Members of {counted(len(guessed), 'group')} ({names}) are not recorded, and taken to be the "
            "ranks that used it: a member that never did is not missed there."
        )
    if found.has_hang is not False and not found.recording.is_on_device:
        notes.append("Gloo's recorder has no sends and receives: a hang in one of them cannot be seen here.")
    return notes


def _about_time(dumps: Iterable[Any]) -> list[str]:
    """A rank that was killed leaves the file of an earlier run, and that looks like one of this run."""
    times = {dump.rank: [each.created for each in dump.entries if each.created] for dump in dumps}
    newest = {rank: max(created) for rank, created in times.items() if created}
    if not newest:
        return []
    old = [rank for rank, time in newest.items() if max(newest.values()) - time > _HOURS_APART * 3600e9]
    if not old:
        return []
    hours = f"The newest operation of {_ranks(old)} is more than an hour older than that of others"
    return [f"{hours}: its file may be of an earlier run."]


def _heading(group: Mapping[str, Any]) -> str:
    what = "Point-to-point" if group["point_to_point"] else "Group"
    members = counted(len(group["members"]), "member")
    return f"{what} {group['group']}, {members}, operation number {group['number']}:"


def _rows(group: Mapping[str, Any]) -> Table:
    rows = [
        [
            _ranks(row["ranks"]),
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
        return [*lines, "  Its Python stack is not in the dump: pickled dumps have it, JSON has not."]
    return [*lines, *(f"  {frame}" for frame in frames[:_MOST_FRAMES])]


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_in_words(ranks)}"


_MOST_RANKS = 1_000_000


def explain(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Dumps, one for each rank, or folders of them.")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, max=_MOST_RANKS, help="How many ranks, if the dumps do not say.")
    ] = None,
    rank_pattern: Annotated[
        str | None,
        typer.Option(help="Where a file's name has the rank: a regular expression, the rank in parentheses."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None,
) -> None:
    """Say why a job hangs, from its Flight Recorder dumps.

    The job needs no torchscout. The exit status is 0 if the dumps show why the job hangs, or that it does
    not, and 1 if they cannot tell.
    """
    try:
        read = read_files(_existing(files), _pattern(rank_pattern))
        dumps = [each.dump for each in read if each.dump is not None]
        if not dumps:
            raise DumpFilesError(_unreadable(read))
        size, size_is_known = _world_size(read, dumps, world_size)
        found = explained(dumps, size)
    except DumpFilesError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    document = report(found, read, size_is_known=size_is_known)
    as_document(document, screen(document), as_json=as_json, output=output)
    raise typer.Exit(1 if found.has_hang is None else 0)


def _existing(files: Sequence[Path]) -> list[Path]:
    for path in files:
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist", param_hint="FILES")
    found = files_in(files)
    if not found:
        raise typer.BadParameter(f"{', '.join(map(str, files))} holds no file", param_hint="FILES")
    return found


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        pattern = None if text is None else re.compile(text)
    except re.error as error:
        raise typer.BadParameter(
            f"{text!r} is no regular expression: {error}", param_hint="--rank-pattern"
        ) from error
    if pattern is not None and pattern.groups < 1:
        raise typer.BadParameter(
            f"{text!r} has no parentheses around the rank, as in 'rank(\\d+)'", param_hint="--rank-pattern"
        )
    return pattern


def _unreadable(read: Sequence[DumpFile]) -> str:
    shown = "\n".join(f"  {each.path}: {each.problem}" for each in read[:10])
    more = f"\n  and {len(read) - 10} more" if len(read) > 10 else ""
    return f"none of these files is a dump of the Flight Recorder that can be read:\n{shown}{more}"


def _world_size(read: Sequence[DumpFile], dumps: Sequence[Dump], given: int | None) -> tuple[int, bool]:
    """As the group of all ranks has it, where it is recorded; else as far as ranks are known. And which."""
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
        raise DumpFilesError(f"these dumps are of different jobs: {shown}; give those of one job only")
    size = given or next(iter(recorded.values()), max(known) + 1)
    if max(known) >= size or size > _MOST_RANKS:
        raise DumpFilesError(
            f"these dumps are not of one job of {size} ranks: they are of, or name, rank {max(known)}; "
            "give those of one job only, with its --world-size"
        )
    return size, bool(given or recorded)
