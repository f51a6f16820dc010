"""Decides which checkpoints are trusted, and which one a failed job loads (paper, section 8, algorithm 3).

The state of the gate has one row for each generation. ``transition`` is a pure function from a state and an
event to the next state, and ``select_checkpoint`` chooses among the rows. All ranks pass the same job-wide
events in the same order, and so have the same rows. ``ledger`` stores them in files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from torchscout.decision.types import Failure

__all__ = [
    "Changed",
    "Checked",
    "CheckpointGate",
    "Effects",
    "Event",
    "Generation",
    "Outcome",
    "Recovered",
    "Row",
    "Selection",
    "SweepResult",
    "TrustLevel",
    "confirm",
    "is_number",
    "select_checkpoint",
    "transition",
]


class TrustLevel(str, Enum):
    """How far recovery trusts a checkpoint."""

    LATEST = "latest"
    """The newest complete checkpoint; nothing is known about its numbers."""
    CANDIDATE = "candidate"
    """Captured after an accepted cycle of checks; another cycle must follow."""
    VERIFIED = "verified"
    """Replay evidence supports its numbers."""


class Outcome(str, Enum):
    """The job-wide outcome of a check: of all recipes due after one step, on all ranks."""

    HEALTHY = "healthy"
    STRAGGLER = "straggler"
    """A rank is slow, but its numbers are right."""
    NOT_CHECKED = "not_checked"
    """A result is missing on some rank."""
    REJECTED = "rejected"
    """Peers disagreed, and the cause is not known to be corruption."""
    SDC = "sdc"
    """Corruption was found in any comparison group."""

    @property
    def accepted(self) -> bool:
        return self in (Outcome.HEALTHY, Outcome.STRAGGLER)


class Generation(NamedTuple):
    """One job-wide checkpoint: all ranks' state after the same step of the same lineage.

    After a recovery steps are trained again, perhaps with different results. The lineage distinguishes them,
    so that shards of step 4 from before and after a recovery are never mixed.
    """

    step: int
    lineage: int = 0
    """The number of recoveries before this step was trained."""

    def __str__(self) -> str:
        return f"step {self.step}" + (f" of lineage {self.lineage}" if self.lineage else "")

    @classmethod
    def from_json(cls, value: Any) -> Generation:
        if not isinstance(value, list) or len(value) != 2 or not all(is_number(each) for each in value):
            raise ValueError(f"a generation is a step and a lineage, got {value!r:.80}")
        return cls(*value)


def is_number(value: Any, lowest: int = 0) -> bool:
    """Whether this is an ``int``, not a ``bool``, from ``lowest`` to 2**63 - 1."""
    return type(value) is int and lowest <= value < 1 << 63


# [Note: dense is not a catalog of one]
#
# A dense model's shapes never change, so an accepted check certifies the generation captured right after it:
# once sealed it is both latest and verified, and there is no candidate. A catalog with K = 1 still waits for
# a second cycle: what was captured at check n is promoted at check n + 1, or dropped if that finds an SDC.
#
# [Note: candidates in between]
#
# A cycle may be long, and without files a job that loses its memory would go back to the last cycle's end.
# So every ``persist_every``-th capture within a cycle is written, too. The newest of them is kept as
# ``interim`` until newer files are sealed. It does not end a cycle, so it is never promoted. It is trusted
# like the latest, which it replaces if that is lost: after a crash the next workers must replay the catalog
# on it before they train.
#
# [Note: rows change when every rank has sealed]
#
# A capture is copied and sealed while training goes on, and may fail on any rank. Until the next check it is
# pending. At that check all ranks report whether they have sealed it: it becomes the latest, or is dropped.
# The previous latest is kept until then. A job that dies in between looks for the pending generation when it
# restarts: if every rank's shard is there, it was sealed (``ledger.settled``).


@dataclass(frozen=True, slots=True)
class Row:
    """What is known about one generation. A flag is set only if it holds on all ranks."""

    generation: Generation
    ends_cycle: bool = False
    """A catalog: all recipes were accepted in a row up to its capture, and no check was rejected since."""
    accepted: bool = False
    """Its check was accepted. Without this verdict a generation is never loaded."""
    sealed: bool = False
    in_memory: bool = False
    """It is in memory, and nothing newer has replaced it there."""
    due: bool = False
    """It is being written to files."""
    in_files: bool = False
    """Its files are sealed, with all copies that other machines keep in files."""
    verified: bool = False

    @classmethod
    def from_json(cls, document: Any) -> Row:
        flags = dict(document) if isinstance(document, dict) else {}
        generation = Generation.from_json(flags.pop("generation", None))
        if flags.keys() != {*FLAGS} or not all(isinstance(each, bool) for each in flags.values()):
            raise ValueError(f"{generation} has other fields than {', '.join(FLAGS)}: {document!r:.200}")
        return cls(generation, **flags)


FLAGS = tuple(each.name for each in fields(Row) if each.name != "generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointGate:
    """The rows of all generations that are kept, and how far the current cycle has come."""

    recipes: int | None = None
    """K, the recipes in a cycle, for a mixture of experts with a recipe catalog; None for a dense model."""
    persist_every: int = 1
    """One in this many certified generations is written to files. A catalog also writes at cycle ends."""
    keep: int = 1
    """Older verified generations that are kept in files besides the newest."""
    accepted_recipes: int = 0
    """q, the accepted recipes of the current cycle."""
    unwritten: int = 0
    """Captured generations since the last one that was due for files."""
    poisoned: int | None = None
    """The step whose check found corruption, until a recovery is recorded."""
    lineage: int = 0
    """The number of recoveries so far."""
    step: int = 0
    """The step of the last check, or of the generation loaded since."""
    rows: tuple[Row, ...] = ()
    """By generation, oldest first."""

    def __post_init__(self) -> None:
        _refuse_nonsense(self)

    @property
    def latest(self) -> Generation | None:
        """The newest sealed generation; a verified one only while it is in memory."""
        return self._newest(lambda row: row.sealed and (row.in_memory or not row.verified))

    @property
    def candidate(self) -> Generation | None:
        """Captured at the end of an accepted cycle and in files; the next accepted cycle promotes it."""
        return self._newest(lambda row: row.ends_cycle and row.in_files and not row.verified)

    @property
    def interim(self) -> Generation | None:
        """The newest files, if they are neither verified nor the candidate's: candidates in between."""
        newest = self._newest(lambda row: row.in_files)
        return None if newest in (None, self.candidate, *self.trusted) else newest

    @property
    def verified(self) -> Generation | None:
        return self._newest(lambda row: row.verified)

    @property
    def trusted(self) -> tuple[Generation, ...]:
        """All verified generations, oldest first."""
        return tuple(row.generation for row in self.rows if row.verified)

    @property
    def pending(self) -> Generation | None:
        """The generation that is being captured after an accepted check."""
        return self._newest(lambda row: row.accepted and not row.sealed)

    @property
    def writing(self) -> Generation | None:
        return self._newest(lambda row: row.due)

    @property
    def sealed(self) -> tuple[Generation, ...]:
        """All sealed generations, oldest first."""
        return tuple(row.generation for row in self.rows if row.sealed)

    @property
    def in_files(self) -> tuple[Generation, ...]:
        return tuple(row.generation for row in self.rows if row.in_files)

    @property
    def held(self) -> frozenset[Generation]:
        """Every generation that must not be deleted."""
        return frozenset(row.generation for row in self.rows)

    @property
    def in_memory(self) -> frozenset[Generation]:
        """Every generation that memory must hold: the latest, and what is not sealed or not in files yet."""
        return frozenset(row.generation for row in self.rows if row.in_memory or row.due or not row.sealed)

    def row(self, generation: Generation) -> Row | None:
        return next((row for row in self.rows if row.generation == generation), None)

    def steps(self) -> dict[str, Any]:
        """Return the steps of the generations by role, for a person; None where there is none."""
        roles = {name: getattr(self, name) for name in ("latest", "candidate", "interim", "verified")}
        return {
            **{name: None if each is None else each.step for name, each in roles.items()},
            "capturing": None if self.pending is None else self.pending.step,
            "durable": [each.step for each in self.in_files],
            "poisoned": self.poisoned,
        }

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"generation": list(row.generation), **{name: getattr(row, name) for name in FLAGS}}
            for row in self.rows
        ]
        return {**{name: getattr(self, name) for name in _LEAST}, "rows": rows}

    @classmethod
    def from_json(cls, document: Any) -> CheckpointGate:
        """Read what ``to_json`` returned; raises ``ValueError`` for anything else."""
        if not isinstance(document, dict) or document.keys() != {*_LEAST, "rows"}:
            raise ValueError(f"not the state of a checkpoint gate: {document!r:.200}")
        if not isinstance(rows := document["rows"], list):
            raise ValueError(f"the rows of a checkpoint gate must be a list, got {rows!r:.80}")
        return cls(**{**document, "rows": tuple(map(Row.from_json, rows))})

    def _newest(self, is_one: Callable[[Row], bool]) -> Generation | None:
        return next((row.generation for row in reversed(self.rows) if is_one(row)), None)


