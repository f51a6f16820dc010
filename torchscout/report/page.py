"""The report as one HTML file that needs no network (pure).

What records contain is in one block of JSON, and the script inserts it as text. The content security policy
admits this script and this style only, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

__all__ = ["embedded", "page"]

_SCRIPTS = ("base.js", "mesh.js", "incidents.js", "charts.js", "tables.js", "report.js")
"""In this order: each uses what those before it define."""


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a document that ``document_of`` has made."""
    style, script = _asset("report.css"), "\n".join(map(_asset, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": escape(policy),
        "style": style,
        "plain": _plain(document),
        "data": embedded(document),
        "script": script,
    }
    text = _asset("report.html")
    head, *rest = text.split("{{")
    # One pass: what is inserted is not searched for further places.
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
def _asset(name: str) -> str:
    return (files("torchscout.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
