"""Finds members of a line that issued different operations (paper, section 7).

Healthy members issue the same operations in the same order, so a strict majority shows which ones differ.
Only operations with the same number are compared; ``wait_graph`` explains members that are late.
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
# A digest covers everything that a member has issued on a line so far. Equal digests therefore mean equal
# histories, and the first number with unequal digests, after one with equal digests, is where members
# diverged, even if they issued more operations since. The visible windows of members need not begin at the
# same number, so the first number *with a majority* decides. If digests differ from the start of what is
# visible, members diverged earlier: then only the digests vote, at the largest number that most members show,
# and no operation can be quoted.


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of one line that issued different operations as the same number."""

    line: CommGroup
    number: int
    compared: str
    """The evidence of the verdict: ``fingerprint``, ``digest`` (members diverged before ``number``), or
    ``splits`` (with how many members the splits of a member do not match)."""
    issued: Mapping[int, IssuedOp]
    """What each visible member issued as ``number``."""
    verdict: Verdict
    """Positions are those of ``issued``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that diverged; empty without a majority."""
        voters = tuple(self.issued)
        return tuple(voters[position] for position in self.verdict.outliers)


def divergences(evidence: HangEvidence, lines: Bools) -> list[Divergence]:
    """Return at most one divergence for each of ``lines``, in the order of their keys."""
    columns = evidence.columns
    looked_at = (lines & _may_differ(evidence))[columns.line[columns.recent]]
    recent, ranks = columns.recent[looked_at].tolist(), columns.recent_rank[looked_at].tolist()
    seen: dict[str, dict[int, dict[int, IssuedOp]]] = defaultdict(lambda: defaultdict(dict))
    for operation, rank in zip(recent, ranks, strict=True):
        each = columns.operations[operation]
        seen[each.line][each.number][rank] = each
    found = (_diverged(evidence.lines[key], seen[key]) for key in sorted(seen))
    return [divergence for divergence in found if divergence is not None]


def culprits(found: Sequence[Divergence]) -> tuple[int, ...]:
    """Return the ranks that explain all divergences; empty if they cannot be determined."""
    if named := {rank for divergence in found for rank in divergence.ranks}:
        return tuple(sorted(named))
    # Several pairs that differ and share one member: otherwise one member of each pair would be wrong.
    voters = {frozenset(divergence.issued) for divergence in found}
    if len(voters) < 2 or any(len(pair) > 2 for pair in voters):
        return ()
    return tuple(frozenset.intersection(*voters))


def _may_differ(evidence: HangEvidence) -> Bools:
    """Lines on which one number has several digests, or operations have splits."""
    columns = evidence.columns
    digest = coded(map(attrgetter("digest"), columns.operations))
    any_digest = np.zeros_like(digest)
    any_digest[columns.place] = digest
    has_splits = np.array([each.sends is not None for each in columns.operations], dtype=bool)
    found = np.zeros(len(evidence.lines), dtype=bool)
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
    """Compare splits of an all-to-all: what i sends to j must be what j expects from i."""
    size = len(line.members)
    position = {rank: index for index, rank in enumerate(line.members)}
    voters = {
        rank: each
        for rank, each in issued.items()
        if rank in position
        and each.sends is not None
        and each.receives is not None
        # The library itself rejects splits of another length.
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
    # The mismatches each member is part of; one with itself counts once.
    parts = wrong.sum(axis=0) + wrong.sum(axis=1) - wrong.diagonal()
    alone = tuple(np.flatnonzero(parts == wrong.sum()).tolist())
    decided = len(alone) == 1 and len(voters) > 2
    status = Status.ATTRIBUTED if decided else Status.INCONCLUSIVE
    verdict = Verdict(status, alone if decided else (), tuple(parts.tolist()))
    return Divergence(line, number, "splits", voters, verdict)