_LEAST = {
    "recipes": 1,
    "persist_every": 1,
    "keep": 0,
    "accepted_recipes": 0,
    "unwritten": 0,
    "poisoned": 0,
    "lineage": 0,
    "step": 0,
}
"""The lowest value of each number of a gate."""


def _refuse_nonsense(gate: CheckpointGate) -> None:
    """Raise ``ValueError`` for a state that cannot exist; it may come from a damaged file."""
    for name, lowest in _LEAST.items():
        value = getattr(gate, name)
        if not is_number(value, lowest) and not (value is None and name in ("recipes", "poisoned")):
            raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
    if gate.accepted_recipes >= (gate.recipes or 1):
        raise ValueError(
            f"{gate.accepted_recipes} accepted recipes do not fit a cycle of {gate.recipes or 1}"
        )
    steps = [row.generation.step for row in gate.rows]
    if steps != sorted({*steps}):
        raise ValueError("the rows of a checkpoint gate must be of ascending steps")
    for row in gate.rows:
        step, lineage = row.generation
        needs_seal = row.in_memory or row.in_files or row.verified
        is_distrusted = gate.poisoned is not None and not row.verified
        is_newer = lineage > gate.lineage or (row.accepted and step > gate.step)
        broken = {
            "what is in memory, in files or verified is sealed": needs_seal and not row.sealed,
            "what is sealed or due was accepted": (row.sealed or row.due) and not row.accepted,
            "what is due is not in files yet": row.due and row.in_files,
            "a dense model has no cycle": row.ends_cycle and gate.recipes is None,
            "after corruption only what is verified is sealed": row.sealed and is_distrusted,
            "nothing accepted is newer than the last check": is_newer,
        }
        if any(broken.values()):
            rules = "; ".join(rule for rule, is_broken in broken.items() if is_broken)
            raise ValueError(f"no such state of a checkpoint gate: {row.generation}: {rules}")


