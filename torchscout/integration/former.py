"""What an earlier run has left, as all ranks together see it, and what to go back to (paper, section 8).

Every rank tells what it finds written down; from the same answers all conclude alike. Loading is done by
``integration.checkpointing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.selection import Failure, Selection, select_checkpoint
from torchscout.checkpoint.storage.inventory import Member
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.errors import CheckpointError, UnavailableError

__all__ = ["Former", "Remains"]

_TOLD = 4


@dataclass(frozen=True, slots=True)
class Remains:
    """What one rank finds."""

    gate: CheckpointGate | None
    """What it had written down last, in whichever place; None if nothing can be read."""
    problems: tuple[str, ...]
    """What is there and cannot be read."""
    shards: int
    """Files that have the name of a shard."""
    pending: tuple[int, ...] = ()
    """The ranks of whose state it finds a shard of what was being captured when the job ended."""
    lineage: int = 0
    """The highest of any shard."""
    ledgers: tuple[CheckpointGate | None, ...] = ()
    """What each folder's ledger says; other ranks have no use for it."""

    @classmethod
    def found(cls, folders: Sequence[Path], member: Member) -> Remains:
        read = [_read(folder, member) for folder in folders]
        gates = [each for each in read if isinstance(each, CheckpointGate)]
        files = [each for folder in folders for each in shard_files(folder)]
        gate = ledger.newest(gates) if gates else None
        pending = {
            each.rank
            for each in files
            if gate is not None and (each.generation, each.world_size) == (gate.pending, member.world_size)
        }
        return cls(
            gate,
            tuple(each for each in read if isinstance(each, str)),
            len(files),
            tuple(sorted(pending)),
            max((each.generation.lineage for each in files), default=0),
            tuple(each if isinstance(each, CheckpointGate) else None for each in read),
        )

    def to_json(self) -> dict[str, Any]:
        gate = None if self.gate is None else self.gate.to_json()
        return {
            "gate": gate,
            "problems": list(self.problems),
            "shards": self.shards,
            "pending": list(self.pending),
            "lineage": self.lineage,
        }

    @classmethod
    def from_json(cls, told: Any) -> Remains:
        gate = None if told["gate"] is None else CheckpointGate.from_json(told["gate"])
        pending = tuple(map(int, told["pending"]))
        return cls(
            gate, tuple(map(str, told["problems"])), int(told["shards"]), pending, int(told["lineage"])
        )


@dataclass(frozen=True, slots=True)
class Former:
    """The earlier run of this job."""

    gate: CheckpointGate
    """What all ranks may rely on; nothing, if nobody can tell."""
    is_whole: bool
    """Whether every rank has its say in it. One that has not is new here, or was away for a while."""
    obstacle: str | None = None
    """Why nobody can tell."""

    @classmethod
    def of(cls, remains: Sequence[Remains]) -> Former | None:
        """None if there was no earlier run."""
        gates = [each.gate for each in remains if each.gate is not None]
        if not gates:
            obstacle = _obstacle(remains)
            lineage = max(each.lineage for each in remains)
            return None if obstacle is None else cls(CheckpointGate(lineage=lineage), False, obstacle)
        # A lineage begins when all ranks have agreed on what to load: who knows only of one before it was not
        # there any more, or was killed just then. What is known now is then for the others to say.
        last = max(gate.lineage for gate in gates)
        heard = [gate for gate in gates if gate.lineage == last]
        gate = ledger.reconcile(heard)
        alike = [each for each in remains if each.gate is not None and each.gate.pending == gate.pending]
        there = {rank for each in alike for rank in each.pending}
        gate = ledger.settled(gate, lambda _: there >= set(range(len(remains))))
        return cls(gate, len(heard) == len(remains))

    def __str__(self) -> str:
        return self.obstacle or f"up to {self.gate.latest}"

    @property
    def is_nothing(self) -> bool:
        """Whether it ended before anything of it was sealed on every rank: there is nothing to go back to,
        and nothing to be lost by beginning anew."""
        return self.obstacle is None and not self.gate.held and self.gate.poisoned is None

    def chosen(self) -> tuple[Selection, list[Generation]]:
        """What to go back to, and should that be damaged, older ones; ``UnavailableError`` if there is none.

        Those are verified, but for the one before the latest, which must stand the same test as that.
        """
        if self.obstacle is not None:
            raise UnavailableError(self.obstacle)
        failure = Failure.OTHER
        if self.gate.poisoned is not None:
            failure = Failure.SDC
        elif not self.is_whole:
            failure = Failure.MACHINES_GONE
        decision = select_checkpoint(failure, self.gate)
        if (first := decision.generation) is None:
            raise UnavailableError(decision.reason)
        fit = {*self.gate.trusted, *(self.gate.captured if decision.tentative else ())}
        return decision, [first, *sorted((each for each in fit if each < first), reverse=True)]


def _read(folder: Path, member: Member) -> CheckpointGate | str | None:
    try:
        return ledger.read(folder, member.rank, job=member.job)
    except CheckpointError as error:
        return str(error)


def _obstacle(remains: Sequence[Remains]) -> str | None:
    """Without any ledger nobody knows what may be trusted; that is not the same as a new job."""
    told = [f"rank {rank}: {each}" for rank, found in enumerate(remains) for each in found.problems]
    count = max(found.shards for found in remains)
    if not told and not count:
        return None
    told += [f"there are {count} shards"] if count else []
    return (
        "Nothing can be recovered: there was an earlier run, and no rank can read which of its checkpoints "
        f"may be trusted ({'; '.join(told[:_TOLD])})."
    )
