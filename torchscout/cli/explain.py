"""``scout explain``: explains a hang from dumps of PyTorch's Flight Recorder."""

from __future__ import annotations

import json
import pickle
import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchscout.cli.console import AsJson, Output, print_report, refusing
from torchscout.decision.flight_recorder import Dump, Entry, Explanation, Recording, State, read_dump
from torchscout.decision.flight_recorder import explain as explained
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import counted, listed, ranks_in_words

__all__ = ["explain", "load"]

MOST_BYTES = 256 << 20
_MOST_RANKS = 1_000_000
_RANK = r"(\d{1,9})(?:\.(?:json|pkl|pickle|bin|dump|txt|trace))*$"
_SHOWN_GROUPS, _SHOWN_RANKS, _SHOWN_FRAMES, _SHOWN_FILES = 4, 3, 6, 10
_LIBRARY = "/torch/distributed/"
"""Frames between the user's call and the recorder."""
_AN_HOUR = 3600 * 10**9
"""In the nanoseconds of a dump."""


def explain(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Dumps, one for each rank, or folders of dumps.")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, max=_MOST_RANKS, help="The job's ranks, if not in the dumps.")
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

    Works for jobs without torchscout. The exit status is 0 if the dumps show no hang, 1 if they show one, and
    2 if they do not tell or cannot be read.
    """
    with refusing("--rank-pattern", re.error):
        pattern = re.compile(_RANK if rank_pattern is None else rank_pattern)
        if not pattern.groups:
            raise ValueError(f"{rank_pattern!r} has no parentheses around the rank, as in 'rank(\\d+)'")
    with refusing("FILES"):
        read = [_read(path, pattern) for path in _files_in(files)]
        dumps = _dumps(read)
        size, is_guess = _world_size(read, dumps, world_size)
    found = explained(dumps, size)
    document = _report(found, read, is_guess=is_guess)
    print_report(document, _screen(document), as_json=as_json, output=output)
    raise typer.Exit({False: 0, True: 1, None: 2}[found.has_hang])


# Files.


class _File(NamedTuple):
    path: Path
    rank: int | None
    dump: Dump | None
    problem: str = ""
    """Why there is no dump."""


def _files_in(paths: Iterable[Path]) -> list[Path]:
    """Return files, and the files in folders sorted by name, without hidden ones."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += [each for each in sorted(path.iterdir()) if each.is_file() and each.name[0] != "."]
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _read(path: Path, pattern: re.Pattern[str]) -> _File:
    found = pattern.search(str(path))
    if found is None or not re.fullmatch("[0-9]{1,9}", found[1] or ""):
        why = "its name does not end with a rank, as in nccl_trace_rank_3; --rank-pattern finds it elsewhere"
        return _File(path, None, None, why)
    rank, problem = int(found[1]), ""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"too large: {size:,} bytes; at most {MOST_BYTES:,} are read")
        return _File(path, rank, read_dump(rank, load(path.read_bytes())))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        problem = str(error)
    except (RecursionError, MemoryError):
        problem = "too large, or nested too deeply"
    return _File(path, rank, None, problem)


class _PlainData(pickle.Unpickler):
    """Reads numbers, text and containers. Nothing else can be in a pickle without a name to look up."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"refused: it names {module}.{name}, which is not plain data, and could run any code"
        )


def load(data: bytes) -> object:
    """Return the plain data in a dump, a pickle or JSON. Raises ``ValueError`` for anything else, and
    ``MemoryError`` or ``RecursionError`` if it would take too much of either."""
    if not data.strip():
        raise ValueError("it is empty")
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(data)
        except ValueError as error:
            raise ValueError(f"invalid JSON: {error}") from error
    try:
        # A damaged number in a pickle asks for any amount of memory.
        with _limited_memory((256 << 20) + 100 * len(data)):
            return _PlainData(BytesIO(data)).load()
    except (EOFError, pickle.UnpicklingError) as error:
        raise ValueError("it is incomplete or damaged") from error
    except (TypeError, LookupError, AttributeError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError("it is damaged") from error


@contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """Let this process allocate ``more`` bytes at most."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _dumps(read: Sequence[_File]) -> list[Dump]:
    """Return the dumps in the order of their ranks; other files may lie among them."""
    found: dict[int, Dump] = {}
    paths: dict[int, Path] = {}
    for path, _, dump, _ in read:
        if dump is None:
            continue
        if dump.rank in found:
            raise ValueError(
                f"{paths[dump.rank]} and {path} are both of rank {dump.rank}: give one dump of each rank, "
                "all taken at the same time, or give --rank-pattern to find the rank in the name"
            )
        found[dump.rank], paths[dump.rank] = dump, path
    if not found:
        shown = "".join(f"\n  {each.path}: {each.problem}" for each in read[:_SHOWN_FILES])
        more = f"\n  and {len(read) - _SHOWN_FILES} more" if len(read) > _SHOWN_FILES else ""
        raise ValueError(f"none of these files is a readable dump of the Flight Recorder:{shown}{more}")
    return [found[rank] for rank in sorted(found)]


