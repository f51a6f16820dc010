"""From what an earlier run left behind to a loaded state, agreed on by all ranks (paper, section 8).

Every rank reports what its ledgers say, and all ranks draw the same conclusion from the same reports. A
checkpoint is loaded, swept if needed, and replaced by an older one if it is not usable. Nothing is written
before all of this has succeeded: a job that is killed meanwhile finds everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import (
    Changed,
    CheckpointGate,
    Generation,
    Selection,
    SweepResult,
    TrustLevel,
    confirm,
    select_checkpoint,
    transition,
)
from torchscout.checkpoint.ledger import Ledger
from torchscout.checkpoint.resume.fetch import Fetched
from torchscout.checkpoint.storage.inventory import Member
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.communicators import Communicators
from torchscout.decision.types import Failure
from torchscout.errors import CheckpointError, ScoutError, UnavailableError, describe_error
from torchscout.log import log
from torchscout.state.collect import StateParts
from torchscout.state.restore import require_as_saved, restore
from torchscout.utils.text import spans

__all__ = [
    "WAYS_OUT",
    "DifferentError",
    "Loaded",
    "NoUsableCheckpointError",
    "PreviousRun",
    "RankRemains",
    "Resumption",
    "SweepReport",
    "Sweeping",
    "load_first_usable",
    "restore_together",
]

WAYS_OUT = (
    'If they were saved by other ranks or in another layout, session.resume(layout="reshard") loads them. '
    "To start from step 0 without these checkpoints, call session.resume(start_over=True); to keep them, "
    "pass another directory to CheckpointConfig. `scout checkpoint explain {folder}` shows what is there, "
    "and `scout checkpoint adopt` lets a job take over the checkpoints of another one."
)

Sweeping = Callable[[int, bool], "SweepReport"]
"""See ``session.replay.driver.ReplayDriver.sweep``."""
Load = Callable[[Sequence[Generation]], Fetched[Any]]
"""Loads the first of these generations that all ranks can get into the model."""
Span = tuple[int, int]
"""The first and the last of consecutive ranks."""
_MOST_PROBLEMS = 4


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a job continues from."""

    step: int
    """Steps that are done; 0 if there was no checkpoint."""
    role: TrustLevel | None
    """How far the checkpoint was trusted; None if there was none."""
    source: str | None
    """Where this rank got its state."""
    reason: str
    """Why this checkpoint was chosen, in sentences."""
    swept: SweepResult | None = None
    """The result of a full replay on these workers; None if none was needed."""
    unswept: str | None = None
    """Something that could not be replayed on this rank, and why."""
    resharded_from: str | None = None
    """The layout of the ranks that had saved it; None if it is that of this job."""
    restored: tuple[str, ...] = ()
    """What was restored from another layout, in words."""
    not_restored: tuple[str, ...] = ()
    """What another layout's ranks have saved that this job's ranks cannot load, in words."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What replay found in a loaded state before training on it; job-wide except for ``unswept``."""

    sweep: SweepResult
    is_state: bool
    """Whether replicas hold different state: then the checkpoint is wrong, whoever computes correctly."""
    unswept: str | None
    """Something that could not be replayed on this rank, and why."""


