"""The position of each rank in the job, and which ranks do the same work (paper, section 4).

Addresses are logical: adapters translate a framework's own groups into them, and nothing else in torchscout
knows how a framework lays ranks out. There is no default mesh: ranks are never assumed to be peers.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["AXES", "Axis", "LayerKind", "Mesh", "MeshAddress", "PeerGroup"]


@dataclass(frozen=True, slots=True, order=True)
class MeshAddress:
    """Coordinates of one rank; 0 along a dimension that the job does not use."""

    replica: int = 0
    """Data-parallel replica, ``d`` in the paper."""
    shard: int = 0
    """FSDP state shard, ``s``."""
    tensor: int = 0
    """Tensor-parallel position, ``t``."""
    pipeline: int = 0
    """Pipeline stage, ``p``."""
    context: int = 0
    """Context-parallel position, ``c``."""
    expert: int = 0
    """Expert partition, ``e``."""


AXES = tuple(field.name for field in fields(MeshAddress))


class Axis(str, Enum):
    """The coordinate along which peers may differ."""

    REPLICA = "replica"
    SHARD = "shard"


class LayerKind(str, Enum):
    """Which layers are compared, where expert parallelism is part of data parallelism."""

    DENSE = "dense"
    EXPERT = "expert"


@dataclass(frozen=True)
class PeerGroup:
    """Ranks that execute the same computation, in the order in which C3 gathers them."""

    ranks: tuple[int, ...]
    axis: Axis

    @cached_property
    def array(self) -> npt.NDArray[np.int64]:
        """The ranks as an array."""
        return np.array(self.ranks)

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"peer ranks must be unique and ascending, got {self.ranks}")

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def can_compare(self) -> bool:
        return len(self.ranks) >= 2

    @property
    def can_attribute(self) -> bool:
        """Two peers show that something differs; it takes three to show which one is wrong."""
        return len(self.ranks) >= 3


_Value = TypeVar("_Value")
_Table = npt.NDArray[np.int64]  # one row of coordinates per rank, columns as AXES
_Addresses = Sequence[MeshAddress] | Mapping[int, MeshAddress] | _Table


class _Members(tuple[int, ...]):
    """Ranks of a large group are in the keys of many dictionaries, so they are hashed once."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


class _Partition(NamedTuple):
    """Ranks split into groups: group ``g`` is ``order[starts[g]:starts[g + 1]]``, ascending."""

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    group_of: npt.NDArray[np.int64]

    def members(self, group: int) -> tuple[int, ...]:
        return _Members(self.order[self.starts[group] : self.starts[group + 1]].tolist())

    def all_members(self) -> list[tuple[int, ...]]:
        flat, starts = self.order.tolist(), self.starts.tolist()
        return [tuple(flat[begin:end]) for begin, end in pairwise(starts)]


