"""`scout report`: a run directory as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.console import AsJson, write_file
from torchscout.cli.status import RunDir, newest_run
from torchscout.report.document import documented
from torchscout.report.page import page
from torchscout.run.reader import is_run

__all__ = ["report"]


def report(
    run_dir: RunDir = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page, report.html by default; with --json that document."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what happened in a run, and the evidence for it, as one HTML page that needs no network.

    The page has stacks and host names: share it as you would share a log.
    """
    folder = newest_run(Path.cwd()) if run_dir is None else run_dir
    if not is_run(folder):
        problem = f"{folder} is not a run directory: it has no incidents/, records/ or ranks/"
        raise typer.BadParameter(problem, param_hint="RUN_DIR")
    document = documented(folder)
    if as_json:
        text = json.dumps(document, indent=2)
        print(text)
        if output is not None:
            write_file(output, text + "\n")
        return
    write_file(target := output or Path("report.html"), page(document))
    print(f"{document['sentence']}\nThe report is in {target}.")
    for problem in document["problems"][:3]:
        typer.echo(f"Not readable: {problem}", err=True)
