"""``scout checkpoint``: list, verify, explain, prune, forget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from torchscout.checkpoint.gate_state import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.selection import Failure, Selection, SweepResult, confirm, select_checkpoint
from torchscout.checkpoint.storage import lock, retention, shards
from torchscout.checkpoint.storage.adoption import adopt as adopt_folder
from torchscout.checkpoint.storage.forgetting import forget as forget_job
from torchscout.checkpoint.storage.forgetting import kept_jobs
from torchscout.checkpoint.storage.memory import memory_root
from torchscout.cli.checkpoint import listing
from torchscout.cli.checkpoint.contents import Contents, contents_of, memory_beside
from torchscout.cli.checkpoint.listing import as_json, heading, roles_of
from torchscout.cli.checkpoint.verification import Broken, Damage, broken_lines, examine, usable
from torchscout.cli.checkpoint.wording import counted, size_in_words, stacked, table
from torchscout.cli.console import as_document
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError

__all__ = ["app", "delete", "explanation", "pruning_plan", "pruning_screen"]

_AFTER = {
    Failure.SDC: "corruption",
    Failure.HANG: "a hang",
    Failure.MACHINES_GONE: "a lost machine",
    Failure.STRAGGLER: "a straggler",
    Failure.OTHER: "a crash",
}


def explanation(contents: Contents, damaged: Sequence[Damage]) -> tuple[dict[str, Any], str]:
    """The document and the screen."""
    named = contents.gate
    gate, broken = usable(contents, named or CheckpointGate(), damaged)
    report = {
        "job": contents.job,
        "world_size": contents.world_size,
        "has_ledger": named is not None,
        "poisoned": gate.poisoned,
        "coverage": contents.coverage,
        "unusable": [each.to_json() for each in broken],
        "decisions": [_decided(failure, gate) for failure in _AFTER],
    }
    return report, _screen(contents, report, broken)


def _decided(failure: Failure, gate: CheckpointGate) -> dict[str, Any]:
    decision = select_checkpoint(failure, gate)
    otherwise = _as_json(confirm(gate, SweepResult.SDC)) if decision.tentative else None
    return {"failure": failure.value, **_as_json(decision), "otherwise": otherwise}


def _as_json(decision: Selection) -> dict[str, Any]:
    return {
        "role": None if decision.role is None else decision.role.value,
        "generation": None if decision.generation is None else as_json(decision.generation),
        "tentative": decision.tentative,
        "reason": decision.reason,
    }


def _screen(contents: Contents, report: dict[str, Any], broken: Sequence[Broken]) -> str:
    lines = [*heading(contents), ""]
    if not report["has_ledger"]:
        lines += ["No ledger is here: nobody has written down which generations may be trusted.", ""]
    if report["coverage"]:
        lines += [f"Checks cover: {report['coverage']}", ""]
    lines += broken_lines(broken, contents.world_size)
    for failure, decided in zip(_AFTER.values(), report["decisions"], strict=True):
        lines += [f"After {failure}:", f"  {decided['reason']}"]
        if decided["otherwise"]:
            lines.append(f"  If they find corruption: {decided['otherwise']['reason']}")
    lines += ["", "Only what lies in these folders was considered."]
    if (memory := memory_beside(contents)) is not None:
        lines.append(f"This machine's memory has more of this job: {memory}")
    return stacked(lines)


def pruning_plan(
    contents: Contents, damaged: Sequence[Damage], keep: int
) -> tuple[dict[str, Any], list[Broken]]:
    """What stays and why, and what goes; a ``ValueError`` where nobody says what is trusted."""
    gate = contents.gate
    if gate is None:
        raise ValueError("no ledger is here, so that nobody says which generations are needed")
    left, broken = usable(contents, gate, damaged)
    kept = _wanted(contents, [gate, left, *(found.gate for found in contents.ledgers)], keep)
    described = {}
    for each in contents.generations:
        files = [copy.file for copy in contents.copies if copy.file.generation == each]
        described[each] = {**as_json(each), "files": len(files), "bytes": sum(file.size for file in files)}
    report = {
        "job": contents.job,
        "kept": [{**each, "why": kept[name]} for name, each in described.items() if name in kept],
        "removed": [each for name, each in described.items() if name not in kept],
        "unusable": [each.to_json() for each in broken],
    }
    return report, broken


def _wanted(contents: Contents, gates: Sequence[CheckpointGate], keep: int) -> dict[Generation, str]:
    """With the reasons. What any rank needs stays: unlike in a recovery, a doubt is a reason to keep."""
    reasons: dict[Generation, str] = {}
    for gate in gates:
        for generation in contents.generations:
            if roles := [role for role in roles_of(generation, gate) if role != "older verified"]:
                reasons.setdefault(generation, ", ".join(roles))
    trusted = {generation for gate in gates for generation in gate.trusted}
    rest = [each for each in contents.generations if each not in reasons]
    rest.sort(key=lambda each: (each in trusted, not contents.missing(each), each.lineage, each.step))
    more = rest[max(0, len(rest) - keep) :]
    return reasons | {each: "older verified" if each in trusted else "one more" for each in more}


def delete(contents: Contents, report: dict[str, Any]) -> None:
    """What the plan says, and what killed writers have left."""
    unwanted = {Generation(each["step"], each["lineage"]) for each in report["removed"]}
    retention.remove(copy.file for copy in contents.copies if copy.file.generation in unwanted)
    for folder in contents.folders:
        shards.clean(folder.path)


def pruning_screen(
    contents: Contents, report: dict[str, Any], broken: Sequence[Broken], *, done: bool
) -> str:
    gone, verb = report["removed"], "deleted" if done else "would be deleted"
    rows = [_row(each, f"stays: {each['why']}") for each in report["kept"]]
    rows += [_row(each, verb) for each in gone]
    files, size = (sum(each[name] for each in gone) for name in ("files", "bytes"))
    warning = broken_lines(broken, contents.world_size)
    parts: list[Table | str] = [
        *heading(contents),
        "",
        *warning,
        table(["generation", "size", "what"], rows),
        "",
    ]
    parts.append(f"{counted(files, 'file')}, {size_in_words(size)} {verb}." if gone else "Nothing to delete.")
    if gone and not done:
        parts.append("Nothing was deleted. Add --yes to delete.")
    return stacked(parts)


def _row(described: dict[str, Any], what: str) -> list[str]:
    generation = Generation(described["step"], described["lineage"])
    return [str(generation), size_in_words(described["bytes"]), what]


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
    report, screen = explanation(contents, _needed(contents, bits=not quick))
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
            report, broken = pruning_plan(contents, _needed(contents, bits=not quick), keep)
            if yes:
                delete(contents, report)
        except (ValueError, CheckpointError) as error:
            raise _refused(error) from error
    screen = pruning_screen(contents, report, broken, done=yes)
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
