"""Stores the gate's rows in one small file per rank, combines the rows of several ranks, and deletes shards
that no ledger names (paper, section 9).

There is one ledger in memory and one on disk. Writes are atomic, and the previous file is kept in case the
new one is damaged later.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchscout.checkpoint.gate import FLAGS, CheckpointGate, Generation, Row, is_number
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.checkpoint.storage.shard_files import ShardFile, remove_shards, shard_files
from torchscout.checkpoint.storage.shard_format import digest
from torchscout.errors import CheckpointError, DamagedError
from torchscout.utils.private_files import open_to_read

__all__ = [
    "SCHEMA",
    "Ledger",
    "Ledgers",
    "inspect",
    "newest",
    "path_of",
    "ranks_in",
    "realigned",
    "reconcile",
    "remove",
    "settled",
    "write",
]

SCHEMA = 1
"""Version of the file; other versions are refused."""

# [Note: the layout of a ledger]
#
# Two lines of JSON: the ledger, and the xxh3-128 of the first line's bytes. The second line has exactly one
# valid spelling, so every flipped bit is detected. A whole ledger of another job, rank or schema is not
# damage: it is refused, and the previous ledger is not read instead.
_NAME = re.compile(r"rank-(0|[1-9]\d{0,8})\.ledger(\.previous)?")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ledger:
    """One rank's record of its job's checkpoints."""

    job: str
    world_size: int
    rank: int
    gate: CheckpointGate
    coverage: str | None = None
    """What the job's checks cover and what they leave out, in one sentence."""
    doubt: str | None = None
    """Why the previous ledger was read in place of the last one; None if the last was read."""
    before: CheckpointGate | None = None
    """The state in the previous ledger, if the last was read and the previous one is whole, too."""


