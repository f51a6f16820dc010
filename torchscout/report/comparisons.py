"""What was compared in a run, and how long it took: the records of all ranks, added up.

All peers write the same comparison. So what one rank wrote is added up first, and of several ranks with the
same peers the most complete one counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torchscout.decision.types import Agreements, EvidenceRecord, Manifestation
from torchscout.run.folder import RECORDS_FOLDER
from torchscout.run.reader import Run, line_files

__all__ = ["Compared", "Comparisons", "NotChecked", "Round", "Series", "Target"]

MOST_ROUNDS = 64
"""Rounds that are kept of one series of times, the newest ones."""


class Target(NamedTuple):
    """What was compared, and among whom."""

    peers: tuple[int, ...]
    surface: str
    manifestation: Manifestation
    layer: str | None
    mode: str | None


@dataclass(slots=True)
class Compared:
    """How often a target was compared."""

    count: int = 0
    findings: int = 0
    """Comparisons in which peers disagreed."""
    first: int = 0
    last: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Those of comparisons that were recorded one by one."""

    def add(self, count: int, first: int, last: int, *, finding: bool = False) -> None:
        self.first = min(self.first, first) if self.count else first
        self.count, self.last = self.count + count, max(self.last, last)
        self.findings += finding


@dataclass(slots=True)
class NotChecked:
    """What was not compared, for one reason."""

    surfaces: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    first: int = 0
    last: int = 0

    def add(self, record: EvidenceRecord) -> None:
        self.first = min(self.first, record.step) if self.surfaces else record.step
        self.last = max(self.last, record.step)
        self.surfaces.add(record.surface)
        self.ranks.update(record.peers)


class Round(NamedTuple):
    """The times of one comparison, in milliseconds."""

    step: int
    layer: str | None
    times: tuple[float, ...]
    outliers: tuple[int, ...]
    """Positions among the peers."""


class Series(NamedTuple):
    """Times that can be drawn in one strip."""

    surface: str
    peers: tuple[int, ...]


class Comparisons:
    """Everything that ranks recorded besides incidents."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        """Those that have written anything."""
        self.compared: dict[Target, Compared] = {}
        self.not_checked: dict[str, NotChecked] = {}
        self.times: dict[Series, dict[tuple[int, str | None], Round]] = {}

    @classmethod
    def read(cls, run: Run) -> Comparisons:
        """Read the records of all ranks, which takes long in a large job; problems are noted in ``run``."""
        found = cls()
        try:
            files = line_files(run.run_dir / RECORDS_FOLDER)
        except OSError as error:
            run.note(error)
            return found
        for rank, path in files:
            found.ranks.add(rank)
            lines = run.lines(path)
            found.add_rank(each.item for each in lines if isinstance(each.item, EvidenceRecord | Agreements))
        return found

    def add_rank(self, items: Iterable[EvidenceRecord | Agreements]) -> None:
        """Add what one rank wrote."""
        own: dict[Target, Compared] = {}
        for item in items:
            if isinstance(item, Agreements):
                for each in item.surfaces:
                    key = Target(item.peers, each.surface, each.manifestation, each.layer, each.mode)
                    own.setdefault(key, Compared()).add(each.count, each.first, each.last)
            elif item.reason is not None:
                self.not_checked.setdefault(item.reason, NotChecked()).add(item)
            else:
                key = Target(item.peers, item.surface, item.manifestation, item.layer, item.mode)
                row = own.setdefault(key, Compared())
                row.add(1, item.step, item.step, finding=bool(item.scope))
                if item.shape is not None:
                    row.shapes.add(item.shape)
                self.add_times([item])
        for key, row in own.items():
            known = self.compared.get(key)
            if known is None or row.count > known.count:
                self.compared[key] = row

    def with_times(self, records: Iterable[EvidenceRecord]) -> Comparisons:
        """Return these comparisons with the times among some further records."""
        made = Comparisons()
        made.ranks, made.compared, made.not_checked = self.ranks, self.compared, self.not_checked
        made.times = {series: dict(rounds) for series, rounds in self.times.items()}
        made.add_times(records)
        return made

    def add_times(self, records: Iterable[EvidenceRecord]) -> None:
        """Add the times among these records."""
        for each in records:
            if each.manifestation is not Manifestation.STRAGGLER or each.verdict is None:
                continue
            times = tuple(
                value if isinstance(value, float) else float("nan") for value in each.verdict.evidence
            )
            rounds = self.times.setdefault(Series(each.surface, each.peers), {})
            rounds[each.step, each.layer] = Round(each.step, each.layer, times, each.verdict.outliers)
            if len(rounds) > MOST_ROUNDS:
                del rounds[min(rounds, key=lambda key: key[0])]
