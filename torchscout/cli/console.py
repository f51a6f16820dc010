"""What commands share: options, errors, JSON output, and interruption."""

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
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

__all__ = [
    "AsJson",
    "Output",
    "checked",
    "exiting",
    "interruptible",
    "made_folder",
    "print_report",
    "refusing",
    "repeated",
    "taking",
    "write_file",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Output = Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")]


@contextmanager
def refusing(option: str, *errors: type[Exception]) -> Iterator[None]:
    """Report a ``ValueError``, or one of ``errors``, as a wrong value of ``option``."""
    kinds: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextmanager
def exiting(*errors: type[Exception]) -> Iterator[None]:
    """Print one of ``errors`` to standard error and exit with status 1."""
    try:
        yield
    except errors as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _refuse_unwritable(path: Path) -> None:
    """Raise ``ValueError`` if the file cannot be written. Its contents stay."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")
    existed = path.exists()
    if existed and not path.is_file():  # a pipe or a device, whose reader would see an end of file
        return
    try:
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def made_folder(path: Path, option: str) -> Path:
    """Create a folder if needed, and return its absolute path. Refuses one that cannot be written."""
    with refusing(option):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; give a folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to {path}: {error.strerror or error}") from error
    return path.absolute()


_Options = TypeVar("_Options")


def taking(options: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Make the fields of ``options`` the parameters of a command, which is called with one object."""

    def decorate(command: Callable[[_Options], None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(options(**given))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = _signature(options)  # type: ignore[attr-defined]
        return run

    return decorate


def checked(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, which first refuses output files that cannot be written."""

    @wraps(command)
    def run(**given: Any) -> None:
        for name in ("output", "html", "exclude_file"):
            if given.get(name) is not None:
                with refusing(f"--{name.replace('_', '-')}"):
                    _refuse_unwritable(given[name])
        command(**given)

    return run


def repeated(options: Any) -> str:
    """The options that differ from their defaults, as on a command line."""
    words: list[str] = []
    for field, parameter in zip(fields(options), _signature(type(options)).parameters.values(), strict=True):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        declared = next(each for each in parameter.annotation.__metadata__ if isinstance(each, OptionInfo))
        # Inside Annotated, the first name takes the place of a default.
        names = [name for name in (declared.default, *(declared.param_decls or ())) if isinstance(name, str)]
        words.append(names[0] if names else f"--{field.name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return shlex.join(words)


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


def print_report(report: dict[str, Any], screen: str, *, as_json: bool, output: Path | None) -> None:
    """Print the screen, or the document with ``--json``; ``--output`` writes the document to a file too."""
    document = json.dumps(report, indent=2)
    print(document if as_json else screen)
    if output is not None:
        write_file(output, document + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a file. Exits with status 1 if that fails, such as on a full disk."""
    try:
        path.write_text(text)
    except OSError as error:
        typer.echo(f"Error: cannot write {path}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``KeyboardInterrupt`` like Ctrl-C, once, so that a command cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleaning up
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
