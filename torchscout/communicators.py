"""SCOUT's own process groups, and job-wide steps that fail on all ranks or on none (paper, section 9).

SCOUT never uses training's own groups: its messages must not interleave with those of training.
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
    """SCOUT's process groups on this rank. Every rank creates one at the same point, and closes it there."""

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self.group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=self._timeout, group_desc=SCOUT_GROUP
        )
        """All ranks, for tensors in host memory; Gloo, whatever backend training uses."""
        self.size = dist.get_world_size()
        self._job = ProcessGroupChannel(PeerGroup(tuple(range(self.size)), Axis.REPLICA), self.group)

    def exchange(self, document: Any) -> list[Any]:
        """Return every rank's document, by rank. Documents are JSON: a rank sends data, never code."""
        return [json.loads(each) for each in self._job.gather(json.dumps(document).encode())]

    def together(self, problem: str | None, error: type[ScoutError] = ScoutError) -> None:
        """Raise ``error`` on every rank if any rank has a problem; the message lists all of them."""
        problems = self.exchange(problem)
        if failed := [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]:
            raise error(f"{len(failed)} of {len(problems)} ranks failed\n" + "\n".join(failed))

    def highest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks."""
        column = torch.tensor(values, dtype=torch.int64, device="cpu")
        try:
            dist.all_reduce(column, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise ChannelError(f"the ranks of the job could not agree: {error}") from error
        highest: list[int] = column.tolist()
        return highest

    def first_problems(self, problems: Sequence[str | None]) -> list[str | None]:
        """Return, for each piece of work, the problem of the lowest rank that has one with it."""
        if not any(self.highest([problem is not None for problem in problems])):
            return [None] * len(problems)
        by_rank = self.exchange(list(problems))
        return [_first(column) for column in zip(*by_rank, strict=True)]

    def from_rank_0(self, document: Any) -> Any:
        """Return rank 0's document."""
        return json.loads(self._job.broadcast(json.dumps(document).encode(), source=0))

    def links(self, peers: PeerGroup, device: torch.device) -> PeerCommunicator:
        """Connect this rank to its peers. Every rank of the job makes this call."""
        is_everybody = len(peers) == self.size
        metadata = self.group if is_everybody else _group_of(peers.ranks, "gloo", self._timeout)
        tensors = metadata
        if dist.get_backend() != "gloo":  # with Gloo for both it would be the same connection twice
            tensors = _group_of(peers.ranks, None, _timeout_of_training(device))
        return PeerCommunicator(self, peers, metadata, tensors, device)

    def close(self) -> None:
        if _is_alive(self.group):
            dist.destroy_process_group(self.group)
        self.abort_device_groups()

    def abort_device_groups(self) -> None:
        """End all operations of SCOUT's groups on this rank's device, finished or not."""
        for key in [key for key in _groups if key[1] is None]:
            # Abort, since an orderly shutdown would wait for a peer that is gone, and the communicators hold
            # device memory. PyTorch still knows the group, so that a later one gets another name.
            group = _groups.pop(key)
            if _is_alive(group):
                group.abort()


class PeerCommunicator:
    """Connects a rank to its peers for replay; see ``replay.recipe``."""

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
        """Overwrite ``tensor`` with that of the peer at position ``source``."""
        group = self._metadata if tensor.is_cpu else self._tensors
        try:
            dist.broadcast(tensor, src=self.group.ranks[source], group=group)
        except RuntimeError as error:
            raise ChannelError(f"broadcast among ranks {self.group.ranks} failed: {error}") from error


def _timeout_of_training(device: torch.device) -> datetime.timedelta:
    """The timeout of training's own groups: NCCL's watchdog ends a process whose operation exceeds it, and
    SCOUT's groups must not make that happen earlier."""
    assert dist.group.WORLD is not None, "SCOUT is attached to an initialized job"
    options = getattr(backend_of(dist.group.WORLD, device), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return timeout


def _group_of(ranks: tuple[int, ...], backend: str | None, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group of some ranks, created without the other ranks and cached for the next session.

    PyTorch names such a group by its ranks alone, so that a second one would look for the members of the
    first in the store, and not find them.
    """
    known = _groups.get((ranks, backend))
    if known is None or not _is_alive(known):
        known = _groups[ranks, backend] = dist.new_group(
            ranks, backend=backend, timeout=timeout, use_local_synchronization=True, group_desc=SCOUT_GROUP
        )
    return known


def _is_alive(group: dist.ProcessGroup) -> bool:
    """False once ``torch.distributed`` has been shut down, even if it has been initialized again."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _first(problems: Sequence[str | None]) -> str | None:
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks have agreed on while attaching."""

    rank: int
    mesh: Mesh
    hosts: Sequence[str]
    token: str
    """A secret of this run, the same on all ranks."""
    run_dir: Path
    address: str = "*"
    """See ``ObserverConfig.address``."""
