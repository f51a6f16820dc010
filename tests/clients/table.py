"""Runs clients and prints what was found as a table: ``python -m tests.clients.table --help``."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from tests.clients.catalog import CLIENTS, NOT_RUN
from tests.clients.rows import ROWS, Result, run

BEGIN, END = "<!-- clients -->", "<!-- end of clients -->"

Found = Mapping[str, Mapping[str, Mapping[str, object]]]
"""By client and row, the fields of its ``Result``."""


def markdown(found: Found) -> str:
    """The table, and below it what was not run."""
    rows = [row for row in ROWS if any(row in of_client for of_client in found.values())]
    lines = ["| client | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name, of_client in found.items():
        cells = [str(of_client.get(row, {}).get("words", "not run")) for row in rows]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    absent = {
        name: f"no {', '.join(client.missing)} here" for name, client in CLIENTS.items() if client.missing
    }
    lines += [
        "",
        "Not run: " + "; ".join(f"{name} ({why})" for name, why in (NOT_RUN | absent).items()) + ".",
    ]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help=f"all if none is named: {', '.join(CLIENTS)}")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=60, help="of the healthy row")
    parser.add_argument("--output", type=Path, help="JSON of all results; what it has is not run again")
    parser.add_argument("--only-print", action="store_true", help="the table of what --output has")
    parser.add_argument("--insert", type=Path, help="a Markdown file that gets the table between its marks")
    return parser.parse_args()


def main() -> None:
    asked = _arguments()
    found: dict[str, dict[str, dict[str, object]]] = {}
    if asked.output is not None and asked.output.exists():
        found = json.loads(asked.output.read_text())["found"]
    for name in [] if asked.only_print else asked.clients or CLIENTS:
        if CLIENTS[name].missing:
            continue
        for row in asked.rows.split(","):
            if row in found.get(name, {}):
                continue
            result = run(row, name, asked.steps)
            found.setdefault(name, {})[row] = asdict(result)
            _say(name, row, result)
            if asked.output is not None:
                _write(asked.output, found)
    table = markdown(found)
    print(table)
    if asked.insert is not None:
        _insert(asked.insert, table)


def _say(name: str, row: str, result: Result) -> None:
    print(f"{'ok  ' if result.ok else 'FAIL'} {name} {row}: {result.words} ({result.seconds} s)", flush=True)
    if result.details and not result.ok:
        print("     " + result.details.replace("\n", "\n     "), flush=True)


def _insert(path: Path, table: str) -> None:
    before, _, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{path} has no {BEGIN} and {END}")
    made = f"{date.today()}, Python {platform.python_version()}, torch {torch.__version__}:"
    path.write_text(f"{before}{BEGIN}\n{made}\n\n{table}\n{END}{after}")


def _write(path: Path, found: Found) -> None:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    path.write_text(json.dumps({"versions": versions, "found": found}, indent=1))


if __name__ == "__main__":
    main()
