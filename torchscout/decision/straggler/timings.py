"""Which times of one check are comparable, and how they compare (paper, sections 5.4 and 6.1.2).

The time that a rank spends by itself is compared among its peers; the time of a collective belongs to a
process group, and counts for each of its members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchscout.config import StragglerConfig
from torchscout.decision import consensus
from torchscout.decision.straggler.groups import CollectiveTime
from torchscout.decision.straggler.measured import Table
from torchscout.decision.straggler.persistence import Times
from torchscout.decision.types import EvidenceRecord, Manifestation, Surface
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
        self._peers: dict[tuple[LayerKind, bool, int], PeerGroup] = {}

    @cached_property
    def computation(self) -> list[EvidenceRecord]:
        """Comparisons of the times that ranks spent by themselves."""
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
        measured: dict[Surface, list[_Groups]] = defaultdict(list)
        for (surface, axis), laps in self._laps().items():
            groups = _Groups.of(laps)
            measured[surface].append(groups)
            times += groups.times(surface, axis)
        records = [
            record
            for surface, groups in measured.items()
            for elements, values in _slowest(groups, len(self._mesh))
            for record in self._compared(surface, (elements,), values)
        ]
        compared = {record.surface for record in records}
        return [each for each in times if each.surface in compared], records

    def _laps(self) -> dict[tuple[Surface, str], list[_Laps]]:
        """Return the collectives of the process groups along each axis."""
        found: dict[tuple[Surface, str], list[_Laps]] = defaultdict(list)
        for table in self._tables:
            for work in table.work:
                for lap in work.laps:
                    laps = _Laps(
                        work.layer, table.ranks, lap.identity(table.values), lap.milliseconds(table.values)
                    )
                    found[_named(lap.surface, lap.axis), lap.axis].append(laps)
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
            peers = self._peers_of(rank, role, is_update)
            members = peers.array
            # A rank that could not replay has no times, and other sizes are other work.
            left[members] = False
            ranks, having = peers.ranks, values.is_there[members]
            if not having.all():
                members = members[having]
                ranks = tuple(members.tolist())
            if len(ranks) >= 2:
                times = values.milliseconds[members]
                is_large = len(times) >= consensus.MANY and np.isfinite(times).all()
                dispersion = consensus.dispersion_of(times) if is_large else None
                record = EvidenceRecord(
                    step=self.step,
                    surface=surface,
                    manifestation=Manifestation.STRAGGLER,
                    peers=ranks,
                    verdict=consensus.statistical(
                        times,
                        kappa=self._config.kappa,
                        ratio=self._config.min_slowdown_ratio,
                        dispersion=dispersion,
                    ),
                    layer=values.layers[rank] or None,
                    shape=shape,
                )
                Times.remember(record, members, times, dispersion)
                yield record

    def _peers_of(self, rank: int, role: LayerKind, is_update: bool) -> PeerGroup:
        key = (role, is_update, rank)
        if key not in self._peers:
            among = self._mesh.peers_of if is_update else self._mesh.layer_peers_of
            self._peers[key] = among(rank, role)
        return self._peers[key]


class _ByRank:
    """One time for each rank that has one."""

    def __init__(self, size: int, layers: Sequence[str] | npt.NDArray[np.object_]) -> None:
        """``layers`` has each rank's."""
        self.layers = layers
        self.milliseconds: _Times = np.zeros(size)
        self.is_there = np.zeros(size, bool)

    def put(self, ranks: _Ranks, milliseconds: _Times) -> None:
        self.milliseconds[ranks], self.is_there[ranks] = milliseconds, True


class _Laps(NamedTuple):
    """The collectives of one kind in one replay, as ranks timed them on their process groups."""

    layer: str
    ranks: _Ranks
    identities: npt.NDArray[np.int64]
    """First and last member, size and elements, for each rank."""
    milliseconds: _Times
    """Of each call, for each rank."""


