"""Tries contracts on jobs and prints what was seen as a table: ``python -m evaluation.jobs --help``."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch

from evaluation.jobs.catalog import CATALOG, NOT_RUN
from evaluation.jobs.contracts import CONTRACTS, Attempt, ContractError

BEGIN, END = "<!-- jobs -->", "<!-- end of jobs -->"

Found = dict[str, dict[str, dict[str, object]]]
"""By job and contract: whether it held, what was seen in words, the seconds it took."""


def markdown(found: Found) -> str:
    """The table, and below it what was not run."""
    columns = [each for each in CONTRACTS if any(each in of_job for of_job in found.values())]
    lines = ["| job | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, of_job in found.items():
        cells = [str(of_job.get(each, {}).get("words", "not run")) for each in columns]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    absent = {name: f"no {', '.join(each.missing)} here" for name, each in CATALOG.items() if each.missing}
    reasons = "; ".join(f"{name} ({why})" for name, why in (NOT_RUN | absent).items())
    return "\n".join([*lines, "", f"Not run: {reasons}."])


def attempt(name: str, contract: str, asked: argparse.Namespace) -> Mapping[str, object]:
    began, ok = time.monotonic(), True
    # An observer may outlive its rank for a moment, and still write there.
    with tempfile.TemporaryDirectory(prefix="scout-job-", ignore_cleanup_errors=True) as folder:
        job = Attempt(name, Path(folder) / "run", Path(folder) / "plain", asked.backend, asked.steps)
        try:
            words = CONTRACTS[contract](job)
        except ContractError as error:
            ok, words = False, f"**{error.words}**"
            print("     " + str(error).replace("\n", "\n     "), flush=True)
    seconds = round(time.monotonic() - began, 1)
    print(f"{'ok  ' if ok else 'FAIL'} {name} {contract}: {words} ({seconds} s)", flush=True)
    return {"ok": ok, "words": words, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", help=f"all if none is named: {', '.join(CATALOG)}")
    parser.add_argument("--contracts", default=",".join(CONTRACTS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=20, help="of a healthy job")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"], help="nccl on CUDA devices")
    parser.add_argument("--output", type=Path, help="JSON of all results; what it has is not run again")
    parser.add_argument("--only-print", action="store_true", help="the table of what --output has")
    parser.add_argument("--insert", type=Path, help="a Markdown file that gets the table between its marks")
    asked = parser.parse_args()
    found: Found = {}
    if asked.output is not None and asked.output.exists():
        found = json.loads(asked.output.read_text())["found"]
    names = (
        [] if asked.only_print else asked.jobs or [name for name, each in CATALOG.items() if not each.missing]
    )
    for name in names:
        for contract in asked.contracts.split(","):
            if contract not in found.setdefault(name, {}):
                found[name][contract] = dict(attempt(name, contract, asked))
                if asked.output is not None:
                    versions = {"python": platform.python_version(), "torch": torch.__version__}
                    asked.output.write_text(json.dumps({"versions": versions, "found": found}, indent=1))
    print(table := markdown(found))
    if asked.insert is not None:
        insert(asked.insert, table)


def insert(path: Path, table: str) -> None:
    before, _, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{path} has no {BEGIN} and {END}")
    made = f"{date.today()}, Python {platform.python_version()}, torch {torch.__version__}:"
    path.write_text(f"{before}{BEGIN}\n{made}\n\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
