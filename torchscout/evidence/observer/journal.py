"""What a trainer declares once, for its observer to read as it comes: lines and phrases (paper, section 7).

One JSON text a line, of two kinds: an object is a communication line, a string is the text of a
fingerprint. The index of either is its place among its kind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchscout.decision.progress import CommGroup

__all__ = ["Journal", "line_text", "phrase_text"]

_PHRASE = 256
"""Characters kept of a phrase."""
_MOST_MEMBERS = 1 << 20
"""Of one line, where nobody says how many ranks there are."""


def line_text(line: CommGroup) -> bytes:
    declared = {"key": line.key, "name": line.name, "pair": line.pair, "members": _runs(line.members)}
    return _text(declared if line.timeout is None else {**declared, "timeout": line.timeout})


def phrase_text(phrase: str) -> bytes:
    return _text(phrase[:_PHRASE])


class Journal:
    """What has been declared, read as it grows."""

    def __init__(self, size: int | None = None) -> None:
        """With ``size``, of a job with so many ranks: a line with more members is a ``ValueError``."""
        self._size = size
        self.lines: list[CommGroup] = []
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
                self.lines.append(_line(declared, self._size))
            self.length += len(text)


def _text(declared: Any) -> bytes:
    return json.dumps(declared, separators=(",", ":")).encode() + b"\n"


def _line(declared: dict[str, Any], size: int | None) -> CommGroup:
    # A few bytes can stand for as many members as there are numbers: count them first.
    limit = _MOST_MEMBERS if size is None else size
    runs = declared["members"]
    if not all(type(number) is int for run in runs for number in run):
        raise ValueError(f"members are (first, stride, count), got {runs!r:.80}")
    if any(count < 0 for _, _, count in runs) or sum(count for _, _, count in runs) > limit:
        raise ValueError(f"a line of more members than the {limit} ranks: {runs!r:.80}")
    members = tuple(first + stride * place for first, stride, count in runs for place in range(count))
    if size is not None and members and not 0 <= min(members) <= max(members) < size:
        raise ValueError(f"members are ranks below {size}, got {min(members)} to {max(members)}")
    key, name, pair, timeout = declared["key"], declared["name"], declared["pair"], declared.get("timeout")
    if not (isinstance(key, str) and isinstance(name, str) and isinstance(pair, bool)):
        raise ValueError(f"no line: {declared!r:.80}")
    if timeout is not None and type(timeout) not in (int, float):
        raise ValueError(f"a timeout is a number of seconds, got {timeout!r:.40}")
    return CommGroup(key, members, name, pair, timeout)


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
