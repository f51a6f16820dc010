"""The checkpoint gate's state and its JSON form; the events that change it, and what is to be done then
(paper, section 8, algorithm 3).

Plain data. ``gate.after`` has the transitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchscout.checkpoint.generation import Generation, is_number
from torchscout.decision.record import Manifestation

__all__ = [
    "SCHEMA",
    "Checked",
    "CheckpointGate",
    "Effects",
    "Event",
    "Hung",
    "Lost",
    "Outcome",
    "Recovered",
    "Sealed",
    "WriteFailed",
    "Written",
]


class Outcome(str, Enum):
    """A check's, job-wide: that of all recipes due at a boundary, on all ranks."""

    HEALTHY = "healthy"
    STRAGGLER = "straggler"
    """Somebody is slow; the numbers are right."""
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
    """A check right after the optimizer's update of this step is over."""

    step: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Hung:
    """The observers found that the job makes no progress at this step."""

    step: int


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
    """Some rank's share of this generation cannot be had: never captured, gone, or damaged everywhere."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Recovered:
    """Every rank has loaded this generation and trains on from it."""

    generation: Generation | None
    """None if the job starts from its beginning, which is allowed only when nothing verified is left."""
    in_files: bool = False
    """Whether every rank has a file of it as well."""


Event = Checked | Hung | Sealed | Written | WriteFailed | Lost | Recovered


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What is to be done about an event, on every rank alike."""

    reason: str
    """Why, in words."""
    capture: Generation | None = None
    """Copy the state as it is now, under this name."""
    persist: Generation | None = None
    """Write this one to files, and report ``Written`` or ``WriteFailed``."""
    promote: Generation | None = None
    """This one is verified from here on."""
    retire: tuple[Generation, ...] = ()
    """Delete these wherever they lie."""
    retrieve: Manifestation | None = None
    """Training must stop and a checkpoint be chosen because of this failure."""


SCHEMA = 1
"""Version of the JSON form; other versions are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointGate:
    """Latest, candidate and verified, and how far the evidence for the next promotion has come."""

    recipes: int | None = None
    """K, the size of the recipe catalog of a mixture of experts; None for a dense model."""
    persist_every: int = 1
    """Dense: certified generations from one that is written to the next; a catalog writes at cycle ends."""
    keep: int = 1
    """Older verified generations kept in files besides the newest one there."""

    accepted: int = 0
    """q, the accepted checks of the cycle under way."""
    pending: Generation | None = None
    """What the last accepted check lets all ranks capture. It has no role until it is known to be sealed on
    every rank: see [Note: pointers move when every rank has sealed]."""
    captured: tuple[Generation, ...] = ()
    """The newest generation that is sealed in every rank's memory; after a recovery, what was loaded. When a
    job starts again it may be two, oldest first: see ``ledger.settled``."""
    candidate: Generation | None = None
    """Captured at the end of an accepted cycle; the next accepted cycle promotes it."""
    trusted: tuple[Generation, ...] = ()
    """Every verified generation that is kept, oldest first."""
    durable: tuple[Generation, ...] = ()
    """Those of the trusted, and the candidate, whose files are sealed on every rank."""
    writing: Generation | None = None
    """What is being written to files."""
    unwritten: int = 0
    """Dense: certified generations since the last one that was to be written."""
    poisoned: int | None = None
    """The step whose check found corruption, until a recovery is recorded."""
    lineage: int = 0
    """Recoveries so far; a step that is trained again makes another generation."""
    step: int = 0
    """Of the last check, or of what was loaded since."""

    def __post_init__(self) -> None:
        _refuse_nonsense(self)

    @property
    def latest(self) -> Generation | None:
        return self.captured[-1] if self.captured else None

    @property
    def verified(self) -> Generation | None:
        return self.trusted[-1] if self.trusted else None

    @property
    def held(self) -> frozenset[Generation]:
        """Every generation that must not be deleted."""
        single = {each for each in (self.candidate, self.writing, self.pending) if each is not None}
        return frozenset(single).union(self.captured, self.trusted)

    @property
    def in_memory(self) -> frozenset[Generation]:
        """Every generation that memory must hold: what is in files need not be there any more."""
        single = {each for each in (self.writing, self.pending) if each is not None}
        return frozenset(single).union(self.captured)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        several = {name: [list(each) for each in getattr(self, name)] for name in _SEVERAL}
        single = {name: getattr(self, name) and list(getattr(self, name)) for name in _SINGLE}
        return {"schema": SCHEMA, **plain, **several, **single}

    @classmethod
    def from_json(cls, document: Any) -> CheckpointGate:
        """Read back what ``to_json`` wrote; a ``ValueError`` says what is wrong with anything else."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not the state of a checkpoint gate of schema {SCHEMA}: {document!r:.80}")
        document = {"pending": None, **document}  # earlier versions had none
        known = {"schema", *_NUMBERS, *_SEVERAL, *_SINGLE}
        if wrong := known.symmetric_difference(document):
            raise ValueError(f"a checkpoint gate's state lacks, or does not know, {sorted(map(str, wrong))}")
        if wrong := {name for name in _SEVERAL if not isinstance(document[name], list)}:
            raise ValueError(f"{sorted(wrong)} must be lists of generations")
        fields: dict[str, Any] = {name: document[name] for name in _NUMBERS}
        fields |= {name: tuple(map(Generation.from_json, document[name])) for name in _SEVERAL}
        named = {name: document[name] for name in _SINGLE}
        fields |= {
            name: value if value is None else Generation.from_json(value) for name, value in named.items()
        }
        return cls(**fields)


