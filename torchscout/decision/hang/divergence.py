"""Finds members of a line that issued different operations (paper, section 7).

Healthy members issue the same operations in the same order, so a strict majority shows which ones differ.
Only operations with the same number are compared; ``wait_graph`` explains members that are late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchscout.decision.consensus import Status, Verdict, exact
from torchscout.decision.hang.evidence import HangEvidence
from torchscout.decision.hang.table import NOTHING, Bools, Hashes, Ints, Rows
from torchscout.decision.progress import CommGroup

__all__ = ["Divergence", "culprits", "divergences"]


class _Shown(NamedTuple):
    """What is visible of one number of a line."""

    ranks: Ints
    operations: Ints
    digests: list[int]


_Seen = Mapping[int, _Shown]
"""What is visible of a line, by number."""

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
    voters: tuple[int, ...]
    """The members that show what they issued as ``number``."""
    texts: tuple[str, ...]
    """What each of them issued."""
    verdict: Verdict
    """Positions are those of ``voters``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that diverged; empty without a majority."""
        return tuple(self.voters[position] for position in self.verdict.outliers)


def divergences(evidence: HangEvidence, lines: Bools) -> list[Divergence]:
    """Return at most one divergence for each of ``lines``, in the order of their keys."""
    table = evidence.table
    looked_at = np.append(lines & _may_differ(evidence), False)  # the last one stands for unknown lines
    rows = np.flatnonzero(looked_at[table.row_line] & (np.diff(table.starts) > 0))
    by_line = Rows.grouped(table.row_line[rows], rows, len(evidence.lines))
    named = sorted((evidence.lines.at(line).key, line) for line in np.flatnonzero(looked_at).tolist())
    found = (_diverged(evidence, line, by_line[line]) for _, line in named)
    return [divergence for divergence in found if divergence is not None]


def culprits(found: Sequence[Divergence]) -> tuple[int, ...]:
    """Return the ranks that explain all divergences; empty if they cannot be determined."""
    if named := {rank for divergence in found for rank in divergence.ranks}:
        return tuple(sorted(named))
    # Several pairs that differ and share one member: otherwise one member of each pair would be wrong.
    voters = {frozenset(divergence.voters) for divergence in found}
    if len(voters) < 2 or any(len(pair) > 2 for pair in voters):
        return ()
    return tuple(frozenset.intersection(*voters))


def _may_differ(evidence: HangEvidence) -> Bools:
    """Lines on which one number has several digests, or operations have splits.

    Equal digests of one number mean equal operations before it. So the members of a line are compared at the
    last number that all of them have issued, and at every later one.
    """
    table, count = evidence.table, len(evidence.lines)
    rows = np.flatnonzero((table.row_line != NOTHING) & (np.diff(table.starts) > 0))
    line, issued, last = table.row_line[rows], table.issued[rows], table.starts[rows + 1] - 1
    common = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(common, line, issued)
    since = issued - common[line]
    at_common = last - since
    is_shown = at_common >= table.starts[rows]
    is_shown[is_shown] = table.age[at_common[is_shown]] == since[is_shown]
    found = np.zeros(count, dtype=bool)
    found[line[~is_shown | table.has_splits[rows]]] = True
    found[_unequal(line[is_shown], line[is_shown], table.digest[at_common[is_shown]])] = True
    operations, theirs = table.expanded(rows[since > 0])
    is_later = table.numbers(operations, theirs) > common[table.row_line[theirs]]
    operations, theirs = operations[is_later], theirs[is_later]
    found[_unequal(evidence.places(operations), table.row_line[theirs], table.digest[operations])] = True
    return found


def _unequal(places: Ints, lines: Ints, digests: Hashes) -> Ints:
    """Return the lines of digests that are not equal to another one of the same place."""
    any_digest = np.zeros(int(places.max(initial=-1)) + 1, np.uint64)
    any_digest[places] = digests
    found: Ints = lines[any_digest[places] != digests]
    return found


def _diverged(evidence: HangEvidence, line: int, rows: Ints) -> Divergence | None:
    seen = _seen(evidence, rows)
    numbers = [number for number in sorted(seen) if len(seen[number].ranks) > 1]
    differing = [number for number in numbers if len(set(seen[number].digests)) > 1]
    if not differing:
        splits = (_misfit(evidence, line, number, seen[number]) for number in numbers)
        return next((divergence for divergence in splits if divergence is not None), None)
    majority = (number for number in differing if exact(seen[number].digests).outliers)
    most_shown = max(differing, key=lambda number: (len(seen[number].ranks), -number))
    number = next(majority, most_shown)
    if _agreed_before(number, seen):
        fingerprints = evidence.table.fingerprints(seen[number].operations).tolist()
        return _divergence(evidence, line, number, "fingerprint", seen[number], exact(fingerprints))
    # See [Note: The first difference].
    number = max(differing, key=lambda number: (len(seen[number].ranks), number))
    return _divergence(evidence, line, number, "digest", seen[number], exact(seen[number].digests))


def _seen(evidence: HangEvidence, rows: Ints) -> dict[int, _Shown]:
    table = evidence.table
    operations, rows = table.expanded(rows)
    numbers, which = np.unique(table.numbers(operations, rows), return_inverse=True)
    by_number = Rows.grouped(which, np.arange(len(operations)), len(numbers))
    return {
        number: _Shown(
            table.row_rank[rows[shown := by_number[place]]],
            operations[shown],
            table.digest[operations[shown]].tolist(),
        )
        for place, number in enumerate(numbers.tolist())
    }


def _divergence(
    evidence: HangEvidence, line: int, number: int, compared: str, shown: _Shown, verdict: Verdict
) -> Divergence:
    fingerprints = evidence.table.fingerprints(shown.operations)
    _, first, which = np.unique(fingerprints, return_index=True, return_inverse=True)
    texts = [evidence.table.issued_op(operation).text for operation in shown.operations[first].tolist()]
    voters = tuple(shown.ranks.tolist())
    by_voter = tuple(texts[each] for each in which.tolist())
    return Divergence(evidence.lines.at(line), number, compared, voters, by_voter, verdict)


def _agreed_before(number: int, seen: _Seen) -> bool:
    if number == 1:
        return True
    if number - 1 not in seen:
        return False
    before = dict(zip(seen[number - 1].ranks.tolist(), seen[number - 1].digests, strict=True))
    ranks = seen[number].ranks.tolist()
    return all(rank in before for rank in ranks) and len({before[rank] for rank in ranks}) == 1


def _misfit(evidence: HangEvidence, line: int, number: int, shown: _Shown) -> Divergence | None:
    """Compare splits of an all-to-all: what i sends to j must be what j expects from i."""
    members = evidence.lines.at(line).members
    size = len(members)
    position = {rank: index for index, rank in enumerate(members)}
    issued = map(evidence.table.issued_op, shown.operations.tolist())
    voters = {
        rank: each
        for rank, each in zip(shown.ranks.tolist(), issued, strict=True)
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
    texts = tuple(each.text for each in voters.values())
    return Divergence(evidence.lines.at(line), number, "splits", tuple(voters), texts, verdict)
