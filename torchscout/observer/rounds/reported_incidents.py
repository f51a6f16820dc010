"""Decides which findings of the hubs are new, so that each is reported once (paper, section 7). Pure.

Rounds repeat while a silence lasts, a standby may have concluded the last one, and failures follow from
failures: a job that hangs is eventually killed, rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchscout.decision.progress import Process
from torchscout.decision.types import Incident, Resolved
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reports import Reports
from torchscout.utils.packed_lists import pack, unpack
from torchscout.utils.text import named, sentences

__all__ = ["Finding", "ReportedIncidents", "after_timeout"]


def after_timeout(incident: Incident, ended: list[int]) -> Incident:
    """Return the incident with the consequence that these trainers were ended for waiting too long."""
    trainers = f"the trainer{'s' if len(ended) > 1 else ''} of {named(ended)}"
    consequence = sentences(f"{trainers} ended after waiting for too long")
    return replace(incident, sentence=f"{incident.sentence} {consequence}")


@dataclass(frozen=True, slots=True)
class Finding:
    """The summary of an incident that hubs send to all observers."""

    scope: str
    surface: str
    """The surface of the deciding record."""
    step: int
    ranks: tuple[int, ...]
    sentence: str
    job_ended: bool
    """Whether any trainer is gone, so that the job cannot continue."""

    @classmethod
    def of(cls, incident: Incident, reports: Mapping[int, RankReport]) -> Finding:
        return cls(
            scope=incident.scope.value,
            surface=incident.records[0].surface,
            step=incident.step,
            ranks=incident.ranks,
            sentence=incident.sentence,
            job_ended=bool(Reports.of(reports).ended),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": pack([*self.ranks])}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """Raises ``LookupError``, ``TypeError`` or ``ValueError`` if the document is not a finding."""
        finding = cls(**{**document, "ranks": tuple(unpack(document["ranks"]))})
        texts = (finding.scope, finding.surface, finding.sentence)
        numbers = (finding.step, *finding.ranks)
        types = [*map(type, texts), *map(type, numbers), type(finding.job_ended)]
        if types != [str] * len(texts) + [int] * len(numbers) + [bool]:
            raise ValueError(f"not a finding: {document!r:.80}")
        return finding

    def says_the_same_as(self, other: Finding) -> bool:
        """Return whether both name the same; they may differ in seconds and evidence."""
        mine = (self.scope, self.surface, self.step, self.ranks)
        return mine == (other.scope, other.surface, other.step, other.ranks)


class ReportedIncidents:
    """What one hub knows of the current finding, if there is one."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self._is_own = True
        self._last: Incident | None = None
        """The last incident that this hub reported, current or not."""
        self._resolving: Finding | None = None
        """The finding that ``_still`` belongs to."""
        self._still: set[int] = set()
        """Its ranks that have not moved since."""
        self._stalled_seconds = 0.0
        self._job_ended = False
        """Once a trainer is gone, nothing can be resolved: a rank that moves again finds its peers gone."""

    def traced(self, incident: Incident, reports: Mapping[int, RankReport]) -> Incident | None:
        """Return the incident, or the earlier one that has caused it; None if that adds nothing new.

        A trainer that has waited for longer than the timeout of a process group is ended by NCCL's watchdog,
        or by an exception, some time later. Until then it may continue, stop, or leave out operations.
        """
        cause, ranks = self._last, set(incident.ranks)
        if cause is None or ranks <= set(cause.ranks):
            return incident
        posted = Reports.of(reports)
        if not all(rank in posted and posted.says(rank, "has_timed_out") for rank in ranks):
            return incident
        gone = posted.ended
        return after_timeout(cause, gone) if gone else None

    def report(self, incident: Incident, reports: Mapping[int, RankReport]) -> bool:
        """Make the incident the current finding; return whether it is new."""
        is_new = self.enter(Finding.of(incident, reports))
        if is_new:
            self._last, self._stalled_seconds = incident, Reports.of(reports).silent_seconds
        return is_new

    def enter(self, finding: Finding) -> bool:
        """Make it the current finding if it is new; return whether it is."""
        current = self.finding
        if current is not None:
            # A trainer that ends after the job has stopped was ended because of that.
            self._job_ended |= current.job_ended or finding.job_ended
            if self._job_ended or finding.says_the_same_as(current):
                return False
        self._set(finding, is_own=True)
        return True

    def adopt(self, finding: Finding | None) -> None:
        """Take over the current finding of another hub."""
        if finding is None:
            self.finding = self.finding if self._is_own else None
        elif self.finding is None or not finding.says_the_same_as(self.finding):
            self._set(finding, is_own=False)

    def moved(self, rank: int, stalled_seconds: float, named_by: Finding | None = None) -> Resolved | None:
        """Note that a rank moves again. Return the end of the incident once all ranks that it names do.

        ``named_by`` is the finding as the rank's observer knows it. It counts if there is none here, because
        the hub that reported it is lost.
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

    def left(self, rank: int, last: Post) -> Resolved | None:
        """As ``moved``, for a rank that went on and whose observer leaves with this last report: it may have
        left before it knew that the rank was named."""
        finding = self.finding
        if finding is None or not self._is_own:
            return None
        goes_on = last.process is Process.RUNNING and last.header.step > finding.step
        return self.moved(rank, 0.0) if goes_on else None

    def _set(self, finding: Finding, *, is_own: bool) -> None:
        self.finding, self._is_own, self._job_ended = finding, is_own, finding.job_ended
        self._start_resolving(finding)

    def _start_resolving(self, finding: Finding) -> None:
        self._resolving, self._still, self._stalled_seconds = finding, set(finding.ranks), 0.0
