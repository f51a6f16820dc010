"""The report as one HTML file that needs no network (pure).

What records contain is in one block of JSON, and the script inserts it as text. The content security policy
admits this script and this style only, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

__all__ = ["embedded", "page", "policy", "tables_markup", "tables_page"]

_SCRIPTS = ("base.js", "mesh.js", "incidents.js", "charts.js", "tables.js", "live.js", "report.js")
"""In this order: each uses what those before it define."""


def page(document: Mapping[str, Any], *, is_live: bool = False) -> str:
    """Return the page of a document that ``document_of`` has made.

    A live page asks where it came from for what has changed after ``document["version"]``.
    """
    parts = {
        "policy": escape(policy(is_live=is_live)),
        "name": "scout watch" if is_live else "scout report",
        "style": _asset("report.css"),
        "plain": _plain(document),
        "data": embedded(document),
        "script": _script(),
    }
    return _filled(_asset("report.html"), parts)


def tables_page(title: str, body: str) -> str:
    """Return a page without a script around some markup, in the style of the report."""
    parts = {
        "policy": escape(policy(has_script=False)),
        "title": escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        "style": _asset("report.css"),
        "body": body.encode("ascii", "xmlcharrefreplace").decode(),
    }
    return _filled(_asset("tables.html"), parts)


def tables_markup(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts as markup for ``tables_page``."""

    def row(cells: Sequence[str]) -> str:
        named = zip(heads, cells, strict=True)
        return "".join(f'<td data-head="{escape(head)}">{escape(cell)}</td>' for head, cell in named)

    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(f"<tr>{row(each)}</tr>" for each in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def policy(*, is_live: bool = False, has_script: bool = True) -> str:
    """Return the content security policy: our script and style, and for a live page its own server."""
    script = f" script-src '{_digest(_script())}';" if has_script else ""
    connect = " connect-src 'self';" if is_live else ""
    return (
        f"default-src 'none';{script}{connect} style-src '{_digest(_asset('report.css'))}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _filled(text: str, parts: Mapping[str, str]) -> str:
    """Insert the parts in one pass: what is inserted is not searched for further places."""
    head, *rest = text.split("{{")
    return head + "".join(parts[name] + after for name, _, after in (each.partition("}}") for each in rest))


def embedded(document: Mapping[str, Any]) -> str:
    """Return JSON that no HTML parser takes for markup, whatever its texts contain."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain(document: Mapping[str, Any]) -> str:
    """The incidents for a reader without scripts."""
    items = [
        f"<li>{escape(each['sentence'])} {escape('; '.join(each['where']))}. {escape(each['todo'])}</li>"
        for each in document["incidents"]
    ]
    text = f"<p>{escape(document['sentence'])}</p><ol>{''.join(items)}</ol>"
    return text.encode("ascii", "xmlcharrefreplace").decode()  # records may have lone surrogates


@cache
def _script() -> str:
    return "\n".join(map(_asset, _SCRIPTS))


@cache
def _asset(name: str) -> str:
    return (files("torchscout.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
