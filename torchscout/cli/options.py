"""A command's options as one frozen dataclass: each field a typer option, explained where it stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

__all__ = ["taking"]

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
