"""``scout checkpoint``: list, verify, explain, export, prune, adopt, forget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from torchscout.checkpoint.folder import adopt as adopt_folder
from torchscout.checkpoint.folder import claim
from torchscout.checkpoint.gate import (
    CheckpointGate,
    Generation,
    Selection,
    SweepResult,
    confirm,
    select_checkpoint,
)
from torchscout.checkpoint.memory import forget as forget_job
from torchscout.checkpoint.memory import kept_jobs, memory_root
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import remove_shards
from torchscout.cli.checkpoint import listing
from torchscout.cli.checkpoint.contents import (
    Contents,
    Folders,
    JobName,
    WorldSize,
    contents_in,
    memory_beside,
)
from torchscout.cli.checkpoint.export import ExportOptions, export
from torchscout.cli.checkpoint.listing import as_json, heading, roles_of
from torchscout.cli.checkpoint.verification import (
    Broken,
    Damage,
    Usable,
    broken_lines,
    examine,
    repairable_lines,
    usable,
)
from torchscout.cli.console import AsJson, Output, exiting, print_report, taking
from torchscout.config import JOB_NAME
from torchscout.decision.types import Failure
from torchscout.errors import CheckpointError
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import counted, size_in_words

__all__ = ["app", "delete", "explanation", "pruning_plan", "pruning_screen"]

_AFTER = {
    Failure.SDC: "corruption",
    Failure.HANG: "a hang",
    Failure.MACHINES_GONE: "a lost machine",
    Failure.STRAGGLER: "a straggler",
    Failure.OTHER: "a crash",
}


def explanation(contents: Contents, damaged: Sequence[Damage]) -> tuple[dict[str, Any], str]:
    """What a recovery would choose after each kind of failure: the document and the screen."""
    found = usable(contents, contents.gate or CheckpointGate(), damaged)
    gate = found.gate
    report = {
        "job": contents.job,
        "world_size": contents.world_size,
        "has_ledger": contents.gate is not None,
        "poisoned": gate.poisoned,
        "coverage": contents.coverage,
        "unusable": [each.to_json() for each in found.broken],
        "repairable": [each.to_json() for each in found.repairable],
        "decisions": [_decided(failure, gate) for failure in _AFTER],
    }
    return report, _screen(contents, report, found)


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


def _screen(contents: Contents, report: dict[str, Any], found: Usable) -> str:
    lines = [*heading(contents), ""]
    if not report["has_ledger"]:
        lines += ["There is no ledger here, so no generation can be trusted.", ""]
    if report["coverage"]:
        lines += [f"Checks cover: {report['coverage']}", ""]
    lines += broken_lines(found.broken, contents.world_size)
    lines += repairable_lines(found.repairable)
    for failure, decided in zip(_AFTER.values(), report["decisions"], strict=True):
        lines += [f"After {failure}:", f"  {decided['reason']}"]
        if decided["otherwise"]:
            lines.append(f"  If they find corruption: {decided['otherwise']['reason']}")
    lines += ["", "Only these folders were considered."]
    if (memory := memory_beside(contents)) is not None:
        lines.append(f"This machine has more of this job in memory: {memory}")
    return stacked(lines)


def pruning_plan(
    contents: Contents, damaged: Sequence[Damage], keep: int
) -> tuple[dict[str, Any], list[Broken]]:
    """Which generations to keep, why, and which to delete. Raises ``ValueError`` without a ledger."""
    gate = contents.gate
    if gate is None:
        raise ValueError("there is no ledger here that says which generations are needed")
    left, broken, _ = usable(contents, gate, damaged)
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
    """The generations to keep, with reasons. Keeps what any rank's ledger needs, unlike a recovery."""
    reasons: dict[Generation, str] = {}
    for number, gate in enumerate(gates):
        source = ("", ", as a fallback", ", by a rank's ledger")[min(number, 2)]
        for generation in contents.generations:
            if roles := [role for role in roles_of(generation, gate) if role != "older verified"]:
                reasons.setdefault(generation, ", ".join(roles) + source)
    trusted = {generation for gate in gates for generation in gate.trusted}
    rest = [each for each in contents.generations if each not in reasons]
    rest.sort(key=lambda each: (each in trusted, not contents.missing(each), each.lineage, each.step))
    more = rest[max(0, len(rest) - keep) :]
    return reasons | {each: "older verified" if each in trusted else "--keep" for each in more}


