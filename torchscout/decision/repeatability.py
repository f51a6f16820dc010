"""Is a disagreement a rank's fault or a kernel's? (paper, sections 5.3 and 6.1)

Pure, and fed with gathered evidence only, so that all peers conclude alike. It decides who may be named after
how many replays, and remembers for the whole job which surfaces do not repeat. Running the replays is for
``replay.replayer``, what is concluded for ``sdc``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase

from torchscout.decision.consensus import Status, Verdict, exact, known
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.utils.text import named

__all__ = [
    "BIAS",
    "CHANCE",
    "MAX_REPLAYS",
    "NONDETERMINISTIC",
    "REFUSED",
    "UNDECIDED",
    "Repeatability",
    "Repeated",
    "SurfaceHistory",
    "Trial",
    "unmet",
]

CHANCE = 1e-6
"""The probability, at most, that a check names a rank because a kernel does not repeat its numbers."""
BIAS = 4.0
"""A kernel may differ so many times as often (as odds) on one rank as it does on the rank's peers."""
MAX_REPLAYS = 64
"""Of one target in one check, the first included; more than two only after a disagreement."""
NONDETERMINISTIC = "nondeterministic kernel"
"""How the reason begins why numbers that differ say nothing."""
REFUSED = "cannot be replayed"
"""How the reason begins why something is not repeated at all, as a rule and not by accident."""
UNDECIDED = "undecided"
"""How the reason begins why numbers that differ name nobody yet."""

# [Note: a rank or a kernel]
#
# Peers replay the same call on the same input. If their results differ, either a rank computes wrongly or
# the kernel does not repeat itself (atomics, races), which no rank is to blame for. A kernel may have any
# number of results with any probabilities, and these may change with the input, hence from check to check.
# So nothing is estimated. One fact is used: the kernel does not know which rank it runs on.
#
# Take one replay by N peers in which a strict majority has the result v and d ranks have another one. If it
# was the kernel, every choice of d ranks among N was equally likely. That exactly one given rank s differs
# (d = 1) has probability 1/N, whatever the probabilities of the results are. Further replays of the call are
# further trials: that k replays differ, each only on s, has probability N^-k, and since s may be any rank, N
# * N^-k. It does not matter that s was wrong in the same way each time, or how many replays agreed in
# between: replays in which all agree have factor 1. So the same rule covers persistent and intermittent
# corruption.
#
# Ranks are not quite equal: chips differ in clocks and in which cores work. Let the odds that the kernel
# differs on s be at most BIAS times those on its peers. A lone difference is then on s with probability
# b / (b + N - 1), b = BIAS; for d ranks out of a set S of j suspects the probability is Fisher's noncentral
# hypergeometric term C(j, d) b^d / sum_i C(j, i) C(N - j, d - i) b^i. A kernel that differs on one rank only,
# for ever, is not distinguishable from a rank that is wrong; nothing can be promised for it.
#
# The product of these factors is compared with CHANCE after each replay. Stopping as soon as it is small
# enough is allowed: for fixed S, the inverse of the product (0 once anybody else differs) is a nonnegative
# martingale with mean 1 under the kernel hypothesis, and exceeds 1/c, ever, with probability c at most
# (Ville). So the bound holds for all checks of a job together, and a fortiori for one. It is shared among
# the choices of S (C(N, j) for each j, with weights 2^-j over j) and among the surfaces of the check.
#
# As soon as a rank outside S differs, or the majority's own result changes, or a later check suspects
# others, the surface does not repeat: it is left out from then on, and names nobody any more. If the replays
# of a check do not suffice, the suspicion is kept and the next disagreement on that surface adds to it.
# Agreement in earlier checks is not counted as evidence that a kernel repeats itself: another input may be
# its first race, and a kernel that differs once in M replays passes M of them with probability 1/e.
#
# Without a strict majority nobody is named. That peers differ is reported if each of them repeats its own
# result so often that chance is excluded: given the results of a replay, the same assignment to ranks as in
# the first replay has probability 1 / (number of distinct assignments), 1/2 at most.
#
# What ranks hold (state, received inputs) is read, not computed, so that no kernel can make it differ: it is
# read a second time, and named at once.


