"""``scout checkpoint export``: writes one generation in the format of other tools."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.checkpoint.export.target import refuse_occupied
from torchscout.checkpoint.gate import CheckpointGate, Generation
from torchscout.checkpoint.resume.plan import Source
from torchscout.cli.checkpoint.contents import Contents, Folders, JobName, WorldSize, contents_in
from torchscout.cli.checkpoint.listing import as_json
from torchscout.cli.console import AsJson, Output, exiting, print_report, refusing
from torchscout.errors import CheckpointError
from torchscout.utils.tables import stacked
from torchscout.utils.text import counted, listed, ranks_in_words, size_in_words

__all__ = ["ExportOptions", "chosen_generation", "export", "files_of", "trust_of"]

_FORMATS = ("dcp", "safetensors")
_MEANINGS = {
    "verified": "replay evidence supports its numbers",
    "candidate": "a complete cycle of checks, or more of one, was not accepted after it yet",
    "latest": "nothing is known about its numbers",
    "none": "no ledger names it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    folders: Folders
    to: Annotated[str, typer.Option("--to", metavar="|".join(_FORMATS), help="The format.")]
    target: Annotated[Path, typer.Option("-o", "--into", metavar="DIR", help="The folder to write.")]
    step: Annotated[
        int | None, typer.Option("--generation", metavar="STEP", help="Export the one after this step.")
    ] = None
    verified: Annotated[
        bool, typer.Option("--verified", help="Export the newest verified one; the default.")
    ] = False
    latest: Annotated[bool, typer.Option("--latest", help="Export the newest one, verified or not.")] = False
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Add the optimizers' state to safetensors; dcp always has it.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that is not empty.")] = False
    job: JobName = None
    world_size: WorldSize = None
    as_json: AsJson = False
    output: Output = None


def export(options: ExportOptions) -> None:
    """Write a generation for other tools: for torch.distributed.checkpoint (DCP), or as safetensors.

    Needs no ranks. Verifies every tensor while reading it, and writes a new folder, or nothing.
    """
    if options.to not in _FORMATS:
        raise typer.BadParameter(f"must be {' or '.join(_FORMATS)}, got {options.to!r}", param_hint="--to")
    if sum([options.step is not None, options.verified, options.latest]) > 1:
        raise typer.BadParameter("choose one of --generation, --verified and --latest")
    contents = contents_in(options.folders, options.job, options.world_size)
    with refusing("-o", CheckpointError, OSError):
        refuse_occupied(options.target.absolute(), force=options.force)
    known = [each.step for each in contents.generations]
    if options.step is not None and options.step not in known:
        problem = (
            f"there is no generation of step {options.step} here, only of {listed(map(str, known), most=8)}"
        )
        raise typer.BadParameter(problem, param_hint="--generation")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # it keeps a file of each rank open, for which this may be enough
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with exiting(ValueError, CheckpointError, OSError):
        report, generation = _newest_exported(options, contents)
    print_report(report, _screen(report, generation), as_json=options.as_json, output=options.output)


def chosen_generation(contents: Contents, step: int | None, *, latest: bool) -> Generation:
    """The generation to export; raises ``ValueError`` if there is none, or if it is not complete."""
    gate = contents.gate or CheckpointGate()
    chosen = gate.latest if latest else gate.verified
    if step is not None:
        found = [each for each in contents.generations if each.step == step]
        chosen = max(found, key=lambda each: each.lineage, default=None)
    if chosen is None:
        known = listed(map(str, contents.generations), most=8) or "none"
        what = (
            f"of step {step}" if step is not None else "that is the latest" if latest else "that is verified"
        )
        hint = "" if step is not None or latest else ". Choose another one with --latest or --generation"
        raise ValueError(f"there is no generation {what} here, only: {known}{hint}")
    if missing := contents.missing(chosen):
        whose = ranks_in_words(missing, contents.world_size)
        problems = [
            f"; {each.file.path}: {each.problem}"
            for each in contents.copies
            if each.file.generation == chosen and each.problem and each.file.rank in missing
        ]
        raise ValueError(
            f"{chosen} is not complete: there is no intact shard of {whose} here{''.join(problems)}"
        )
    return chosen


def trust_of(generation: Generation, gate: CheckpointGate | None) -> str:
    """``verified``, ``candidate``, ``latest``, or ``none`` without a role in the ledgers."""
    if gate is None:
        return "none"
    if generation in gate.trusted:
        return "verified"
    if generation in (gate.candidate, gate.interim):
        return "candidate"
    return "latest" if generation in gate.sealed else "none"


def files_of(contents: Contents, generation: Generation) -> dict[int, list[Path]]:
    """The copies of each rank's shard, in the order in which a rank would read them."""
    copies = [each for each in contents.copies if each.file.generation == generation and not each.problem]
    copies.sort(key=lambda each: Source(each.file.rank, each.tier, each.file.holder).cost(each.file.rank))
    return {
        rank: [each.file.path for each in copies if each.file.rank == rank]
        for rank in range(contents.world_size)
    }


def _newest_exported(
    options: ExportOptions, contents: Contents, attempts: int = 5
) -> tuple[dict[str, Any], Generation]:
    """Choose a generation and export it; choose again if a running job has deleted it meanwhile."""
    try:
        generation = chosen_generation(contents, options.step, latest=options.latest)
        return _exported(options, contents, generation), generation
    except (ValueError, CheckpointError) as error:
        now = contents_in(options.folders, options.job, options.world_size)
        if now == contents:
            raise
        if not attempts:
            again = "a job changes these folders while they are read; run it again"
            raise CheckpointError(f"{again} ({error})") from error
    return _newest_exported(options, now, attempts - 1)


def _exported(options: ExportOptions, contents: Contents, generation: Generation) -> dict[str, Any]:
    from torchscout.checkpoint.export.export import Format, export  # imports torch

    trust = trust_of(generation, contents.gate)
    origin = {"job": contents.job, **as_json(generation), "trust": trust, "world_size": contents.world_size}
    done = export(
        files_of(contents, generation),
        options.target.absolute(),
        Format(options.to),
        optimizer=options.optimizer,
        force=options.force,
        origin=origin,
    )
    return {**origin, "format": options.to, "folder": str(options.target.absolute()), **asdict(done)}


def _screen(report: dict[str, Any], generation: Generation) -> str:
    size = f"{counted(report['tensors'], 'tensor')}, {size_in_words(report['bytes'])}"
    trust = report["trust"]
    lines = [
        f"{generation} of job {report['job']} is in {report['folder']}, as {report['format']}: {size}.",
        f"Trust level: {trust} ({_MEANINGS[trust]}).",
        *(f"Note: {each}." for each in report["notes"]),
        *(f"Not included: {each}." for each in report["left_out"]),
    ]
    return stacked(lines)
