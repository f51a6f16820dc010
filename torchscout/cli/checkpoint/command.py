"""The commands of `scout checkpoint`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.checkpoint.storage import lock
from torchscout.checkpoint.storage.adoption import adopt as adopt_folder
from torchscout.checkpoint.storage.forgetting import forget as forget_job
from torchscout.checkpoint.storage.forgetting import kept_jobs
from torchscout.checkpoint.storage.memory import memory_root
from torchscout.cli.checkpoint import explanation, listing, pruning
from torchscout.cli.checkpoint.contents import Contents, contents_of
from torchscout.cli.checkpoint.examination import Damage, examine
from torchscout.cli.checkpoint.wording import counted, size_in_words, stacked
from torchscout.cli.document import as_document
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError

__all__ = ["app"]

app = typer.Typer(
    help="What lies in a job's checkpoint folders, and what a recovery would make of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="Checkpoint folders of one job, on disk or in memory.")
]
Job = Annotated[str | None, typer.Option("--job", help="Which job, if a folder holds several.")]
WorldSize = Annotated[int | None, typer.Option("--world-size", help="Of how many ranks, if that changed.")]
Quick = Annotated[bool, typer.Option("--quick", help="Look at headers and lengths only, not at every bit.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Output = Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")]


@app.command("list")
def list_(
    folders: Folders,
    files: Annotated[bool, typer.Option("--files", help="Show every shard.")] = False,
    job: Job = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Show which generations lie where, and what each is to recovery."""
    contents = _contents(folders, job, world_size)
    screen = listing.screen(contents, files=files)
    as_document(listing.listing(contents), screen, as_json=as_json, output=output)


