"""The command `scout explain`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.document import as_document
from torchscout.cli.explain import view
from torchscout.cli.explain.dump_files import DumpFile, DumpFilesError, files_in, read_files
from torchscout.decision.hang.flight_recorder import Dump
from torchscout.decision.hang.flight_recorder_diagnosis import explain as explained
from torchscout.decision.hang.flight_recorder_lines import WORLD

__all__ = ["explain"]

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
    document = view.report(found, read, size_is_known=size_is_known)
    as_document(document, view.screen(document), as_json=as_json, output=output)
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
