"""What the catalog says of a job: how it is trained, and what must come of its faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from evaluation.jobs.job import Job

Flip = Literal["named", "reported"]
REPLAY = range(1, 400)
"""The calls of a place in a step that are not training's own, however often it is replayed."""


@dataclass(frozen=True)
class Wrong:
    """A bit that is wrong in one place on one rank, and the first incident that must come of it."""

    at: str
    """As ``FaultPlan`` names it: ``stack.1/output``, ``stack.1.up/weight.exp_avg``, ``all_reduce@dp``."""
    rank: int
    surface: str = ""
    """Where it is seen; as ``at`` if not given."""
    calls: range | None = REPLAY
    """Which calls of the place in the step; ``range(1)`` for what a rank holds."""
    step: int = 2
    bit: int = 20
    index: int = 0
    scope: str = "rank"
    named: tuple[int, ...] = ()
    """Who is named; the rank if not given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "surface", self.surface or self.at)
        object.__setattr__(self, "named", self.named or (self.rank,))


@dataclass(frozen=True)
class Entry:
    train: Callable[[Job], None]
    ranks: int = 3
    flip: Flip = "named"
    """What a changed weight on one rank leads to. ``named``: an incident with exactly that rank.
    ``reported``: an incident with that rank, perhaps among others, as no majority holds the same."""
    compared: Collection[str] | Callable[[int], Collection[str]] = ()
    """What every rank, or the given one, must have compared after 20 healthy steps, at least."""
    unchecked: tuple[str, ...] = ("*",)
    """Patterns of what may be left out of a comparison; empty where everything must be compared."""
    wrong: Mapping[str, Wrong] = field(default_factory=dict)
    """Wrong numbers that must be named, by a short name."""
    needs: tuple[str, ...] = ()
    """Packages that must be installed."""
    patience: float = 1.0
    """How many times longer than others it may take: compilation, precisions that a CPU emulates."""
    slow: tuple[int, ...] = (1,)
    """Who is named when layers of rank 1 are slow: of two that do the same work, both."""
    has_no_peers: bool = False
    """Whether no two ranks do the same work, so that torchscout says what it cannot find."""
    not_slowed: str = ""
    """Why no layer of it can be made slow here, if so."""
    not_resumed: str = ""
    """Why it does not go on from our checkpoints, if so."""
    resumed_on: int | None = None
    """On how many ranks it is resumed, if not on all: DDP among more than two does not end with the same bits
    (see ``contracts.resumed``)."""

    in_test: tuple[str, ...] = ()
    """Contracts that ``make test`` tries on it; a wrong number as ``wrong_number:NAME``."""
    in_ci: tuple[str, ...] = ()
    """Contracts that CI tries on it besides; the others are tried with ``make test-slow``."""
    on_cuda: tuple[str, ...] = ()
    """Contracts that ``make test-gpu`` tries on it, over NCCL."""
    wrong_today: Mapping[str, str] = field(default_factory=dict)
    """Contracts that torchscout does not keep on it yet, and why: expected failures, and strict ones."""

    def compared_on(self, rank: int) -> set[str]:
        return {*(self.compared(rank) if callable(self.compared) else self.compared)}

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]
