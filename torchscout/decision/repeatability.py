"""Decides whether a rank or a nondeterministic kernel causes a disagreement (paper, sections 5.3 and 6.1).

It uses gathered evidence only, so that all peers reach the same conclusion: after how many replays a rank may
be named, and which surfaces of the job do not repeat.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase

from torchscout.decision.consensus import exact, known
from torchscout.decision.types import EvidenceRecord, Status, Surface, Verdict
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
"""The largest probability that a check names a rank because a kernel is nondeterministic."""
BIAS = 4.0
"""The largest odds ratio of a kernel to differ on one rank rather than on its peers."""
MAX_REPLAYS = 64
"""Replays of one target in one check, including the first; more than two only after a disagreement."""
NONDETERMINISTIC = "nondeterministic kernel"
"""The beginning of the reason why different numbers prove nothing."""
REFUSED = "cannot be replayed"
"""The beginning of the reason why something is never replayed."""
UNDECIDED = "undecided"
"""The beginning of the reason why different numbers do not name a rank yet."""

# [Note: a rank or a kernel]
#
# Peers replay the same call on the same input. If their results differ, either a rank computes wrongly or the
# kernel is nondeterministic (atomics, races), which is no rank's fault. A kernel may have any number of
# results with any probabilities, and these may change with the input, hence from check to check. So nothing
# is estimated. Only one fact is used: the kernel does not know on which rank it runs.
#
# Consider one replay by N peers in which a strict majority has the result v and d ranks have another one. If
# the kernel is the cause, every choice of d ranks among N is equally likely. The probability that only a
# given rank s differs (d = 1) is 1/N, whatever the probabilities of the results are. Further replays are
# further trials: k replays that differ only on s have probability N^-k, and since s may be any rank, N *
# N^-k. It does not matter whether s was wrong in the same way each time, or how many replays agreed in
# between: replays in which all agree have factor 1. So the same rule covers persistent and intermittent
# corruption.
#
# Ranks are not quite equal: chips differ in clocks and in which cores work. Let the odds that the kernel
# differs on s be at most BIAS times those on its peers. A lone difference is then on s with probability
# b / (b + N - 1), b = BIAS; for d ranks out of a set S of j suspects the probability is Fisher's noncentral
# hypergeometric term C(j, d) b^d / sum_i C(j, i) C(N - j, d - i) b^i. A kernel that always differs on one
# rank only cannot be distinguished from a rank that is wrong.
#
# The product of these factors is compared with CHANCE after each replay. Stopping as soon as it is small
# enough is allowed: for fixed S, the inverse of the product (0 once another rank differs) is a nonnegative
# martingale with mean 1 under the kernel hypothesis, and ever exceeds 1/c with probability c at most (Ville).
# So the bound holds for all checks of a job together. It is shared among the choices of S (C(N, j) for each
# j, with weights 2^-j over j) and among the surfaces of the check.
#
# If a rank outside S differs, or the result of the majority changes, or a later check suspects other ranks,
# the surface does not repeat, and is left out from then on. If the replays of a check do not suffice, the
# suspicion is kept and the next disagreement on that surface adds to it. Agreement in earlier checks is no
# evidence that a kernel is deterministic: another input may cause its first race, and a kernel that differs
# once in M replays passes M of them with probability 1/e.
#
# Without a strict majority no rank is named. A disagreement is reported if each peer repeats its own result
# so often that chance is excluded: given the results of a replay, the same assignment to ranks as in the
# first replay has probability 1 / (number of distinct assignments), 1/2 at most.
#
# What ranks hold (state, received inputs) is read, not computed, so that no kernel can make it differ: it is
# read a second time, and reported at once.


class Repeatability(str, Enum):
    """The result of replaying a disagreement again on the same input."""

    PERSISTENT = "persistent"
    """Every peer repeats its own numbers: the wrong ones are wrong in the same way."""
    INTERMITTENT = "intermittent"
    """Only suspects do not repeat their numbers, and chance is excluded."""
    NONDETERMINISTIC = "nondeterministic"
    """Other ranks do not repeat their numbers either: the kernel makes them differ."""
    UNDECIDED = "undecided"
    """Only suspects differ, but too rarely to exclude the kernel."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """One disagreement, and the result of replaying it again."""

    record: EvidenceRecord
    """The record to keep: without a verdict if no rank may be named."""
    kind: Repeatability
    replays: int
    """Replays in this check, including the first."""
    differing: int
    """Those in which peers differed."""
    earlier: int = 0
    """Replays of earlier checks in which the same ranks differed."""
    again: tuple[EvidenceRecord, ...] = ()
    """The first further replay, and each one whose numbers differ from those of the one before."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """The evidence of earlier checks against ranks, on one surface."""

    suspects: frozenset[int]
    log_chance: float = 0.0
    """The log of the probability that a kernel made these ranks differ."""
    differing: int = 0


class Trial:
    """One disagreement while it is replayed again. See [Note: a rank or a kernel]."""

    def __init__(
        self,
        record: EvidenceRecord,
        *,
        limit: float,
        before: _Suspicion | None = None,
        is_held: bool = False,
        right: Hashable | None = None,
    ) -> None:
        """``limit`` is the probability at which ranks may be named; ``is_held`` means that the value was
        read, not computed; ``right`` is the right value, if known."""
        assert record.verdict is not None, "only a comparison can be replayed again"
        assert record.scope is not None, "only a disagreement is replayed again"
        self.record, self._first, self.is_held, self._right = record, record.verdict, is_held, right
        self._limit = math.log(limit)
        self.suspects = frozenset(record.ranks)
        """Empty without a majority."""
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
        """Whether another replay could still change the result."""
        return self._kind is None and not self._is_over and self.replays < MAX_REPLAYS

    def observe(self, ranks: Sequence[int], values: Sequence[Hashable]) -> None:
        """Add the values of all peers in a further replay; the trial ends if peers are missing."""
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
        """Return the result; its record has a reason instead of a verdict if no rank may be named."""
        kind = self._kind or (Repeatability.PERSISTENT if self.is_held else Repeatability.UNDECIDED)
        record, reason = self.record, None
        if kind is Repeatability.NONDETERMINISTIC:
            changed, times = named(sorted(self._changed)), _times(self.replays)
            reason = f"{NONDETERMINISTIC}: replayed {times}, {changed} did not repeat the same numbers"
        elif kind is Repeatability.UNDECIDED:
            earlier = f" and {_times(self.before.differing)} before" if self.before.differing else ""
            reason = (
                f"{UNDECIDED}: {named(sorted(self.suspects or record.peers))} differed "
                f"{_times(self.differing)} in {self.replays} replays{earlier}; "
                "that is too rare to distinguish a rank from a kernel"
            )
        if reason is not None:
            record = replace(record, verdict=None, reason=reason)
        return Repeated(record, kind, self.replays, self.differing, self.before.differing, tuple(self.again))

    def _verdict(self, evidence: tuple[Hashable, ...]) -> Verdict:
        return exact(evidence) if self._right is None else known(evidence, self._right)

    def _differing(self, evidence: Sequence[Hashable]) -> int:
        reference = Counter(self._first.evidence).most_common(1)[0][0]
        return sum(value != reference for value in evidence)

    def _weigh(self, differing: int) -> None:
        """Add a replay in which this many of the suspects, and no other ranks, differ."""
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
"""A surface, and its target if the name of the surface does not contain it."""


@dataclass(slots=True)
class SurfaceHistory:
    """Surfaces of a job that do not repeat, and suspicions against ranks; the same on all peers."""

    _left_out: dict[_Key, str] = field(default_factory=dict)
    _suspicions: dict[Hashable, _Suspicion] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)
    """Ranks that were named for what they compute; further replays would add nothing."""

    def reason(self, surface: Surface, target: str | None) -> str | None:
        """Return why a surface is left out of comparisons; None if it is compared."""
        return self._left_out.get((surface, target or None))

    def leave_out(self, surface: Surface, target: str | None, reason: str) -> None:
        """Leave a surface out from now on; the first reason is kept."""
        self._left_out.setdefault((surface, target or None), reason)

    def trial(
        self, record: EvidenceRecord, *, among: int, is_held: bool, right: Hashable | None = None
    ) -> Trial:
        """Begin to replay a disagreement again, one of ``among`` comparisons in the check."""
        before = self._suspicions.get(_trial_key(record))
        limit = CHANCE / max(among, 1)
        is_known = bool(record.ranks) and self._named.issuperset(record.ranks)
        return Trial(record, limit=limit, before=before, is_held=is_held or is_known, right=right)

    def conclude(self, trial: Trial) -> Repeated:
        """Return the result of a trial, and remember it for later checks."""
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
        """Return the surfaces that are left out, with the reasons."""
        return {_spelled(*key): reason for key, reason in self._left_out.items()}


def unmet(records: Iterable[EvidenceRecord], require: Collection[str]) -> dict[Surface, str]:
    """Return required surfaces that were left out because they do not repeat, with the reasons.

    ``require`` has modes (``backward``) and surfaces, in which ``*`` matches anything.
    """
    return {
        record.surface: record.reason
        for record in records
        if record.reason is not None and record.reason.startswith((NONDETERMINISTIC, REFUSED))
        if any(_is_meant(record, each) for each in require)
    }


def _is_meant(record: EvidenceRecord, required: str) -> bool:
    if (record.reason or "").startswith(REFUSED):  # the record stands for everything that was not computed
        if "/" in required:
            return fnmatchcase(record.layer or "", required.rpartition("/")[0])
        return record.surface.endswith("optimizer") is (required == "optimizer")
    mode = (record.mode or "").partition(" ")[0]
    return fnmatchcase(record.surface, required) if "/" in required else mode == required


def _of_held(first: Verdict, second: Sequence[Hashable]) -> Repeatability:
    """Compare with values read a second time; see the end of [Note: a rank or a kernel]."""
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
    """The log of the probability that a kernel makes only suspects differ in a replay."""
    others = peers - suspects
    logs = [
        _log_comb(suspects, inside) + _log_comb(others, differing - inside) + inside * math.log(BIAS)
        for inside in range(max(0, differing - others), min(suspects, differing) + 1)
    ]
    largest = max(logs)  # hundreds of suspects have sums that are larger than any float
    return logs[-1] - largest - math.log(sum(math.exp(each - largest) for each in logs))


def _log_choices(peers: int, suspects: int) -> float:
    """The log of the weighted number of sets of suspects; smaller sets get more of the shared bound."""
    largest = (peers - 1) // 2
    return _log_comb(peers, suspects) + suspects * math.log(2) + math.log1p(-(2.0**-largest))


def _log_comb(number: int, chosen: int) -> float:
    return math.lgamma(number + 1) - math.lgamma(chosen + 1) - math.lgamma(number - chosen + 1)


def _log_assignments(evidence: Sequence[Hashable]) -> float:
    """The log of the number of ways to assign these results to the peers."""
    counts: Mapping[Hashable, int] = Counter(evidence)
    return math.lgamma(len(evidence) + 1) - sum(math.lgamma(count + 1) for count in counts.values())


def _trial_key(record: EvidenceRecord) -> Hashable:
    return record.surface, record.layer, record.mode


def _spelled(surface: Surface, target: str | None) -> str:
    is_said = target is None or surface.startswith((f"{target}/", f"{target}."))
    return surface if is_said else f"{surface} (of {target})"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
