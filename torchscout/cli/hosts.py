"""`scout hosts`: the machines that a job must not use, for launchers other than torchrun."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.cli.console import AsJson, Output, print_report, refusing, write_file
from torchscout.decision.types import Action
from torchscout.errors import RestartPlanError
from torchscout.run.folder import read_roster
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan
from torchscout.utils.identity import is_host_name

__all__ = ["hosts"]

NONE, SOME, STOPPED = 0, 3, 4
"""Exit statuses. A file that cannot be written is 1, and wrong options are 2, as for every command."""


class Format(str, Enum):
    plain = "plain"
    slurm = "slurm"


_SEPARATOR = {Format.plain: "\n", Format.slurm: ","}


def hosts(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The job's run directory, or the folder of its checkpoints, which has its restart plan.",
        ),
    ],
    exclude_file: Annotated[Path | None, typer.Option(help="Write the list to a file as well.")] = None,
    list_format: Annotated[
        Format, typer.Option("--format", help="plain: one name in each line. slurm: as --exclude takes it.")
    ] = Format.plain,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """List the machines that the recovery policy decided to replace.

    The exit status is 0 if there are none, 3 if there are some, and 4 if the policy stopped the job, which
    should not be started again before a person has looked.
    """
    with refusing("DIR", OSError, RestartPlanError):
        report = examined(folder)
    names = _SEPARATOR[list_format].join(report["excluded"])
    if exclude_file is not None:
        write_file(exclude_file, names + "\n" * bool(names))
    print_report(report, names, as_json=as_json, output=output)
    raise typer.Exit(report["exit_status"])


def examined(folder: Path) -> dict[str, Any]:
    """The report on a run directory or on the folder of a restart plan; ``ValueError`` if it is neither."""
    plan, entries = RestartPlan.read(folder), read_roster(folder)
    if not entries and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    excluded, decisions = plan.reasons(), IncidentLog.read(folder).decisions
    newest = [*plan.restarts[-1:], *decisions[-1:]]
    last = next((each for each in plan.restarts if each.action is Action.STOP), None)
    for decision in decisions:
        # Also of a dry run: then the launcher carries the decisions out.
        if decision.action is Action.REPLACE:
            excluded |= dict.fromkeys(filter(is_host_name, decision.hosts), decision.sentence)
        last = decision if decision.action is Action.STOP else last
    return {
        "folder": str(folder),
        "excluded": excluded,
        "preflight": {
            host: each.sentence
            for each in newest
            if each.action is Action.PREFLIGHT
            for host in filter(is_host_name, each.hosts)
        },
        "stopped": None if last is None else last.sentence,
        "used": sorted({entry.host for entry in entries}),
        "devices": {entry.rank: entry.device for entry in entries if entry.host in excluded and entry.device},
        "exit_status": STOPPED if last is not None else SOME if excluded else NONE,
    }
