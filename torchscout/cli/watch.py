"""`scout watch`: a run as it goes on, in a browser or in the terminal."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.console import interruptible, refusing
from torchscout.cli.status import newest_run
from torchscout.report.live import LiveRun

__all__ = ["watch"]


def watch(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            help="The job's run directory, scout-run-..., which may be missing yet; by default the newest "
            "one in this folder."
        ),
    ] = None,
    tui: Annotated[bool, typer.Option("--tui", help="Show the run in this terminal; q ends.")] = False,
    address: Annotated[
        str, typer.Option(help="Where to listen; any address but a loopback one needs the token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 for any free port.")] = 8642,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TORCHSCOUT_WATCH_TOKEN",
            help="What requests must contain; by default a random one is printed where one is needed.",
        ),
    ] = None,
) -> None:
    """Show a run while it goes on: the views of scout report, on a page that follows the run.

    It only reads the run directory, and listens on this machine only, unless --address says otherwise.
    """
    folder = newest_run(Path.cwd()) if run_dir is None else run_dir
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file; give a run directory", param_hint="RUN_DIR")
    live = LiveRun(folder)
    if tui:
        from torchscout.cli.watch_terminal import show

        show(live)
    else:
        _serve(live, address, port, token)


def _serve(live: LiveRun, address: str, port: int, token: str | None) -> None:
    from torchscout.report.server import ReportServer, is_loopback

    if token is not None and len(token) < 16:
        raise typer.BadParameter("a token has at least 16 characters", param_hint="--token")
    if token is None and not is_loopback(address):
        token = secrets.token_urlsafe(24)
    with refusing("--address or --port", OSError, OverflowError):
        server = ReportServer(live, address, port, token)
    with server, interruptible():
        print(f"{live.run_dir} is on {server.url} until you press Ctrl-C.")
        if not is_loopback(address):
            print("Everybody who has this link can read the records. The connection is not encrypted.")
        sys.stdout.flush()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("Ended.")
