"""What a trainer declares once, for its observer to read as it comes: lines and phrases (paper, section 7).

One JSON text a line, of two kinds: an object is a communication line, a string is the text of a
fingerprint. The index of either is its place among its kind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchscout.decision.progress import Line

__all__ = ["Journal", "line_text", "phrase_text"]

_PHRASE = 256
"""Characters kept of a phrase."""


def line_text(line: Line) -> bytes:
    return _text({"key": line.key, "name": line.name, "pair": line.pair, "members": _runs(line.members)})


def phrase_text(phrase: str) -> bytes:
    return _text(phrase[:_PHRASE])


class Journal:
    """What has been declared, read as it grows."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.phrases: list[str] = []
        self.length = 0
        """Bytes understood so far."""

    def has(self, line: int, phrase: int) -> bool:
        """Whether both were declared."""
        return line < len(self.lines) and phrase < len(self.phrases)

    def extend(self, texts: bytes) -> None:
        for text in texts.splitlines(keepends=True):
            try:
                declared = json.loads(text)
            except ValueError:
                return  # another core saw the journal's new length first; it is whole next time
            if isinstance(declared, str):
                self.phrases.append(declared)
            else:
                self.lines.append(_line(declared))
            self.length += len(text)


def _text(declared: Any) -> bytes:
    return json.dumps(declared, separators=(",", ":")).encode() + b"\n"


def _line(declared: dict[str, Any]) -> Line:
    members = tuple(
        first + stride * place for first, stride, count in declared["members"] for place in range(count)
    )
    return Line(declared["key"], members, declared["name"], declared["pair"])


def _runs(members: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranks as (first, stride, count): the groups of a mesh are regular, however large they are."""
    runs: list[tuple[int, int, int]] = []
    for member in members:
        first, stride, count = runs[-1] if runs else (0, 0, 0)
        if count == 1:
            runs[-1] = first, member - first, 2
        elif count and member == first + stride * count:
            runs[-1] = first, stride, count + 1
        else:
            runs.append((member, 0, 1))
    return runs
