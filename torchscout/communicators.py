"""The process groups that SCOUT owns, and job-wide steps that fail everywhere or nowhere (paper, section 9).

Training's own groups are never used: what SCOUT says must not come between what training says.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchscout.collectives.call import SCOUT_GROUP
from torchscout.decision.channel import PeerChannel, ProcessGroupChannel
from torchscout.errors import ChannelError, ScoutError
from torchscout.mesh import Axis, Mesh, PeerGroup
from torchscout.utils._torch import backend_of

__all__ = ["Communicators", "Job", "PeerCommunicator"]

_groups: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}


class Communicators:
    """SCOUT's own groups of this rank. Every rank makes one at the same point, and closes it there."""

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        self._patience = datetime.timedelta(seconds=timeout_seconds)
        # Gloo whatever training uses: what is exchanged lives in host memory.
        self._group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=self._patience, group_desc=SCOUT_GROUP
        )
        self.size = dist.get_world_size()
        everybody = PeerGroup(tuple(range(self.size)), Axis.REPLICA)
        self._job = ProcessGroupChannel(everybody, self._group)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks, for tensors in host memory."""
        return self._group

    def exchange(self, document: Any) -> list[Any]:
        """Every rank's document, by rank. JSON: what a rank sends is data, not code."""
        return [json.loads(each) for each in self._job.gather(json.dumps(document).encode())]

    def together(self, problem: str | None) -> None:
        """Fail on every rank if a step failed on any, and say what happened where."""
        problems = self.exchange(problem)
        if told := [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]:
            raise ScoutError(f"{len(told)} of {len(problems)} ranks failed\n" + "\n".join(told))

    def highest(self, values: Sequence[int]) -> list[int]:
        """Each value's maximum over all ranks."""
        column = torch.tensor(values, dtype=torch.int64, device="cpu")
        try:
            dist.all_reduce(column, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise ChannelError(f"the ranks of the job could not agree: {error}") from error
        highest: list[int] = column.tolist()
        return highest

    def first_problems(self, problems: Sequence[str | None]) -> list[str | None]:
        """For each piece of work the first rank's problem with it, if any has one."""
        if not any(self.highest([problem is not None for problem in problems])):
            return [None] * len(problems)
        told = self.exchange(list(problems))
        return [_first(column) for column in zip(*told, strict=True)]

    def said_by_first(self, document: Any) -> Any:
        """Rank 0's document."""
        return json.loads(self._job.broadcast(json.dumps(document).encode(), source=0))

    def links(self, peers: PeerGroup, device: torch.device) -> PeerCommunicator:
        """The connections among this rank's peers; every rank of the job makes its own."""
        is_everybody = len(peers) == dist.get_world_size()
        metadata = self._group if is_everybody else _group_of(peers.ranks, "gloo", self._patience)
        tensors = metadata
        if dist.get_backend() != "gloo":  # Gloo on both sides would be the same connection twice
            tensors = _group_of(peers.ranks, None, _timeout_of_training(device))
        return PeerCommunicator(self, peers, metadata, tensors, device)

    def close(self) -> None:
        if _is_alive(self._group):
            dist.destroy_process_group(self._group)
        for key in [key for key in _groups if key[1] is None]:
            # Its communicators hold memory of the device. To end them in order would wait for a peer that is
            # gone. The group itself stays known to PyTorch, so that a later one is given another name.
            group = _groups.pop(key)
            if _is_alive(group):
                group.abort()


class PeerCommunicator:
    """What replay needs of the other ranks: see ``replay.recipe``."""

    def __init__(
        self,
        job: Communicators,
        peers: PeerGroup,
        metadata: dist.ProcessGroup,
        tensors: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.group, self.device = peers, device
        self.metadata: PeerChannel = ProcessGroupChannel(peers, metadata)
        over = torch.device("cpu") if tensors is metadata else device
        self.evidence: PeerChannel = ProcessGroupChannel(peers, tensors, device=over)
        self.position = self.metadata.position
        self.size = job.size
        self.highest, self.first_problems, self.exchange = job.highest, job.first_problems, job.exchange
        self._metadata, self._tensors = metadata, tensors

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        group = self._metadata if tensor.is_cpu else self._tensors
        try:
            dist.broadcast(tensor, src=self.group.ranks[source], group=group)
        except RuntimeError as error:
            raise ChannelError(f"broadcast among ranks {self.group.ranks} failed: {error}") from error


def _timeout_of_training(device: torch.device) -> datetime.timedelta:
    """How long training itself waits for a rank. The watchdog of NCCL ends a process whose operation takes
    longer, and SCOUT's own groups must not make it less patient."""
    assert dist.group.WORLD is not None, "SCOUT is attached to an initialized job"
    options = getattr(backend_of(dist.group.WORLD, device), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return timeout


def _group_of(ranks: tuple[int, ...], backend: str | None, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """The group of some ranks, made without the others and kept for the next session.

    PyTorch names such a group by its ranks alone. A second one of that name would look for the first
    one's members in the store, and not find them.
    """
    known = _groups.get((ranks, backend))
    if known is None or not _is_alive(known):
        known = _groups[ranks, backend] = dist.new_group(
            ranks, backend=backend, timeout=timeout, use_local_synchronization=True, group_desc=SCOUT_GROUP
        )
    return known


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Not so once ``torch.distributed`` as a whole was shut down, and perhaps begun anew."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _first(problems: Sequence[str | None]) -> str | None:
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks have agreed upon at attach."""

    rank: int
    mesh: Mesh
    hosts: Sequence[str]
    token: str
    """A secret of this run, the same on all ranks."""
    run_dir: Path
    address: str = "*"
    """See ``ObserverConfig.address``."""
