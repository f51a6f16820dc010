"""Finds members of a group that issued different operations (paper, section 7).

Healthy members issue the same operations in the same order, so a strict majority of the members shows which
ones differ. Only operations with the same number are compared; ``hang_graph`` explains members that are late.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchscout.decision.consensus import Status, Verdict
from torchscout.decision.hang_graph import Evidence
from torchscout.decision.progress import CommGroup, IssuedOp

__all__ = ["Divergence", "culprits", "divergences"]

_READ = 8
"""Members of one history whose windows are read: they need not begin at the same number."""

# [Note: The first difference]
#
# A digest covers everything that a member has issued in a group so far. Equal digests therefore mean equal
# histories, and the first number with unequal digests, after one with equal digests, is where members
# diverged, even if they issued more operations since. The visible windows of members need not begin at the
# same number, so the first number *with a majority* decides. If digests differ from the start of what is
# visible, members diverged earlier: then only the digests vote, at the largest number that most members show,
# and no operation can be quoted.


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of one group that issued different operations as the same number."""

    group: CommGroup
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
    is_old: bool
    """Whether all members have issued more since: that did no harm, unless nothing else explains a hang."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that diverged; empty without a majority."""
        return tuple(self.voters[position] for position in self.verdict.outliers)


def divergences(evidence: Evidence, looked_at: Iterable[int]) -> list[Divergence]:
    """Return at most one divergence for each group of the ranks ``looked_at``, in the order of their keys."""
    groups = set[str]()
    for rank in looked_at:
        progress = evidence.reports[rank].progress
        groups.update(() if progress is None else progress.recent.digests)
    found = []
    for key in sorted(groups & evidence.groups.keys()):
        histories = _histories(evidence, key)
        if len(histories) > 1 and (divergence := _diverged(evidence, key, histories)) is not None:
            found.append(divergence)
    return found


def culprits(found: Sequence[Divergence]) -> tuple[int, ...]:
    """Return the ranks that explain all divergences; empty if they cannot be determined."""
    if named := {rank for divergence in found for rank in divergence.ranks}:
        return tuple(sorted(named))
    # Several pairs that differ and share one member: otherwise one member of each pair would be wrong.
    voters = {frozenset(divergence.voters) for divergence in found}
    if len(voters) < 2 or any(len(pair) > 2 for pair in voters):
        return ()
    return tuple(frozenset.intersection(*voters))


def _histories(evidence: Evidence, key: str) -> list[list[int]]:
    """Put members together that have issued the same: digests of one number are equal. Splits are in no digest,
    so that each member with splits is on its own."""
    found = defaultdict[tuple[int, int, int], list[int]](list)
    for rank in evidence.groups[key].members:
        report = evidence.reports.get(rank)
        progress = None if report is None else report.progress
        if progress is not None and (digest := progress.recent.digests.get(key)) is not None:
            alone = rank if progress.recent.has_splits(key) else -1
            found[progress.issued.get(key, 0), digest, alone].append(rank)
    return [*found.values()]


def _diverged(evidence: Evidence, key: str, histories: Iterable[Sequence[int]]) -> Divergence | None:
    group, shown = evidence.groups[key], defaultdict[int, dict[int, IssuedOp]](dict)
    for ranks in histories:
        # Those of one history show the same operations, however many they are.
        progresses = (evidence.reports[rank].progress for rank in ranks[:_READ])
        windows = [progress.recent.of(key) for progress in progresses if progress is not None]
        for number, each in {each.number: each for window in windows for each in window}.items():
            shown[number] |= dict.fromkeys(ranks, each)
    numbers = [number for number in sorted(shown) if len(shown[number]) > 1]
    differing = [number for number in numbers if len({each.digest for each in shown[number].values()}) > 1]
    if not differing:
        splits = (_misfit(evidence, group, shown[number]) for number in numbers)
        return next((divergence for divergence in splits if divergence is not None), None)
    for number in {*differing, *(number - 1 for number in differing)}:
        theirs = shown.get(number, {})
        shown[number] = {rank: theirs[rank] for rank in group.members if rank in theirs}
    majority = (number for number in differing if _vote(group, _digests(shown[number])).outliers)
    most_shown = max(differing, key=lambda number: (len(shown[number]), -number))
    number = next(majority, most_shown)
    if _agreed_before(number, shown):
        fingerprints = {rank: each.fingerprint for rank, each in shown[number].items()}
        return _divergence(evidence, group, "fingerprint", shown[number], _vote(group, fingerprints))
    # See [Note: The first difference].
    number = max(differing, key=lambda number: (len(shown[number]), number))
    return _divergence(evidence, group, "digest", shown[number], _vote(group, _digests(shown[number])))


def _digests(shown: Mapping[int, IssuedOp]) -> dict[int, int]:
    return {rank: each.digest for rank, each in shown.items()}


def _vote(group: CommGroup, values: Mapping[int, Hashable]) -> Verdict:
    """Compare what members show. A majority is one of all members: those that have not come yet may join any."""
    evidence = tuple(values.values())
    (majority, count), *others = Counter(evidence).most_common()
    if not others:
        return Verdict(Status.AGREE, (), evidence)
    if 2 * count <= len(group.members):
        return Verdict(Status.INCONCLUSIVE, (), evidence)
    outliers = tuple(place for place, value in enumerate(evidence) if value != majority)
    return Verdict(Status.ATTRIBUTED, outliers, evidence)


def _divergence(
    evidence: Evidence, group: CommGroup, compared: str, shown: Mapping[int, IssuedOp], verdict: Verdict
) -> Divergence:
    number = next(iter(shown.values())).number
    texts = tuple(each.text for each in shown.values())
    is_old = compared == "digest" or all(
        evidence.issued(rank, group.key) > number for rank in evidence.answered(group.key)
    )
    return Divergence(group, number, compared, tuple(shown), texts, verdict, is_old)


def _agreed_before(number: int, shown: Mapping[int, Mapping[int, IssuedOp]]) -> bool:
    if number == 1:
        return True
    before = shown.get(number - 1, {})
    return shown[number].keys() <= before.keys() and len({before[rank].digest for rank in shown[number]}) == 1


def _misfit(evidence: Evidence, group: CommGroup, shown: Mapping[int, IssuedOp]) -> Divergence | None:
    """Compare splits of an all-to-all: what i sends to j must be what j expects from i."""
    size, position = len(group.members), {rank: place for place, rank in enumerate(group.members)}
    voters = {
        rank: each
        for rank, each in shown.items()
        # The library itself rejects splits of another length.
        if each.sends is not None
        and each.receives is not None
        and len(each.sends) == len(each.receives) == size
    }
    wrong = [
        {place, other}
        for place, mine in enumerate(voters.values())
        for other, (rank, theirs) in enumerate(voters.items())
        if mine.sends
        and theirs.receives
        and mine.sends[position[rank]] != theirs.receives[position[[*voters][place]]]
    ]
    if not wrong:
        return None
    # The mismatches each member is part of; one with itself counts once.
    parts = tuple(sum(place in pair for pair in wrong) for place in range(len(voters)))
    alone = tuple(place for place, count in enumerate(parts) if count == len(wrong))
    decided = len(alone) == 1 and len(voters) > 2
    status = Status.ATTRIBUTED if decided else Status.INCONCLUSIVE
    verdict = Verdict(status, alone if decided else (), parts)
    return _divergence(evidence, group, "splits", voters, verdict)
