"""Stores the gate's state in one small file per rank beside the shards (paper, section 9).

Writes are atomic, and the previous file is kept in case the new one is damaged later.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import digest
from torchscout.checkpoint.trust.gate_state import CheckpointGate
from torchscout.checkpoint.trust.generation import Generation, is_number
from torchscout.errors import CheckpointError, DamagedError

__all__ = [
    "SCHEMA",
    "Ledger",
    "inspect",
    "newest",
    "path_of",
    "ranks_in",
    "read",
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


def read(folder: Path | str, rank: int, *, job: str | None = None) -> CheckpointGate | None:
    """The state in this rank's ledger, or None if it has none; see ``inspect``."""
    found = inspect(folder, rank)
    if found is not None and job is not None and found.job != job:
        raise CheckpointError(f"{path_of(folder, rank)} belongs to job {found.job!r}, not to {job!r}")
    return None if found is None else found.gate


def inspect(folder: Path | str, rank: int) -> Ledger | None:
    """This rank's ledger, or None if it has none. Reads the previous one if the last is damaged or missing;
    raises ``DamagedError`` if neither is whole."""
    path = path_of(folder, rank)
    if isinstance(last := _read_or_problem(path, rank), Ledger):
        return last
    if isinstance(previous := _read_or_problem(_previous(path), rank), Ledger):
        return replace(previous, doubt=last or f"{path} is missing")
    if last is previous is None:
        return None
    raise DamagedError("; ".join(filter(None, (last, previous))))


def newest(gates: Iterable[CheckpointGate]) -> CheckpointGate:
    """The newest state of one rank, of several ledgers of which some may be older."""
    gates = list(gates)
    last = max((gate.lineage, gate.step) for gate in gates)
    return reconcile([gate for gate in gates if (gate.lineage, gate.step) == last])


def reconcile(gates: Sequence[CheckpointGate | None]) -> CheckpointGate:
    """Combine the ranks' states into one that all of them can rely on, for a job that is not running.

    Ranks may have stopped in the middle of a job-wide change, so a generation is trusted as far as the rank
    that trusts it least. None stands for a rank without a ledger and does not count.
    """
    known = _agreed_on_pending([gate for gate in gates if gate is not None])
    if not known:
        return CheckpointGate()
    poisoned = max((gate.poisoned for gate in known if gate.poisoned is not None), default=None)
    catalogs = {gate.recipes for gate in known}
    trusted = _common(known, lambda gate: gate.trusted)
    durable = _common(known, lambda gate: gate.durable)
    # Promoted on some ranks only, it is still a candidate; without files on all ranks it is none.
    waiting = _common(known, lambda gate: tuple(filter(None, (*gate.trusted, gate.candidate))))
    candidates = [each for each in waiting if each in durable and each not in trusted]
    captured = _common(known, lambda gate: gate.captured)
    interim = _common(known, lambda gate: (gate.interim,) if gate.interim is not None else ())
    if poisoned is not None:
        candidates, interim, captured = [], (), tuple(each for each in captured if each in trusted)
    assert len(candidates) < 2, "a candidate is newer than all that its rank trusts"
    return CheckpointGate(
        recipes=max((size for size in catalogs if size is not None), default=None),
        persist_every=min(gate.persist_every for gate in known),
        keep=max(gate.keep for gate in known),
        accepted=min(gate.accepted for gate in known) if len(catalogs) == 1 and poisoned is None else 0,
        pending=known[0].pending,
        captured=captured,
        candidate=candidates[0] if candidates else None,
        interim=interim[0] if interim else None,
        trusted=trusted,
        durable=tuple(each for each in durable if each in (*trusted, *candidates, *interim)),
        unwritten=max(gate.unwritten for gate in known),
        poisoned=poisoned,
        lineage=max(gate.lineage for gate in known),
        step=max(gate.step for gate in known),
    )


def realigned(states: Sequence[Any]) -> CheckpointGate:
    """Combine the ranks' states, as JSON, into one that a running job continues from after a failed check.

    All ranks had the same state before that check. If some have applied its votes and others have not, the
    state is what ``reconcile`` can rely on; what only some ranks are capturing or writing is given up. In any
    case a new cycle begins, since the steps until now were not checked.
    """
    gates = [CheckpointGate.from_json(each) for each in states]
    gate = gates[0] if all(each == gates[0] for each in gates) else reconcile(gates)
    return replace(gate, accepted=0)


def settled(gate: CheckpointGate, is_there: Callable[[Generation], bool]) -> CheckpointGate:
    """Resolve the pending generation of a job that is not running: it was sealed if ``is_there``, which says
    whether every rank's shard exists."""
    if (pending := gate.pending) is None:
        return gate
    gate = replace(gate, pending=None, writing=None if gate.writing == pending else gate.writing)
    if not is_there(pending):
        return gate
    # Keep the one before it: unlike in a running job, it may have to replace a damaged one.
    trusted = (*gate.trusted, pending) if gate.recipes is None else gate.trusted
    return replace(gate, captured=(*gate.captured, pending)[-2:], trusted=trusted)


def _agreed_on_pending(gates: Sequence[CheckpointGate]) -> list[CheckpointGate]:
    """Give all states the same pending generation, or none: what one rank knows to be sealed is sealed on
    all ranks, and what one rank does not know of was never captured by it."""
    sealed = {
        each for gate in gates for each in (*gate.captured, *gate.trusted, gate.candidate, gate.interim)
    }
    common = len({gate.pending for gate in gates}) == 1
    return [gate if common else settled(gate, sealed.__contains__) for gate in gates]


_Pick = Callable[[CheckpointGate], tuple[Generation, ...]]


def _common(gates: Sequence[CheckpointGate], pick: _Pick) -> tuple[Generation, ...]:
    return tuple(sorted(set.intersection(*(set(pick(gate)) for gate in gates))))


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _sealed(body: bytes) -> bytes:
    return body + b'\n{"xxh3_128":"' + digest(body).encode() + b'"}\n'


def _bytes(path: Path) -> bytes:
    """Read the file; does not follow a link, block on a pipe, or read a huge file."""
    extra = os.O_NONBLOCK | os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as file:
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
