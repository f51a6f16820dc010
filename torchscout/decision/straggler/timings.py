"""Which times of one check are comparable, and how they compare (paper, sections 5.4 and 6.1.2).

The time that a rank spends by itself is compared among its peers; the time of a collective belongs to a
process group, and counts for each of its members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchscout.config import StragglerConfig
from torchscout.decision import consensus
from torchscout.decision.record import EvidenceRecord, Manifestation, Surface
from torchscout.decision.straggler.groups import CollectiveTime
from torchscout.decision.straggler.measured import Table
from torchscout.mesh import LayerKind, Mesh, PeerGroup

__all__ = ["Timings"]

_Ranks = npt.NDArray[np.int64]
_Times = npt.NDArray[np.float64]


class Timings:
    """The times of all ranks in one check."""

    def __init__(
        self,
        step: int,
        mesh: Mesh,
        tables: Sequence[Table],
        config: StragglerConfig = StragglerConfig(),  # noqa: B008  it is frozen
    ) -> None:
        self.step, self._mesh, self._config, self._tables = step, mesh, config, tables
        self._peers: dict[tuple[LayerKind, bool, int], tuple[PeerGroup, _Ranks]] = {}

    def computation(self) -> list[EvidenceRecord]:
        """Compare the times that ranks spent by themselves."""
        # By layer, because a check may replay one surface several times: experts at several shapes.
        size = len(self._mesh)
        found: dict[tuple[Surface, str, tuple[int, ...]], _ByRank] = {}
        for table in self._tables:
            for work in table.work:
                for surface, place in work.times.items():
                    key = (surface, work.layer, work.shape)
                    values = found.setdefault(key, _ByRank(size, [work.layer] * size))
                    values.put(table.ranks, table.values[:, place])
        return [
            record
            for (surface, _, shape), values in found.items()
            for record in self._compared(surface, shape, values)
        ]

    def communication(self) -> tuple[list[CollectiveTime], list[EvidenceRecord]]:
        """Return the time of each process group, and comparisons of its members with their peers."""
        times: list[CollectiveTime] = []
        slowest: dict[Surface, _Slowest] = defaultdict(lambda: _Slowest(len(self._mesh)))
        for key, laps in self._laps().items():
            if (total := laps.total(key.size)) is None:
                continue
            ranks, shape = laps.ranks(), (key.elements,)
            times.append(CollectiveTime(key.axis, tuple(ranks.tolist()), key.surface, total, shape))
            slowest[key.surface].put_group(ranks, total, laps.layer, key.elements)
        records = [
            record
            for surface, each in slowest.items()
            for elements, values in each.by_elements()
            for record in self._compared(surface, (elements,), values)
        ]
        compared = {record.surface for record in records}
        return [each for each in times if each.surface in compared], records

    def _laps(self) -> dict[_GroupKey, _Laps]:
        """Return the collectives of each process group."""
        found: dict[_GroupKey, _Laps] = {}
        for table in self._tables:
            for work in table.work:
                for lap in work.laps:
                    identities, milliseconds = lap.identity(table.values), lap.milliseconds(table.values)
                    for rows in _alike(identities):
                        identity = identities[rows[0]].tolist()
                        key = _GroupKey(_named(lap.surface, lap.axis), lap.axis, *identity)
                        laps = found.setdefault(key, _Laps(work.layer))
                        laps.put(table.ranks[rows], milliseconds[rows])
        return found

    def _compared(
        self, surface: Surface, shape: tuple[int, ...], values: _ByRank
    ) -> Iterator[EvidenceRecord]:
        # Only replicas share state.
        is_update = surface.startswith(("time/optimizer", "time/expert_optimizer"))
        role = LayerKind.EXPERT if _is_of_experts(surface) else LayerKind.DENSE
        left = values.is_there.copy()
        rank = 0
        while left[rank:].any():
            rank += int(left[rank:].argmax())
            peers, members = self._peers_of(rank, role, is_update)
            # A rank that could not replay has no times, and other sizes are other work.
            having = values.is_there[members]
            ranks = peers.ranks if having.all() else tuple(members[having].tolist())
            left[members] = False
            if len(ranks) >= 2:
                yield EvidenceRecord(
                    step=self.step,
                    surface=surface,
                    manifestation=Manifestation.STRAGGLER,
                    peers=ranks,
                    verdict=consensus.statistical(
                        values.milliseconds[members[having]],
                        kappa=self._config.kappa,
                        ratio=self._config.min_slowdown_ratio,
                    ),
                    layer=values.layers[rank] or None,
                    shape=shape,
                )

    def _peers_of(self, rank: int, role: LayerKind, is_update: bool) -> tuple[PeerGroup, _Ranks]:
        key = (role, is_update, rank)
        if key not in self._peers:
            among = self._mesh.peers_of if is_update else self._mesh.layer_peers_of
            peers = among(rank, role)
            self._peers[key] = peers, np.array(peers.ranks)
        return self._peers[key]


class _GroupKey(NamedTuple):
    surface: Surface
    axis: str
    first: int
    last: int
    size: int
    elements: int


class _ByRank:
    """One time for each rank that has one."""

    def __init__(self, size: int, layers: list[str]) -> None:
        """``layers`` has each rank's."""
        self.layers = layers
        self.milliseconds: _Times = np.zeros(size)
        self.is_there = np.zeros(size, bool)

    def put(self, ranks: _Ranks, milliseconds: _Times) -> None:
        self.milliseconds[ranks], self.is_there[ranks] = milliseconds, True