def delete(contents: Contents, report: dict[str, Any]) -> None:
    """Delete the generations of the plan, and incomplete files of killed writers."""
    unwanted = {Generation(each["step"], each["lineage"]) for each in report["removed"]}
    remove_shards(copy.file for copy in contents.copies if copy.file.generation in unwanted)
    for folder in contents.folders:
        shards.clean(folder.path)


def pruning_screen(
    contents: Contents, report: dict[str, Any], broken: Sequence[Broken], *, done: bool
) -> str:
    gone, verb = report["removed"], "deleted" if done else "would be deleted"
    rows = [_row(each, f"kept: {each['why']}") for each in report["kept"]]
    rows += [_row(each, verb) for each in gone]
    files, size = (sum(each[name] for each in gone) for name in ("files", "bytes"))
    warning = broken_lines(broken, contents.world_size)
    parts: list[Table | str] = [
        *heading(contents),
        "",
        *warning,
        table(["generation", "size", "action"], rows),
        "",
    ]
    parts.append(
        f"{counted(files, 'file')}, {size_in_words(size)}: {verb}." if gone else "Nothing to delete."
    )
    if gone and not done:
        parts.append("Nothing was deleted. Add --yes to delete.")
    return stacked(parts)


def _row(described: dict[str, Any], what: str) -> list[str]:
    generation = Generation(described["step"], described["lineage"])
    return [str(generation), size_in_words(described["bytes"]), what]


