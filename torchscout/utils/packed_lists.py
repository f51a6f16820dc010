"""Long lists of a JSON document in few bytes: what observers send about all ranks is mostly regular.

The ranks of a group are ``first, first + stride, ...``, and most ranks show the same evidence. Without this,
a message about every rank that is sent to every rank would grow with the square of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

__all__ = ["pack", "unpack"]

_RUNS, _REPEATS = "list of runs", "list of repeats"
_SHORT = 16
"""Lists up to this length stay as they are."""
_LONGEST = 1 << 20


def pack(document: Any) -> Any:
    """Return plain JSON with its long, regular lists written shorter; ``unpack`` restores it."""
    if isinstance(document, dict):
        return {name: pack(value) for name, value in document.items()}
    if not isinstance(document, list):
        return document
    if len(document) > _SHORT:
        if all(type(each) is int for each in document):
            runs = _runs(document)
            return {_RUNS: runs} if 3 * len(runs) < len(document) else document
        # By type as well, since 1 == True == 1.0.
        repeats = [[key[1], len([*same])] for key, same in groupby(document, lambda each: (type(each), each))]
        if 2 * len(repeats) < len(document):
            return {_REPEATS: pack(repeats)}
    return [pack(each) for each in document]


def unpack(document: Any) -> Any:
    """Return the document as it was before ``pack``; raises ``ValueError`` for a list that is too long."""
    if isinstance(document, list):
        return [unpack(each) for each in document]
    if not isinstance(document, dict):
        return document
    if [*document] == [_RUNS]:
        _require_bounded(count for _, _, count in document[_RUNS])
        return [first + stride * place for first, stride, count in document[_RUNS] for place in range(count)]
    if [*document] == [_REPEATS]:
        repeats = unpack(document[_REPEATS])
        _require_bounded(count for _, count in repeats)
        return [value for value, count in repeats for _ in range(count)]
    return {name: unpack(value) for name, value in document.items()}


def _require_bounded(counts: Any) -> None:
    # A few bytes can stand for any number of values, so count them first.
    known = [*counts]
    if not all(type(count) is int and count >= 0 for count in known) or sum(known) > _LONGEST:
        raise ValueError(f"a list has more than {_LONGEST} values, or a count that is no number")


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return numbers as (first, stride, count)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][2] == 1:
            runs[-1][1:] = number - runs[-1][0], 2
        elif runs and number == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([number, 0, 1])
    return runs
