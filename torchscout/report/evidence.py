"""The evidence of one incident as plain data: who voted what, who waits for whom, and stacks (pure)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchscout.config import KAPPA
from torchscout.decision.consensus import robust_scale
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.report.comparisons import Round, Series
from torchscout.utils.text import spans

__all__ = ["is_shown_apart", "record_of", "records_of", "stacks_of", "strip", "waits_of"]

_COUNTED = ("issued", "entered")
"""First parts of surfaces that count the operations of a process group."""
_SHOWN_APART = {"stack", "flight_recorder"}
_MOST_DOTS = 64
"""Peers whose times are all drawn; among more, the outliers and quartiles are."""
_MOST_VALUES = 40
"""Different values of one vote that are listed."""


def record_of(record: EvidenceRecord) -> dict[str, Any]:
    """Return one comparison, with the ranks of each value."""
    return {
        "step": record.step,
        "surface": record.surface,
        "layer": record.layer,
        "mode": record.mode,
        "shape": None if record.shape is None else list(record.shape),
        "status": record.status,
        "reason": record.reason,
        "peers": spans(record.peers),
        "votes": votes_of(record),
        "repeats": 1,
        "is_time": record.manifestation is Manifestation.STRAGGLER,
        "stall_seconds": record.stall_seconds,
        "about": _about(record),
        "operations": [str(each) for each in record.fingerprints],
    }


def records_of(records: Iterable[EvidenceRecord]) -> list[dict[str, Any]]:
    """Return the comparisons of an incident; one that a second replay repeated is there once."""
    found: list[dict[str, Any]] = []
    for each in records:
        made = record_of(each)
        same = next((known for known in found if known | {"repeats": 1} == made), None)
        if same is None:
            found.append(made)
        else:
            same["repeats"] += 1
    return found


def votes_of(record: EvidenceRecord) -> list[dict[str, Any]]:
    """Return the values of a comparison and who had them: named ranks first, then by number of ranks."""
    if record.verdict is None:
        return []
    votes: dict[tuple[str, bool], list[int]] = {}
    outliers = set(record.verdict.outliers)
    for position, (rank, value) in enumerate(zip(record.peers, record.verdict.evidence, strict=True)):
        votes.setdefault((_in_words(record.surface, value), position in outliers), []).append(rank)
    ordered = sorted(votes.items(), key=lambda vote: (not vote[0][1], -len(vote[1]), vote[1][0]))
    return [
        {"value": value, "ranks": spans(ranks), "named": is_named}
        for (value, is_named), ranks in ordered[:_MOST_VALUES]
    ]


def _in_words(surface: str, value: Any) -> str:
    """A value as a person reads it; records have counts and coordinates as integers."""
    if isinstance(value, float):
        return f"{value:.3g} ms"
    in_words = _NUMBERS.get(surface.partition("/")[0])
    return f"{value & 0xFFFF_FFFF_FFFF_FFFF:016x}" if in_words is None else in_words(value)


def _count(value: int) -> str:
    return "no answer" if value < 0 else f"{value} operations"


def _coordinate(value: int) -> str:
    return "no answer" if value < 0 else f"step {value >> 32}, operation {value & 0xFFFF_FFFF}"


_NUMBERS: dict[str, Callable[[int], str]] = {
    "issued": _count,
    "entered": _count,
    "coordinate": _coordinate,
    "process": lambda value: "ended" if value else "alive",
    "device": lambda value: "has work left" if value else "idle",
    "deadlock": lambda value: f"in operation {value + 1}",
}
"""How the integers of these surfaces read; all other integers are signatures."""


def _about(record: EvidenceRecord) -> list[list[str]]:
    """What is known about the rank whose context the record has, without its stack."""
    progress = record.progress
    if not isinstance(progress, Mapping):
        return []
    return [[str(name), _plain(value)] for name, value in progress.items() if name != "stack"]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def waits_of(incident: Incident) -> list[dict[str, Any]]:
    """Return the operations that ranks wait in: who has entered, and who is missing.

    Of a cycle, ``missing`` is empty and ``cycle`` is true: its ranks wait for each other.
    """
    found = []
    for record in incident.records:
        kind, _, name = record.surface.partition("/")
        if record.verdict is None or not (kind in _COUNTED or kind == "deadlock"):
            continue
        counts = [value if isinstance(value, int) else -1 for value in record.verdict.evidence]
        pairs = [*zip(record.peers, counts, strict=True)]
        if kind == "deadlock":
            for operation in sorted(set(counts)):
                inside = spans(rank for rank, count in pairs if count == operation)
                found.append(_wait(f"operation {operation + 1}", None, inside, [], cycle=True))
            continue
        furthest = max(counts)
        inside = spans(rank for rank, count in pairs if count == furthest)
        missing = spans(rank for rank, count in pairs if count < furthest)
        found.append(_wait(name, furthest, inside, missing))
    return found


def _wait(
    group: str, number: int | None, inside: list[list[int]], missing: list[list[int]], *, cycle: bool = False
) -> dict[str, Any]:
    return {"group": group, "number": number, "inside": inside, "missing": missing, "cycle": cycle}


def stacks_of(incident: Incident) -> list[dict[str, Any]]:
    """Return the stacks of ranks, equal ones together: first those of named ranks, then those of others."""
    found: dict[tuple[bool, str], list[int]] = {}
    for record in incident.records:
        progress = record.progress
        if not isinstance(progress, Mapping) or not progress.get("stack"):
            continue
        rank = progress.get("rank")
        ranks = found.setdefault((rank in incident.ranks, _plain(progress["stack"])), [])
        if type(rank) is int:
            ranks.append(rank)
    ordered = sorted(found.items(), key=lambda each: (not each[0][0], min(each[1], default=0)))
    return [{"text": text, "ranks": spans(ranks), "named": is_named} for (is_named, text), ranks in ordered]


def is_shown_apart(record: EvidenceRecord) -> bool:
    """Whether a record only carries a stack or operations, and compares nothing."""
    return record.surface in _SHOWN_APART


def strip(series: Series, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the times of one surface among some peers, round by round."""
    return {
        "surface": series.surface,
        "peers": spans(series.peers),
        "count": len(series.peers),
        "slow": spans(series.peers[position] for each in rounds for position in each.outliers),
        "rounds": [drawn for each in rounds if (drawn := _round(series.peers, each)) is not None],
    }


def _round(peers: Sequence[int], each: Round) -> dict[str, Any] | None:
    finite = sorted(time for time in each.times if math.isfinite(time))
    if not finite:
        return None
    median = statistics.median(finite)
    # Two peers have no majority: a ratio decides there, and no limit is drawn.
    limit = median + KAPPA * robust_scale(finite) if len(finite) > 2 else None
    outliers, is_small = set(each.outliers), len(peers) <= _MOST_DOTS
    dots = [
        [rank, time, int(position in outliers)]
        for position, (rank, time) in enumerate(zip(peers, each.times, strict=True))
        if math.isfinite(time) and (is_small or position in outliers)
    ]
    quartiles = [finite[round(share * (len(finite) - 1))] for share in (0, 0.25, 0.75, 1)]
    return {
        "step": each.step,
        "layer": each.layer,
        "median": median,
        "limit": limit,
        "range": quartiles,
        "dots": dots[: 2 * _MOST_DOTS],
    }
