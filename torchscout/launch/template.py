"""Writes ``scout.toml`` with explanations, from the config classes and the texts under their fields."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from torchscout.launch.settings import ENABLED, Settings, class_of

__all__ = ["document_of", "field_texts", "template"]

_COLUMNS = 100
_HEAD = """
Settings of torchscout for `scout run --config scout.toml -- torchrun ...`. All values are the defaults. A
line that begins with #, without a space, is a setting that is left out; where a text says None, leave the
setting out. The environment variable TORCHSCOUT_REPLAY_INTERVAL overrides `interval` in [replay], and so on
for every setting; for example, TORCHSCOUT_REPLAY_STRAGGLER_KAPPA overrides `kappa` in [replay.straggler].
"""
_EXAMPLES = {
    "run_dir": "scout-run",
    "directory": "checkpoints",
    "max_overhead": 0.005,
    "embedding": "embedding",
    "layers": "layers",
    "output": "head",
    "experts": "layers.*.experts",
    "expert_catalog": "catalog.json",
    "watch_budget": 0.002,
    "memory_budget": 17_179_869_184,
    "checks_per_cycle": 10,
    "job": "pretraining",
    "webhook": "https://example.org/incidents",
    "port": 9464,
    "textfile": "/var/lib/node_exporter",
    "otlp": "http://localhost:4318/v1/metrics",
}
"""A value for each setting that has no default."""


def template() -> str:
    """Return the text of a ``scout.toml`` with all settings at their defaults."""
    return "\n".join([*_commented(_HEAD), *_lines(Settings, ()), ""])


def document_of(settings: Any) -> dict[str, Any]:
    """Return settings as a file would contain them, which ``Settings.from_document`` reads."""
    document: dict[str, Any] = {}
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        if class_of(hints[field.name]) is None:
            document |= {} if value is None else {field.name: _plain(value)}
        elif value is None:
            document[field.name] = {ENABLED: False}
        else:
            document[field.name] = document_of(value)
    return document


def _lines(kind: type, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the settings of a class, then its sections."""
    hints, texts, sections = get_type_hints(kind), field_texts(kind), []
    for field in fields(kind):
        if class_of(hints[field.name]) is not None:
            sections.append(field.name)
            continue
        yield ""
        yield from _commented(texts.get(field.name, ""))
        missing = field.default is field.default_factory  # both are MISSING for a field without a default
        value = _EXAMPLES[field.name] if missing or field.default is None else field.default
        yield f"{'#' if field.default is None else ''}{field.name} = {_toml(value)}"
    for name in sections:
        section = class_of(hints[name])
        assert section is not None
        yield ""
        yield ""
        yield f"[{'.'.join((*path, name))}]"
        yield from _commented(texts.get(name) or inspect.getdoc(section) or "")
        if type(None) in get_args(hints[name]):
            yield ""
            yield from _commented("Whether torchscout does this at all.")
            default = next(field.default for field in fields(kind) if field.name == name)
            yield f"{ENABLED} = {_toml(default is not None)}"
        yield from _lines(section, (*path, name))


def field_texts(kind: type) -> dict[str, str]:
    """Return the text under each field of a class and of those it is derived from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[node.target.id] = str(after.value.value)
    return found


def _commented(text: str) -> list[str]:
    plain = " ".join(text.replace("``", "`").split())
    return [f"# {line}" for line in textwrap.wrap(plain, _COLUMNS - 2, break_long_words=False)]


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        line = f"[{', '.join(map(_toml, value))}]"
        return line if len(line) < _COLUMNS // 2 else "[" + "".join(f"\n  {_toml(e)}," for e in value) + "\n]"
    return json.dumps(value)  # TOML writes strings, numbers and booleans in the same way


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return [*value] if isinstance(value, tuple | list) else str(value) if hasattr(value, "parts") else value
