"""What benchmarks share: their options, where figures were measured, and how a report is printed."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def parser_of(about: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with ``--json`` and ``--output``, and with ``--part`` if there are parts."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    if choices := [*parts]:
        parser.add_argument("--part", action="append", choices=choices, help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--output", type=Path, help="write the JSON document to this file")
    return parser


def environment(*packages: str, on_cuda: bool = False) -> dict[str, Any]:
    """Return when and on what this runs, with the versions of Python and these packages."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": _accelerator() if on_cuda else _processor(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def heading(report: dict[str, Any], *more: str) -> str:
    """Return the first line of a table: what ``environment`` has found."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "; ".join([report["device"], versions, report["date"], *more])


def publish(
    report: dict[str, Any], table: Callable[[dict[str, Any]], str], options: argparse.Namespace
) -> None:
    """Write the report to the file of ``--output``, and print it as JSON or as a table."""
    document = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(document + "\n")
    print(document if options.json else table(report))


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