def path_of(folder: Path | str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.ledger"


def ranks_in(folder: Path | str) -> list[int]:
    """The ranks with a ledger in this folder, whole or not; raises ``OSError`` if there is no such folder."""
    names = (_NAME.fullmatch(path.name) for path in Path(folder).iterdir())
    return sorted({int(name[1]) for name in names if name})


def write(
    folder: Path | str,
    rank: int,
    gate: CheckpointGate,
    *,
    job: str,
    world_size: int,
    coverage: str | None = None,
) -> None:
    """Replace this rank's ledger. If it raises ``CheckpointError``, the last ledger is unchanged."""
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    path = path_of(folder, rank)
    try:
        last = _bytes(path)
        _parsed(last, path)
    except (FileNotFoundError, DamagedError):
        pass  # keep the previous ledger: there is nothing better to replace it with
    except OSError as error:
        raise _unreadable(path, error) from error
    else:
        shards.replace(_previous(path), [last])
    body = {"schema": SCHEMA, "job": job, "world_size": world_size, "rank": rank, "gate": gate.to_json()}
    if coverage is not None:
        body["coverage"] = coverage
    shards.replace(path, [_sealed(json.dumps(body, separators=(",", ":")).encode())])


def remove(folder: Path | str, rank: int) -> None:
    """Delete this rank's ledgers."""
    for path in (_previous(path_of(folder, rank)), path_of(folder, rank)):
        path.unlink(missing_ok=True)


def inspect(folder: Path | str, rank: int, *, job: str | None = None) -> Ledger | None:
    """This rank's ledger, or None if it has none. Reads the previous one if the last is damaged or missing.

    Raises ``DamagedError`` if neither is whole, and ``CheckpointError`` if it belongs to another job than
    ``job``.
    """
    path = path_of(folder, rank)
    last = _read_or_problem(path, rank)
    if isinstance(last, Ledger):
        with suppress(CheckpointError):  # an older one of another job or schema
            previous = _read_or_problem(_previous(path), rank)
            if isinstance(previous, Ledger) and previous.job == last.job:
                last = replace(last, before=previous.gate)
    elif isinstance(previous := _read_or_problem(_previous(path), rank), Ledger):
        last = replace(previous, doubt=last or f"{path} is missing")
    elif last is None is previous:
        return None
    else:
        raise DamagedError("; ".join(filter(None, (last, previous))))
    if job not in (None, last.job):
        raise CheckpointError(f"{path} belongs to job {last.job!r}, not to {job!r}")
    return last


def newest(gates: Sequence[CheckpointGate]) -> CheckpointGate | None:
    """The newest state of one rank, of several ledgers of which some may be older; None if there is none."""
    last = max(((gate.lineage, gate.step) for gate in gates), default=None)
    return reconcile([gate for gate in gates if (gate.lineage, gate.step) == last]) if gates else None


def reconcile(gates: Sequence[CheckpointGate]) -> CheckpointGate:
    """Combine the ranks' states into one that all of them can rely on, for a job that is not running.

    Ranks may have stopped in the middle of a job-wide change, so a row is the minimum over ranks: a
    generation is trusted as far as by the rank that trusts it least. Call ``settled`` afterwards.
    """
    if not gates:
        return CheckpointGate()
    catalogs = {gate.recipes for gate in gates}
    poisoned = [gate.poisoned for gate in gates if gate.poisoned is not None]
    known = sorted(frozenset.intersection(*(gate.held for gate in gates)))
    rows = [_least([row for gate in gates if (row := gate.row(each)) is not None]) for each in known]
    return CheckpointGate(
        recipes=max((size for size in catalogs if size is not None), default=None),
        persist_every=min(gate.persist_every for gate in gates),
        keep=max(gate.keep for gate in gates),
        accepted_recipes=min(gate.accepted_recipes for gate in gates) if len(catalogs) == 1 else 0,
        unwritten=max(gate.unwritten for gate in gates),
        poisoned=max(poisoned, default=None),
        lineage=max(gate.lineage for gate in gates),
        step=max(gate.step for gate in gates),
        rows=tuple(row for row in rows if not poisoned or row.verified or not row.sealed),
    )


def _least(rows: Sequence[Row]) -> Row:
    least = Row(rows[0].generation, **{name: all(getattr(row, name) for row in rows) for name in FLAGS})
    # Where a sealed generation is does not say how far it is trusted, and what one rank knows holds for all.
    in_files = least.sealed and any(row.in_files for row in rows)
    is_nowhere_else = least.sealed and not in_files and not least.due
    return replace(
        least,
        ends_cycle=least.ends_cycle and in_files == least.in_files,  # a candidate only where all say so
        in_memory=least.in_memory or (is_nowhere_else and any(row.in_memory for row in rows)),
        due=least.due and not in_files,
        in_files=in_files,
    )


def settled(gate: CheckpointGate, is_there: Callable[[Generation], bool]) -> CheckpointGate:
    """Resolve what was being captured: an accepted generation was sealed if ``is_there``, which says whether
    every rank's shard exists. Whatever has no verdict is dropped."""
    rows = []
    for row in gate.rows:
        if row.sealed:
            rows.append(row)
        elif row.accepted and is_there(row.generation):
            rows.append(replace(row, sealed=True, in_memory=True, verified=gate.recipes is None))
    if gate.poisoned is not None:
        rows = [row for row in rows if row.verified]
    return replace(gate, rows=tuple(rows))


def realigned(gates: Sequence[CheckpointGate]) -> CheckpointGate:
    """Combine the ranks' states into one that a running job continues from after a failed check.

    All ranks had the same state before that check. If some have applied its votes and others have not, what
    only some of them capture is given up, and what one of them knows to be sealed is sealed on all ranks. In
    any case a new cycle begins, since the steps until now were not checked.
    """
    gate = gates[0]
    if any(each != gate for each in gates):
        sealed = {generation for each in gates for generation in each.sealed}
        gate = settled(reconcile(gates), sealed.__contains__)
    return replace(gate, accepted_recipes=0)


# [Note: which ledger protects which shards]
#
# A restarted job uses the newest ledger that it finds (``newest``). While both tiers are there, that is the
# newer of the two, and the shards that it expects in memory must be there. If the machine is lost, so is its
# memory, and the ledger on disk decides, however old it is: files stay as long as any ledger names them. A
# ledger in memory that cannot be replaced stops protecting memory once the one on disk is newer: otherwise a
# full memory would end all further captures.


class Ledgers:
    """One rank's ledgers in both tiers, and the shards that they protect from deletion. Thread-safe."""

    def __init__(
        self, member: Member, memory: Path, disk: Path, found: Sequence[CheckpointGate | None] = (None, None)
    ) -> None:
        """``found`` are the states in memory and on disk when the job began; None where none is readable."""
        self._member = member
        self._folders = {Tier.MEMORY: memory, Tier.DISK: disk}
        self._written = dict(zip(self._folders, found, strict=True))
        self._lock = threading.Lock()

    def write(self, tier: Tier, gate: CheckpointGate, coverage: str | None = None) -> None:
        """Replace the ledger of one tier; raises ``CheckpointError`` and leaves the last one if it cannot."""
        rank, job, size = self._member.rank, self._member.job, self._member.world_size
        write(self._folders[tier], rank, gate, job=job, world_size=size, coverage=coverage)
        with self._lock:
            self._written[tier] = gate

    def needed(self, tier: Tier, gate: CheckpointGate) -> frozenset[Generation]:
        """The generations that must stay in this tier, because a written ledger or the gate names them."""
        with self._lock:
            written = [each for each in self._written.values() if each is not None]
        if tier is Tier.DISK:
            return gate.held.union(*(each.held for each in written))
        last = max(((each.lineage, each.step) for each in written), default=None)
        return gate.in_memory.union(*(x.in_memory for x in written if (x.lineage, x.step) == last))

    def delete_unneeded(self, tier: Tier, gate: CheckpointGate) -> None:
        """Delete this rank's shards that are not needed, and those of ranks that the job no longer has.

        Raises ``CheckpointError`` if some could not be deleted.
        """
        needed = self.needed(tier, gate)
        remove_shards(
            each
            for each in self._own(tier, lambda generation: generation not in needed, gate.lineage)
            # In memory, a copy of another rank's state is deleted when its owner asks for that.
            if tier is Tier.DISK or not each.is_replica or each.generation.lineage < gate.lineage
        )

    def delete_other_ranks(self, gate: CheckpointGate) -> None:
        """Delete the ledgers of ranks that the job no longer has, where this rank's own says so."""
        for tier, folder in self._folders.items():
            written = self._written[tier]
            if written is not None and written.lineage >= gate.lineage:
                for rank in ranks_in(folder):
                    if rank >= self._member.world_size:
                        remove(folder, rank)

    def free_memory(self, gate: CheckpointGate) -> None:
        """After the job, delete from memory what is also in files, if the ledger on disk is current."""
        if self._written[Tier.DISK] != gate:
            return
        memory, disk = self._folders[Tier.MEMORY], self._folders[Tier.DISK]
        held = self._own(Tier.MEMORY, lambda _: True, gate.lineage)
        unneeded = [
            each
            for each in held
            if (disk / each.path.relative_to(memory)).exists() or each.generation not in gate.held
        ]
        remove_shards(unneeded)
        if len(unneeded) == len(held):
            remove(memory, self._member.rank)

    def _own(self, tier: Tier, wanted: Callable[[Generation], bool], lineage: int) -> list[ShardFile]:
        """What this rank keeps in a tier. Of earlier lineages also what ranks keep that are gone since."""
        folder, me = self._folders[tier], self._member.rank
        if not folder.is_dir():
            return []
        own = shard_files(folder, lambda each: each.lineage >= lineage and wanted(each), holder=me)
        earlier = shard_files(folder, lambda each: each.lineage < lineage and wanted(each))
        return own + [each for each in earlier if each.holder == me or each.holder >= self._member.world_size]


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _sealed(body: bytes) -> bytes:
    return body + b'\n{"xxh3_128":"' + digest(body).encode() + b'"}\n'


def _bytes(path: Path) -> bytes:
    with open_to_read(path) as file:
        return file.read(_MAX_BYTES + 1)


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    """The ledger's first line; raises ``DamagedError`` if its digest does not match."""
    body, _, _ = data.partition(b"\n")
    if data != _sealed(body):
        raise DamagedError(f"{path} is damaged: its digest does not match")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not a ledger: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError(f"{path} is not a ledger: {document!r:.80}")
    return document


def _read_or_problem(path: Path, rank: int) -> Ledger | str | None:
    """The ledger, or how it is damaged, or None if there is no such file."""
    try:
        return _ledger(_parsed(_bytes(path), path), path, rank)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        return str(error)
    except OSError as error:
        raise _unreadable(path, error) from error


def _ledger(document: dict[str, Any], path: Path, rank: int) -> Ledger:
    if (schema := document.get("schema")) != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema!r:.20}, this version reads {SCHEMA}")
    fields: list[Any] = [document.get(name) for name in ("job", "world_size", "rank")]
    job, size, owner = fields
    if not isinstance(job, str) or not is_number(owner) or not is_number(size, owner + 1):
        raise DamagedError(f"{path} is not a ledger: job, world size or rank is missing")
    if owner != rank:
        raise CheckpointError(f"{path} is the ledger of rank {owner}")
    coverage = document.get("coverage")
    if coverage is not None and not isinstance(coverage, str):
        raise DamagedError(f"{path} is not a ledger: its coverage is {coverage!r:.40}")
    try:
        return Ledger(job, size, rank, CheckpointGate.from_json(document.get("gate")), coverage)
    except ValueError as error:
        raise DamagedError(f"{path} is not a ledger: {error}") from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {error.strerror}")
