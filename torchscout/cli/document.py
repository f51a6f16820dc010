"""How every command answers: a screen for a person, or one JSON document for a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

__all__ = ["as_document", "written"]


def as_document(report: dict[str, Any], screen: str, *, as_json: bool, output: Path | None) -> None:
    """Print the screen, or with ``--json`` the document; with ``--output`` a file gets the document too."""
    document = json.dumps(report, indent=2)
    print(document if as_json else screen)
    if output is not None:
        written(output, document + "\n")


def written(path: Path, text: str) -> None:
    """Write a file; if that fails, such as on a full disk, say so and end with exit status 1."""
    try:
        path.write_text(text)
    except OSError as error:
        typer.echo(f"Error: {path} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(1) from error
