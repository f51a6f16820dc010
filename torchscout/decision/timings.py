"""The times of all ranks in one check, and how comparable ones differ (paper, sections 5.4 and 6.1.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import dispersions, statistical
from torchscout.decision.types import EvidenceRecord, Manifestation, Status, Surface
from torchscout.mesh import LayerKind, Mesh

__all__ = ["Calls", "Floats", "GroupTimes", "Ints", "PeerTimes", "Slower", "Timings", "Work"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Work(NamedTuple):
    """What is equal work on all ranks that timed it."""

    surface: Surface
    layer: str
    shape: tuple[int, ...]


class Calls(NamedTuple):
    """The collectives of one kind that one replay makes on process groups along one axis."""

    surface: Surface
    """Ends in ``@`` for those of a module; the axis of the process groups is then added."""
    axis: str
    layer: str
    shape: tuple[int, ...]
    repeats: int


class GroupTimes(NamedTuple):
    """How long the same collectives took on several process groups, of which every member has timed them."""

    surface: Surface
    axis: str
    layer: str
    elements: int
    """The size of the work; only equal sizes are compared."""
    milliseconds: dict[tuple[int, ...], float]
    """By the members of the group, ascending."""


class Slower(NamedTuple):
    """A rank that takes materially longer than its peers."""

    rank: int
    excess: float
    """Relative to the reference: 1.0 is twice as long."""
    is_shown: bool
    """Whether the verdict of this one comparison names the rank, or leaves it open between two."""
    row: int


class PeerTimes:
    """Times of equal work among several groups of peers, one group in a row.

    The reference of a group is the median of its times; of two peers, the faster one.
    """

    def __init__(
        self, step: int, work: Work, peers: Ints, times: Floats, config: StragglerConfig | None = None
    ) -> None:
        """``peers`` and ``times`` have the same shape; the time of a rank without one is NaN."""
        self.step, self.work, self.peers = step, work, peers
        self._config = config or StragglerConfig()
        self._records: dict[int, EvidenceRecord] = {}
        with np.errstate(invalid="ignore"):
            self.times = np.where(np.isfinite(times) & (times > 0), times, np.nan)
        is_timed = ~np.isnan(self.times)
        self.counts = np.count_nonzero(is_timed, axis=1)
        self._center, self._scale = dispersions(self.times)
        faster = np.where(is_timed, self.times, np.inf).min(axis=1)
        self.reference = np.select([self.counts > 2, self.counts == 2], [self._center, faster], np.nan)
        floor = np.maximum(
            self._config.min_slowdown_ratio * self.reference, self.reference + self._config.min_slowdown_ms
        )
        with np.errstate(invalid="ignore"):
            self._is_slower = self.times >= floor[:, np.newaxis]

    @classmethod
    def of(cls, record: EvidenceRecord, config: StragglerConfig | None = None) -> PeerTimes | None:
        """Return the one of a record; None if too few peers were timed to compare them."""
        if record.verdict is None:
            return None
        work = Work(record.surface, record.layer or "", record.shape or ())
        times = np.array([[*record.verdict.evidence]], np.float64)
        found = cls(record.step, work, np.array([record.peers]), times, config)
        # Two peers that disagree can be compared; in any other inconclusive round most were not timed.
        is_open = record.verdict.status is Status.INCONCLUSIVE and found.counts[0] != 2
        found._records[0] = record
        return None if found.counts[0] < 2 or is_open else found

    def slower(self) -> list[Slower]:
        """Return the ranks that are materially slower than the reference of their group."""
        rows, columns = np.nonzero(self._is_slower)
        times, reference = self.times[rows, columns], self.reference[rows]
        is_far = times - self._center[rows] > self._config.kappa * self._scale[rows]
        return [
            Slower(*each)
            for each in zip(
                self.peers[rows, columns].tolist(),
                (times / reference - 1).tolist(),
                (is_far | (self.counts[rows] == 2)).tolist(),
                rows.tolist(),
                strict=True,
            )
        ]

    def timed(self) -> Ints:
        """Return the ranks that were compared."""
        compared: Ints = self.peers[~np.isnan(self.times) & (self.counts >= 2)[:, np.newaxis]]
        return compared

    def spreads(self) -> Floats:
        """Return the robust scale of each group, relative to its reference; NaN for fewer than three peers.

        The slowest time of a group is left out: among few peers a slow rank would widen the scale that it is
        measured with. What is left estimates the standard deviation too low, which the factor corrects.
        """
        rest = self.times.copy()
        rest[np.arange(len(rest)), np.where(np.isnan(rest), -np.inf, rest).argmax(axis=1)] = np.nan
        large = self.counts > 2
        found = np.full(len(rest), np.nan)
        scale = dispersions(rest[large])[1] / self.reference[large]
        found[large] = scale * (1 + 3.3 / self.counts[large])
        return found

    def differences(self) -> Floats:
        """Return the logarithm of how many times as long as the second of two peers the first one takes; NaN
        if there are not exactly two."""
        if self.times.shape[1] != 2:
            return np.full(len(self.times), np.nan)
        apart: Floats = np.log(self.times[:, 0] / self.times[:, 1])
        return apart

    def row_of(self, rank: int) -> int | None:
        """Return the row in which a rank was compared."""
        rows, _ = np.nonzero((self.peers == rank) & ~np.isnan(self.times) & (self.counts >= 2)[:, np.newaxis])
        return int(rows[0]) if len(rows) else None

    def record(self, row: int) -> EvidenceRecord:
        """Return the comparison within one group as evidence."""
        if row not in self._records:
            is_timed = ~np.isnan(self.times[row])
            self._records[row] = EvidenceRecord(
                step=self.step,
                surface=self.work.surface,
                manifestation=Manifestation.STRAGGLER,
                peers=tuple(self.peers[row][is_timed].tolist()),
                verdict=statistical(
                    self.times[row][is_timed],
                    kappa=self._config.kappa,
                    ratio=self._config.min_slowdown_ratio,
                ),
                layer=self.work.layer or None,
                shape=self.work.shape,
            )
        return self._records[row]


class Timings:
    """The times of all ranks in one check: by surface, what ranks spent by themselves, and collectives."""

    def __init__(self, step: int, mesh: Mesh) -> None:
        self.step, self._mesh = step, mesh
        self._computing: dict[Work, Floats] = {}
        self._collectives: dict[Calls, list[tuple[Ints, Ints, Floats]]] = defaultdict(list)

    def add(self, work: Work, ranks: Ints, milliseconds: Floats) -> None:
        """Add what some ranks took for work of their own."""
        if work not in self._computing:
            self._computing[work] = np.full(len(self._mesh), np.nan)
        self._computing[work][ranks] = milliseconds

    def add_collectives(self, calls: Calls, ranks: Ints, groups: Ints, milliseconds: Floats) -> None:
        """Add what some ranks took for collectives, a column for each call.

        ``groups`` identifies each rank's process group and its work: first and last member, size, elements.
        """
        self._collectives[calls].append((ranks, groups, milliseconds))

    def computation(self, config: StragglerConfig) -> Iterator[PeerTimes]:
        """Compare what ranks spent by themselves."""
        for work, times in self._computing.items():
            peers = _peers(self._mesh, work.surface)
            of_peers = np.where(peers >= 0, times[peers], np.nan)
            yield PeerTimes(self.step, work, peers, of_peers, config)

    def communication(self) -> Iterator[GroupTimes]:
        """Return the times of process groups by kind of work."""
        for calls, parts in self._collectives.items():
            ranks, groups, times = (np.concatenate(each) for each in zip(*parts, strict=True))
            order = np.lexsort((ranks, *groups.T[::-1]))
            ranks, groups, times = ranks[order], groups[order], times[order]
            begins = np.append(True, (groups[1:] != groups[:-1]).any(axis=1))
            starts = np.flatnonzero(begins)
            ends = np.append(starts[1:], len(ranks))
            # The member that enters last does not wait, and it may be another one each time.
            totals = np.minimum.reduceat(times, starts, axis=0).sum(axis=1)
            found: dict[int, dict[tuple[int, ...], float]] = defaultdict(dict)
            members = ranks.tolist()
            for start, end, (*_, size, elements), total in zip(
                starts.tolist(), ends.tolist(), groups[starts].tolist(), totals.tolist(), strict=True
            ):
                if end - start == size:
                    found[elements][tuple(members[start:end])] = total
            surface = f"{calls.surface}{calls.axis}" if calls.surface.endswith("@") else calls.surface
            for elements, milliseconds in found.items():
                yield GroupTimes(surface, calls.axis, calls.layer, elements, milliseconds)


def _peers(mesh: Mesh, surface: Surface) -> Ints:
    """Return the peer groups that compare a surface, one in a row; -1 fills smaller ones."""
    is_of_experts = surface.startswith(("time/experts", "time/expert_"))
    role = LayerKind.EXPERT if is_of_experts else LayerKind.DENSE
    # Only replicas share state.
    is_update = surface.startswith(("time/optimizer", "time/expert_optimizer"))
    return mesh.peer_table(role, of_layers=not is_update)