class _Slowest(_ByRank):
    """For each rank the slowest of several groups, such as those with two neighbours in a pipeline."""

    def __init__(self, size: int) -> None:
        super().__init__(size, [""] * size)
        self.elements = np.zeros(size, np.int64)

    def put_group(self, ranks: _Ranks, milliseconds: float, layer: str, elements: int) -> None:
        """Add a group that took this time for so many elements in a layer."""
        slower = ranks[~self.is_there[ranks] | (self.milliseconds[ranks] < milliseconds)]
        self.put(slower, np.full(len(slower), milliseconds))
        self.elements[slower] = elements
        for rank in slower.tolist():
            self.layers[rank] = layer

    def by_elements(self) -> Iterator[tuple[int, _ByRank]]:
        for elements in dict.fromkeys(self.elements[self.is_there].tolist()):
            values = _ByRank(len(self.elements), self.layers)
            ranks = np.flatnonzero(self.is_there & (self.elements == elements))
            values.put(ranks, self.milliseconds[ranks])
            yield elements, values


class _Laps:
    """The collectives of one process group, as its members timed them."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self._parts: list[tuple[_Ranks, _Times]] = []

    def put(self, ranks: _Ranks, milliseconds: _Times) -> None:
        """Add members; those of a later replay replace those of an earlier one."""
        kept = [
            (members[keep], times[keep])
            for members, times in self._parts
            if (keep := ~np.isin(members, ranks)).any()
        ]
        self._parts = [*kept, (ranks, milliseconds)]

    def ranks(self) -> _Ranks:
        return np.sort(np.concatenate([ranks for ranks, _ in self._parts]))

    def total(self, size: int) -> float | None:
        """Return the time of the transfers, without waiting; None unless all members sent theirs.

        The member that enters last does not wait, and it may be another one each time.
        """
        calls = {times.shape[1] for _, times in self._parts}
        if sum(len(ranks) for ranks, _ in self._parts) != size or len(calls) != 1:
            return None
        return sum(np.min([times.min(axis=0) for _, times in self._parts], axis=0).tolist(), 0.0)


def _alike(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Return the numbers of equal rows, ascending."""
    if (rows == rows[0]).all():
        return [np.arange(len(rows))]
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    return np.split(order, np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1)


def _is_of_experts(surface: Surface) -> bool:
    """Whether it is the work of experts, or communication among ranks with different ones."""
    return surface.startswith(("time/experts", "time/expert_")) or surface.endswith("@expert")


def _named(surface: Surface, axis: str) -> Surface:
    return Surface(f"{surface}{axis}") if surface.endswith("@") else surface