def _world_size(read: Sequence[_File], dumps: Sequence[Dump], given: int | None) -> tuple[int, bool]:
    """Return the size of the group of all ranks, and whether it is a guess from ranks that are mentioned."""
    recorded = {dump.world_size: dump.rank for dump in dumps if dump.world_size is not None}
    if len(recorded) > 1:
        shown = ", ".join(f"rank {rank} is one of {size}" for size, rank in sorted(recorded.items()))
        raise ValueError(f"these dumps are of different jobs: {shown}; give the dumps of one job")
    known = max(max((dump.rank, *map(max, dump.groups.values()))) for dump in dumps)
    # A file that is named like the dumps is one, even if it cannot be read.
    alike = {re.sub(r"\d", "", each.path.name) for each in read if each.dump is not None}
    ranks = [each.rank or 0 for each in read if re.sub(r"\d", "", each.path.name) in alike]
    size = given or next(iter(recorded), max(known, *ranks) + 1)
    if known >= size or size > _MOST_RANKS:
        raise ValueError(
            f"these dumps are not of one job of {size} ranks: they are from, or mention, rank {known}; "
            "give the dumps of one job, with its --world-size"
        )
    return size, not given and not recorded


# The report.


def _report(found: Explanation, read: Sequence[_File], *, is_guess: bool) -> dict[str, Any]:
    """Return the document of ``--json``; ``is_guess``: the world size is not recorded."""
    incident, recording = found.incident, found.recording
    ranks = () if incident is None else incident.ranks
    groups = [
        (min(waits.values()), {*ranks}.isdisjoint(recording.groups[key].members), key)
        for key, waits in found.waits.items()
    ]
    return {
        "hang": found.has_hang,
        "sentence": found.sentence,
        "scope": None if incident is None else incident.scope.value,
        "ranks": list(ranks),
        "action": None if incident is None else incident.action.value,
        "world_size": len(recording.world),
        "without_dump": list(found.absent),
        "groups": [_group(recording, key, number) for number, _, key in sorted(groups)],
        "last_operations": [_last(recording, rank) for rank in ranks if rank in recording.dumps],
        "notes": _notes(found, read, is_guess=is_guess),
    }


def _group(found: Recording, key: str, number: int) -> dict[str, Any]:
    """Return what each member has done about one operation; equal members share a row."""
    group, rows = found.groups[key], dict[tuple[str, str, int | None], list[int]]()
    for rank in group.members:
        theirs = found.operations[key].get(rank, {})
        last = max(theirs, default=None if rank in found.lost or rank not in found.dumps else 0)
        if rank not in found.dumps:
            row = "", "no readable dump", last
        elif number in theirs:
            row = theirs[number].text, _state(theirs[number], found), last
        else:
            row = "", "not in the dump" if last is None or last > number else "not entered", last
        rows.setdefault(row, []).append(rank)
    return {
        "group": group.name,
        "point_to_point": group.pair,
        "members": list(group.members),
        "members_recorded": key not in found.guessed,
        "number": number,
        "rows": [
            {"ranks": ranks, "operation": operation, "state": state, "last_number": last}
            for (operation, state, last), ranks in rows.items()
        ],
    }


