"""Files and folders that a user names, tried before any work is done for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

__all__ = ["made_folder", "refuse_unwritable"]


def refuse_unwritable(path: Path, option: str) -> None:
    """``typer.BadParameter`` if a file cannot be written there. What is in the file stays."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, and a file is needed", param_hint=option)
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint=option)
    existed = path.exists()
    if existed and not path.is_file():  # a pipe or a device: whoever reads it would see an end
        return
    try:
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written: {error.strerror or error}", param_hint=option
        ) from error


def made_folder(path: Path, option: str) -> Path:
    """The absolute path of a folder that exists and can be written; ``typer.BadParameter`` otherwise."""
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file, and a folder is needed", param_hint=option)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"nothing can be written to {path}: {error.strerror or error}", param_hint=option
        ) from error
    return path.absolute()
