"""The checkpoint gate's state, its JSON form, its events and their effects (paper, section 8, algorithm 3).

Plain data; ``gate.transition`` has the logic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchscout.checkpoint.trust.generation import Generation, is_number

__all__ = [
    "SCHEMA",
    "Checked",
    "CheckpointGate",
    "Effects",
    "Event",
    "Lost",
    "Outcome",
    "Realigned",
    "Recovered",
    "Sealed",
    "WriteFailed",
    "Written",
]


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


@dataclass(frozen=True, slots=True)
class Checked:
    """The check after this step's optimizer update is complete."""

    step: int
    outcome: Outcome
    recipes: int = 1
    """How many recipes of the catalog it has replayed; at least 1 if it was accepted."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Every rank has sealed its capture of this generation in memory."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Written:
    """Every rank has sealed its files of this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Some rank could not write its files of this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Lost:
    """Some rank's shard of this generation is unavailable: never captured, deleted, or damaged everywhere."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Recovered:
    """Every rank has loaded this generation and continues training from it."""

    generation: Generation | None
    """None if the job starts from step 0, which is allowed only when no verified generation is left."""
    in_files: bool = False
    """Whether every rank also has it on disk."""


@dataclass(frozen=True, slots=True)
class Realigned:
    """A check failed, and ranks may have applied its votes or not: all continue with this state."""

    gate: CheckpointGate


Event = Checked | Sealed | Written | WriteFailed | Lost | Recovered | Realigned


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What every rank does after an event."""

    reason: str
    """Why, for people."""
    capture: Generation | None = None
    """Capture the current state as this generation."""
    persist: Generation | None = None
    """Write this generation to files, and report ``Written`` or ``WriteFailed``."""
    promote: Generation | None = None
    """This generation is now verified."""
    retire: tuple[Generation, ...] = ()
    """Delete these generations from memory and disk."""


SCHEMA = 1
"""Version of the JSON form; other versions are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointGate:
    """Which generations are latest, candidate and verified, and how far the current cycle has come."""

    recipes: int | None = None
    """K, the recipes in a cycle, for a mixture of experts with a recipe catalog; None for a dense model."""
    persist_every: int = 1
    """One in this many certified generations is written to files. A catalog also writes at cycle ends."""
    keep: int = 1
    """Older verified generations that are kept in files besides the newest."""

    accepted: int = 0
    """q, the accepted recipes of the current cycle."""
    pending: Generation | None = None
    """The generation that is being captured. It has no role until every rank has sealed it: see
    [Note: pointers move when every rank has sealed]."""
    captured: tuple[Generation, ...] = ()
    """The newest generation that is sealed in every rank's memory; after a recovery, the loaded one. When a
    job restarts there may be two, oldest first: see ``ledger.settled``."""
    candidate: Generation | None = None
    """Captured at the end of an accepted cycle; the next accepted cycle promotes it."""
    interim: Generation | None = None
    """A catalog: captured within a cycle and written to files, newer than all other files. It is never
    promoted, and takes the place of the latest if that is lost."""
    trusted: tuple[Generation, ...] = ()
    """All verified generations that are kept, oldest first."""
    durable: tuple[Generation, ...] = ()
    """Trusted generations, the candidate and the interim one, whose files are sealed on every rank."""
    writing: Generation | None = None
    """The generation that is being written to files."""
    unwritten: int = 0
    """Captured generations since the last one that was due for files."""
    poisoned: int | None = None
    """The step whose check found corruption, until a recovery is recorded."""
    lineage: int = 0
    """The number of recoveries so far."""
    step: int = 0
    """The step of the last check, or of the generation loaded since."""

    def __post_init__(self) -> None:
        _refuse_nonsense(self)

    @property
    def latest(self) -> Generation | None:
        return self.captured[-1] if self.captured else None

    @property
    def verified(self) -> Generation | None:
        return self.trusted[-1] if self.trusted else None

    @property
    def newest_candidate(self) -> Generation | None:
        """The newest candidate whose files are sealed; it takes the place of a latest that is lost."""
        return max((each for each in (self.interim, self.candidate) if each in self.durable), default=None)

    @property
    def held(self) -> frozenset[Generation]:
        """Every generation that must not be deleted."""
        single = (self.candidate, self.interim, self.writing, self.pending)
        return frozenset(each for each in single if each is not None).union(self.captured, self.trusted)

    @property
    def in_memory(self) -> frozenset[Generation]:
        """Every generation that memory must hold, because it is not in files yet or is the latest."""
        single = {each for each in (self.writing, self.pending) if each is not None}
        return frozenset(single).union(self.captured)

    def steps(self) -> dict[str, Any]:
        """Return the steps of the generations by role, for a person; None where there is none."""
        roles = {name: getattr(self, name) for name in ("latest", "candidate", "interim", "verified")}
        return {
            **{name: None if each is None else each.step for name, each in roles.items()},
            "capturing": None if self.pending is None else self.pending.step,
            "durable": [each.step for each in self.durable],
            "poisoned": self.poisoned,
        }

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        several = {name: [list(each) for each in getattr(self, name)] for name in _SEVERAL}
        single = {name: getattr(self, name) and list(getattr(self, name)) for name in _SINGLE}
        return {"schema": SCHEMA, **plain, **several, **single}

    @classmethod
    def from_json(cls, document: Any) -> CheckpointGate:
        """Read what ``to_json`` returned; raises ``ValueError`` for anything else."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not the state of a checkpoint gate of schema {SCHEMA}: {document!r:.80}")
        document = {"pending": None, "interim": None, **document}  # earlier versions had none
        known = {"schema", *_NUMBERS, *_SEVERAL, *_SINGLE}
        if wrong := known.symmetric_difference(document):
            raise ValueError(
                f"missing or unknown fields in a checkpoint gate's state: {sorted(map(str, wrong))}"
            )
        if wrong := {name for name in _SEVERAL if not isinstance(document[name], list)}:
            raise ValueError(f"{sorted(wrong)} must be lists of generations")
        fields: dict[str, Any] = {name: document[name] for name in _NUMBERS}
        fields |= {name: tuple(map(Generation.from_json, document[name])) for name in _SEVERAL}
        single = {name: document[name] for name in _SINGLE if document[name] is not None}
        fields |= {name: Generation.from_json(value) for name, value in single.items()}
        return cls(**fields)


