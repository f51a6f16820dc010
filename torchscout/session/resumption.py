"""From what an earlier run left to a loaded state, as all ranks together see it (paper, section 8).

Every rank reports what it finds in its ledgers, and from the same reports all conclude alike. What should
be loaded is loaded, swept if need be, and exchanged for the next older generation if it is not fit. Until
all of this has ended nothing is written, so that a job that is killed meanwhile finds everything as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate, transition
from torchscout.checkpoint.gate_state import Lost
from torchscout.checkpoint.generation import Generation, TrustLevel
from torchscout.checkpoint.resume.fetch import Fetched
from torchscout.checkpoint.selection import Failure, Selection, SweepResult, confirm, select_checkpoint
from torchscout.checkpoint.storage.inventory import Member
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shards import Restored
from torchscout.errors import CheckpointError, UnavailableError

__all__ = [
    "WAYS_OUT",
    "Loaded",
    "NoUsableCheckpointError",
    "PreviousRun",
    "RankRemains",
    "Resumption",
    "SweepReport",
    "Sweeping",
    "load_first_usable",
]

WAYS_OUT = (
    "To begin again without these checkpoints, call session.resume(start_over=True); to keep them, give "
    "CheckpointConfig another directory. `scout checkpoint explain {folder}` shows what is there, and "
    "`scout checkpoint adopt` lets a job take over another one's."
)

Sweeping = Callable[[int, bool], "SweepReport"]
"""See ``session.replay_driver.ReplayDriver.sweep``."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a job goes on from."""

    step: int
    """Steps that are done; 0 if there was nothing to go back to."""
    role: TrustLevel | None
    """What the checkpoint was trusted for; None if there was none."""
    source: str | None
    """Where this rank got its state."""
    reason: str
    """Why this one, in words."""
    swept: SweepResult | None = None
    """What a replay of everything has shown on these workers; None if there was no need for one."""
    unswept: str | None = None
    """What it could not replay on this rank, and why; one of several perhaps."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What replay has found in a loaded state, before it is trained on; job-wide but for ``unswept``."""

    sweep: SweepResult
    is_state: bool
    """Whether replicas hold different state: then that is what was loaded, whoever computes well."""
    unswept: str | None
    """What could not be replayed on this rank, and why; one of several perhaps."""


_TOLD = 4


@dataclass(frozen=True, slots=True)
class RankRemains:
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
    def found(cls, folders: Sequence[Path], member: Member) -> RankRemains:
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
    def from_json(cls, told: Any) -> RankRemains:
        gate = None if told["gate"] is None else CheckpointGate.from_json(told["gate"])
        pending = tuple(map(int, told["pending"]))
        return cls(
            gate, tuple(map(str, told["problems"])), int(told["shards"]), pending, int(told["lineage"])
        )


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """The earlier run of this job."""

    gate: CheckpointGate
    """What all ranks may rely on; nothing, if nobody can tell."""
    is_whole: bool
    """Whether every rank has its say in it. One that has not is new here, or was away for a while."""
    obstacle: str | None = None
    """Why nobody can tell."""

    @classmethod
    def of(cls, remains: Sequence[RankRemains]) -> PreviousRun | None:
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


def _obstacle(remains: Sequence[RankRemains]) -> str | None:
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


Load = Callable[[Sequence[Generation]], Fetched[Restored]]
"""The first of these that all ranks can have, put into the model."""


class NoUsableCheckpointError(CheckpointError):
    """What was loaded must not be trained on, and there is nothing else."""

    def __init__(self, reason: str, lost: Sequence[Generation]) -> None:
        super().__init__(
            f"{reason} To begin again, start the job once more and call session.resume(start_over=True)."
        )
        self.lost = lost
        """Those that new processes shall not try again."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the model holds, and why."""

    decision: Selection
    fetched: Fetched[Restored]
    swept: SweepReport | None
    """Of everything; None if there was no need for that."""
    lost: tuple[Generation, ...]
    """Passed over: damaged, or unfit."""


def load_first_usable(
    gate: CheckpointGate,
    decision: Selection,
    wanted: Sequence[Generation],
    load: Load,
    sweep: Sweeping | None,
) -> Loaded:
    """Return the same on every rank; raise ``NoUsableCheckpointError`` on all if none may be trained on."""
    lost: list[Generation] = []
    told: SweepReport | None = None
    while True:
        fetched = load(wanted)
        lost += [passed for passed, _ in fetched.plan.passed]
        swept = None if sweep is None else sweep(fetched.step, decision.is_swept)
        if decision.is_swept:
            told = swept
        if swept is not None and swept.is_state:
            # A copy went wrong after it was certified: the one before it need not have.
            lost.append(fetched.generation)
            reason = f"Replicas hold different numbers in {fetched.generation}."
            older = [each for each in wanted if each < fetched.generation]
        elif not decision.tentative or fetched.generation in gate.trusted:
            return Loaded(decision, fetched, told, tuple(lost))
        else:
            decision = _confirmed(gate, lost, told)
            if decision.role is TrustLevel.LATEST:
                return Loaded(decision, fetched, told, tuple(lost))
            reason = decision.reason
            older = [each for each in reversed(gate.trusted) if each < fetched.generation]
        if not older:
            raise NoUsableCheckpointError(reason, [*gate.captured, *lost])
        wanted = older


def _confirmed(gate: CheckpointGate, lost: Sequence[Generation], swept: SweepReport | None) -> Selection:
    found = reduce(lambda known, gone: transition(known, Lost(gone))[0], lost, gate)
    return confirm(found, SweepResult.COULD_NOT_RUN if swept is None else swept.sweep)
