"""`scout hosts`: the machines that a job must not use, for launchers other than torchrun."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchscout.cli.console import AsJson, Output, print_report, refusing, write_file
from torchscout.decision.types import Action, Decision, Failure
from torchscout.errors import RestartPlanError
from torchscout.run.folder import RUNS_FILE
from torchscout.run.reader import Run, is_run, runs_of
from torchscout.run.restart import RestartPlan, is_same
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
    """List the machines that the recovery policy decided to replace, unless a later run has finished on them.

    The exit status is 0 if there are none, 3 if there are some, and 4 if the policy stopped the job, which
    should not be started again before a person has looked. With --json, it says which restart plan or run
    directory excludes a machine.
    """
    with refusing("DIR", OSError, RestartPlanError):
        report = examined(folder)
    names = _SEPARATOR[list_format].join(report["excluded"])
    if exclude_file is not None:
        write_file(exclude_file, names + "\n" * bool(names))
    print_report(report, names, as_json=as_json, output=output)
    if report["stopped"] is not None:
        typer.echo(f"The job was stopped, as {report['stopped_by']} says: {report['stopped']}", err=True)
    raise typer.Exit(report["exit_status"])


class Advice(NamedTuple):
    """A decision, and where it stands."""

    decision: Decision
    by: Path
    """A restart plan or a run directory."""
    run: Run | None
    """The run in which it was made; None if that is not known."""
    time: float
    """When it was made; infinity if that is not known."""

    def holds(self, finished: Iterable[Run], host: str | None = None) -> bool:
        """Return whether no later success disproves it, on this machine if one is given.

        A run that went on after wrong numbers, or with a slow machine, and finished, disproves nothing.
        """
        goes_on = self.decision.failure in (Failure.SDC, Failure.STRAGGLER)
        later = (each for each in finished if each.began > self.time or (each is self.run and not goes_on))
        return not any(host is None or any(entry.host == host for entry in each.entries) for each in later)


def examined(folder: Path) -> dict[str, Any]:
    """The report on a run directory or on the folder of a restart plan; ``ValueError`` if it is neither."""
    plan, path = RestartPlan.read(folder), RestartPlan.path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not (is_run(folder) or path.exists() or (folder / RUNS_FILE).exists()):
        missing = f"it has no incidents/, records/ or ranks/, no {RUNS_FILE} and no {path.name}"
        raise ValueError(f"{folder} is neither a run directory nor a folder of checkpoints: {missing}")
    own, *others = runs = [*map(Run, (folder, *runs_of(folder)))]
    for run in runs:
        run.read_events()
    # Also those of a dry run: then the launcher carries them out. The plan has the others.
    logged = [
        Advice(decision, run.run_dir, run, time)
        for run in (*others, own)
        for time, decision in run.decisions
        if run is own or not decision.is_carried_out
    ]
    planned = [_of_plan(each, plan, path, runs) for each in plan.restarts]
    for run in runs if planned or logged else [own]:  # reading the ranks of a large job takes long
        run.read_ranks()
    if unread := next((run.unread for run in runs if run.unread), ""):
        raise ValueError(unread)
    finished = [run for run in runs if run.has_finished]
    replaced = (each.decision.hosts for each in planned if each.decision.action is Action.REPLACE)
    decided = set(chain.from_iterable(replaced))
    excluded = {host: (why, path) for host, why in plan.reasons().items() if host not in decided}
    preflight, last = dict[str, str](), None
    for each in (*planned, *logged):
        hosts = [host for host in each.decision.hosts if is_host_name(host) and each.holds(finished, host)]
        if each.decision.action is Action.REPLACE:
            excluded |= dict.fromkeys(hosts, (each.decision.sentence, each.by))
        elif each.decision.action is Action.PREFLIGHT and each in (*planned[-1:], *logged[-1:]):
            preflight |= dict.fromkeys(hosts, each.decision.sentence)
        elif each.decision.action is Action.STOP and each.holds(finished):
            last = each
    return {
        "folder": str(folder),
        "excluded": {host: why for host, (why, _) in excluded.items()},
        "excluded_by": {host: str(by) for host, (_, by) in excluded.items()},
        "preflight": preflight,
        "stopped": None if last is None else last.decision.sentence,
        "stopped_by": None if last is None else str(last.by),
        "used": sorted({entry.host for entry in own.entries}),
        "devices": {
            entry.rank: entry.device for entry in own.entries if entry.host in excluded and entry.device
        },
        "exit_status": STOPPED if last is not None else SOME if excluded else NONE,
    }


def _of_plan(decision: Decision, plan: RestartPlan, path: Path, runs: Iterable[Run]) -> Advice:
    """A decision in a plan, with its time, which only the directory of its run has; without the machines that
    a person has removed from the plan."""
    made = [(run, time) for run in runs for time, each in run.decisions if is_same(each, decision)]
    run, time = max(made, key=lambda each: each[1], default=(None, math.inf))
    if decision.action is Action.REPLACE:
        decision = replace(decision, hosts=tuple(host for host in decision.hosts if host in plan.excluded))
    return Advice(decision, path, run, time)
