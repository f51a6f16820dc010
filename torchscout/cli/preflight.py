"""``scout preflight``: starts a preflight with the user's launcher, and shows its report."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.console import AsJson, Output, interruptible, made_folder, print_report, write_file

__all__ = ["preflight"]

_STANDARD_ERROR = 2
_UNDECIDED = 2


def preflight(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The launcher with its options, without a script: -- torchrun --nproc-per-node=8.",
        ),
    ],
    seconds: Annotated[float, typer.Option(min=1, help="How long to repeat the work.")] = 120.0,
    run_dir: Annotated[Path | None, typer.Option(help="A folder for the evidence.")] = None,
    as_json: AsJson = False,
    output: Output = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the tables to a file.")] = None,
) -> None:
    """Test the devices, machines and links of a job before it starts.

    The exit status is 0 if nothing was found, 1 if a rank, machine or link is named, and 2 if nothing could
    be decided.
    """
    evidence = None if run_dir is None else made_folder(run_dir, "--run-dir")
    with tempfile.TemporaryDirectory(prefix="scout-preflight-") as folder:
        report = Path(folder) / "report.json"
        wanted = ["-m", "torchscout.preflight", "--quiet", f"--seconds={seconds}", f"--output={report}"]
        wanted += [] if evidence is None else [f"--run-dir={evidence.absolute()}"]
        status = _run([*command, *wanted])
        if not report.exists():
            typer.echo(
                f"Error: {command[0]} ended with status {status}, and there is no report. Give the launcher "
                "with its options and without a script, such as: scout preflight -- torchrun "
                "--nproc-per-node=8",
                err=True,
            )
            raise typer.Exit(_UNDECIDED)
        found = json.loads(report.read_text())

    from torchscout.preflight.page import html_page, page

    if html is not None:
        write_file(html, html_page(found))
    print_report(found, page(found), as_json=as_json, output=output)
    raise typer.Exit(found["exit_code"])


def _run(command: list[str]) -> int:
    """Run the launcher, whose output goes to standard error, and return its exit status."""
    try:
        launcher = subprocess.Popen(command, stdout=_STANDARD_ERROR)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot run {command[0]}: {error.strerror}", param_hint="COMMAND"
        ) from error
    try:
        with interruptible():
            return launcher.wait()
    except KeyboardInterrupt:
        launcher.terminate()
        launcher.wait()
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(130) from None