_NUMBERS = ("recipes", "persist_every", "keep", "accepted", "unwritten", "poisoned", "lineage", "step")
_SEVERAL = ("captured", "trusted", "durable")
_SINGLE = ("candidate", "writing", "pending")


def _refuse_nonsense(gate: CheckpointGate) -> None:
    """Whether such a state can exist; it may come from a file."""
    least = {"persist_every": 1, "keep": 0, "accepted": 0, "unwritten": 0, "lineage": 0, "step": 0}
    for name, lowest in {**least, "recipes": 1, "poisoned": 0}.items():
        value = getattr(gate, name)
        if (value is not None or name in least) and not is_number(value, lowest):
            raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
    if gate.accepted >= (gate.recipes or 1):
        raise ValueError(f"{gate.accepted} accepted checks do not fit a cycle of {gate.recipes or 1}")
    if len(gate.captured) > 2:
        raise ValueError(f"memory holds two generations at most, not {len(gate.captured)}")
    for name in ("captured", "trusted", "durable"):
        steps = [each.step for each in getattr(gate, name)]
        if steps != sorted(set(steps)):
            raise ValueError(f"{name} must be of ascending steps, got {steps}")
    lasting, sealed = {*gate.trusted, gate.candidate}, {*gate.trusted, *gate.captured, gate.candidate}
    allowed: dict[str, bool] = {
        "a dense model has no candidate": gate.recipes is not None or gate.candidate is None,
        "only what is trusted, or the candidate, is durable": lasting.issuperset(gate.durable),
        "only what is trusted, pending, or the candidate, is written": gate.writing is None
        or gate.writing in {*lasting, gate.pending},
        "what is pending is newer than all that is sealed": gate.pending is None
        or all(each is None or each.step < gate.pending.step for each in sealed),
        "nothing is pending after corruption": gate.pending is None or gate.poisoned is None,
        "what is being written is not durable yet": gate.writing not in gate.durable,
        "the candidate is newer than what is verified": gate.candidate is None
        or all(each.step < gate.candidate.step for each in gate.trusted),
        "after corruption only what is trusted remains": gate.poisoned is None
        or (gate.candidate is None and set(gate.captured) <= set(gate.trusted)),
        "nothing is newer than the last check": all(
            each.step <= gate.step and each.lineage <= gate.lineage for each in gate.held
        ),
    }
    if broken := [rule for rule, kept in allowed.items() if not kept]:
        raise ValueError(f"no such state of a checkpoint gate: {'; '.join(broken)}")
