"""What the hubs have already said, so that they say everything once (paper, section 7). Pure.

Rounds repeat while a silence lasts, a standby may have concluded the last one, and failures follow from
failures: a job that hangs is in the end killed, rank by rank. Here it is decided what of that is news.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchscout.decision.progress import Process
from torchscout.decision.record import Incident, Resolved
from torchscout.observer.protocol import RankReport
from torchscout.utils.text import named

__all__ = ["Finding", "ReportedIncidents"]


@dataclass(frozen=True, slots=True)
class Finding:
    """An incident in short, as the hubs tell it to everybody."""

    scope: str
    surface: str
    """Of the deciding record."""
    step: int
    ranks: tuple[int, ...]
    sentence: str
    job_ended: bool
    """Whether a trainer is gone, one of ``ranks`` or another: the job cannot go on."""

    @classmethod
    def of(cls, incident: Incident, posts: Mapping[int, RankReport]) -> Finding:
        return cls(
            scope=incident.scope.value,
            surface=incident.records[0].surface,
            step=incident.step,
            ranks=incident.ranks,
            sentence=incident.sentence,
            job_ended=any(post.standing.process is Process.GONE for post in posts.values()),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """``ValueError`` or ``TypeError`` where it is none."""
        finding = cls(**{**document, "ranks": tuple(document["ranks"])})
        texts = (finding.scope, finding.surface, finding.sentence)
        numbers = (finding.step, *finding.ranks)
        if not (
            all(type(each) is str for each in texts)
            and all(type(each) is int for each in numbers)
            and type(finding.job_ended) is bool
        ):
            raise ValueError(f"not a finding: {document!r:.80}")
        return finding

    def says_the_same_as(self, other: Finding) -> bool:
        """Conclusions may differ in seconds and proof."""
        mine = (self.scope, self.surface, self.step, self.ranks)
        return mine == (other.scope, other.surface, other.step, other.ranks)


class ReportedIncidents:
    """One hub's knowledge of the finding that stands, if any."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self._is_own = True
        self._reported: Incident | None = None
        """The last one, whether it stands or not."""
        self._resolving: Finding | None = None
        """The finding that ``_still`` belongs to."""
        self._still: set[int] = set()
        """Its ranks that have not moved since."""
        self._stalled_seconds = 0.0
        self._job_ended = False
        """Once a trainer is gone there is nothing to resolve: a rank that moves again finds the others
        missing."""

    def traced(self, incident: Incident, posts: Mapping[int, RankReport]) -> Incident | None:
        """The incident, or the earlier one that it is a consequence of; None if that says nothing new.

        Whoever has waited for longer than the timeout of a process group is ended by NCCL's watchdog, or by
        an exception, some time later. Until then it may go on, stand still, or leave operations out.
        """
        earlier, named_now = self._reported, set(incident.ranks)
        if earlier is None or named_now <= set(earlier.ranks):
            return incident
        if not all(rank in posts and posts[rank].has_timed_out for rank in named_now):
            return incident
        gone = [rank for rank, post in sorted(posts.items()) if post.standing.process is Process.GONE]
        if not gone:
            return None
        ended = f"the trainer{'s' if len(gone) > 1 else ''} of {named(gone)} ended after waiting for too long"
        return replace(earlier, sentence=f"{earlier.sentence}; {ended}")

    def report(self, incident: Incident, posts: Mapping[int, RankReport]) -> bool:
        """Whether it is news; from then on it stands."""
        if not self.enter(Finding.of(incident, posts)):
            return False
        self._reported = incident
        return True

    def enter(self, finding: Finding) -> bool:
        """Whether it is news; from then on it stands."""
        standing = self.finding
        if standing is not None:
            # Whoever ends after the job has stopped was ended because of it.
            self._job_ended |= standing.job_ended or finding.job_ended
            if self._job_ended or finding.says_the_same_as(standing):
                return False
        self._set(finding, is_own=True)
        return True

    def adopt(self, finding: Finding | None) -> None:
        """Take over what another hub says stands."""
        if finding is None:
            self.finding = self.finding if self._is_own else None
        elif self.finding is None or not finding.says_the_same_as(self.finding):
            self._set(finding, is_own=False)

    def moved(self, rank: int, stalled_seconds: float, named_by: Finding | None = None) -> Resolved | None:
        """Note that a rank moves again. Return the end of the incident once all ranks that it names do.

        ``named_by`` is the finding as the rank's observer knows it. It counts if no finding stands here,
        because the hub that reported it is lost.
        """
        finding = self.finding or named_by
        if finding is None or finding.job_ended or (self.finding is not None and self._job_ended):
            return None
        if self._resolving is None or not finding.says_the_same_as(self._resolving):
            self._start_resolving(finding)
        if rank not in self._still:
            return None
        self._still.discard(rank)
        self._stalled_seconds = max(self._stalled_seconds, stalled_seconds)
        if self._still:
            return None
        self.finding = self._resolving = None
        return Resolved(
            step=finding.step,
            ranks=finding.ranks,
            sentence=finding.sentence,
            stalled_seconds=self._stalled_seconds,
        )

    def _set(self, finding: Finding, *, is_own: bool) -> None:
        self.finding, self._is_own = finding, is_own
        self._job_ended = finding.job_ended
        self._start_resolving(finding)

    def _start_resolving(self, finding: Finding) -> None:
        self._resolving, self._still, self._stalled_seconds = finding, set(finding.ranks), 0.0
