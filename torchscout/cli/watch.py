"""`scout watch`: a run as it goes on, in a browser or in the terminal."""

from __future__ import annotations

import os
import secrets
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchscout.cli.console import interruptible, refusing
from torchscout.cli.status import newest_run
from torchscout.report.live import LiveRun
from torchscout.report.screen import watch_screen

__all__ = ["Window", "watch"]

_POLL_SECONDS = 1.0
_KEYS: dict[str, int | str] = {
    "j": 1, "\x1b[B": 1, "\x1bOB": 1, "k": -1, "\x1b[A": -1, "\x1bOA": -1,
    " ": "page", "\x1b[6~": "page", "b": "-page", "\x1b[5~": "-page",
    "g": "first", "\x1b[H": "first", "\x1b[1~": "first", "G": "last", "\x1b[F": "last", "\x1b[4~": "last",
}  # fmt: skip
_QUIT = {"q", "Q", "\x03", "\x04"}


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
        _show(live)
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


class Window:
    """The lines that fit on the screen, and where the reader is."""

    def __init__(self) -> None:
        self.top = 0

    def press(self, key: str, height: int, count: int) -> None:
        """Move by a key; others do nothing."""
        page = max(1, height - 2)
        move = _KEYS.get(key, 0)
        by = {"page": page, "-page": -page, "first": -count, "last": count}
        self.top += by[move] if isinstance(move, str) else move

    def lines(self, text: str, height: int) -> list[str]:
        """Return the visible lines, and below them where they are."""
        every = text.splitlines()
        room = max(1, height - 1)
        self.top = max(0, min(self.top, len(every) - room))
        shown = every[self.top : self.top + room]
        last = self.top + len(shown)
        where = f"lines {self.top + 1} to {last} of {len(every)}; arrows move, " if len(every) > room else ""
        return [*shown, *[""] * (room - len(shown)), f"{where}q ends"]


def _show(live: LiveRun) -> None:
    """Follow the run until q or Ctrl-C; if the output is no terminal, print it once."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        print(watch_screen(live.document()))
        return
    window, next_look, document = Window(), 0.0, live.document()
    try:
        with (
            interruptible(),
            _keys() as has_keys,
            Live(console=console, screen=True, auto_refresh=False) as screen,
        ):
            while True:
                if time.monotonic() >= next_look:
                    document, next_look = live.document(), time.monotonic() + _POLL_SECONDS
                width, height = console.size
                text = watch_screen(document, width)
                lines = window.lines(text, height)
                screen.update(Text("\n", no_wrap=True).join(map(_styled, lines)), refresh=True)
                key = _key(next_look - time.monotonic(), has_keys)
                if key in _QUIT:
                    return
                window.press(key, height, text.count("\n") + 1)
    except KeyboardInterrupt:
        return


def _styled(line: str) -> Text:
    head, colon, _ = line.partition(":")
    is_heading = head.isupper() and not line.startswith(" ")
    text = Text(line)
    if is_heading:
        text.stylize("bold", 0, len(head) + len(colon))
    if ", OPEN: " in line:
        text.stylize("bold red")
    return text


@contextmanager
def _keys() -> Iterator[bool]:
    """Let single keys arrive at once, without being shown; yields False if the input is no terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield True
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _key(seconds: float, has_keys: bool) -> str:
    """Wait for a key; empty if none was pressed in time."""
    if not has_keys:
        time.sleep(max(0.0, seconds))
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
    return os.read(sys.stdin.fileno(), 8).decode(errors="replace") if ready else ""