class Repeatability(str, Enum):
    """What further replays of the same input say about a disagreement."""

    PERSISTENT = "persistent"
    """Everybody repeats its own numbers: the wrong ones are wrong in the same way."""
    INTERMITTENT = "intermittent"
    """Only suspects fail to repeat theirs, and chance is excluded."""
    NONDETERMINISTIC = "nondeterministic"
    """Others fail to as well: the kernel, not a rank, makes the numbers differ."""
    UNDECIDED = "undecided"
    """Only suspects fail to, and too rarely to exclude that it is the kernel."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """One disagreement, and what came of replaying again."""

    record: EvidenceRecord
    """As it should be kept: without a verdict where nobody is to be named."""
    kind: Repeatability
    replays: int
    """In this check, the first included."""
    differing: int
    """Those of them in which peers differed."""
    earlier: int = 0
    """Replays of earlier checks in which the same ranks differed."""
    again: tuple[EvidenceRecord, ...] = ()
    """Of the further replays the first, and each that gave other numbers than the one before it."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """What earlier checks hold against ranks, on one surface."""

    suspects: frozenset[int]
    log_chance: float = 0.0
    """That a kernel made these ranks differ, given how many did in each replay."""
    differing: int = 0


class Trial:
    """One disagreement while it is being replayed. See [Note: a rank or a kernel]."""

    def __init__(
        self,
        record: EvidenceRecord,
        *,
        limit: float,
        before: _Suspicion | None = None,
        is_held: bool = False,
        right: Hashable | None = None,
    ) -> None:
        """``limit`` is the chance at which ranks may be named. ``is_held``: it was read, not computed.
        ``right`` is what all should have, where that is known."""
        assert record.verdict is not None, "only what was compared can be replayed again"
        assert record.scope is not None, "only a disagreement is replayed again"
        self.record, self._first, self.is_held, self._right = record, record.verdict, is_held, right
        self._limit = math.log(limit)
        self.suspects = frozenset(record.ranks)
        """Empty where there is no majority."""
        self.before = before or _Suspicion(self.suspects)
        self.log_chance = self.before.log_chance
        self.replays, self.differing = 1, 0
        self._is_over = False
        self._kind: Repeatability | None = None
        self._last = self._first.evidence
        self._changed: set[int] = set()
        self.again: list[EvidenceRecord] = []
        if self.before.suspects != self.suspects:
            self._kind = Repeatability.NONDETERMINISTIC
            self._changed |= self.before.suspects | self.suspects
        elif self.suspects and not is_held:
            self._weigh(self._differing(self._first.evidence))

    @property
    def is_open(self) -> bool:
        """Whether another replay could still tell something."""
        return self._kind is None and not self._is_over and self.replays < MAX_REPLAYS

    def observe(self, ranks: Sequence[int], values: Sequence[Hashable]) -> None:
        """Take in what every peer had in one further replay; fewer peers than before end the trial."""
        if not self.is_open:
            return
        if tuple(ranks) != self.record.peers:
            self._is_over = True
            return
        evidence = tuple(values)
        self.replays += 1
        if not self.again or evidence != self._last:
            self.again.append(replace(self.record, verdict=self._verdict(evidence)))
        self._last = evidence
        pairs = zip(self.record.peers, self._first.evidence, evidence, strict=True)
        changed = {rank for rank, before, after in pairs if before != after}
        self._changed |= changed
        if self.is_held:
            self.differing = 1 + (not self._verdict(evidence).agrees)
            self._kind = _of_held(self._first, evidence)
        elif not self.suspects:
            self._without_majority(evidence, is_same=not changed)
        elif changed - self.suspects:
            self._kind = Repeatability.NONDETERMINISTIC
        else:
            self._weigh(self._differing(evidence))

    def conclude(self) -> Repeated:
        unknown = Repeatability.PERSISTENT if self.is_held else Repeatability.UNDECIDED
        kind = self._kind or unknown
        kept, changed = self.record, named(sorted(self._changed))
        if kind is Repeatability.NONDETERMINISTIC:
            told = f"replayed {_times(self.replays)}, {changed} did not repeat the same numbers"
            kept = replace(kept, verdict=None, reason=f"{NONDETERMINISTIC}: {told}")
        elif kind is Repeatability.UNDECIDED:
            earlier = f" and {_times(self.before.differing)} before" if self.before.differing else ""
            told = (
                f"{named(sorted(self.suspects or kept.peers))} differed {_times(self.differing)} in "
                f"{self.replays} replays{earlier}; that is too rare to tell a rank from a kernel"
            )
            kept = replace(kept, verdict=None, reason=f"{UNDECIDED}: {told}")
        return Repeated(kept, kind, self.replays, self.differing, self.before.differing, tuple(self.again))

    def _verdict(self, evidence: tuple[Hashable, ...]) -> Verdict:
        return exact(evidence) if self._right is None else known(evidence, self._right)

    def _differing(self, evidence: Sequence[Hashable]) -> int:
        reference = Counter(self._first.evidence).most_common(1)[0][0]
        return sum(value != reference for value in evidence)

    def _weigh(self, differing: int) -> None:
        """So many of the suspects, and nobody else, differ in one more replay."""
        if not differing:
            return
        peers, suspects = len(self.record.peers), len(self.suspects)
        self.differing += 1
        self.log_chance += _log_chance(peers, suspects, differing)
        if self.log_chance + _log_choices(peers, suspects) <= self._limit:
            is_same = not self._changed and not self.before.differing
            self._kind = Repeatability.PERSISTENT if is_same else Repeatability.INTERMITTENT

    def _without_majority(self, evidence: Sequence[Hashable], *, is_same: bool) -> None:
        if not is_same:
            self._kind = Repeatability.NONDETERMINISTIC
            return
        self.differing += 1
        self.log_chance -= _log_assignments(evidence)
        if self.log_chance <= self._limit:
            self._kind = Repeatability.PERSISTENT


_Key = tuple[Surface, str | None]
"""A surface, and of which target, where its name does not say so."""


@dataclass(slots=True)
class SurfaceHistory:
    """Which surfaces of a job were seen not to repeat, and what is held against ranks; the same on all
    peers."""

    _left_out: dict[_Key, str] = field(default_factory=dict)
    _suspicions: dict[Hashable, _Suspicion] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)
    """Ranks that were named for what they compute; further replays would say nothing new about them."""

    def reason(self, surface: Surface, target: str | None) -> str | None:
        """Why a surface is left out of comparisons; None if it is compared."""
        return self._left_out.get((surface, target or None))

    def leave_out(self, surface: Surface, target: str | None, reason: str) -> None:
        """From now on. The first reason stays."""
        self._left_out.setdefault((surface, target or None), reason)

    def trial(
        self, record: EvidenceRecord, *, among: int, is_held: bool, right: Hashable | None = None
    ) -> Trial:
        """Begin to find out about a disagreement, one of ``among`` comparisons in the check."""
        before = self._suspicions.get(_trial_key(record))
        limit = CHANCE / max(among, 1)
        is_known = bool(record.ranks) and self._named.issuperset(record.ranks)
        return Trial(record, limit=limit, before=before, is_held=is_held or is_known, right=right)

    def conclude(self, trial: Trial) -> Repeated:
        """What is to be kept of a disagreement; remembered for later checks."""
        found = trial.conclude()
        record, key = trial.record, _trial_key(trial.record)
        self._suspicions.pop(key, None)
        if found.kind is Repeatability.NONDETERMINISTIC:
            self.leave_out(record.surface, record.layer, str(found.record.reason))
        elif found.kind is Repeatability.UNDECIDED and trial.suspects:
            differing = found.differing + found.earlier
            self._suspicions[key] = _Suspicion(trial.suspects, trial.log_chance, differing)
        elif not trial.is_held:
            self._named |= trial.suspects
        return found

    def not_repeating(self) -> dict[str, str]:
        """The surfaces that are left out, each with the reason."""
        return {_spelled(*key): reason for key, reason in self._left_out.items()}


def unmet(records: Iterable[EvidenceRecord], require: Collection[str]) -> dict[Surface, str]:
    """What is required and was left out, because it does not or cannot repeat, with the reasons.

    ``require`` has modes (``backward``) and surfaces, in which ``*`` stands for anything.
    """
    return {
        record.surface: record.reason
        for record in records
        if record.reason is not None and record.reason.startswith((NONDETERMINISTIC, REFUSED))
        if any(_is_meant(record, each) for each in require)
    }


def _is_meant(record: EvidenceRecord, required: str) -> bool:
    if (record.reason or "").startswith(REFUSED):  # the record stands for all that was not computed
        if "/" in required:
            return fnmatchcase(record.layer or "", required.rpartition("/")[0])
        return record.surface.endswith("optimizer") is (required == "optimizer")
    mode = (record.mode or "").partition(" ")[0]
    return fnmatchcase(record.surface, required) if "/" in required else mode == required


def _of_held(first: Verdict, second: Sequence[Hashable]) -> Repeatability:
    """Of what was read a second time; see the end of [Note: a rank or a kernel]."""
    pairs = zip(first.evidence, second, strict=True)
    changed = {place for place, (before, after) in enumerate(pairs) if before != after}
    if not changed:
        return Repeatability.PERSISTENT
    if first.status is Status.ATTRIBUTED:
        innocent = changed - set(first.outliers)
        return Repeatability.NONDETERMINISTIC if innocent else Repeatability.INTERMITTENT
    most = 2 * len(changed) > len(first.evidence)
    return Repeatability.NONDETERMINISTIC if most else Repeatability.INTERMITTENT


def _log_chance(peers: int, suspects: int, differing: int) -> float:
    """That all who differ in a replay are among the suspects, though it is the kernel."""
    others = peers - suspects
    terms = [
        math.comb(suspects, inside) * math.comb(others, differing - inside) * BIAS**inside
        for inside in range(min(suspects, differing) + 1)
        if differing - inside <= others
    ]
    return math.log(math.comb(suspects, differing) * BIAS**differing) - math.log(sum(terms))


def _log_choices(peers: int, suspects: int) -> float:
    """How many sets of suspects there are; smaller ones get more of the chance that all sets share."""
    largest = (peers - 1) // 2
    weight = 2.0**-suspects / (1 - 2.0**-largest)
    return math.log(math.comb(peers, suspects)) - math.log(weight)


def _log_assignments(evidence: Sequence[Hashable]) -> float:
    """In how many ways these results could have fallen to the peers."""
    counts: Mapping[Hashable, int] = Counter(evidence)
    return math.lgamma(len(evidence) + 1) - sum(math.lgamma(count + 1) for count in counts.values())


def _trial_key(record: EvidenceRecord) -> Hashable:
    return record.surface, record.layer, record.mode


def _spelled(surface: Surface, target: str | None) -> str:
    is_said = target is None or surface.startswith((f"{target}/", f"{target}."))
    return surface if is_said else f"{surface} (of {target})"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
