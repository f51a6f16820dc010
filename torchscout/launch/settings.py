"""The settings of ``scout.toml``: read, checked, and overridden by environment variables.

Nothing of a file is executed. ``Settings.from_document`` is pure: it takes what a TOML file contains, and
refuses what it does not know with one sentence.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torchscout.config import (
    CheckpointConfig,
    MetricsConfig,
    ObserverConfig,
    Parallelism,
    RecoveryConfig,
    ReplayConfig,
)
from torchscout.run.notify import host_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ENABLED", "VARIABLE", "Settings", "class_of", "overridden", "read_document", "variables"]

VARIABLE = "TORCHSCOUT_SETTINGS"
"""The environment variable in which ``scout run`` passes the settings to the workers, as JSON."""
ENABLED = "enabled"
"""The key that switches a section on or off."""
_PREFIX = "TORCHSCOUT"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of ``scout run``."""

    run_dir: str | None = None
    """The folder for incidents and records; by default a new folder scout-run-... where scout run was
    started."""
    attach_seconds: float = 30.0
    """How long ranks wait for each other before torchscout is attached. If one does not come, because it was
    not started by scout run or never reaches an optimizer step, all ranks continue without."""
    webhook: str | None = None
    """The URL to which each incident is posted as JSON, with a text for Slack."""
    replay: ReplayConfig | None = ReplayConfig()  # noqa: RUF009  frozen
    observer: ObserverConfig | None = ObserverConfig()  # noqa: RUF009
    checkpoint: CheckpointConfig | None = None
    recovery: RecoveryConfig = RecoveryConfig()  # noqa: RUF009
    parallelism: Parallelism | None = None
    metrics: MetricsConfig | None = None

    def __post_init__(self) -> None:
        if not 0 < self.attach_seconds < math.inf:
            raise ValueError(f"attach_seconds must be positive and finite, got {self.attach_seconds}")
        if self.webhook is not None:
            host_of(self.webhook)

    @classmethod
    def from_document(cls, document: Mapping[str, Any], base: Path | None = None) -> Settings:
        """Check what a file contains. Relative paths begin at ``base``.

        Raises ``ValueError`` that names the key and the value.
        """
        return cls(**_values(cls, document, "", base))


def read_document(path: Path) -> dict[str, Any]:
    """Return what a TOML file contains; raises ``ValueError`` for one that cannot be read."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} is larger than {_MAX_BYTES} bytes, so it is no settings file")
        document: dict[str, Any] = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged or no TOML file: {error}; correct it, or write a new one with scout config"
        ) from error
    return document


def variables() -> dict[str, tuple[str, ...]]:
    """Return the environment variables that override settings, with the keys of each."""
    return {"_".join((_PREFIX, *keys)).upper(): keys for keys in _keys(Settings, ())}


def overridden(document: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the document with the settings that environment variables override.

    Raises ``ValueError`` for a variable that begins like that of a setting and is none.
    """
    known, found = variables(), _copied(document)
    sections = tuple(
        f"{_PREFIX}_{name.upper()}_" for name, kind in _hints(Settings).items() if class_of(kind)
    )
    for name in sorted(environment):
        if name in known:
            *path, key = known[name]
            table = found
            for section in path:
                table = table.setdefault(section, {})
                if not isinstance(table, dict):
                    raise ValueError(f"{name} is set, but the file's {section} is no section: {table!r}")
            table[key] = _parsed(environment[name], name, known[name])
        elif name.startswith(sections):
            raise ValueError(
                f"the environment variable {name} is no setting; scout config lists all settings"
            )
    return found


def _parsed(text: str, name: str, keys: tuple[str, ...]) -> Any:
    """Return the value of a variable: written as in the file; a string may be written without quotes."""
    kind: Any = Settings
    for key in keys[:-1]:
        kind = class_of(_hints(kind)[key])
    hint = bool if keys[-1] == ENABLED else _hints(kind)[keys[-1]]
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = {"value": text}
    if parsed.keys() == {"value"} and _fits(parsed["value"], hint):
        return parsed["value"]
    if _fits(text, hint):
        return text
    raise ValueError(f"the environment variable {name} must be {_wanted(hint)}, got {text!r}")


def _copied(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in document.items()}


def _keys(kind: type, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, hint in _hints(kind).items():
        section = class_of(hint)
        if section is None:
            found.append((*path, name))
        else:
            found += [(*path, name, ENABLED)] if _is_optional(hint) else []
            found += _keys(section, (*path, name))
    return found


def _values(kind: type, table: Mapping[str, Any], path: str, base: Path | None) -> dict[str, Any]:
    """Check a table against the fields of a class, and return the arguments for it."""
    hints = _hints(kind)
    if unknown := [key for key in table if key not in hints]:
        where = f"the section [{path.rstrip('.')}]" if path else "the file"
        raise ValueError(
            f"{path}{unknown[0]} is no setting (its value is {table[unknown[0]]!r}); {where} may have "
            f"{', '.join(hints)}"
        )
    values = {}
    for key, value in table.items():
        section = class_of(hints[key])
        if section is not None:
            values[key] = _section(section, value, f"{path}{key}", base, optional=_is_optional(hints[key]))
            continue
        if not _fits(value, hints[key]):
            raise ValueError(f"{path}{key} must be {_wanted(hints[key])}, got {value!r}")
        is_path = base is not None and Path in get_args(hints[key])
        values[key] = str(base / value) if is_path and base is not None else _frozen(value)
    return values


def _section(kind: type, table: Any, path: str, base: Path | None, *, optional: bool) -> Any:
    """Return the object that a section describes; None for one that is switched off."""
    if not isinstance(table, dict):
        raise ValueError(f"{path} is a section, written [{path}], got {table!r}")
    enabled = table.get(ENABLED, True) if optional else True
    if not isinstance(enabled, bool):
        raise ValueError(f"{path}.{ENABLED} must be true or false, got {enabled!r}")
    given = {key: value for key, value in table.items() if not (optional and key == ENABLED)}
    values = _values(kind, given, f"{path}.", base)
    required = [field.name for field in fields(kind) if field.default is field.default_factory]
    if enabled and (missing := [name for name in required if name not in values]):
        raise ValueError(f"{path}.{missing[0]} is missing; set it, or {path}.{ENABLED} = false")
    if not enabled and not values.keys() >= {*required}:
        return None
    try:
        made = kind(**values)
    except ValueError as error:
        raise ValueError(f"[{path}] {error}") from error
    return made if enabled else None


def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def class_of(hint: Any) -> type | None:
    """Return the class of a section; None for a setting."""
    return next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)  # type: ignore[return-value]


def _is_optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a TOML file has this type."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inside)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(_fits(each, inside[1]) for each in value.values())
    if origin is not None and issubclass(origin, Collection):
        return isinstance(value, list) and all(_fits(each, inside[0]) for each in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str if hint is Path else hint)


def _wanted(hint: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        Path: "a string",
    }
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_wanted(each) for each in inside if each is not type(None)))
    if origin is not None:
        is_table = issubclass(origin, Mapping)
        return f"a {'table' if is_table else 'list'} of {_plural(inside[1 if is_table else 0])}"
    return words[hint]


def _plural(hint: Any) -> str:
    return {int: "whole numbers", float: "numbers", str: "strings"}[hint]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