class Mesh:
    """Every rank's address and host.

    Expert parallelism is usually part of data parallelism: ranks that are replicas of a dense layer hold
    different experts. Such a mesh has a second address table for the expert layers, and ``role`` selects
    one. Without a role the expert coordinate counts, as in the paper's formulas.
    """

    def __init__(
        self,
        addresses: _Addresses,
        hosts: Sequence[str] | Mapping[int, str] | None = None,
        *,
        expert_addresses: _Addresses | None = None,
    ) -> None:
        dense = _table(addresses)
        expert = dense if expert_addresses is None else _table(expert_addresses)
        if len(dense) != len(expert):
            raise ValueError(f"{len(dense)} dense addresses but {len(expert)} expert addresses")
        if hosts is not None and len(hosts) != len(dense):
            raise ValueError(f"{len(dense)} addresses but {len(hosts)} hosts")
        self._tables = {LayerKind.DENSE: dense, LayerKind.EXPERT: expert}
        self._hosts = None if hosts is None else tuple(_by_rank(hosts))
        self._partitions: dict[tuple[str, LayerKind], _Partition] = {}
        self._degrees: dict[tuple[str, LayerKind], int] = {}
        self._peers: dict[tuple[LayerKind, int], PeerGroup] = {}
        self._peer_tables: dict[tuple[LayerKind, bool], _Table] = {}

    @classmethod
    def grid(
        cls,
        replica: int = 1,
        shard: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        hosts: Sequence[str] | None = None,
    ) -> Mesh:
        """A full mesh with ranks in row-major order: the last axis varies fastest."""
        degrees = (replica, shard, tensor, pipeline, context, expert)
        for axis, degree in zip(AXES, degrees, strict=True):
            if degree < 1:
                raise ValueError(f"the degree of {axis} must be at least 1, got {degree}")
        return cls(np.indices(degrees).reshape(len(AXES), -1).T.astype(np.int64), hosts)

    def carve_experts(self, degree: int, *, out_of: Axis = Axis.REPLICA) -> Mesh:
        """The same ranks, with expert layers split over ``degree`` neighbours along ``out_of``."""
        size = self.degree(out_of)
        if degree < 1 or size % degree:
            raise ValueError(f"cannot carve {degree} expert partitions out of {size} along {out_of.value}")
        dense = self._tables[LayerKind.DENSE]
        expert, column = dense.copy(), AXES.index(out_of.value)
        expert[:, AXES.index("expert")] = expert[:, column] % degree
        expert[:, column] //= degree
        return Mesh(dense, self._hosts, expert_addresses=expert)

    def on(self, hosts: Sequence[str]) -> Mesh:
        """The same ranks, with the machines they run on."""
        return Mesh(self._tables[LayerKind.DENSE], hosts, expert_addresses=self._tables[LayerKind.EXPERT])

    def __len__(self) -> int:
        return len(self._tables[LayerKind.DENSE])

    def address_of(self, rank: int, role: LayerKind | str | None = None) -> MeshAddress:
        return MeshAddress(*self._table(role)[self._known(rank)].tolist())

    def rows(self, role: LayerKind | str | None = None) -> list[list[int]]:
        """The coordinates of every rank, in the order of ``AXES``."""
        rows: list[list[int]] = self._table(role).tolist()
        return rows

    def degree(self, axis: Axis | str, role: LayerKind | str | None = None) -> int:
        key = (_axis(axis), LayerKind.EXPERT if role is None else LayerKind(role))
        if key not in self._degrees:
            # Without indices, np.unique imports numpy.ma, which takes 0.02 s in each trainer.
            self._degrees[key] = len(set(self._tables[key[1]][:, AXES.index(key[0])].tolist()))
        return self._degrees[key]

    def peers_of(self, rank: int, role: LayerKind | str | None = None) -> PeerGroup:
        """The replicas of ``rank``, or the ranks that shard one copy if the job has no replicas."""
        axis = self.peer_axis(role)
        partition = self._partition(axis.value, role)
        group = int(partition.group_of[self._known(rank)])
        key = (LayerKind.EXPERT if role is None else LayerKind(role), group)
        if key not in self._peers:
            self._peers[key] = PeerGroup(partition.members(group), axis)
        return self._peers[key]

    def layer_peers_of(self, rank: int, role: LayerKind | str | None = None) -> PeerGroup:
        """The ranks that compute the same layer once its parameters are gathered.

        These are the replicas. Two replicas cannot settle which of them is wrong; if they are sharded, their
        shards count too: with gathered parameters they compute the same.
        """
        peers = self.peers_of(rank, role)
        if len(peers) != 2 or peers.axis is Axis.SHARD or self.degree(Axis.SHARD, role) == 1:
            return peers
        ranks = {each for peer in peers.ranks for each in self.ranks_along(Axis.SHARD, peer, role)}
        return PeerGroup(tuple(sorted(ranks)), Axis.REPLICA)

    def peer_groups(self, role: LayerKind | str | None = None) -> list[PeerGroup]:
        """All peer groups."""
        axis = self.peer_axis(role)
        return [PeerGroup(ranks, axis) for ranks in self.groups_along(axis, role)]

    def peer_table(self, role: LayerKind | str | None = None, *, of_layers: bool) -> _Table:
        """All peer groups, or all groups of ``layer_peers_of``, one in a row; -1 fills smaller ones."""
        kind = LayerKind.EXPERT if role is None else LayerKind(role)
        key = (kind, of_layers)
        if key not in self._peer_tables:
            groups = [peers.ranks for peers in self.peer_groups(kind)]
            if of_layers and 2 in map(len, groups):
                groups = [*dict.fromkeys(self.layer_peers_of(ranks[0], kind).ranks for ranks in groups)]
            table = np.full((len(groups), max(map(len, groups), default=0)), -1)
            for row, ranks in enumerate(groups):
                table[row, : len(ranks)] = ranks
            self._peer_tables[key] = table
        return self._peer_tables[key]

    def peer_axis(self, role: LayerKind | str | None = None) -> Axis:
        return Axis.REPLICA if self.degree(Axis.REPLICA, role) > 1 else Axis.SHARD

    def ranks_along(
        self, axis: Axis | str, rank: int, role: LayerKind | str | None = None
    ) -> tuple[int, ...]:
        """The ranks that have the same coordinates as ``rank`` except along ``axis``."""
        partition = self._partition(_axis(axis), role)
        return partition.members(int(partition.group_of[self._known(rank)]))

    def groups_along(self, axis: Axis | str, role: LayerKind | str | None = None) -> list[tuple[int, ...]]:
        """All process groups along ``axis``."""
        return self._partition(_axis(axis), role).all_members()

    def axes_across(self, ranks: Sequence[int], role: LayerKind | str | None = None) -> tuple[str, ...]:
        """The axes along which these ranks have different coordinates."""
        places = self._table(role)[[self._known(rank) for rank in ranks]]
        differs = (places != places[0]).any(axis=0)
        return tuple(axis for axis, is_across in zip(AXES, differs, strict=True) if is_across)

    def host_of(self, rank: int) -> str | None:
        """The machine of ``rank``, or None if the mesh does not know the machines."""
        return None if self._hosts is None else self._hosts[self._known(rank)]

    def summary(self) -> str:
        """The degrees of the axes and a digest of all addresses: equal for equal meshes only."""
        degrees = ", ".join(f"{axis} {self.degree(axis)}" for axis in AXES if self.degree(axis) > 1)
        # As a ``MeshAddress`` is printed: digests of earlier versions are stored in checkpoints.
        words = f"MeshAddress({', '.join(f'{axis}=%d' for axis in AXES)})"
        places = "\n".join(words % tuple(row) for row in self.rows())
        digest = hashlib.blake2b(places.encode(), digest_size=6).hexdigest()
        return f"{degrees or 'one rank'} ({digest})"

    def hosts_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The known machines of ``ranks``, without duplicates, in order of first appearance."""
        if self._hosts is None or not len(ranks):
            return ()
        self._known(min(ranks)), self._known(max(ranks))
        return tuple(dict.fromkeys(map(self._hosts.__getitem__, ranks)))

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return self._ranks_by_host.get(host, ())

    @cached_property
    def _ranks_by_host(self) -> dict[str, tuple[int, ...]]:
        found = defaultdict[str, list[int]](list)
        for rank, host in enumerate(self._hosts or ()):
            found[host].append(rank)
        return {host: tuple(ranks) for host, ranks in found.items()}

    def _table(self, role: LayerKind | str | None) -> _Table:
        return self._tables[LayerKind.EXPERT if role is None else LayerKind(role)]

    def _known(self, rank: int) -> int:
        if not 0 <= rank < len(self):
            raise ValueError(f"rank {rank} is not in a mesh of {len(self)} ranks")
        return rank

    def _partition(self, axis: str, role: LayerKind | str | None) -> _Partition:
        key = (axis, LayerKind.EXPERT if role is None else LayerKind(role))
        if key not in self._partitions:
            self._partitions[key] = _split(self._table(role), AXES.index(axis))
        return self._partitions[key]


def _by_rank(values: Sequence[_Value] | Mapping[int, _Value]) -> list[_Value]:
    """A list indexed by rank, from a list or from a mapping that has every rank."""
    if not isinstance(values, Mapping):
        return list(values)
    if sorted(values) != list(range(len(values))):
        raise ValueError(f"ranks must be 0 to {len(values) - 1}, got {sorted(values)}")
    return [values[rank] for rank in range(len(values))]


def _table(addresses: _Addresses) -> _Table:
    if not isinstance(addresses, np.ndarray):
        rows = [astuple(address) for address in _by_rank(addresses)]
        addresses = np.array(rows, dtype=np.int64).reshape(-1, len(AXES))
    if negative := addresses[(addresses < 0).any(axis=1)].tolist():
        raise ValueError(f"mesh coordinates must not be negative, got {MeshAddress(*negative[0])}")
    _refuse_duplicates(addresses)
    return addresses


def _refuse_duplicates(table: _Table) -> None:
    unique, counts = np.unique(_keys(table), return_counts=True)
    if (counts > 1).any():
        row = int(np.flatnonzero(_keys(table) == unique[counts > 1][0])[0])
        ranks = np.flatnonzero((table == table[row]).all(axis=1)).tolist()
        raise ValueError(f"ranks {ranks} share one mesh address {MeshAddress(*table[row].tolist())}")


def _split(table: _Table, column: int) -> _Partition:
    """Group the ranks that differ in ``column`` only."""
    masked = table.copy()
    masked[:, column] = 0
    _, group_of = np.unique(_keys(masked), return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    starts = np.searchsorted(group_of[order], np.arange(group_of.max(initial=-1) + 2))
    return _Partition(order, starts, group_of)


def _keys(table: _Table) -> npt.NDArray[np.int64]:
    """One integer per row, equal for equal rows only."""
    if not len(table):
        return np.empty(0, dtype=np.int64)
    # Dense indices first, so that the product of degrees fits 64 bits however a framework numbers ranks.
    dense = [np.unique(column, return_inverse=True)[1] for column in table.T]
    return np.ravel_multi_index(dense, [int(column.max()) + 1 for column in dense]).astype(np.int64)


def _axis(axis: Axis | str) -> str:
    name = axis.value if isinstance(axis, Axis) else axis
    if name not in AXES:
        raise ValueError(f"unknown mesh axis {name!r}; the axes are {', '.join(AXES)}")
    return name
