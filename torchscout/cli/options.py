"""A command's options as one frozen dataclass, and what holds of the options of every command."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from typer.models import OptionInfo

from torchscout.cli.paths import refuse_unwritable

__all__ = ["checked", "repeated", "taking"]

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
