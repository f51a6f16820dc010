"""Ranks of one job as threads of this process, each with the real driver of checks.

They are connected by ``ThreadChannel`` instead of process groups. One rank runs at a time, until it waits for
the others in an exchange: a replay sets random streams and deterministic kernels for the whole process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.thread_peers import ThreadPeers, on_threads
from torchscout.c3.channel import PeerChannel, ThreadChannel
from torchscout.config import BaselineConfig, ReplayConfig, StragglerConfig
from torchscout.decision.types import Incident, Manifestation, Recordable
from torchscout.mesh import Axis, Mesh, PeerGroup
from torchscout.replay.recipe import Recipe
from torchscout.session.boundary import Boundary
from torchscout.session.checkpoints.certifier import CertifiedSteps
from torchscout.session.replay.coverage import RecipeCycle
from torchscout.session.replay.driver import ReplayDriver, ReplayParts
from torchscout.state.table import StateTable

CPU, PATIENCE = torch.device("cpu"), 60.0
UNTIMED = {
    "straggler": StragglerConfig(min_slowdown_ms=1e9),
    "baseline": BaselineConfig(min_slowdown_ms=1e9),
}
"""Settings under which times decide nothing: threads that take turns are slow in any order."""


class InTurns:
    """A channel whose rank lets another one run while it waits."""

    def __init__(self, channel: PeerChannel, turn: threading.Lock) -> None:
        self.peers, self.position = channel.peers, channel.position
        self._channel, self._turn = channel, turn

    def gather(self, payload: bytes) -> list[bytes]:
        self._turn.release()
        try:
            return self._channel.gather(payload)
        finally:
            self._turn.acquire()

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        return self.gather(payload)[source]


class Links(ThreadPeers):
    """One rank's connections, to its peers and to the whole job."""

    is_tree = False

    def __init__(
        self, peers: PeerChannel, job: PeerChannel, turn: threading.Lock, device: torch.device
    ) -> None:
        super().__init__(InTurns(peers, turn), InTurns(job, turn))
        self._turn, self.device = turn, device

    @classmethod
    def of(cls, mesh: Mesh, device: torch.device) -> list[Links]:
        """Connect the ranks of a mesh; return one end for each, in rank order."""
        turn = threading.Lock()
        every = PeerGroup(tuple(range(len(mesh))), Axis.REPLICA)
        job = ThreadChannel.create_all(every, timeout=PATIENCE)
        peers = [
            each for group in mesh.peer_groups() for each in ThreadChannel.create_all(group, timeout=PATIENCE)
        ]
        peers.sort(key=lambda each: each.peers.ranks[each.position])
        return [cls(*ends, turn, device) for ends in zip(peers, job, strict=True)]

    def gather(self, payload: bytes) -> list[bytes]:
        return self._job.gather(payload)

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        on_host = tensor.cpu()
        super().broadcast(on_host, source=source)
        tensor.copy_(on_host)

    def from_rank_0(self, document: Any) -> Any:
        return json.loads(self._job.broadcast(json.dumps(document).encode(), source=0))

    def abort_device_groups(self) -> None:
        """There are none."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._turn:
            yield


class NotWritten:
    """A recorder without files."""

    def record(self, item: Recordable) -> None:
        pass

    def close(self) -> None:
        pass


class Rank:
    """One rank's driver, and what it has reported."""

    def __init__(
        self,
        links: Links,
        mesh: Mesh,
        recipes: Sequence[Recipe],
        config: ReplayConfig,
        parameters: Sequence[torch.Tensor] = (),
        table: StateTable | None = None,
    ) -> None:
        """Every rank makes this call at the same time."""
        self.links, self.boundary, self.incidents = links, Boundary(links.rank), list[Incident]()
        self.driver = ReplayDriver(
            ReplayParts(
                config=config,
                recipes=recipes,
                cycle=RecipeCycle(),
                parameters=parameters,
                table=StateTable({}) if table is None else table,
                mesh=mesh,
                communicators=links,  # type: ignore[arg-type]
                peers=lambda *_: links,  # type: ignore[arg-type,return-value]
                recorder=NotWritten(),
                certifier=CertifiedSteps(),
                boundary=self.boundary,
                finish_update=lambda: None,
                on_incidents=lambda _, found: self.incidents.extend(found),
                keeps_history=False,
                still_alive=lambda: None,
            )
        )

    def step_finished(self) -> None:
        """Called right after each update."""
        self.boundary.step += 1
        self.driver.step_finished(self.boundary.step)

    @property
    def corruption(self) -> list[Incident]:
        """What was reported about wrong numbers, oldest first."""
        return [each for each in self.incidents if each.manifestation is Manifestation.SDC]


def on_every_rank(mesh: Mesh, body: Callable[[Links], Any], device: torch.device = CPU) -> list[Any]:
    """Run the body as every rank of a job, all on one device; return each rank's result."""

    def run(links: Links) -> Any:
        with links.turn():
            return body(links)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    try:
        return on_threads(Links.of(mesh, device), run)
    finally:
        torch.set_num_threads(threads)
