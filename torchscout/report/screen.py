"""A job on a terminal: the screens of ``scout status`` and ``scout watch --tui`` (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from torchscout.decision.types import Manifestation
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import listed, visible

__all__ = ["status_screen", "watch_screen"]

_COLUMNS = ("rank", "host", "pid", "state", "step", "phase", "silent_seconds", "inside")
_HEADS = {"silent_seconds": "silent s"}
_MOST_LAYERS = 200


def status_screen(report: Mapping[str, Any]) -> str:
    """Return the screen of what ``standing.examined`` has returned."""
    # One line, however wide, for those who search it.
    head = visible(f"{report['run_dir']}: {report['sentence']}")
    parts: list[Table | str] = ["", _ranks(report["ranks"])]
    if (replay := report["replay"]) is not None:
        parts += ["", str(replay["sentence"])]
    for incident in report["incidents"]:
        parts += ["", _incident(incident)]
    for decision in report["decisions"]:
        kept = "" if decision["is_carried_out"] else ", not carried out"
        parts += ["", f"decision{kept}: {decision['sentence']}"]
    return f"{head}\n{stacked(parts)}"


def watch_screen(document: Mapping[str, Any], width: int | None = None) -> str:
    """Return everything that there is to say about a live document."""
    now = document["now"]
    parts: list[Table | str] = [f"{document['run_dir']}: {now['sentence']}", ""]
    parts += [*_incidents(document["incidents"]), ""]
    parts += [_heading("Ranks", _counts(now["counts"]))]
    if now["ranks"]:
        parts.append(_ranks(now["ranks"]))
    if now["unlisted"]:
        parts.append(f"and {now['unlisted']} more; these need attention most")
    if "elsewhere" in now["counts"]:
        parts.append("  scout watch on their machines shows where the ranks elsewhere are")
    parts += ["", *_checks(document), "", *_trust(document["trust"]), "", *_coverage(document)]
    parts += [*_problems(document)]
    return stacked(parts, width)


def _heading(name: str, about: str) -> str:
    return f"{name.upper()}: {about}" if about else name.upper()


def _ranks(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = [*_COLUMNS, *(["device"] if any(row.get("device") for row in rows) else [])]
    cells = (["" if (cell := row.get(name)) is None else str(cell) for name in names] for row in rows)
    return table([_HEADS.get(name, name) for name in names], cells)


def _incident(incident: Mapping[str, Any]) -> str:
    state = "OPEN" if incident["state"] == "open" else incident["state"]
    if incident["recovered"] is not None:
        state += f" by resuming from step {incident['recovered']}"
    return f"step {incident['step']}, {state}: {incident['sentence']}"


def _incidents(incidents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Those that are open first, the newest of them first."""
    still = sum(each["state"] == "open" for each in incidents)
    yield _heading("Incidents", f"{still} open, {len(incidents) - still} over" if incidents else "none")
    for each in sorted(incidents, key=lambda each: (each["state"] != "open", -each["id"])):
        done = "" if not each["is_decided"] else " (done)" if each["is_carried_out"] else " (not carried out)"
        yield f"  {Manifestation(each['manifestation']).in_words}, {_incident(each)}"
        yield f"    where: {'; '.join(each['where']) or 'no rank is named'}"
        yield f"    what to do: {each['todo']}{done}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"


def _checks(document: Mapping[str, Any]) -> Iterator[str]:
    rows = document["coverage"]
    made, found = sum(row["count"] for row in rows), sum(row["findings"] for row in rows)
    last = max((row["last"] for row in rows), default=0)
    about = f"{made} comparisons up to step {last}, {found} with a difference" if rows else "none recorded"
    yield _heading("Checks", about)
    if document["now"]["checks"] is not None:
        yield f"  {document['now']['checks']}"
    ranks = document["ranks"]
    yield f"  observed for hangs: {ranks['observed']} of {ranks['size']} ranks"


def _trust(points: Sequence[Sequence[Any]]) -> Iterator[str]:
    """The checkpoints that can be trusted, as rungs."""
    if not points:
        yield _heading("Checkpoints", "no checks are recorded")
        return
    _, step, latest, candidate, verified, poisoned = points[-1]
    yield _heading("Checkpoints", f"after the check of step {step}")
    for name, at in (("latest", latest), ("candidate", candidate), ("verified", verified)):
        yield f"  {name:<10}{'none' if at is None else f'step {at}'}"
    if poisoned is not None:
        yield f"  corruption was found at step {poisoned}; nothing since is trusted"


def _coverage(document: Mapping[str, Any]) -> Iterator[Table | str]:
    rows, not_checked = document["coverage"], document["not_checked"]
    yield _heading("Coverage", f"{len(rows)} parts of the model and state" if rows else "nothing compared")
    if rows:
        cells = (
            [
                row["name"],
                Manifestation(row["manifestation"]).in_words,
                str(row["count"]),
                str(row["findings"]),
                str(row["first"]) if row["first"] == row["last"] else f"{row['first']}-{row['last']}",
            ]
            for row in rows[:_MOST_LAYERS]
        )
        yield table(["what", "for", "compared", "differed", "steps"], cells)
        if len(rows) > _MOST_LAYERS:
            yield f"and {len(rows) - _MOST_LAYERS} more"
    for each in not_checked:
        of = f" ({listed(each['surfaces'])})" if each["surfaces"] else ""
        yield f"  not checked: {each['reason']}{of}; {_spans(each['ranks'])}"


def _spans(spans: Iterable[Sequence[int]]) -> str:
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"ranks {listed(texts, most=12)}"


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    count = len(document["problems"]) + document["unlisted_problems"]
    if count:
        yield ""
        yield _heading("Not readable", f"{count} lines or files; the rest is shown")
        yield from (f"  {each}" for each in document["problems"][:20])
