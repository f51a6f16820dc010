"""A job on a terminal: the screens of ``scout status`` and ``scout watch --tui`` (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from torchscout.decision.types import Manifestation
from torchscout.report.standing import COLUMNS, overview
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import listed, visible

__all__ = ["status_screen", "watch_screen"]

_MOST_LAYERS = 200


def status_screen(report: Mapping[str, Any]) -> str:
    """Return the screen of what ``standing.examined`` has returned."""
    # One line, however wide, for those who search it.
    head = visible(f"{report['run_dir']}: {report['sentence']}")
    return f"{head}\n{stacked(['', *_found({**report, 'now': overview(report)}), *_problems(report)])}"


def watch_screen(document: Mapping[str, Any], width: int | None = None) -> str:
    """Return everything that there is to say about a live document."""
    parts: list[Table | str] = [f"{document['run_dir']}: {document['now']['sentence']}", ""]
    parts += [*_found(document), "", *_checks(document), "", *_trust(document), ""]
    return stacked([*parts, *_coverage(document), *_problems(document)], width)


def _heading(name: str, about: str) -> str:
    return f"{name.upper()}: {about}" if about else name.upper()


def _found(document: Mapping[str, Any]) -> Iterator[Table | str]:
    """Incidents with what was decided about them, then ranks."""
    incidents, now = document["incidents"], document["now"]
    still = sum(each["state"] == "open" for each in incidents)
    yield _heading("Incidents", f"{still} open, {len(incidents) - still} over" if incidents else "none")
    for each in sorted(incidents, key=lambda each: (each["state"] != "open", -each["number"])):
        yield from _incident(each)
    known = {each["id"] for each in incidents}
    for each in document["decisions"]:
        if each["incident"] not in known:
            yield f"  decision, step {each['step']}: {each['sentence']}{_done(each)}"
    if now["checks"] is not None:
        yield f"  {now['checks']}"
    yield from ("", _heading("Ranks", "" if now["states"] else "none"))
    for each in now["states"]:
        first, last = each["steps"] or (None, None)
        at = "" if first is None else f", step {first}" if first == last else f", steps {first} to {last}"
        yield f"  {each['count']} {each['state']}: {_spans(each['ranks'])}{at}"
    if now["hosts"]:
        yield f"  scout status on {listed(now['hosts'])} shows more about the ranks there"
    if rows := now["ranks"]:
        names = [name for name in COLUMNS if name != "device" or any(row[name] for row in rows)]
        cells = (["" if row[name] is None else str(row[name]) for name in names] for row in rows)
        yield from ("", table([name.replace("silent_seconds", "silent s") for name in names], cells))
    if now["unlisted"]:
        yield f"and {now['unlisted']} more; these need attention most"


def _incident(incident: Mapping[str, Any]) -> Iterator[str]:
    state = "OPEN" if incident["state"] == "open" else incident["state"]
    if incident["recovered"] is not None:
        state += f" by resuming from step {incident['recovered']}"
    kind = Manifestation(incident["manifestation"]).in_words
    about = ", ".join(filter(None, (kind, incident["launcher"], f"step {incident['step']}", state)))
    yield f"  {about}: {incident['sentence']}"
    yield f"    where: {'; '.join(incident['where']) or 'no rank is named'}"
    yield f"    what to do: {incident['todo']}{_done(incident) if incident['is_decided'] else ''}"


def _done(decision: Mapping[str, Any]) -> str:
    return " (done)" if decision["is_carried_out"] else " (not carried out)"


def _checks(document: Mapping[str, Any]) -> Iterator[str]:
    rows, ranks = document["coverage"], document["ranks"]
    made, found = sum(row["count"] for row in rows), sum(row["findings"] for row in rows)
    last = max((row["last"] for row in rows), default=0)
    about = f"{made} comparisons up to step {last}, {found} with a difference" if rows else "none recorded"
    yield _heading("Checks", about)
    yield f"  observed for hangs: {ranks['observed']} of {ranks['size']} ranks"


def _trust(document: Mapping[str, Any]) -> Iterator[str]:
    """The checkpoints that can be trusted, as rungs."""
    if not (points := document["trust"]):
        yield _heading("Checkpoints", "no checks are recorded")
        return
    _, step, latest, candidate, verified, poisoned = points[-1]
    roles = {"latest": latest, "candidate": candidate, "verified": verified}
    if not document["keeps_checkpoints"]:
        roles = {"certified": verified}
    yield _heading("Checkpoints" if len(roles) > 1 else "State", f"after the check of step {step}")
    for name, at in roles.items():
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
    return f"{'rank' if len(texts) == 1 and '-' not in texts[0] else 'ranks'} {listed(texts, most=12)}"


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    count = len(document["problems"]) + document["unlisted_problems"]
    if count:
        yield from ("", _heading("Not readable", f"{count} lines or files; the rest is shown"))
        yield from (f"  {each}" for each in document["problems"][:20])
