"""`scout checkpoint list`: which generations lie where, and what each is to recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from torchscout.checkpoint.gate_state import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.ledger import reconcile
from torchscout.checkpoint.storage.owner import Owner
from torchscout.cli.checkpoint.contents import Contents, Folder, StoredShard
from torchscout.cli.checkpoint.wording import (
    counted,
    numbers_in_words,
    ranks_in_words,
    size_in_words,
    stacked,
    table,
)

__all__ = ["as_json", "heading", "listing", "roles_of", "screen"]


def listing(contents: Contents) -> dict[str, Any]:
    gate = contents.gate
    return {
        "job": contents.job,
        "world_size": contents.world_size,
        "folders": [_folder(folder) for folder in contents.folders],
        "roles": None if gate is None else _standing(gate),
        "generations": [
            {
                **as_json(each),
                "roles": roles_of(each, gate),
                "missing": contents.missing(each),
                "shards": [_shard(copy) for copy in contents.copies if copy.file.generation == each],
            }
            for each in contents.generations
        ],
    }


def as_json(generation: Generation) -> dict[str, int]:
    return {"step": generation.step, "lineage": generation.lineage}


def roles_of(generation: Generation, gate: CheckpointGate | None) -> list[str]:
    """What this one is, by the ledgers."""
    if gate is None:
        return []
    roles = {
        "latest": generation == gate.latest,
        "candidate": generation == gate.candidate,
        "verified": generation == gate.verified,
        "older verified": generation in gate.trusted[:-1],
    }
    return [name for name, holds in roles.items() if holds]


def _standing(gate: CheckpointGate) -> dict[str, Any]:
    named = {"latest": gate.latest, "candidate": gate.candidate, "verified": gate.verified}
    roles: dict[str, Any] = {name: None if each is None else as_json(each) for name, each in named.items()}
    return {**roles, "poisoned": gate.poisoned, "lineage": gate.lineage}


def _folder(folder: Folder) -> dict[str, Any]:
    return {
        "path": str(folder.path),
        "tier": folder.tier.value,
        "in_use_by": None if folder.owner is None else _owner(folder.owner),
        "ledgers": [
            {"rank": each.rank, **_standing(each.gate), "doubt": each.doubt} for each in folder.ledgers
        ],
        "problems": list(folder.problems),
    }


def _owner(owner: Owner) -> dict[str, Any]:
    return {"job": owner.job, "host": owner.host, "pid": owner.pid, "since": owner.since}


def _shard(copy: StoredShard) -> dict[str, Any]:
    return {
        "rank": copy.file.rank,
        "holder": copy.file.holder,
        "tier": copy.tier.value,
        "bytes": copy.file.size,
        "sealed_as": None if copy.sealed_as is None else copy.sealed_as.value,
        "problem": copy.problem,
        "file": str(copy.file.path),
    }


def screen(contents: Contents, *, files: bool = False) -> str:
    gate, several = contents.gate, len(contents.folders) > 1
    parts: list[Table | str] = [*heading(contents), ""]
    rows = [
        _row(each, folder, contents, gate, several)
        for each in contents.generations
        for folder in contents.folders
        if any(copy.file.generation == each for copy in folder.copies)
    ]
    heads = ["generation", "roles", "own", "copies", "size", *(["in"] if several else [])]
    parts.append(table(heads, rows) if rows else "There is no shard.")
    if files:
        parts += ["", _files(contents)]
    return stacked([*parts, *_notes(contents)])


def heading(contents: Contents) -> list[str]:
    """Whose folders these are, and what each one's ledgers say."""
    lines = [f"job {contents.job}, {counted(contents.world_size, 'rank')}"]
    for folder in contents.folders:
        used = "not in use" if folder.owner is None else f"in use by {folder.owner}"
        used = folder.untold or used
        lines += [
            f"{contents.label(folder)}: {folder.path}, {used}",
            f"  ledgers: {_ledgers(folder, contents)}",
        ]
    return lines


def _ledgers(folder: Folder, contents: Contents) -> str:
    gates = [each.gate for each in folder.ledgers]
    if not gates:
        return "none"
    agreed = reconcile(gates)
    named = {"latest": agreed.latest, "candidate": agreed.candidate, "verified": agreed.verified}
    told = ", ".join(f"{name} {each or 'none'}" for name, each in named.items())
    poisoned = "" if agreed.poisoned is None else f"; corruption was found at step {agreed.poisoned}"
    return f"{len(gates)} of {counted(contents.world_size, 'rank')}; {told}{poisoned}"


def _row(
    generation: Generation,
    folder: Folder,
    contents: Contents,
    gate: CheckpointGate | None,
    several: bool,
) -> list[str]:
    copies = [copy for copy in folder.copies if copy.file.generation == generation]
    own = {copy.file.rank for copy in copies if not copy.file.is_replica}
    replicas = {copy.file.rank for copy in copies if copy.file.is_replica}
    return [
        str(generation),
        ", ".join(roles_of(generation, gate)) or "-",
        _share(own, contents.world_size),
        _share(replicas, contents.world_size),
        size_in_words(sum(copy.file.size for copy in copies)),
        *([contents.label(folder)] if several else []),
    ]


def _share(ranks: set[int], of: int) -> str:
    """Whose; a glance must tell all from some."""
    if not ranks:
        return "none"
    return "all" if len(ranks) == of else numbers_in_words([*ranks])


def _files(contents: Contents) -> Table:
    rows = [
        [
            str(copy.file.generation),
            str(copy.file.rank),
            str(copy.file.holder),
            copy.sealed_as.value if copy.sealed_as else "damaged",
            size_in_words(copy.file.size),
            str(copy.file.path),
        ]
        for copy in sorted(contents.copies, key=lambda copy: (copy.file.generation, copy.file.rank))
    ]
    return table(["generation", "rank", "held by", "sealed as", "size", "file"], rows)


def _notes(contents: Contents) -> Sequence[str]:
    notes = [
        f"{each}: no usable shard of {ranks_in_words(missing, contents.world_size)} is here"
        for each in contents.generations
        if (missing := contents.missing(each))
    ]
    notes += [f"{copy.file.path}: {copy.problem}" for copy in contents.copies if copy.problem]
    notes += [problem for folder in contents.folders for problem in folder.problems]
    notes += [f"the state before the last is used: {each.doubt}" for each in contents.ledgers if each.doubt]
    meshes = {copy.identity.mesh for copy in contents.copies if copy.identity}
    if len(meshes) > 1:
        notes.append(f"these are shards of {len(meshes)} layouts: {', '.join(sorted(meshes))}")
    return ["", *notes] if notes else []
