"""How every command answers: a screen for a person, or one JSON document for a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["as_document"]


def as_document(report: dict[str, Any], screen: str, *, as_json: bool, output: Path | None) -> None:
    """Print the screen, or with ``--json`` the document; with ``--output`` a file gets the document too."""
    document = json.dumps(report, indent=2)
    if output is not None:
        output.write_text(document + "\n")
    print(document if as_json else screen)
