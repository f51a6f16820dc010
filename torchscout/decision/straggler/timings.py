"""The times of one check: who tells what, and what is compared with what (paper, sections 5.4 and 6.1.2).

Every rank tells the whole job what it has measured. What a rank spent by itself is compared among its
peers; what a collective took belongs to a process group, and stands for each of its members. Pure: nothing
is timed or exchanged here, and what a slow rank or group means is for the diagnoses to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchscout.config import StragglerConfig
from torchscout.decision import consensus
from torchscout.decision.record import EvidenceRecord, Manifestation, Surface
from torchscout.decision.straggler.groups import CollectiveTime
from torchscout.mesh import AXES, LayerKind, Mesh

__all__ = ["Lap", "Measured", "Timings", "axis_of"]


@dataclass(frozen=True, slots=True)
class Lap:
    """The collectives of one kind that one replay made on one process group."""

    surface: Surface
    """Ends in ``@`` where the axis of the group is to be added: a module's own collectives."""
    members: tuple[int, ...]
    elements: int
    milliseconds: tuple[float, ...]
    """Of each, in order."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one replay took on this rank."""

    layer: str
    """What was replayed."""
    shape: tuple[int, ...]
    """The size of the work."""
    times: Mapping[Surface, float]
    laps: Sequence[Lap]

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """Without the members of groups, which may be many: who tells of the same group is in it."""
        return {
            "layer": self.layer,
            "shape": list(self.shape),
            "times": dict(self.times),
            "laps": [
                [lap.surface, axis_of(mesh, lap.members), *_identity(lap), list(lap.milliseconds)]
                for lap in self.laps
            ],
        }


def axis_of(mesh: Mesh, members: Sequence[int]) -> str:
    """The axis of the mesh that a process group lies along, of dense layers or of experts.

    Of a group over several of them, or of a part of one, those along which its members differ.
    """
    wanted = tuple(sorted(members))
    along = (axis for role in LayerKind for axis in AXES if mesh.ranks_along(axis, wanted[0], role) == wanted)
    return next(along, None) or "+".join(mesh.axes_across(wanted, LayerKind.DENSE))


class Timings:
    """What every rank has told about one check."""

    def __init__(
        self,
        step: int,
        mesh: Mesh,
        told: Sequence[Sequence[Mapping[str, Any]]],
        config: StragglerConfig = StragglerConfig(),  # noqa: B008  it is frozen
    ) -> None:
        """``told`` has for each rank the JSON form of what it measured."""
        self.step, self._mesh, self._config = step, mesh, config
        self._told = told

    def computation(self) -> list[EvidenceRecord]:
        """What ranks spent by themselves, among peers."""
        found: dict[Surface, dict[int, _Value]] = defaultdict(dict)
        for rank, measured in enumerate(self._told):
            for each in measured:
                for surface, milliseconds in each["times"].items():
                    found[surface][rank] = _Value(milliseconds, each["layer"], tuple(each["shape"]))
        return [record for surface, values in found.items() for record in self._compared(surface, values)]

    def communication(self) -> tuple[list[CollectiveTime], list[EvidenceRecord]]:
        """What collectives took: each process group's time, and that of its members as peers of others."""
        found: dict[_GroupKey, dict[int, _Value]] = defaultdict(dict)
        laps: dict[_GroupKey, dict[int, Sequence[float]]] = defaultdict(dict)
        for rank, measured in enumerate(self._told):
            for each in measured:
                for surface, axis, *identity, milliseconds in each["laps"]:
                    key = _GroupKey(_named(surface, axis), axis, *identity)
                    laps[key][rank] = milliseconds
                    found[key][rank] = _Value(0.0, each["layer"], (key.elements,))
        times: list[CollectiveTime] = []
        by_surface: dict[Surface, dict[int, _Value]] = defaultdict(dict)
        for key, told in laps.items():
            if (total := _total(told, key.size)) is not None:
                shape = (key.elements,)
                times.append(CollectiveTime(key.axis, tuple(sorted(told)), key.surface, total, shape))
                for rank, value in found[key].items():
                    # Of several groups, as a stage of a pipeline has two neighbours, the slowest.
                    before, own = by_surface[key.surface].get(rank), value._replace(milliseconds=total)
                    if before is None or before.milliseconds < total:
                        by_surface[key.surface][rank] = own
        records = [
            record for surface, values in by_surface.items() for record in self._compared(surface, values)
        ]
        compared = {record.surface for record in records}
        return [each for each in times if each.surface in compared], records

    def _compared(self, surface: Surface, values: Mapping[int, _Value]) -> Iterable[EvidenceRecord]:
        seen: set[int] = set()
        for rank, value in values.items():
            if rank in seen:
                continue
            # Of state, which only replicas share.
            is_update = surface.startswith(("time/optimizer", "time/expert_optimizer"))
            role = LayerKind.EXPERT if _is_of_experts(surface) else LayerKind.DENSE
            among = self._mesh.peers_of if is_update else self._mesh.layer_peers_of
            peers = among(rank, role)
            # A rank that could not replay has told nothing; that is no slowness. Other sizes are other work.
            having = tuple(
                each for each in peers.ranks if each in values and values[each].shape == value.shape
            )
            seen.update(having)
            if len(having) >= 2:
                yield EvidenceRecord(
                    step=self.step,
                    surface=surface,
                    manifestation=Manifestation.STRAGGLER,
                    peers=having,
                    verdict=consensus.statistical(
                        [values[each].milliseconds for each in having],
                        kappa=self._config.kappa,
                        ratio=self._config.min_slowdown_ratio,
                    ),
                    layer=value.layer or None,
                    shape=value.shape,
                )


class _Value(NamedTuple):
    milliseconds: float
    layer: str
    shape: tuple[int, ...]


class _GroupKey(NamedTuple):
    surface: Surface
    axis: str
    first: int
    last: int
    size: int
    elements: int


def _identity(lap: Lap) -> tuple[int, int, int, int]:
    return min(lap.members), max(lap.members), len(lap.members), lap.elements


def _is_of_experts(surface: Surface) -> bool:
    """Their own work, and what is exchanged among those who hold different ones."""
    return surface.startswith(("time/experts", "time/expert_")) or surface.endswith("@expert")


def _named(surface: Surface, axis: str) -> Surface:
    return Surface(f"{surface}{axis}") if surface.endswith("@") else surface


def _total(laps: Mapping[int, Sequence[float]], size: int) -> float | None:
    """What the transfers took, without the wait for whoever came last; None unless all members told it.

    The member that enters last waits for nobody, and it may be another one each time.
    """
    counts = {len(each) for each in laps.values()}
    if len(laps) != size or len(counts) != 1:
        return None
    return sum((min(each) for each in zip(*laps.values(), strict=True)), 0.0)