@app.command()
def verify(
    folders: Folders,
    job: Job = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Look at every bit of every shard.

    The exit status is 1 if anything is damaged, or if there is no shard.
    """
    contents = _contents(folders, job, world_size)
    damaged = examine(contents.copies)
    ledgers = [problem for folder in contents.folders for problem in folder.problems]
    ledgers += [each.doubt for each in contents.ledgers if each.doubt]
    report = _verified(contents, damaged, ledgers)
    as_document(report, _verification(contents, report), as_json=as_json, output=output)
    raise typer.Exit(0 if report["whole"] else 1)


@app.command()
def explain(
    folders: Folders,
    quick: Quick = False,
    job: Job = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Say what a recovery would choose, and why."""
    contents = _contents(folders, job, world_size)
    report, screen = explanation.explanation(contents, _needed(contents, bits=not quick))
    as_document(report, screen, as_json=as_json, output=output)


@app.command()
def prune(
    folders: Folders,
    keep: Annotated[int, typer.Option(min=0, help="How many more to keep, verified ones first.")] = 1,
    yes: Annotated[bool, typer.Option("--yes/--dry-run", help="Delete, or only say what would be.")] = False,
    quick: Quick = False,
    job: Job = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Delete generations that nobody needs.

    Verified, candidate, latest and a few more stay. Refused while a live job uses the folder.
    """
    contents = _contents(folders, job, world_size)
    with ExitStack() as held:
        if yes:
            _claim(contents, held)
            contents = _contents(folders, job, world_size)
        try:
            report, broken = pruning.plan(contents, _needed(contents, bits=not quick), keep)
            if yes:
                pruning.delete(contents, report)
        except (ValueError, CheckpointError) as error:
            raise _refused(error) from error
    screen = pruning.screen(contents, report, broken, done=yes)
    as_document({**report, "dry_run": not yes}, screen, as_json=as_json, output=output)


@app.command()
def adopt(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A checkpoint folder on disk.", exists=True, file_okay=False),
    ],
    job: Annotated[str, typer.Option("--as", metavar="JOB", help="The name of the job that takes it over.")],
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Let a job take over the checkpoints that another one has written.

    Every file in the folder is written again with the job's name. Refused while a live job uses the folder.
    """
    if not JOB_NAME.fullmatch(job):
        raise typer.BadParameter(f"a name is of letters, digits and ._+=@-, got {job!r}", param_hint="--as")
    try:
        adopted = adopt_folder(folder.absolute(), job)
    except (CheckpointError, OSError) as error:
        raise _refused(error) from error
    done = (
        f"{counted(adopted.shards, 'shard')} and {counted(adopted.ledgers, 'ledger')} are of job {job} now."
    )
    screen = stacked([done, *(f"DAMAGED {each}" for each in adopted.damaged)])
    as_document({"job": job, **asdict(adopted)}, screen, as_json=as_json, output=output)


@app.command()
def forget(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Of which jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all jobs that do not run.")] = False,
    yes: Annotated[bool, typer.Option("--yes/--dry-run", help="Delete, or only say what would be.")] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Give back what ended jobs keep in this machine's memory; files on disk stay.

    Without a job, shows all of them. Refused for a job that runs.
    """
    kept = kept_jobs(memory_root())
    wanted = {each.name for each in kept if each.holder is None} if everything else {*(jobs or ())}
    if unknown := sorted(wanted - {each.name for each in kept}):
        raise typer.BadParameter(f"{memory_root()} has nothing of {', '.join(unknown)}", param_hint="JOB")
    rows: list[dict[str, Any]] = []
    for each in kept:
        chosen = each.name in wanted
        try:
            if chosen and yes:
                forget_job(each)
        except CheckpointError as error:
            raise _refused(error) from error
        rows.append({"job": each.name, "bytes": each.bytes, "in_use": each.holder, "forgotten": chosen})
    done = "deleted" if yes else "would be deleted; add --yes"
    lines = [
        f"{row['job']}  {size_in_words(row['bytes'])}"
        + (f"  in use by {row['in_use']}" if row["in_use"] else "")
        + (f"  {done}" if row["forgotten"] else "")
        for row in rows
    ]
    screen = stacked(lines or ["Nothing is kept in memory."])
    as_document({"jobs": rows, "dry_run": not yes}, screen, as_json=as_json, output=output)


def _contents(folders: list[Path], job: str | None, world_size: int | None) -> Contents:
    try:
        return contents_of(folders, job, world_size)
    except (ValueError, OSError, CheckpointError) as error:
        raise typer.BadParameter(str(error), param_hint="DIR") from error


def _needed(contents: Contents, *, bits: bool) -> list[Damage]:
    """What is damaged among the shards that a recovery could need."""
    gate = contents.gate
    held = frozenset() if gate is None else gate.held
    return examine([copy for copy in contents.copies if copy.file.generation in held], bits=bits)


def _claim(contents: Contents, held: ExitStack) -> None:
    """No job may begin in these folders while files are deleted, and none may run."""
    try:
        for folder in contents.folders:
            held.enter_context(lock.claim(folder.path, "scout checkpoint prune"))
    except CheckpointError as error:
        raise _refused(error) from error


def _refused(error: Exception) -> typer.Exit:
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(1)


def _verified(contents: Contents, damaged: list[Damage], ledgers: list[str]) -> dict[str, Any]:
    return {
        "job": contents.job,
        "whole": bool(contents.copies) and not damaged and not ledgers,
        "files": len(contents.copies),
        "bytes": sum(copy.file.size for copy in contents.copies),
        "damaged": [
            {
                **listing.as_json(each.copy.file.generation),
                "rank": each.copy.file.rank,
                "holder": each.copy.file.holder,
                "file": str(each.copy.file.path),
                "tensors": list(each.tensors),
                "problems": list(each.problems),
            }
            for each in damaged
        ],
        "ledgers": ledgers,
    }


def _verification(contents: Contents, report: dict[str, Any]) -> str:
    lines = [*listing.heading(contents), ""]
    for each in report["damaged"]:
        lines += [f"DAMAGED {each['file']}", *(f"  {problem}" for problem in each["problems"])]
    lines += [f"DAMAGED ledger: {problem}" for problem in report["ledgers"]]
    looked = f"{counted(report['files'], 'shard')}, {size_in_words(report['bytes'])}: "
    shards, ledgers = len(report["damaged"]), len(report["ledgers"])
    found = f"{shards} damaged" if shards else "every bit is as it was sealed"
    if not report["files"]:
        found = "there is nothing that could be verified"
    found += f"; {counted(ledgers, 'ledger')} damaged." if ledgers else "."
    return stacked([*lines, *([""] if lines[-1] else []), looked + found])
