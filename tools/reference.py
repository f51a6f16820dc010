"""Writes docs/reference/configuration.md and cli.md from the code: `python tools/reference.py`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import typer

from torchscout.cli.main import app
from torchscout.launch.settings import Settings, class_of, variables
from torchscout.launch.template import field_texts

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_CONFIGURATION = """
Every setting, with its default. This page is generated from the config classes; `scout config` prints the
same as a `scout.toml`. In code, pass the classes to `enable_resiliency`; for `scout run`, write the sections
of a file ([run.md](../run.md)). A variable of the environment overrides the file.
"""
_CLI = """
Every command with its options, as `--help` prints them; this page is generated from the code. Every command
that reports something prints one JSON document with `--json`, and writes it to a file with `--output`. The
exit status is 2 for a command line that was not understood.
"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in pages().items():
        (FOLDER / name).write_text(page)


def pages() -> dict[str, str]:
    """The text of each generated page, by file name."""
    return {
        "configuration.md": _page("Configuration", _CONFIGURATION, _sections(Settings, ())),
        "cli.md": _page("Commands", _CLI, _commands(typer.main.get_command(app), "scout")),
    }


def _page(title: str, text: str, body: Iterator[str]) -> str:
    return "\n".join([f"# {title}", "", *_wrapped(text), "", *body])


def _sections(kind: type, path: tuple[str, ...]) -> Iterator[str]:
    """The settings of a class, then those of the classes in it."""
    names, texts = {keys: name for name, keys in variables().items()}, field_texts(kind)
    hints = get_type_hints(kind)
    if path:
        yield from (f"## `[{'.'.join(path)}]`: `{kind.__name__}`", "")
        yield from (*_wrapped(inspect.getdoc(kind) or ""), "")
    else:
        yield from ("## Outside of the sections", "")
    inner = []
    for field in fields(kind):
        section = class_of(hints[field.name])
        if section is not None:
            inner.append((section, (*path, field.name)))
            continue
        default = "required" if field.default is MISSING else f"default `{_written(field.default)}`"
        yield from (f"### `{field.name}`", "")
        yield from (*_wrapped(f"`{field.type}`, {default}; `{names[(*path, field.name)]}`"), "")
        yield from (*_wrapped(texts.get(field.name, "")), "")
    for section, where in inner:
        yield from _sections(section, where)


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _commands(group: Any, path: str) -> Iterator[str]:
    for name in group.list_commands(None):
        command, whole = group.get_command(None, name), f"{path} {name}"
        if hasattr(command, "list_commands"):
            yield from (f"## `{whole}`", "", *_wrapped(command.help or ""), "")
            yield from _commands(command, whole)
            continue
        yield from (f"{'#' * len(whole.split())} `{whole}`", "")
        yield from ("```text", *_help_of(command, whole), "```", "")


def _help_of(command: Any, path: str) -> list[str]:
    context = command.make_context(path, [], resilient_parsing=True, terminal_width=90, max_content_width=90)
    return [line.rstrip() for line in command.get_help(context).splitlines()]


def _wrapped(text: str) -> list[str]:
    """The text at 100 columns, with Markdown's quotes of code."""
    plain = re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split()))
    return textwrap.wrap(plain, 100, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main()
