"""Draws docs/images/demo.svg from what `scout demo` prints: `python tools/demo_picture.py [OUTPUT]`.

Without an argument it runs the demo, which takes about a minute; OUTPUT is a file with what it printed.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
_COLUMNS = 96
_STYLES = {"reported": "bold red", "stopped": "yellow", "resumed": "bold cyan", "step": "dim"}
_ENDS = ("Restarting", "Repeating", "Exactly", "The job ended")
_THEME = TerminalTheme(
    (24, 28, 34),
    (222, 226, 232),
    [(24, 28, 34), (255, 128, 118), (126, 211, 136), (240, 198, 116), *[(122, 184, 245)] * 2, (94, 212, 212)],
    [(130, 138, 150)] * 8,
)


def main(arguments: list[str]) -> None:
    printed = Path(arguments[0]).read_text() if arguments else _run_demo()
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(printed))


def _run_demo() -> str:
    command = [sys.executable, "-m", "torchscout", "demo"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def picture(printed: str) -> str:
    """The lines that tell what happened, as SVG; the tables of evidence are left out."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ scout demo", style="bold"))
    for line in printed.splitlines():
        word, rest = line.split(" ", 1)[0], line[11:]
        if line.startswith(_ENDS):
            console.print(Text(line, style="green" if line.startswith(_ENDS[2:]) else ""))
        elif word == "step":
            console.print(Text(line, style=_STYLES[word]))
        elif word in _STYLES and not rest.startswith("after step"):
            for place, part in enumerate(Text(rest).wrap(console, _COLUMNS - 11)):
                head = f"{word:<11}" if place == 0 else " " * 11
                console.print(Text.assemble((head, _STYLES[word]), part))
    svg = console.export_svg(title="scout demo", theme=_THEME, unique_id="demo")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts from a server


if __name__ == "__main__":
    main(sys.argv[1:])