class _Groups(NamedTuple):
    """Process groups of which every member sent its times, in columns."""

    members: _Ranks
    """Those of one group after the other, ascending in each."""
    starts: npt.NDArray[np.int64]
    """Where each group starts in ``members``; the last one is the end."""
    totals: _Times
    """The time of each group's transfers, without waiting."""
    elements: npt.NDArray[np.int64]
    layers: npt.NDArray[np.object_]

    @classmethod
    def of(cls, laps: Sequence[_Laps]) -> _Groups:
        """Groups are in the order of the replays that timed them first."""
        part = np.repeat(np.arange(len(laps)), [len(each.ranks) for each in laps])
        ranks = np.concatenate([each.ranks for each in laps])
        identities = np.concatenate([each.identities for each in laps])
        calls = np.array([each.milliseconds.shape[1] for each in laps])[part]
        times = np.zeros((len(ranks), calls.max(initial=0)))
        for number, each in enumerate(laps):
            times[part == number, : each.milliseconds.shape[1]] = each.milliseconds
        order = _ordered(part, ranks, identities)
        part, ranks, identities = part[order], ranks[order], identities[order]
        begins = _changes(identities)
        # The layer is that of the first replay, but the time of a rank is that of the last.
        first_part = np.minimum.reduceat(part, np.flatnonzero(begins))
        is_last = np.append((ranks[1:] != ranks[:-1]) | begins[1:], True)
        group = (np.cumsum(begins) - 1)[is_last]
        ranks, times, calls = ranks[is_last], times[order][is_last], calls[order][is_last]
        starts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        identities = identities[begins]
        counts = np.diff(np.append(starts, len(ranks)))
        same = np.minimum.reduceat(calls, starts) == np.maximum.reduceat(calls, starts)
        # The member that enters last does not wait, and it may be another one each time.
        totals = np.minimum.reduceat(times, starts, axis=0).sum(axis=1)
        kept = np.flatnonzero((counts == identities[:, 2]) & same)
        kept = kept[np.argsort(first_part[kept], kind="stable")]
        new_starts = np.append(0, np.cumsum(counts[kept]))
        places = np.repeat(starts[kept] - new_starts[:-1], counts[kept]) + np.arange(new_starts[-1])
        return cls(
            ranks[places],
            new_starts,
            totals[kept],
            identities[kept, 3],
            np.array([each.layer for each in laps], np.object_)[first_part[kept]],
        )

    def times(self, surface: Surface, axis: str) -> Iterator[CollectiveTime]:
        members, sizes = self.members.tolist(), {*np.diff(self.starts).tolist()}
        groups: Iterable[tuple[int, ...]]
        if len(sizes) == 1:  # as usual, and faster
            groups = zip(*[iter(members)] * sizes.pop(), strict=True)
        else:
            groups = (tuple(members[begin:end]) for begin, end in pairwise(self.starts.tolist()))
        shapes = zip(self.elements.tolist(), strict=True)
        return map(CollectiveTime, repeat(axis), groups, repeat(surface), self.totals.tolist(), shapes)


def _slowest(parts: Sequence[_Groups], size: int) -> Iterator[tuple[int, _ByRank]]:
    """Yield, for each size of work, the time of every rank: the slowest of its groups, such as those with two
    neighbours in a pipeline."""
    counts = [np.diff(each.starts) for each in parts]
    ranks = np.concatenate([each.members for each in parts])
    times, elements, layers = (
        np.concatenate([np.repeat(column, count) for column, count in zip(columns, counts, strict=True)])
        for columns in zip(*((each.totals, each.elements, each.layers) for each in parts), strict=True)
    )
    order = np.arange(len(ranks))
    if len(ranks) and np.bincount(ranks).max() > 1:
        order = np.lexsort((-times, ranks))
        order = order[_changes(ranks[order])]
    of_rank = np.full(size, "", np.object_)
    of_rank[ranks[order]] = layers[order]
    for each in dict.fromkeys(elements[order].tolist()):
        chosen = order[elements[order] == each]
        values = _ByRank(size, of_rank)
        values.put(ranks[chosen], times[chosen])
        yield each, values


def _ordered(part: _Ranks, ranks: _Ranks, identities: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the order by identity, then rank, then part. Keys that are equal everywhere cost time only."""
    keys = [part, ranks, *identities.T[::-1]]
    return np.lexsort([key for key in keys if key is ranks or (key != key[0]).any()])


def _changes(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether each row, or number, differs from the one before it; the first does."""
    differs = rows[1:] != rows[:-1]
    return np.append(np.ones(min(1, len(rows)), bool), differs if rows.ndim == 1 else differs.any(axis=1))


def _is_of_experts(surface: Surface) -> bool:
    """Whether it is the work of experts, or communication among ranks with different ones."""
    return surface.startswith(("time/experts", "time/expert_")) or surface.endswith("@expert")


def _named(surface: Surface, axis: str) -> Surface:
    return Surface(f"{surface}{axis}") if surface.endswith("@") else surface
