"""`scout status`: the state of a job, from its run directory and the progress records of this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.cli.console import AsJson, Output, print_report, refusing
from torchscout.report.document import examined
from torchscout.report.screen import status_screen

__all__ = ["RunDir", "newest_run", "status"]

_WATCH_SECONDS = 2.0
_CLEAR = "\033[2J\033[H"
RunDir = Annotated[
    Path | None,
    typer.Argument(help="The job's run directory, scout-run-...; by default the newest one in this folder."),
]


def status(
    run_dir: RunDir = None,
    as_json: AsJson = False,
    output: Output = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every 2 seconds until the job ends.")
    ] = False,
) -> None:
    """Show the incidents of a job, and whether it is running, finished, interrupted, failed or killed.

    The exit status is 0 if the job is healthy, 1 if incidents are open or a rank failed or was killed, and 2
    if that is unknown. ``scout watch`` shows more, and follows the job.
    """
    if watch and (as_json or output is not None):
        raise typer.BadParameter("--watch cannot be combined with --json or --output")
    folder = newest_run(Path.cwd()) if run_dir is None else run_dir
    report = _examined(folder)
    while watch and report["state"] in {"running", "unknown"}:
        print(_CLEAR * sys.stdout.isatty() + status_screen(report), flush=True)
        time.sleep(_WATCH_SECONDS)
        report = _examined(folder)
    shown = _CLEAR * (watch and sys.stdout.isatty()) + status_screen(report)
    print_report(report, shown, as_json=as_json, output=output)
    raise typer.Exit(report["exit_status"])


def newest_run(folder: Path) -> Path:
    """The run directory in this folder whose job was attached last."""
    found = [each for each in folder.iterdir() if (each / "ranks").is_dir()]
    if not found:
        raise typer.BadParameter(
            f"{folder} contains no run directory; give one, or change to the folder the job was started in",
            param_hint="RUN_DIR",
        )
    return max(found, key=lambda each: (each / "ranks").stat().st_mtime)


def _examined(run_dir: Path) -> dict[str, Any]:
    with refusing("RUN_DIR"):  # another user's run, or a damaged one
        return examined(run_dir)