_NUMBERS = ("recipes", "persist_every", "keep", "accepted", "unwritten", "poisoned", "lineage", "step")
_SEVERAL = ("captured", "trusted", "durable")
_SINGLE = ("candidate", "interim", "writing", "pending")


def _refuse_nonsense(gate: CheckpointGate) -> None:
    """Raise ``ValueError`` for a state that cannot exist; it may come from a damaged file."""
    least = {"persist_every": 1, "keep": 0, "accepted": 0, "unwritten": 0, "lineage": 0, "step": 0}
    for name, lowest in {**least, "recipes": 1, "poisoned": 0}.items():
        value = getattr(gate, name)
        if (value is not None or name in least) and not is_number(value, lowest):
            raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
    if gate.accepted >= (gate.recipes or 1):
        raise ValueError(f"{gate.accepted} accepted recipes do not fit a cycle of {gate.recipes or 1}")
    if len(gate.captured) > 2:
        raise ValueError(f"memory holds two generations at most, not {len(gate.captured)}")
    for name in ("captured", "trusted", "durable"):
        steps = [each.step for each in getattr(gate, name)]
        if steps != sorted(set(steps)):
            raise ValueError(f"{name} must be of ascending steps, got {steps}")
    lasting = {*gate.trusted, gate.candidate, gate.interim}
    sealed = {*lasting, *gate.captured}
    allowed: dict[str, bool] = {
        "a dense model has no candidate": gate.recipes is not None or gate.candidate is gate.interim is None,
        "only what is trusted, or a candidate, is durable": lasting.issuperset(gate.durable),
        "an interim generation is in files": gate.interim is None or gate.interim in gate.durable,
        "a dense model writes only what is trusted or pending": gate.recipes is not None
        or gate.writing in {None, *gate.trusted, gate.pending},
        "what is pending is newer than all that is sealed": gate.pending is None
        or all(each is None or each.step < gate.pending.step for each in sealed),
        "nothing is pending after corruption": gate.pending is None or gate.poisoned is None,
        "what is being written is not durable yet": gate.writing not in gate.durable,
        "the candidate is newer than what is verified": gate.candidate is None
        or all(each.step < gate.candidate.step for each in gate.trusted),
        "an interim generation is newer than other files": gate.interim is None
        or all(each.step <= gate.interim.step for each in gate.durable),
        "after corruption only what is trusted remains": gate.poisoned is None
        or {*gate.captured, gate.candidate, gate.interim, gate.writing} <= {*gate.trusted, None},
        "nothing is newer than the last check": all(
            each.step <= gate.step and each.lineage <= gate.lineage for each in gate.held
        ),
    }
    if broken := [rule for rule, kept in allowed.items() if not kept]:
        raise ValueError(f"no such state of a checkpoint gate: {'; '.join(broken)}")
