"""Writes a report as a post; see ``post`` for its parts (paper, section 7)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torchscout.decision.progress import CommGroup, IssuedOp, RankReport
from torchscout.observer.record.layout import LINES, PLACES, runs_of
from torchscout.observer.rounds.post import (
    BUSY,
    FLAGS,
    HEADER,
    KINDS,
    MAYBE,
    OPERATION,
    PAIR,
    PHASE,
    PHASES,
    PHRASE,
    PLAIN,
    PROCESS,
    PROCESSES,
    ROW,
    RUN,
    SPLITS,
    WAITING,
    Header,
    Row,
    hash_of,
)

__all__ = ["post_of"]

_AGES, _PHRASES = 1 << 16, 1 << 8
_TEXT_BYTES, _KEY_BYTES = 1 << 10, 1 << 16
"""Names and texts are cut, since they are only shown. A line whose key is longer is left out."""
_SPLITS_BYTES = 512
"""What splits of earlier operations may add to a post. Those of the last on each line are always sent."""


def post_of(report: RankReport, number: int = 0, kind: str = "report") -> bytes:
    """Return the bytes of a report in round ``number``."""
    if type(number) is not int or not 0 <= number < 1 << 64:
        raise ValueError(f"not the number of a round: {number!r:.40}")
    progress = report.progress
    body = _Body(report)
    header = Header(
        kind=1 + KINDS.index(kind),
        round=number,
        rank=report.rank,
        flags=_flags_of(report),
        gone_seconds=math.nan if report.gone_seconds is None else report.gone_seconds,
        step=0 if progress is None else progress.step,
        operation=0 if progress is None else progress.operation,
        silent_seconds=0.0 if progress is None else progress.silent_seconds,
        device_step=-1 if progress is None or progress.device_step is None else progress.device_step,
        captured=0 if progress is None else progress.captured,
        rows=len(body.rows),
        operations=len(body.operations),
        runs=len(body.runs),
        phrases=len(body.phrases),
        strings=sum(map(len, body.strings)),
        rest=len(body.rest),
    )
    rows = (ROW.pack(*row) for row in body.rows)
    runs = (RUN.pack(*run) for run in body.runs)
    return b"".join(
        [HEADER.pack(*header), *rows, *body.operations, *runs, *body.phrases, *body.strings, body.rest]
    )


def _flags_of(report: RankReport) -> int:
    progress = report.progress
    flags = sum(FLAGS[name] for name in PLAIN if getattr(report, name))
    flags |= MAYBE.index(report.waiting) << WAITING | PROCESSES.index(report.process) << PROCESS
    if progress is not None:
        flags |= FLAGS["has_progress"] | FLAGS["at_communication"] * progress.at_communication
        flags |= MAYBE.index(progress.device_busy) << BUSY | PHASES.index(progress.phase) << PHASE
    return flags


_known_runs: dict[int, tuple[tuple[int, ...], list[tuple[int, int, int]]]] = {}
"""By identity: a line of the whole job has many members, and its observer reports it again and again."""


def _runs_of(members: tuple[int, ...]) -> list[tuple[int, int, int]]:
    known = _known_runs.get(id(members))
    if known is None:
        if len(_known_runs) >= LINES:
            _known_runs.clear()
        known = _known_runs[id(members)] = members, runs_of(members)
    return known[1]


class _Body:
    """The parts of a post that follow its header."""

    def __init__(self, report: RankReport) -> None:
        progress = report.progress
        self.rows: list[Row] = []
        self.runs: list[tuple[int, int, int]] = []
        self.operations: list[bytes] = []
        self.phrases: list[bytes] = []
        issued = {} if progress is None else progress.issued
        entered = {} if progress is None else progress.entered
        recent = defaultdict[str, list[tuple[int, IssuedOp]]](list)
        # The newest first, because they matter most if there is no room for all.
        for order, each in reversed([*enumerate(() if progress is None else progress.recent)][-PLACES:]):
            recent[each.group].append((order, each))
        lines = {line.key: line for line in report.groups}
        for key in {**lines, **issued, **entered, **recent}:
            lines.setdefault(key, CommGroup(key, (), ""))
        codes: dict[tuple[int, str], int] = {}
        names: list[bytes] = []
        for line in list(lines.values())[:LINES]:
            key_bytes, name = line.key.encode(), line.name.encode()[:_TEXT_BYTES]
            if len(key_bytes) >= _KEY_BYTES:
                continue
            count = issued.get(line.key, 0)
            operations = recent.get(line.key, ())
            shown = _packed(operations, count, codes)
            runs = _runs_of(line.members)
            row = Row(
                hash_of(line.key),
                count,
                entered.get(line.key, -1),
                len(shown),
                len(runs),
                len(key_bytes),
                len(name),
                PAIR * line.pair
                + SPLITS * any(each.sends is not None for _, each in recent.get(line.key, ())),
                line.timeout or 0.0,
            )
            self.rows.append(row)
            self.operations += shown
            self.runs += runs
            names += [key_bytes, name]
        texts = [text.encode()[:_TEXT_BYTES] for _, text in codes]
        self.phrases += [PHRASE.pack(code[0], len(text)) for code, text in zip(codes, texts, strict=True)]
        self.strings = [*names, *texts]
        self.rest = _rest_of(report)


def _packed(
    recent: Sequence[tuple[int, IssuedOp]], count: int, codes: dict[tuple[int, str], int]
) -> list[bytes]:
    """Pack the operations of one line, given newest first, oldest first; leave out what does not fit."""
    found = []
    for order, each in recent:
        phrase = codes.setdefault((each.fingerprint, each.text), len(codes))
        if phrase < _PHRASES and 0 <= count - each.number < _AGES:
            found.append(OPERATION.pack(each.digest, count - each.number, order, phrase))
        if phrase == _PHRASES:
            del codes[each.fingerprint, each.text]
    return found[::-1]


def _rest_of(report: RankReport) -> bytes:
    progress, rest = report.progress, dict[str, Any]()
    if report.stalled is not None:
        rest["stalled"] = report.stalled.to_json()
    if report.how is not None:
        rest["ended"] = report.how, report.wait_status, report.why
    if report.operations is not None:
        rest["operations"] = dict(report.operations)
    if report.phase_seconds:
        rest["phase_seconds"] = {phase.value: seconds for phase, seconds in report.phase_seconds.items()}
    if progress is not None and (splits := _splits_of(progress.recent)):
        rest["splits"] = splits
    return json.dumps(rest, separators=(",", ":"), allow_nan=False).encode() if rest else b""


def _splits_of(recent: Sequence[IssuedOp]) -> dict[str, Any]:
    found, seen, room = {}, set[str](), _SPLITS_BYTES
    for order, each in reversed([*enumerate(recent)]):
        if each.sends is None and each.receives is None:
            continue
        room -= 3 * (len(each.sends or ()) + len(each.receives or ()))
        if each.group not in seen or room >= 0:
            found[str(order)] = each.sends, each.receives
        seen.add(each.group)
    return found