def _last(found: Recording, rank: int) -> dict[str, Any]:
    if rank not in found.last:
        return {"rank": rank, "operation": None}
    key, number = found.last[rank]
    entry, name = found.operations[key][rank][number], found.groups[key].name
    shown = {"number": number, "group": name, "state": _state(entry, found), "frames": list(entry.frames)}
    return {"rank": rank, "operation": entry.text, **shown}


def _state(entry: Entry, found: Recording) -> str:
    if not entry.is_on_device:
        return "completed or failed" if entry.state is State.RETIRED else "not completed"
    is_queued = found.has_starts and entry.state is State.SCHEDULED
    return "scheduled, not started on its device" if is_queued else entry.state.value


def _notes(found: Explanation, read: Sequence[_File], *, is_guess: bool) -> list[str]:
    """Say what may be wrong with the dumps, and what they cannot show."""
    recording, dumps = found.recording, found.recording.dumps.values()
    notes = [f"{each.path}: {each.problem}." for each in read if each.problem]
    for dump in dumps:
        if dump.unreadable:
            total = dump.unreadable + len(dump.entries)
            notes.append(f"{dump.unreadable} of {total} entries of rank {dump.rank} could not be read.")
    if recording.lost:
        notes.append(
            f"Older operations of {ranks_in_words(sorted(recording.lost))} are not in the dumps: the "
            "buffer was full (TORCH_FR_BUFFER_SIZE sets its size), or only open operations were dumped."
        )
    newest = {dump.rank: max((each.created for each in dump.entries), default=0) for dump in dumps}
    if old := [rank for rank, time in newest.items() if 0 < time < max(newest.values()) - _AN_HOUR]:
        whose = ranks_in_words(old)
        notes.append(f"The dump of {whose} is more than an hour older: it may be from an earlier run.")
    if is_guess:
        size = len(recording.world)
        notes.append(
            f"The world size is not recorded; {size} is assumed, and --world-size can say otherwise."
        )
    if recording.guessed and found.has_hang is not False:
        names = listed(recording.groups[key].in_words for key in sorted(recording.guessed))
        notes.append(
            f"The members of {names} are not recorded. The ranks that used a group are taken to be its "
            "members, so a member that never used it is not missed."
        )
    if not recording.is_on_device and found.has_hang is not False:
        notes.append(
            "Gloo does not record sends and receives: a rank may wait in one that does not show here."
        )
    if recording.is_on_device and not recording.has_starts:
        notes.append(
            "These dumps do not distinguish operations that a device has started from those that its host "
            'has only issued: both are "scheduled". TORCH_NCCL_ENABLE_TIMING=1 records the difference.'
        )
    return notes


def _screen(document: Mapping[str, Any]) -> str:
    """Return the report as text."""
    parts: list[Any] = [document["sentence"]]
    for group in document["groups"][:_SHOWN_GROUPS]:
        kind, members = "Point-to-point" if group["point_to_point"] else "Group", len(group["members"])
        rows = [
            (ranks_in_words(each["ranks"]), each["state"], each["operation"] or "-", each["last_number"])
            for each in group["rows"]
        ]
        shown = [[*rest, "-" if last is None else str(last)] for *rest, last in rows]
        title = f"{kind} {group['group']}, {counted(members, 'member')}, operation number {group['number']}:"
        parts += ["", title, table(["", "state", "operation", "last number issued"], shown)]
    if (more := len(document["groups"]) - _SHOWN_GROUPS) > 0:
        parts += ["", f"{counted(more, 'more group')}: see --json."]
    for last in document["last_operations"][:_SHOWN_RANKS]:
        parts += ["", *_stack(last)]
    return stacked([*parts, *[""] * bool(document["notes"]), *document["notes"]])


def _stack(last: Mapping[str, Any]) -> list[str]:
    if last["operation"] is None:
        return [f"Rank {last['rank']} has recorded no operation."]
    where = f"number {last['number']} of {last['group']}, {last['state']}"
    title = f"Rank {last['rank']}'s last operation: {last['operation']} {where}"
    frames = [frame for frame in last["frames"] if _LIBRARY not in frame] or last["frames"]
    if not frames:
        return [title, "  The dump has no Python stack: pickled dumps have one, JSON dumps do not."]
    return [title, *(f"  {frame}" for frame in frames[:_SHOWN_FRAMES])]