@dataclass(frozen=True, slots=True)
class RankRemains:
    """What one rank finds of an earlier run."""

    gate: CheckpointGate | None
    """The newest state that any of its ledgers has; None if none can be read."""
    problems: tuple[str, ...] = ()
    """Ledgers that exist and cannot be read."""
    shards: int = 0
    """Number of files with the name of a shard; not counted if a ledger can be read."""
    pending: tuple[Span, ...] = ()
    """The ranks of which it has a shard of what was being captured when the job ended. If ranks share a disk,
    all of them find the shards of all."""
    lineage: int = 0
    """The highest lineage of these shards."""
    before: CheckpointGate | None = None
    """The newest state that any of its previous ledgers has."""
    ledgers: tuple[CheckpointGate | None, ...] = ()
    """What each folder's ledger says; not sent to other ranks."""

    @classmethod
    def found(cls, folders: Sequence[Path], member: Member) -> RankRemains:
        read = [_read(folder, member) for folder in folders]
        known = [each for each in read if isinstance(each, Ledger)]
        gate = ledger.newest([each.gate for each in known])
        before = ledger.newest([each.before for each in known if each.before is not None])
        files = [
            each
            for folder in folders
            for each in shard_files(folder, lambda shown: gate is None or shown == gate.pending)
        ]
        pending = {each.rank for each in files if gate is not None and each.world_size == member.world_size}
        return cls(
            gate,
            tuple(each for each in read if isinstance(each, str)),
            0 if gate is not None else len(files),
            tuple((first, last) for first, last in spans(pending)),
            max((each.generation.lineage for each in files), default=0),
            before,
            tuple(each.gate if isinstance(each, Ledger) else None for each in read),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "gate": None if self.gate is None else self.gate.to_json(),
            "problems": list(self.problems),
            "shards": self.shards,
            "pending": list(self.pending),
            "lineage": self.lineage,
            "before": None if self.before is None else self.before.to_json(),
        }

    @classmethod
    def from_json(cls, document: Any) -> RankRemains:
        return cls(
            None if document["gate"] is None else CheckpointGate.from_json(document["gate"]),
            tuple(map(str, document["problems"])),
            int(document["shards"]),
            tuple((int(first), int(last)) for first, last in document["pending"]),
            int(document["lineage"]),
            None if document["before"] is None else CheckpointGate.from_json(document["before"]),
        )


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """The earlier run of this job."""

    gate: CheckpointGate
    """What all ranks can rely on; empty if no rank can read a ledger."""
    is_whole: bool
    """Whether every rank's ledger has contributed. A rank without one is new, or was absent for a while."""
    obstacle: str | None = None
    """Why no rank can read a ledger."""

    @classmethod
    def of(cls, remains: Sequence[RankRemains]) -> PreviousRun | None:
        """Conclude from what each rank found; None if there was no earlier run."""
        gates = [each.gate for each in remains if each.gate is not None]
        if not gates:
            obstacle = _obstacle(remains)
            lineage = max(each.lineage for each in remains)
            return None if obstacle is None else cls(CheckpointGate(lineage=lineage), False, obstacle)
        # A lineage begins when all ranks have agreed on what to load. A rank that knows only an earlier one
        # was already gone, or was killed at that moment, and has no say in what is trusted now.
        last = max(gate.lineage for gate in gates)
        current = [gate for gate in gates if gate.lineage == last]
        is_whole = len(current) == len(remains)
        # A rank without a ledger may have come less far than the others, but by one write at most.
        before = () if is_whole else (each.before for each in remains if each.before is not None)
        gate = ledger.reconcile([*current, *(each for each in before if each.lineage == last)])

        def is_there(generation: Generation) -> bool:
            looked = [each for each in remains if each.gate is not None and each.gate.pending == generation]
            spans = {span for each in looked for span in each.pending}
            captured = {rank for first, last in spans for rank in range(first, last + 1)}
            # What one rank knows to be sealed is sealed on all ranks.
            return captured >= {*range(len(remains))} or any(generation in each.sealed for each in current)

        return cls(ledger.settled(gate, is_there), is_whole)

    def __str__(self) -> str:
        return self.obstacle or f"up to {self.gate.latest}"

    @property
    def is_nothing(self) -> bool:
        """Whether it ended before anything was sealed on every rank, so that starting over loses nothing."""
        return self.obstacle is None and not self.gate.held and self.gate.poisoned is None

    def chosen(self, failure: Failure = Failure.OTHER) -> tuple[Selection, list[Generation]]:
        """Return what to load after this failure, and the generations to try in order should that be damaged.

        The older ones are verified, except the one before the latest and candidates in files, which have to
        pass the same sweep as the latest. Raises ``UnavailableError`` if there is nothing to load.
        """
        if self.obstacle is not None:
            raise UnavailableError(self.obstacle)
        if self.gate.poisoned is not None:
            failure = Failure.SDC
        elif not self.is_whole:
            failure = Failure.MACHINES_GONE
        decision = select_checkpoint(failure, self.gate)
        if (first := decision.generation) is None:
            raise UnavailableError(decision.reason)
        usable = self.gate.sealed if decision.tentative else self.gate.trusted
        return decision, [first, *(each for each in reversed(usable) if each < first)]


def _read(folder: Path, member: Member) -> Ledger | str | None:
    try:
        return ledger.inspect(folder, member.rank, job=member.job)
    except CheckpointError as error:
        return str(error)


def _obstacle(remains: Sequence[RankRemains]) -> str | None:
    """Without any ledger nothing can be trusted; None if there is no shard either, as in a new job."""
    problems = [f"rank {rank}: {each}" for rank, found in enumerate(remains) for each in found.problems]
    count = max(found.shards for found in remains)
    if not problems and not count:
        return None
    problems += [f"there are {count} shards"] if count else []
    return (
        "Cannot resume: an earlier run left checkpoints, but no rank could read its ledger, so none of them "
        f"can be trusted ({'; '.join(problems[:_MOST_PROBLEMS])})."
    )