@dataclass(frozen=True, slots=True)
class Checked:
    """The check after this step's optimizer update is complete."""

    step: int
    outcome: Outcome
    recipes: int = 1
    """How many recipes of the catalog it has replayed. An accepted check without any certifies nothing."""
    can_capture: bool = True
    """Whether every rank has a buffer for the state. If not, an accepted check captures nothing."""

    @property
    def kind(self) -> str:
        return "accepted" if self.outcome.accepted else self.outcome.value


class Changed(NamedTuple):
    """What became of one generation."""

    kind: Literal["begun", "sealed", "written", "write_failed", "lost"]
    """``begun``: all ranks capture it while its check has no verdict yet. ``sealed``: every rank has sealed
    it in memory. ``written``: its files are sealed, with all their copies. ``write_failed``: that was not
    possible on some rank. ``lost``: some rank's shard was never captured, or no copy of it is whole."""
    generation: Generation


@dataclass(frozen=True, slots=True)
class Recovered:
    """Every rank has loaded this generation and continues training from it."""

    generation: Generation | None
    """None if the job starts from step 0, which is allowed only when no verified generation is left."""
    in_files: bool = False
    """Whether every rank also has it on disk."""

    @property
    def kind(self) -> str:
        return "recovered"


Event = Checked | Changed | Recovered


