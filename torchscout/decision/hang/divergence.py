"""Who issued something else: members of a line that do not follow the same protocol (paper, section 7).

Healthy members issue the same operations in the same order, so a strict majority shows who differs.
Only operations with the same number are compared: to be late is not to differ, and is for
``wait_graph`` to explain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from torchscout.decision.consensus import Status, Verdict, exact
from torchscout.decision.hang.evidence import Bools, HangEvidence, coded
from torchscout.decision.progress import CommGroup, IssuedOp

__all__ = ["Divergence", "culprits", "divergences"]

_Seen = Mapping[int, Mapping[int, IssuedOp]]
"""What is visible of a line: number -> member -> the operation it issued."""

# [Note: The first difference]
#
# Digests cover everything a member has issued on a line so far. Equal digests therefore clear all that
# went before, and the first number with unequal digests, after one with equal digests, is where the
# members parted, also when they launched more since. Members show windows that need not begin at the
# same number, so the first number *with a majority* decides. When digests differ from the start of
# what is visible, the difference lies further back: then only the digests vote, at the largest number
# that most members show, and no operation can be quoted.


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of one line that issued different things as the same number."""

    line: CommGroup
    number: int
    compared: str
    """What the verdict is over: ``fingerprint``, ``digest`` (the difference lies before ``number``), or
    ``splits``, where a member's evidence is with how many members its own splits do not fit."""
    issued: Mapping[int, IssuedOp]
    """What each visible member issued as ``number``."""
    verdict: Verdict
    """Positions are those of ``issued``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who diverged; nobody where there is no majority."""
        voters = tuple(self.issued)
        return tuple(voters[position] for position in self.verdict.outliers)


def divergences(call: HangEvidence, lines: Bools) -> list[Divergence]:
    """At most one of each of ``lines``, by key."""
    columns = call.columns
    looked_at = (lines & _may_differ(call))[columns.line[columns.recent]]
    recent, ranks = columns.recent[looked_at].tolist(), columns.recent_rank[looked_at].tolist()
    seen: dict[str, dict[int, dict[int, IssuedOp]]] = defaultdict(lambda: defaultdict(dict))
    for operation, rank in zip(recent, ranks, strict=True):
        each = columns.operations[operation]
        seen[each.line][each.number][rank] = each
    found = (_diverged(call.lines[key], seen[key]) for key in sorted(seen))
    return [divergence for divergence in found if divergence is not None]


def culprits(found: Sequence[Divergence]) -> tuple[int, ...]:
    """Who alone explains all divergences; nobody where that cannot be told."""
    if named := {rank for divergence in found for rank in divergence.ranks}:
        return tuple(sorted(named))
    # Several pairs that differ and share one member: else a member of each pair would have to be wrong.
    voters = {frozenset(divergence.issued) for divergence in found}
    if len(voters) < 2 or any(len(pair) > 2 for pair in voters):
        return ()
    return tuple(frozenset.intersection(*voters))


def _may_differ(call: HangEvidence) -> Bools:
    """Lines that are worth a look: one number has several digests, or there are splits."""
    columns = call.columns
    digest = coded(map(attrgetter("digest"), columns.operations))
    any_digest = np.zeros_like(digest)
    any_digest[columns.place] = digest
    has_splits = np.array([each.sends is not None for each in columns.operations], dtype=bool)
    found = np.zeros(len(call.lines), dtype=bool)
    found[columns.line[has_splits | (any_digest[columns.place] != digest)]] = True
    return found


def _diverged(line: CommGroup, seen: _Seen) -> Divergence | None:
    numbers = [number for number in sorted(seen) if len(seen[number]) > 1]
    differing = [number for number in numbers if len(set(_digests(seen[number]))) > 1]
    if not differing:
        splits = (_misfit(line, number, seen[number]) for number in numbers)
        return next((divergence for divergence in splits if divergence is not None), None)
    majority = (number for number in differing if exact(_digests(seen[number])).outliers)
    most_shown = max(differing, key=lambda number: (len(seen[number]), -number))
    number = next(majority, most_shown)
    if _agreed_before(number, seen):
        fingerprints = exact([each.fingerprint for each in seen[number].values()])
        return Divergence(line, number, "fingerprint", seen[number], fingerprints)
    # See [Note: The first difference].
    number = max(differing, key=lambda number: (len(seen[number]), number))
    return Divergence(line, number, "digest", seen[number], exact(_digests(seen[number])))


def _digests(issued: Mapping[int, IssuedOp]) -> list[int]:
    return [each.digest for each in issued.values()]


def _agreed_before(number: int, seen: _Seen) -> bool:
    before = seen.get(number - 1, {})
    visible = all(rank in before for rank in seen[number])
    return number == 1 or (visible and len({before[rank].digest for rank in seen[number]}) == 1)


def _misfit(line: CommGroup, number: int, issued: Mapping[int, IssuedOp]) -> Divergence | None:
    """AllToAll: what i sends to j is what j expects from i; that splits are uneven is healthy."""
    size = len(line.members)
    position = {rank: index for index, rank in enumerate(line.members)}
    voters = {
        rank: each
        for rank, each in issued.items()
        if rank in position
        and each.sends is not None
        and each.receives is not None
        # The library itself refuses splits of another length.
        and len(each.sends) == len(each.receives) == size
    }
    if not voters:
        return None
    columns = [position[rank] for rank in voters]
    sends = np.array([each.sends for each in voters.values()])[:, columns]
    receives = np.array([each.receives for each in voters.values()])[:, columns]
    wrong = sends != receives.T
    if not wrong.any():
        return None
    # Pairs a member has part in; one with itself counts once.
    parts = wrong.sum(axis=0) + wrong.sum(axis=1) - wrong.diagonal()
    alone = tuple(np.flatnonzero(parts == wrong.sum()).tolist())
    decided = len(alone) == 1 and len(voters) > 2
    status = Status.ATTRIBUTED if decided else Status.INCONCLUSIVE
    verdict = Verdict(status, alone if decided else (), tuple(parts.tolist()))
    return Divergence(line, number, "splits", voters, verdict)
