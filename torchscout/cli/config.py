"""`scout config`: writes the settings of `scout run` with explanations, and checks such a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.console import AsJson, Output, print_report, refusing
from torchscout.launch.settings import Settings, overridden, read_document
from torchscout.launch.template import document_of, template

__all__ = ["config", "read_settings"]


def config(
    check: Annotated[
        Path | None, typer.Option("--check", help="Check this file instead, and show the settings in effect.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Print a scout.toml with all settings of scout run, their defaults and explanations.

    scout config > scout.toml writes it to a file. With --check, --json or --output it shows the settings in
    effect: those of the file, if one is given, and of environment variables.
    """
    settings = read_settings(check, "--check")
    report = {"file": None if check is None else str(check), "settings": document_of(settings)}
    print_report(
        report, template() if check is None else _screen(check, settings), as_json=as_json, output=output
    )


def read_settings(path: Path | None, option: str) -> Settings:
    """Return the settings of a file and of environment variables; refuses invalid ones."""
    with refusing(option):
        document = {} if path is None else read_document(path)
        where = "" if path is None else f"{path}: "
        try:
            return Settings.from_document(overridden(document, os.environ), Path.cwd())
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error


def _screen(path: Path, settings: Settings) -> str:
    """The settings that differ from the defaults."""
    given, usual = _flat(document_of(settings)), _flat(document_of(Settings()))
    changed = [f"  {key} = {value}" for key, value in given.items() if usual.get(key) != value]
    which = "Settings other than the defaults:" if changed else "All settings have their defaults."
    return "\n".join([f"{path} is valid. {which}", *changed])


def _flat(document: dict[str, object], path: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in document.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found
