"""What commands share: options, paths, JSON and tables, and what happens at Ctrl-C."""

from __future__ import annotations

import inspect
import json
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

__all__ = [
    "as_document",
    "checked",
    "interruptible",
    "made_folder",
    "refuse_unwritable",
    "repeated",
    "taking",
    "written",
]


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


_Options = TypeVar("_Options")


def taking(options: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Let typer see the fields of ``options`` as a command's own parameters; the command gets one object."""

    def decorate(command: Callable[[_Options], None]) -> Callable[..., None]:
        def run(**told: Any) -> None:
            command(options(**told))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = _signature(options)  # type: ignore[attr-defined]
        return run

    return decorate


def checked(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, which is refused before it begins if a file that it is to write cannot be written."""

    @wraps(command)
    def run(**given: Any) -> None:
        for name in ("output", "html"):
            if given.get(name) is not None:
                refuse_unwritable(given[name], f"--{name}")
        command(**given)

    return run


def repeated(options: Any) -> str:
    """The options that differ from their defaults, as they are given on a command line."""
    told: list[str] = []
    for field, parameter in zip(fields(options), _signature(type(options)).parameters.values(), strict=True):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        declared = next(each for each in parameter.annotation.__metadata__ if isinstance(each, OptionInfo))
        # Inside of Annotated the first name stands where a default would.
        names = [name for name in (declared.default, *(declared.param_decls or ())) if isinstance(name, str)]
        told.append(names[0] if names else f"--{field.name.replace('_', '-')}")
        if value is not True:
            told.append(str(value))
    return shlex.join(told)


def _signature(options: type) -> inspect.Signature:
    hints = get_type_hints(options, include_extras=True)
    return inspect.Signature(
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(options)
        ]
    )


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


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that it can clear up, once."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # an impatient second one would leave something behind
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