@dataclass(frozen=True, slots=True)
class Effects:
    """What every rank does after an event."""

    reason: str
    """Why, for people."""
    capture: Row | None = None
    """Capture the current state as this generation, and write it to files if it is ``due``."""
    promoted: Generation | None = None
    """This generation is now verified."""


_Next = tuple[CheckpointGate, Effects]


def transition(gate: CheckpointGate, event: Event) -> _Next:
    """Return the next state and what to do; raises ``ValueError`` for an event that cannot follow."""
    if isinstance(event, Checked):
        gate = _at_check(gate, event)
        if gate.poisoned is not None:
            reason = f"corruption was found at step {gate.poisoned}, and the job has not recovered since"
            return gate, Effects(reason)
    following, effects = _TRANSITIONS[event.kind](gate, event)
    return _pruned(following), effects


def _at_check(gate: CheckpointGate, event: Checked) -> CheckpointGate:
    """A capture that has begun without a verdict is dropped here; an accepted check adds it again."""
    if event.step <= gate.step:
        raise ValueError(f"a check at step {event.step} cannot follow step {gate.step}")
    if gate.pending is not None:
        raise ValueError(f"report {gate.pending} as sealed or lost before the next check")
    return replace(gate, step=event.step, rows=tuple(row for row in gate.rows if row.accepted))


def _accepted(gate: CheckpointGate, event: Checked) -> _Next:
    """Healthy, or slow: a straggler's numbers are right. Captures, and counts the recipes."""
    captures = event.can_capture and event.recipes > 0
    total = gate.accepted_recipes + event.recipes
    is_complete = gate.recipes is not None and total >= gate.recipes
    # While older files are written, the cycle ends with the next accepted check, and likewise if nothing can
    # be captured: the recipes that are accepted until then include all of them, too.
    ends_cycle = is_complete and captures and gate.writing is None
    is_first = gate.recipes is None and not gate.in_files and gate.unwritten == 0  # no write has failed
    unwritten = gate.unwritten + captures
    is_due = captures and gate.writing is None
    is_due = is_due and (ends_cycle or is_first or unwritten >= gate.persist_every)
    ripe = gate.candidate if is_complete else None
    fresh = Row(Generation(event.step, gate.lineage), ends_cycle=ends_cycle, accepted=True, due=is_due)
    gate = replace(
        _changed(gate, ripe, verified=True),
        accepted_recipes=0 if ends_cycle or gate.recipes is None else min(total, gate.recipes - 1),
        unwritten=0 if is_due else unwritten,
    )
    reason = f"the check at step {event.step} is accepted"
    if gate.recipes is not None:
        reason += f", with {min(total, gate.recipes)} of {gate.recipes} recipes in this cycle"
    reason += f", and {ripe} is verified" if ripe is not None else ""
    if not captures:
        return gate, Effects(f"{reason}; nothing is captured", None, ripe)
    return replace(gate, rows=(*gate.rows, fresh)), Effects(reason, fresh, ripe)


def _not_checked(gate: CheckpointGate, event: Checked) -> _Next:
    """Captures nothing, as in the paper. A rotation visits all recipes only if those of a cycle follow each
    other, so the count starts again. The candidate stays: its own cycle was complete."""
    reason = f"the check at step {event.step} is incomplete: nothing is captured, and the cycle starts again"
    return replace(gate, accepted_recipes=0), Effects(reason)


