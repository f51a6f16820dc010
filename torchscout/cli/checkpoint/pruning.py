"""`scout checkpoint prune`: which generations a person may delete, and deleting them (paper, section 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from torchscout.checkpoint.gate_state import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.storage import retention, shards
from torchscout.cli.checkpoint.contents import Contents
from torchscout.cli.checkpoint.examination import Broken, Damage, broken_lines, usable
from torchscout.cli.checkpoint.listing import as_json, heading, roles_of
from torchscout.cli.checkpoint.wording import counted, size_in_words, stacked, table

__all__ = ["delete", "plan", "screen"]


def plan(contents: Contents, damaged: Sequence[Damage], keep: int) -> tuple[dict[str, Any], list[Broken]]:
    """What stays and why, and what goes; a ``ValueError`` where nobody says what is trusted."""
    gate = contents.gate
    if gate is None:
        raise ValueError("no ledger is here, so that nobody says which generations are needed")
    left, broken = usable(contents, gate, damaged)
    kept = _wanted(contents, [gate, left, *(found.gate for found in contents.ledgers)], keep)
    described = {}
    for each in contents.generations:
        files = [copy.file for copy in contents.copies if copy.file.generation == each]
        described[each] = {**as_json(each), "files": len(files), "bytes": sum(file.size for file in files)}
    report = {
        "job": contents.job,
        "kept": [{**each, "why": kept[name]} for name, each in described.items() if name in kept],
        "removed": [each for name, each in described.items() if name not in kept],
        "unusable": [each.to_json() for each in broken],
    }
    return report, broken


def _wanted(contents: Contents, gates: Sequence[CheckpointGate], keep: int) -> dict[Generation, str]:
    """With the reasons. What any rank needs stays: unlike in a recovery, a doubt is a reason to keep."""
    reasons: dict[Generation, str] = {}
    for gate in gates:
        for generation in contents.generations:
            if roles := [role for role in roles_of(generation, gate) if role != "older verified"]:
                reasons.setdefault(generation, ", ".join(roles))
    trusted = {generation for gate in gates for generation in gate.trusted}
    rest = [each for each in contents.generations if each not in reasons]
    rest.sort(key=lambda each: (each in trusted, not contents.missing(each), each.lineage, each.step))
    more = rest[max(0, len(rest) - keep) :]
    return reasons | {each: "older verified" if each in trusted else "one more" for each in more}


def delete(contents: Contents, report: dict[str, Any]) -> None:
    """What the plan says, and what killed writers have left."""
    unwanted = {Generation(each["step"], each["lineage"]) for each in report["removed"]}
    retention.remove(copy.file for copy in contents.copies if copy.file.generation in unwanted)
    for folder in contents.folders:
        shards.clean(folder.path)


def screen(contents: Contents, report: dict[str, Any], broken: Sequence[Broken], *, done: bool) -> str:
    gone, verb = report["removed"], "deleted" if done else "would be deleted"
    rows = [_row(each, f"stays: {each['why']}") for each in report["kept"]]
    rows += [_row(each, verb) for each in gone]
    files, size = (sum(each[name] for each in gone) for name in ("files", "bytes"))
    warning = broken_lines(broken, contents.world_size)
    parts: list[Table | str] = [
        *heading(contents),
        "",
        *warning,
        table(["generation", "size", "what"], rows),
        "",
    ]
    parts.append(f"{counted(files, 'file')}, {size_in_words(size)} {verb}." if gone else "Nothing to delete.")
    if gone and not done:
        parts.append("Nothing was deleted. Add --yes to delete.")
    return stacked(parts)


def _row(described: dict[str, Any], what: str) -> list[str]:
    generation = Generation(described["step"], described["lineage"])
    return [str(generation), size_in_words(described["bytes"]), what]
