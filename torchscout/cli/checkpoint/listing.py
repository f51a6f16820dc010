"""`scout checkpoint list`: generations, their roles in a recovery, and their shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchscout.checkpoint.gate import CheckpointGate, Generation
from torchscout.checkpoint.ledger import reconcile
from torchscout.cli.checkpoint.contents import Contents, Folder, StoredShard
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import columns, counted, numbers_in_words, ranks_in_words, size_in_words

__all__ = ["as_json", "heading", "listing", "roles_of", "screen"]


def listing(contents: Contents) -> dict[str, Any]:
    """The document of ``--json``."""
    gate = contents.gate
    return {
        "job": contents.job,
        "world_size": contents.world_size,
        "folders": [_folder(folder) for folder in contents.folders],
        "roles": None if gate is None else _roles(gate),
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
    """The roles of a generation, by the ledgers."""
    if gate is None:
        return []
    roles = {
        "latest": generation == gate.latest,
        "candidate": generation == gate.candidate,
        "interim candidate": generation == gate.interim,
        "verified": generation == gate.verified,
        "older verified": generation in gate.trusted[:-1],
    }
    return [name for name, holds in roles.items() if holds]


def _named(gate: CheckpointGate) -> dict[str, Generation | None]:
    return {"latest": gate.latest, "candidate": gate.candidate, "verified": gate.verified}


def _roles(gate: CheckpointGate) -> dict[str, Any]:
    roles = {name: None if each is None else as_json(each) for name, each in _named(gate).items()}
    return {**roles, "poisoned": gate.poisoned, "lineage": gate.lineage}


def _folder(folder: Folder) -> dict[str, Any]:
    owner = folder.owner
    return {
        "path": str(folder.path),
        "tier": folder.tier.value,
        "in_use_by": owner and {name: getattr(owner, name) for name in ("job", "host", "pid", "since")},
        "ledgers": [{"rank": each.rank, **_roles(each.gate), "doubt": each.doubt} for each in folder.ledgers],
        "problems": list(folder.problems),
    }


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
    """The table of generations; with ``files``, also every shard."""
    gate, several = contents.gate, len(contents.folders) > 1
    rows = [
        [*_row(each, folder, contents, gate), contents.label(folder)]
        for each in contents.generations
        for folder in contents.folders
        if any(copy.file.generation == each for copy in folder.copies)
    ]
    heads = ["generation", "roles", "own", "copies", "size", "in"]
    end = len(heads) if several else -1
    shown = table(heads[:end], [row[:end] for row in rows]) if rows else "There is no shard."
    more = [line for folder in contents.folders for line in _files(folder)] if files else []
    return stacked([*heading(contents), "", shown, *more, *_notes(contents)])


def heading(contents: Contents) -> list[str]:
    """The job, its folders, and the roles by each folder's ledgers."""
    lines = [f"job {contents.job}, {counted(contents.world_size, 'rank')}"]
    for folder in contents.folders:
        used = "not in use" if folder.owner is None else f"in use by {folder.owner}"
        used = folder.lock_problem or used
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
    named = {**_named(agreed), "capturing": agreed.pending}
    roles = ", ".join(f"{name} {each}" for name, each in named.items() if each) or "nothing is captured"
    poisoned = "" if agreed.poisoned is None else f"; corruption was found at step {agreed.poisoned}"
    return f"{len(gates)} of {counted(contents.world_size, 'rank')}; {roles}{poisoned}"


def _row(
    generation: Generation, folder: Folder, contents: Contents, gate: CheckpointGate | None
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
    ]


def _share(ranks: set[int], of: int) -> str:
    """``all``, ``none``, or which ranks."""
    if not ranks:
        return "none"
    return "all" if len(ranks) == of else numbers_in_words([*ranks])


def _files(folder: Folder) -> list[str]:
    """Every shard in a folder: a path below it where there is a terminal, which is narrow, else whole."""
    lines = ["", f"{folder.path}:", f"{'size':>10}  sealed as  file"]
    for copy in sorted(folder.copies, key=lambda copy: (copy.file.generation, copy.file.rank)):
        sealed_as = copy.sealed_as.value if copy.sealed_as else "damaged"
        path = copy.file.path if columns() is None else copy.file.path.relative_to(folder.path)
        lines.append(f"{size_in_words(copy.file.size):>10}  {sealed_as:9}  {path}")
    return lines


def _notes(contents: Contents) -> Sequence[str]:
    notes = [
        f"{each}: there is no usable shard of {ranks_in_words(missing, contents.world_size)} here"
        for each in contents.generations
        if (missing := contents.missing(each))
    ]
    notes += [f"{copy.file.path}: {copy.problem}" for copy in contents.copies if copy.problem]
    notes += [problem for folder in contents.folders for problem in folder.problems]
    notes += [f"the previous ledger is used: {each.doubt}" for each in contents.ledgers if each.doubt]
    meshes = {copy.identity.mesh for copy in contents.copies if copy.identity}
    if len(meshes) > 1:
        notes.append(f"the shards are of {len(meshes)} different layouts: {', '.join(sorted(meshes))}")
    return ["", *notes] if notes else []
