"""Decides which findings of the hubs are new, so that each is reported once (paper, section 7). Pure.

Rounds repeat while a silence lasts, a standby may have concluded the last one, and failures follow from
failures: a job that hangs is eventually killed, rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchscout.decision.progress import Process, RankReport
from torchscout.decision.types import Incident, Manifestation, Resolved
from torchscout.utils.packed_lists import pack, unpack
from torchscout.utils.text import named, sentences

__all__ = ["Finding", "ReportedIncidents"]

_PROTOCOL = ("fingerprint/", "digest/", "splits/")
"""How the surfaces begin that show members issuing different operations; see ``decision.divergence``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The summary of an incident that hubs send to all observers."""

    id: str
    scope: str
    surface: str
    """The surface of the deciding record."""
    step: int
    ranks: tuple[int, ...]
    sentence: str
    job_ended: bool
    """Whether a trainer has ended, so that the job cannot continue."""

    @classmethod
    def of(cls, incident: Incident, reports: Mapping[int, RankReport]) -> Finding:
        return cls(
            id=incident.id,
            scope=incident.scope.value,
            surface=incident.records[0].surface,
            step=incident.step,
            ranks=incident.ranks,
            sentence=incident.sentence,
            job_ended=bool(_ended(reports)),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": pack([*self.ranks])}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """Raises ``LookupError``, ``TypeError`` or ``ValueError`` if the document is not a finding."""
        finding = cls(**{**document, "ranks": tuple(unpack(document["ranks"]))})
        texts = (finding.id, finding.scope, finding.surface, finding.sentence)
        numbers = (finding.step, *finding.ranks)
        types = [*map(type, texts), *map(type, numbers), type(finding.job_ended)]
        if types != [str] * len(texts) + [int] * len(numbers) + [bool]:
            raise ValueError(f"not a finding: {document!r:.80}")
        return finding

    def says_the_same_as(self, other: Finding) -> bool:
        """Return whether both name the same; they may differ in seconds and evidence.

        Members of one group that differ are named once, also if a majority has come to them since.
        """
        if self.surface == other.surface and self.surface.startswith(_PROTOCOL):
            return self.step == other.step and (
                {*self.ranks} <= {*other.ranks} or {*self.ranks} >= {*other.ranks}
            )
        mine = (self.scope, self.surface, self.step, self.ranks)
        return mine == (other.scope, other.surface, other.step, other.ranks)


def _ended(reports: Mapping[int, RankReport]) -> list[int]:
    return sorted(rank for rank, each in reports.items() if each.process is Process.GONE)


@dataclass(slots=True)
class _Open:
    """A finding that is not over."""

    finding: Finding
    is_own: bool
    """Whether this hub has reported it."""
    still: set[int] = field(default_factory=set)
    """Its ranks that have not moved since."""
    stalled_seconds: float = 0.0
    steps: dict[int, int] = field(default_factory=dict)
    """The step of each of its ranks when this hub reported it: a host may be ahead of its device."""


def _steps(reports: Mapping[int, RankReport]) -> dict[int, int]:
    return {rank: each.progress.step for rank, each in reports.items() if each.progress is not None}


class ReportedIncidents:
    """What one hub knows of the findings that are not over."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        """The latest last."""
        self._last: Incident | None = None
        """The last incident that this hub reported, open or not."""
        self._job_ended = False
        """Once a trainer is gone, nothing can be resolved: a rank that moves again finds its peers gone."""

    @property
    def findings(self) -> list[Finding]:
        """The findings that are not over, the latest last."""
        return [each.finding for each in self._open]

    @property
    def job_ended(self) -> bool:
        return any(each.finding.job_ended for each in self._open)

    def traced(self, incident: Incident, reports: Mapping[int, RankReport]) -> Incident | None:
        """Return the incident, or the earlier one that has caused it; None if that adds nothing new.

        A trainer that has waited for longer than the timeout of a process group is ended by NCCL's watchdog,
        or by an exception, some time later. Until then it may continue, stop, or leave out operations.
        """
        cause, ranks = self._last, set(incident.ranks)
        if cause is None or cause.manifestation is Manifestation.CRASH or ranks <= set(cause.ranks):
            return incident
        if not all(rank in reports and reports[rank].has_timed_out for rank in ranks):
            return incident
        if not (gone := _ended(reports)):
            return None
        trainers = f"the trainer{'s' if len(gone) > 1 else ''} of {named(gone)}"
        consequence = sentences(f"{trainers} ended after waiting for too long")
        return replace(cause, sentence=f"{cause.sentence} {consequence}")

    def report(self, incident: Incident, reports: Mapping[int, RankReport]) -> bool:
        """Note the incident; return whether it is new."""
        is_new = self.enter(Finding.of(incident, reports))
        if is_new:
            progresses = (each.progress for each in reports.values())
            silences = (each.silent_seconds for each in progresses if each is not None)
            self._last, self._open[-1].stalled_seconds = incident, max(silences, default=0.0)
            steps = _steps(reports)
            self._open[-1].steps = {rank: steps[rank] for rank in incident.ranks if rank in steps}
        return is_new

    def enter(self, finding: Finding) -> bool:
        """Note the finding if it is new; return whether it is.

        A trainer that ends while the job stands still was ended because of that: launchers kill what is left
        of a job, one rank after the other.
        """
        if self._open and finding.job_ended:
            self._job_ended = True
            return False
        if any(finding.says_the_same_as(each) for each in self.findings):
            return False
        self._add(finding, is_own=True)
        return True

    def adopt(self, findings: Iterable[Finding]) -> None:
        """Take over the open findings of another hub."""
        known = list(findings)
        self._open = [each for each in self._open if each.is_own or each.finding in known]
        for finding in known:
            if not any(finding.says_the_same_as(each) for each in self.findings):
                self._add(finding, is_own=False)

    def moved(self, rank: int, stalled_seconds: float, named_by: Iterable[Finding] = ()) -> list[Resolved]:
        """Note that a rank moves again. Return the ends of the incidents whose ranks have all moved.

        ``named_by`` are the findings as the rank's observer knows them. They count if there is none here,
        because the hub that reported them is lost.
        """
        if not self._open:
            for finding in named_by:
                self._add(finding, is_own=False)
        if self._job_ended or self.job_ended:
            return []
        over = []
        for each in [*self._open]:
            if rank not in each.still:
                continue
            each.still.discard(rank)
            each.stalled_seconds = max(each.stalled_seconds, stalled_seconds)
            if not each.still:
                self._open.remove(each)
                over.append(each)
        return [
            Resolved(
                incident=each.finding.id,
                step=each.finding.step,
                ranks=each.finding.ranks,
                sentence=each.finding.sentence,
                stalled_seconds=each.stalled_seconds,
            )
            for each in over
        ]

    def gone_on(self, reports: Mapping[int, RankReport]) -> list[Resolved]:
        """As ``moved``, for incidents whose ranks have all come to a later step, as their reports show: a
        trainer that goes on may end before its observer has said that it moves."""
        now, found = _steps(reports), []
        for each in [*self._open]:
            ahead = [rank for rank, step in each.steps.items() if now.get(rank, step) > step]
            if len(ahead) == len(each.finding.ranks):
                for rank in ahead:
                    found += self.moved(rank, 0.0)
        return found

    def left(self, report: RankReport) -> list[Resolved]:
        """As ``moved``, for a rank that went on and whose observer leaves with this last report: it may have
        left before it knew that the rank was named."""
        progress = report.progress
        own = [each.finding.step for each in self._open if each.is_own]
        if (
            progress is None
            or report.process is not Process.RUNNING
            or progress.step <= max(own, default=progress.step)
        ):
            return []
        return self.moved(report.rank, 0.0)

    def _add(self, finding: Finding, *, is_own: bool) -> None:
        self._job_ended |= finding.job_ended
        self._open.append(_Open(finding, is_own, set(finding.ranks)))
