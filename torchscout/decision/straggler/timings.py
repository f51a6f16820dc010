"""The times of one check, and which of them are comparable (paper, sections 5.4 and 6.1.2).

Every rank sends its times to all ranks. The time that a rank spends by itself is compared among its peers;
the time of a collective belongs to a process group, and counts for each of its members.
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
    """Ends in ``@`` for the collectives of a module, whose surfaces get the axis of the group."""
    members: tuple[int, ...]
    elements: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one replay on this rank."""

    layer: str
    shape: tuple[int, ...]
    """The size of the work."""
    times: Mapping[Surface, float]
    laps: Sequence[Lap]

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """Return plain JSON, without members: the ranks that send times of a group are its members."""
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
    """Return the mesh axis of a process group, of dense layers or of experts.

    For a group over several axes, or a part of one, these are the axes along which its members differ.
    """
    wanted = tuple(sorted(members))
    along = (axis for role in LayerKind for axis in AXES if mesh.ranks_along(axis, wanted[0], role) == wanted)
    return next(along, None) or "+".join(mesh.axes_across(wanted, LayerKind.DENSE))


class Timings:
    """The times of all ranks in one check."""

    def __init__(
        self,
        step: int,
        mesh: Mesh,
        measured: Sequence[Sequence[Mapping[str, Any]]],
        config: StragglerConfig = StragglerConfig(),  # noqa: B008  it is frozen
    ) -> None:
        """``measured`` has the JSON form of ``Measured`` for each rank."""
        self.step, self._mesh, self._config, self._measured = step, mesh, config, measured

    def computation(self) -> list[EvidenceRecord]:
        """Compare the times that ranks spent by themselves."""
        # By layer, because a check may replay one surface several times: experts at several shapes.
        found: dict[tuple[Surface, str], dict[int, _Value]] = defaultdict(dict)
        for rank, measured in enumerate(self._measured):
            for each in measured:
                value = (each["layer"], tuple(each["shape"]))
                for surface, milliseconds in each["times"].items():
                    found[surface, each["layer"]][rank] = _Value(milliseconds, *value)
        return [
            record for (surface, _), values in found.items() for record in self._compared(surface, values)
        ]

    def communication(self) -> tuple[list[CollectiveTime], list[EvidenceRecord]]:
        """Return the time of each process group, and comparisons of its members with their peers."""
        found: dict[_GroupKey, dict[int, _Value]] = defaultdict(dict)
        laps: dict[_GroupKey, dict[int, Sequence[float]]] = defaultdict(dict)
        for rank, measured in enumerate(self._measured):
            for each in measured:
                for surface, axis, *identity, milliseconds in each["laps"]:
                    key = _GroupKey(_named(surface, axis), axis, *identity)
                    laps[key][rank] = milliseconds
                    found[key][rank] = _Value(0.0, each["layer"], (key.elements,))
        times: list[CollectiveTime] = []
        by_surface: dict[Surface, dict[int, _Value]] = defaultdict(dict)
        for key, by_rank in laps.items():
            if (total := _total(by_rank, key.size)) is not None:
                shape = (key.elements,)
                times.append(CollectiveTime(key.axis, tuple(sorted(by_rank)), key.surface, total, shape))
                for rank, value in found[key].items():
                    # The slowest of several groups, such as those with two neighbours in a pipeline.
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
            # Only replicas share state.
            is_update = surface.startswith(("time/optimizer", "time/expert_optimizer"))
            role = LayerKind.EXPERT if _is_of_experts(surface) else LayerKind.DENSE
            among = self._mesh.peers_of if is_update else self._mesh.layer_peers_of
            peers = among(rank, role)
            # A rank that could not replay has no times, and other sizes are other work.
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
    """Whether it is the work of experts, or communication among ranks with different ones."""
    return surface.startswith(("time/experts", "time/expert_")) or surface.endswith("@expert")


def _named(surface: Surface, axis: str) -> Surface:
    return Surface(f"{surface}{axis}") if surface.endswith("@") else surface


def _total(laps: Mapping[int, Sequence[float]], size: int) -> float | None:
    """Return the time of the transfers, without waiting; None unless all members sent theirs.

    The member that enters last does not wait, and it may be another one each time.
    """
    counts = {len(each) for each in laps.values()}
    if len(laps) != size or len(counts) != 1:
        return None
    return sum((min(each) for each in zip(*laps.values(), strict=True)), 0.0)