def _rejected(gate: CheckpointGate, event: Checked) -> _Next:
    """A rank or a kernel may be at fault: the candidate's second cycle is not accepted, so it is none."""
    rows = tuple(replace(row, ends_cycle=False) for row in gate.rows)
    reason = f"the check at step {event.step} was not accepted: its cycle and the candidate are void"
    return replace(gate, rows=rows, accepted_recipes=0), Effects(reason)


def _corrupted(gate: CheckpointGate, event: Checked) -> _Next:
    """Whatever later checks say, nothing is captured or certified until a recovery."""
    rows = tuple(row for row in gate.rows if row.verified)
    reason = f"the check at step {event.step} found corruption: nothing of this lineage is certified any more"
    return replace(gate, rows=rows, accepted_recipes=0, poisoned=event.step), Effects(reason)


def _begun(gate: CheckpointGate, event: Changed) -> _Next:
    fresh = Row(event.generation)
    if gate.poisoned is not None:
        return gate, Effects(f"{fresh.generation} is not captured: corruption was found")
    if not all(row.accepted for row in gate.rows) or fresh.generation.step <= gate.step:
        raise ValueError(f"{fresh.generation} cannot be captured before the verdict on the last check")
    reason = f"{fresh.generation} is captured, and its check has no verdict yet"
    return replace(gate, rows=(*gate.rows, fresh)), Effects(reason, fresh)


def _sealed(gate: CheckpointGate, event: Changed) -> _Next:
    fresh, is_dense = event.generation, gate.recipes is None
    if fresh != gate.pending:
        raise ValueError(f"{fresh} is not being captured; pending is {gate.pending}")
    gate = replace(gate, rows=tuple(replace(row, in_memory=False) for row in gate.rows))
    gate = _changed(gate, fresh, sealed=True, in_memory=True, verified=is_dense)
    return gate, Effects(f"{fresh} is sealed on every rank", None, fresh if is_dense else None)


def _written(gate: CheckpointGate, event: Changed) -> _Next:
    written, is_in_files = event.generation, event.kind == "written"
    reason = f"the files of {written} " + ("are sealed" if is_in_files else "could not be written")
    if written != gate.writing:  # its lineage or cycle was dropped meanwhile
        return gate, Effects(f"{reason}, and no longer needed")
    if not is_in_files:  # at least one, so that a full disk is not tried again at every check
        gate = replace(gate, unwritten=max(gate.unwritten, 1))
    return _changed(gate, written, due=False, in_files=is_in_files), Effects(f"{reason} on every rank")


def _lost(gate: CheckpointGate, event: Changed) -> _Next:
    rows = tuple(row for row in gate.rows if row.generation != event.generation)
    return replace(gate, rows=rows), Effects(f"{event.generation} is no longer available")


def _recovered(gate: CheckpointGate, event: Recovered) -> _Next:
    """Rows newer than the loaded one belong to an abandoned lineage. There is no candidate: rotations begin
    again, and a replaced machine may hide what the old one did wrong."""
    loaded = event.generation
    known = gate.trusted if gate.poisoned is not None else gate.sealed
    if loaded is None and gate.trusted:
        raise ValueError(
            f"a job cannot start from step 0 while {gate.verified} is verified; report it lost first"
        )
    if loaded is not None and loaded not in known:
        raise ValueError(f"{loaded} may not be loaded; available: {', '.join(map(str, known)) or 'none'}")
    step = 0 if loaded is None else loaded.step
    rows = tuple(
        replace(
            row,
            ends_cycle=False,
            in_memory=row.generation == loaded,
            due=False,
            in_files=row.in_files or (row.generation == loaded and event.in_files),
        )
        for row in gate.rows
        if row.generation == loaded or (row.verified and row.generation.step <= step)
    )
    gate = replace(
        gate,
        rows=rows,
        accepted_recipes=0,
        unwritten=0,
        poisoned=None,
        lineage=gate.lineage + 1,
        step=step,
    )
    origin = "step 0" if loaded is None else str(loaded)
    return gate, Effects(f"the job continues from {origin} as lineage {gate.lineage}")


