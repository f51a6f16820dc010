"""Ranks of one job as threads of one process: the connections that replay needs, over ``ThreadChannel``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from torchscout.c3.channel import PeerChannel, ThreadChannel
from torchscout.c3.tree import TreeChannel, groups_of
from torchscout.mesh import Axis, PeerGroup

_End = TypeVar("_End")


class CountedChannel:
    """A channel that counts its exchanges."""

    def __init__(self, channel: PeerChannel) -> None:
        self.peers, self.position, self._channel = channel.peers, channel.position, channel
        self.exchanges = 0

    def gather(self, payload: bytes) -> list[bytes]:
        self.exchanges += 1
        return self._channel.gather(payload)

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        self.exchanges += 1
        return self._channel.broadcast(payload, source=source)


class ThreadPeers:
    """One rank's end; see ``replay.recipe``. Its peers share one channel, the whole job another."""

    def __init__(self, peers: PeerChannel, job: PeerChannel) -> None:
        self.group, self.position = peers.peers, peers.position
        self.metadata = self.evidence = CountedChannel(peers)
        self._job = CountedChannel(job)
        self.size = len(job.peers)
        self.rank = self.group.ranks[self.position]

    @classmethod
    def create_all(cls, *groups: Sequence[int], timeout: float = 10.0) -> list[ThreadPeers]:
        """Make one for each rank, in rank order, given the peers of each."""
        channels = [
            channel
            for ranks in groups
            for channel in ThreadChannel.create_all(PeerGroup(tuple(ranks), Axis.REPLICA), timeout=timeout)
        ]
        channels.sort(key=lambda channel: channel.peers.ranks[channel.position])
        everybody = PeerGroup(tuple(range(len(channels))), Axis.REPLICA)
        job = ThreadChannel.create_all(everybody, timeout=timeout)
        return [cls(*ends) for ends in zip(channels, job, strict=True)]

    @property
    def exchanges(self) -> int:
        return self.metadata.exchanges + self._job.exchanges

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        payload = self.metadata.broadcast(tensor.view(torch.uint8).numpy().tobytes(), source=source)
        tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def highest(self, values: Sequence[int]) -> list[int]:
        return [max(column) for column in self._columns([int(value) for value in values])]

    def first_problems(self, problems: Sequence[str | None]) -> list[str | None]:
        named = [None if problem is None else f"rank {self.rank}: {problem}" for problem in problems]
        return [next(filter(None, column), None) for column in self._columns(named)]

    def exchange(self, document: Any) -> list[Any]:
        return [json.loads(each) for each in self._job.gather(json.dumps(document).encode())]

    def _columns(self, row: Sequence[Any]) -> list[tuple[Any, ...]]:
        return list(zip(*self.exchange(row), strict=True))


def tree_of_threads(size: int, width: int, *, timeout: float = 10.0) -> list[TreeChannel]:
    """Return one end of a tree for each of ``size`` ranks."""
    peers = PeerGroup(tuple(range(size)), Axis.REPLICA)
    groups: dict[range, Sequence[ThreadChannel]] = {}
    ends = []
    for rank in peers.ranks:
        levels = []
        for places in groups_of(rank, size, width):
            if places not in groups:
                members = PeerGroup(tuple(places), Axis.REPLICA)
                groups[places] = ThreadChannel.create_all(members, timeout=timeout)
            levels.append(groups[places][places.index(rank)])
        ends.append(TreeChannel(peers, rank, levels, width))
    return ends


def on_threads(peers: Sequence[_End], body: Callable[[_End], Any]) -> list[Any]:
    """Run the body on all ranks at the same time; return each result."""
    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(body, peers))