app = typer.Typer(
    help="Inspect and manage a job's checkpoint folders.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Quick = Annotated[bool, typer.Option("--quick", help="Check only headers and lengths, not every bit.")]
Yes = Annotated[bool, typer.Option("--yes/--dry-run", help="Delete, or only show what would be deleted.")]


@app.command("list")
def list_(
    folders: Folders,
    files: Annotated[bool, typer.Option("--files", help="List every shard file.")] = False,
    job: JobName = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """List generations, their roles in a recovery, and their shards."""
    contents = contents_in(folders, job, world_size)
    screen = listing.screen(contents, files=files)
    print_report(listing.listing(contents), screen, as_json=as_json, output=output)


@app.command()
def verify(
    folders: Folders,
    job: JobName = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Verify every bit of every shard.

    The exit status is 1 if anything is damaged, or if there is no shard.
    """
    contents = contents_in(folders, job, world_size)
    damaged = examine(contents.copies)
    ledgers = [problem for folder in contents.folders for problem in folder.problems]
    ledgers += [each.doubt for each in contents.ledgers if each.doubt]
    found = usable(contents, contents.gate or CheckpointGate(), damaged)
    report = _verified(contents, damaged, ledgers, found)
    print_report(report, _verification(contents, report, found), as_json=as_json, output=output)
    raise typer.Exit(0 if report["whole"] else 1)


@app.command()
def explain(
    folders: Folders,
    quick: Quick = False,
    job: JobName = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Show which checkpoint a recovery would choose after each kind of failure, and why."""
    contents = contents_in(folders, job, world_size)
    report, screen = explanation(contents, _needed(contents, bits=not quick))
    print_report(report, screen, as_json=as_json, output=output)


app.command("export")(taking(ExportOptions)(export))


@app.command()
def prune(
    folders: Folders,
    keep: Annotated[int, typer.Option(min=0, help="How many more to keep, verified ones first.")] = 1,
    yes: Yes = False,
    quick: Quick = False,
    job: JobName = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Delete generations that are not needed.

    Keeps the verified, candidate and latest generation and a few more. Refused while a job uses the folder.
    """
    contents = contents_in(folders, job, world_size)
    with exiting(ValueError, CheckpointError), ExitStack() as locks:
        if yes:
            for folder in contents.folders:  # no job may run in them, or start while files are deleted
                locks.enter_context(claim(folder.path, "scout checkpoint prune"))
            contents = contents_in(folders, job, world_size)
        report, broken = pruning_plan(contents, _needed(contents, bits=not quick), keep)
        if yes:
            delete(contents, report)
    screen = pruning_screen(contents, report, broken, done=yes)
    print_report({**report, "dry_run": not yes}, screen, as_json=as_json, output=output)


@app.command()
def adopt(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A checkpoint folder on disk.", exists=True, file_okay=False),
    ],
    job: Annotated[
        str, typer.Option("--as", metavar="JOB", help="The name of the job that takes them over.")
    ],
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Give the checkpoints of one job to another.

    Rewrites every file in the folder with the new job's name. Refused while a job uses the folder.
    """
    if not JOB_NAME.fullmatch(job):
        problem = f"a job's name consists of letters, digits and ._+=@-, got {job!r}"
        raise typer.BadParameter(problem, param_hint="--as")
    with exiting(CheckpointError, OSError):
        adopted = adopt_folder(folder.absolute(), job)
    files = f"{counted(adopted.shards, 'shard')} and {counted(adopted.ledgers, 'ledger')}"
    screen = stacked([f"{files} now belong to job {job}.", *(f"DAMAGED {each}" for each in adopted.damaged)])
    print_report({"job": job, **asdict(adopted)}, screen, as_json=as_json, output=output)


@app.command()
def forget(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Names of jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs that are not running.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Delete checkpoints of ended jobs from this machine's memory; files on disk stay.

    Without a job, lists all jobs that have checkpoints in memory. Refused for a running job.
    """
    kept = kept_jobs(memory_root())
    wanted = {each.name for each in kept if each.holder is None} if everything else {*(jobs or ())}
    if unknown := sorted(wanted - {each.name for each in kept}):
        raise typer.BadParameter(f"{memory_root()} has no job {', '.join(unknown)}", param_hint="JOB")
    rows: list[dict[str, Any]] = []
    for each in kept:
        chosen = each.name in wanted
        with exiting(CheckpointError):
            if chosen and yes:
                forget_job(each)
        rows.append({"job": each.name, "bytes": each.bytes, "in_use": each.holder, "forgotten": chosen})
    done = "deleted" if yes else "would be deleted; add --yes"
    cells = [
        [
            row["job"],
            size_in_words(row["bytes"]),
            f"in use by {row['in_use']}" if row["in_use"] else done if row["forgotten"] else "",
        ]
        for row in rows
    ]
    parts: list[Table | str] = [table(["job", "size", ""], cells)] if rows else []
    if rows and not wanted:
        parts += ["", "Name the jobs to delete, or add --all."]
    screen = stacked(parts or ["No job has checkpoints in memory."])
    print_report({"jobs": rows, "dry_run": not yes}, screen, as_json=as_json, output=output)


def _needed(contents: Contents, *, bits: bool) -> list[Damage]:
    """The damaged ones of the shards that a recovery could need."""
    gate = contents.gate
    held = frozenset() if gate is None else gate.held
    return examine([copy for copy in contents.copies if copy.file.generation in held], bits=bits)


def _verified(contents: Contents, damaged: list[Damage], ledgers: list[str], found: Usable) -> dict[str, Any]:
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
        "unusable": [each.to_json() for each in found.broken],
        "repairable": [each.to_json() for each in found.repairable],
    }


def _verification(contents: Contents, report: dict[str, Any], usable: Usable) -> str:
    lines = [*listing.heading(contents), ""]
    for each in report["damaged"]:
        lines += [f"DAMAGED {each['file']}", *(f"  {problem}" for problem in each["problems"])]
    lines += [f"DAMAGED ledger: {problem}" for problem in report["ledgers"]]
    total = f"{counted(report['files'], 'shard')}, {size_in_words(report['bytes'])}: "
    shards, ledgers = len(report["damaged"]), len(report["ledgers"])
    found = f"{shards} damaged" if shards else "every bit is intact"
    if not report["files"]:
        found = "there is nothing to verify"
    found += f"; {counted(ledgers, 'ledger')} damaged." if ledgers else "."
    if shards:
        lines += [""]
        lines += broken_lines(usable.broken, contents.world_size, files=False)
        lines += repairable_lines(usable.repairable)
    return stacked([*lines, *([""] if lines[-1] else []), total + found])