class DifferentError(CheckpointError):
    """A rank's state was not restored as it was saved, although the file is intact."""

    def __init__(self, generation: Generation, reason: str) -> None:
        super().__init__(f"{generation} was not restored as it was saved: {reason}")
        self.generation = generation


class NoUsableCheckpointError(UnavailableError):
    """The loaded state must not be trained on, and there is no other checkpoint."""

    def __init__(self, reason: str, lost: Sequence[Generation]) -> None:
        super().__init__(
            reason, "To start from step 0, restart the job and call session.resume(start_over=True)."
        )
        self.lost = lost
        """The generations that a restarted job must not try again."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the model holds, and why."""

    decision: Selection
    fetched: Fetched[Any]
    swept: SweepReport | None
    """The result of a full replay; None if none was needed."""
    lost: tuple[Generation, ...]
    """Generations that were skipped because they are damaged or unusable."""

    def resumption(self, rank: int, *, is_trusted: bool) -> Resumption:
        """Where this rank continues from; ``is_trusted`` if the generation is verified."""
        fetched, swept = self.fetched, self.swept
        return Resumption(
            fetched.step,
            TrustLevel.VERIFIED if is_trusted else self.decision.role,
            fetched.plan.source_of(rank),
            f"{self.decision.reason} {fetched.plan.reason}.",
            None if swept is None else swept.sweep,
            None if swept is None else swept.unswept,
        )


def load_first_usable(
    gate: CheckpointGate,
    decision: Selection,
    wanted: Sequence[Generation],
    load: Load,
    sweep: Sweeping | None,
) -> Loaded:
    """Load the first usable generation, the same on every rank.

    Raises ``NoUsableCheckpointError`` on all ranks if none may be trained on.
    """
    lost: list[Generation] = []
    full: SweepReport | None = None
    while True:
        try:
            fetched = load(wanted)
        except DifferentError as error:
            log.error("%s", error)
            lost.append(error.generation)
            wanted = [each for each in wanted if each < error.generation]
            if not wanted:  # they stay as they are: on other machines they may be restored
                raise UnavailableError(f"No checkpoint could be restored as it was saved: {error}") from None
            continue
        lost += [skipped for skipped, _ in fetched.plan.passed]
        swept = None if sweep is None else sweep(fetched.step, decision.is_swept)
        if decision.is_swept:
            full = swept
        if swept is not None and swept.is_state:
            # A copy was corrupted after it was certified; an older one need not be.
            lost.append(fetched.generation)
            reason = f"Replicas hold different numbers in {fetched.generation}."
            older = [each for each in wanted if each < fetched.generation]
        elif not decision.tentative or fetched.generation in gate.trusted:
            return Loaded(decision, fetched, full, tuple(lost))
        else:
            decision = _confirmed(gate, lost, full)
            if decision.role is TrustLevel.LATEST:
                return Loaded(decision, fetched, full, tuple(lost))
            reason = decision.reason
            older = [each for each in reversed(gate.trusted) if each < fetched.generation]
        if not older:
            untrusted = [each for each in gate.sealed if each not in gate.trusted]
            raise NoUsableCheckpointError(reason, [*untrusted, *lost])
        wanted = older


def _confirmed(gate: CheckpointGate, lost: Sequence[Generation], swept: SweepReport | None) -> Selection:
    remaining = reduce(lambda known, gone: transition(known, Changed("lost", gone))[0], lost, gate)
    return confirm(remaining, SweepResult.COULD_NOT_RUN if swept is None else swept.sweep)


def restore_together(
    generation: Generation,
    parts: StateParts,
    tree: Any,
    communicators: Communicators,
    signatures: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Load a state into the model, the optimizers and the rest; if one rank fails, all raise
    ``CheckpointError``.

    If what one rank then holds is not what was saved, see ``require_as_saved``, all raise ``DifferentError``.
    """
    problem: str | None = f"{generation} could not be restored"
    try:
        restored = restore(parts, tree)
        problem = None
    except ScoutError as error:
        problem = str(error)
    finally:  # whatever a user's load_state_dict raises: the others must not wait for this rank
        communicators.together(problem, CheckpointError)
    try:
        require_as_saved(restored, signatures)
    except (ScoutError, RuntimeError, ValueError) as error:
        problem = describe_error(error)
    try:
        communicators.together(problem)
    except ScoutError as error:
        raise DifferentError(generation, str(error)) from None
