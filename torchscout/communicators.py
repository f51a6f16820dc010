"""SCOUT's own process groups, and job-wide steps that fail on all ranks or on none (paper, section 9).

SCOUT never uses training's own groups: its messages must not interleave with those of training.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchscout.c3.channel import PeerChannel, ProcessGroupChannel, decoded
from torchscout.c3.tree import FAN_OUT, Runs, TreeChannel, groups_of, height_of
from torchscout.collectives.call import SCOUT_GROUP, set_members
from torchscout.errors import ChannelError, ScoutError
from torchscout.mesh import Axis, Mesh, PeerGroup
from torchscout.run.folder import Identity
from torchscout.utils import unlisted_groups
from torchscout.utils._torch import backend_of

__all__ = ["Communicators", "Job", "PeerCommunicator"]

_MOST_LOCAL = 64
"""Ranks of one host in one group at most."""


class Communicators:
    """SCOUT's process groups on this rank. Every rank creates one at the same point, and closes it there."""

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self.size = dist.get_world_size()
        self._everybody = PeerGroup(tuple(range(self.size)), Axis.REPLICA)
        self._links: list[PeerCommunicator] = []
        self._groups: dict[tuple[tuple[int, ...], torch.device | None], dist.ProcessGroup] = {}
        """Those of the current connection, by their ranks and the device of their tensors; None: the host."""
        store = unlisted_groups.store_of_job()
        session = store.add(f"torchscout/sessions/{dist.get_rank()}", 1)
        self.store = unlisted_groups.part_of(store, f"torchscout/{session}")
        """The part of the job's store that belongs to these communicators, on every rank."""
        self._width = self._agree_on_width()
        self.connections = 0
        """How often all ranks have connected, or tried to."""
        self._pid = os.getpid()
        atexit.register(self.close)  # NCCL's threads must end before CUDA does
        self.connect()

    def connect(self) -> None:
        """Connect all ranks, again after ``disconnect``. Every rank makes this call.

        Raises ``ChannelError`` if a rank does not connect within the timeout.
        """
        self.connections += 1
        try:
            self._job, _ = self._tree(self._everybody)
            for each in self._links:
                self._link(each)
            # NCCL connects with the first operation, without a timeout; here all ranks are known to come.
            self.highest([0])
            for each in self._links:
                each.evidence.gather(b"")
        except RuntimeError as error:
            raise ChannelError(f"SCOUT's process groups could not be connected: {error}") from error

    def disconnect(self) -> None:
        """Close all connections of this rank, so that other ranks do not wait for it. Idempotent."""
        self.abort_device_groups()
        self._groups.clear()
        for each in self._links:
            each.disconnect()
        self._job = _Closed()  # type: ignore[assignment]

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, each connected to every other, for messages between any two of them.

        Created when it is first used, by all ranks at the same time.
        """
        return self._group(self._job.peers.ranks)

    @property
    def is_tree(self) -> bool:
        """Whether the job is too large for one group; see ``c3.tree``."""
        return self._job.height > 1

    def exchange(self, document: Any) -> list[Any]:
        """Return every rank's document, by rank. Documents are JSON: a rank sends data, never code.

        Ranks with equal documents share one object, so callers must not change what they receive.
        """
        return decoded(self.gather(json.dumps(document).encode()))

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank."""
        return self._job.gather(payload)

    def consult(self, payloads: Sequence[bytes], answer: Callable[[list[Runs]], bytes]) -> bytes:
        """Return what rank 0 answers to the payloads of all ranks; see ``TreeChannel.consult``."""
        return self._job.consult(payloads, answer)

    def together(self, problem: str | None, error: type[ScoutError] = ScoutError) -> None:
        """Raise ``error`` on every rank if any rank has a problem; the message lists all of them."""
        problems = self.exchange(problem)
        if failed := [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]:
            raise error(f"{len(failed)} of {len(problems)} ranks failed\n" + "\n".join(failed))

    def highest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks."""
        return self._job.highest(values)

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
        link = PeerCommunicator(self, peers, device)
        self._link(link)
        self._links.append(link)
        return link

    def close(self) -> None:
        atexit.unregister(self.close)
        if os.getpid() == self._pid:  # a forked child has the same connections as its parent
            self.disconnect()

    def abort_device_groups(self) -> None:
        """End all operations of SCOUT's groups on this rank's device, finished or not."""
        for key in [key for key in self._groups if key[1] is not None]:
            # Abort, since an orderly shutdown would wait for a peer that is gone, and the communicators hold
            # device memory.
            self._groups.pop(key).abort()

    def _link(self, link: PeerCommunicator) -> None:
        metadata, groups = self._tree(link.group)
        device_group = None
        # With Gloo for both it would be the same connection twice.
        if link.device.type != "cpu" and dist.get_backend() != "gloo":
            device_group = self._group(link.group.ranks, link.device)
        link.connect(metadata, groups, device_group)

    def _tree(self, peers: PeerGroup) -> tuple[TreeChannel, list[dist.ProcessGroup]]:
        """Connect this rank to its peers; return the channel, and its group on each level."""
        width = self._width if peers.ranks == self._everybody.ranks else FAN_OUT
        position, height = peers.ranks.index(dist.get_rank()), height_of(len(peers), width)
        levels: list[PeerChannel] = []
        groups: list[dist.ProcessGroup] = []
        for number, places in enumerate(groups_of(position, len(peers), width)):
            members = PeerGroup(tuple(peers.ranks[place] for place in places), peers.axis)
            group = self._group(members.ranks)
            patience = (height - number) * self._timeout  # see [Note: a failure goes down too]
            levels.append(ProcessGroupChannel(members, group, patience=patience))
            groups.append(group)
        return TreeChannel(peers, position, levels, width), groups

    def _agree_on_width(self) -> int:
        """Return how many ranks the lowest groups have: those of one host, which are consecutive.

        A wrong number costs time only. It must be the same on all ranks, so that rank 0's counts.
        """
        if self.size <= FAN_OUT:
            return FAN_OUT
        if dist.get_rank() == 0:
            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            width = int(local) if local.isdecimal() and 2 <= int(local) <= _MOST_LOCAL else FAN_OUT
            self.store.set("width", str(width))
        return int(self.store.get("width"))

    def _group(self, ranks: tuple[int, ...], device: torch.device | None = None) -> dist.ProcessGroup:
        if (known := self._groups.get((ranks, device))) is not None:
            return known
        timeout = self._timeout if device is None else _timeout_of_training(device)
        name = f"{self.connections}/{_name_of(ranks)}/{'host' if device is None else 'device'}"
        group = unlisted_groups.create(self.store, ranks, timeout, SCOUT_GROUP, name=name, device=device)
        set_members(group, ranks)
        self._groups[ranks, device] = group
        return group


class PeerCommunicator:
    """Connects a rank to its peers for replay; see ``replay.recipe``."""

    def __init__(self, job: Communicators, peers: PeerGroup, device: torch.device) -> None:
        self.group, self.device = peers, device
        self.size = job.size
        self.highest, self.first_problems, self.exchange = job.highest, job.first_problems, job.exchange

    def connect(
        self,
        metadata: TreeChannel,
        groups: Sequence[dist.ProcessGroup],
        device_group: dist.ProcessGroup | None,
    ) -> None:
        """``groups`` are this rank's on each level of the tree; ``device_group`` has all peers, if any."""
        self.metadata: PeerChannel = metadata
        self.evidence: PeerChannel = metadata
        if device_group is not None:
            self.evidence = ProcessGroupChannel(self.group, device_group, device=self.device)
        self.position = metadata.position
        self._hops, self._groups, self._device_group = metadata.hops, groups, device_group

    def disconnect(self) -> None:
        self.metadata = self.evidence = _Closed()
        self._hops, self._groups, self._device_group = _Closed(), (), None  # type: ignore[assignment]

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite ``tensor`` with that of the peer at position ``source``."""
        try:
            if self._device_group is not None and not tensor.is_cpu:
                unlisted_groups.broadcast(tensor, self._device_group, source=source)
                return
            for level, place in self._hops(source):
                unlisted_groups.broadcast(tensor, self._groups[level], source=place)
        except RuntimeError as error:
            raise ChannelError(f"broadcast among ranks {self.group.ranks} failed: {error}") from error


class _Closed:
    """In place of a group or channel that is closed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ChannelError("SCOUT's process groups are closed on this rank")

    def __call__(self, *_: object) -> NoReturn:
        raise ChannelError("SCOUT's process groups are closed on this rank")


def _timeout_of_training(device: torch.device) -> datetime.timedelta:
    """The timeout of training's own groups: NCCL's watchdog ends a process whose operation exceeds it, and
    SCOUT's groups must not make that happen earlier."""
    assert dist.group.WORLD is not None, "SCOUT is attached to an initialized job"
    options = getattr(backend_of(dist.group.WORLD, device), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return timeout


def _name_of(ranks: tuple[int, ...]) -> str:
    """A short name for any number of ranks."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


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
    run: Identity
    address: str = "*"
    """See ``ObserverConfig.address``."""
    devices: Sequence[str] = ()
    """Every rank's device, as ``identity.device_name`` describes it; empty texts without an accelerator."""
    directories: Sequence[str | None] = ()
    """What identifies each rank's run directory: ranks of one file system have the same. None if it cannot be
    written."""

    @property
    def run_dir(self) -> Path:
        return Path(self.run.run_dir)

    def copies_from(self, writer: int) -> bool:
        """Return whether this rank also records what ``writer`` records: in each run directory that is not
        the writer's, the first rank does."""
        own = self.directories[self.rank] if self.directories else None
        if own is None or self.directories[writer] == own:
            return False
        return self.directories.index(own) == self.rank