_TRANSITIONS: dict[str, Callable[[CheckpointGate, Any], _Next]] = {
    "accepted": _accepted,
    "not_checked": _not_checked,
    "rejected": _rejected,
    "sdc": _corrupted,
    "begun": _begun,
    "sealed": _sealed,
    "written": _written,
    "write_failed": _written,
    "lost": _lost,
    "recovered": _recovered,
}


def _changed(gate: CheckpointGate, generation: Generation | None, **flags: Any) -> CheckpointGate:
    rows = (replace(row, **flags) if row.generation == generation else row for row in gate.rows)
    return replace(gate, rows=tuple(rows))


def _pruned(gate: CheckpointGate) -> CheckpointGate:
    """Drop what newer state has replaced in memory, and all but the newest verified files."""
    verified_files = [row.generation for row in gate.rows if row.verified and row.in_files]
    kept = {*verified_files[-1 - gate.keep :], gate.candidate, gate.interim, *gate.in_memory}
    return replace(gate, rows=tuple(row for row in gate.rows if row.generation in kept))


class SweepResult(str, Enum):
    """The job-wide result of replaying the complete recipe catalog."""

    CLEAN = "clean"
    SDC = "sdc"
    COULD_NOT_RUN = "could_not_run"


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoint that every rank loads."""

    role: TrustLevel | None
    """None if no checkpoint may be loaded."""
    generation: Generation | None
    tentative: bool
    """Whether the new workers must replay the catalog and call ``confirm`` before they train."""
    reason: str
    """Why, in one sentence."""
    is_swept: bool = False
    """Whether the new workers replay the catalog before they train, because nobody has done so since."""


def select_checkpoint(failure: Failure, gate: CheckpointGate) -> Selection:
    """Select the checkpoint to load after this failure, when trainers are blocked or gone."""
    if why := _out_of_question(gate) or _DISTRUSTED.get(failure):
        # The machine that computed wrong numbers may not have been named, and run this job again.
        return replace(_verified(gate, why), is_swept=failure is Failure.SDC)
    if failure is Failure.STRAGGLER:
        return _latest(gate, "slowness does not affect the numbers")
    if gate.latest == gate.verified:
        same = _verified(gate, "it is also the latest, so a sweep could not change the choice")
        return replace(same, is_swept=True)
    return _latest(
        gate, "the catalog has not been replayed, so the next workers must replay it before they train", True
    )


def confirm(gate: CheckpointGate, swept: SweepResult) -> Selection:
    """Select the checkpoint to train from, given the result of a sweep."""
    if why := _out_of_question(gate) or _SWEPT.get(swept):
        return _verified(gate, why)
    return _latest(gate, "the sweep of the catalog was clean")


_DISTRUSTED = {
    Failure.SDC: "corruption was found",
    Failure.MACHINES_GONE: "a machine is gone, and the state in its memory cannot be inspected",
}
_SWEPT = {
    SweepResult.SDC: "the sweep of the catalog found corruption",
    SweepResult.COULD_NOT_RUN: "the sweep of the catalog did not complete",
}


def _out_of_question(gate: CheckpointGate) -> str | None:
    """Why the latest cannot be selected, whatever a sweep would find; None if it can."""
    if gate.poisoned is not None:
        return f"corruption was found at step {gate.poisoned}"
    return "no newer state is in memory" if gate.latest is None else None


def _latest(gate: CheckpointGate, why: str, tentative: bool = False) -> Selection:
    how = "Tentatively take the latest" if tentative else "Take the latest"
    reason = f"{how} checkpoint, {gate.latest}: {why}."
    return Selection(TrustLevel.LATEST, gate.latest, tentative, reason, is_swept=tentative)


def _verified(gate: CheckpointGate, why: str) -> Selection:
    if gate.verified is None:
        reason = f"Nothing can be recovered: {why}, and no verified checkpoint is left."
        return Selection(None, None, False, reason)
    return Selection(
        TrustLevel.VERIFIED, gate.verified, False, f"Take the verified checkpoint, {gate.verified}: {why}."
    )
