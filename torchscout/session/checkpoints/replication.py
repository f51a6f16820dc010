"""Sets up copies of a rank's state in another machine's memory, if one can be reached (paper, section 8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchscout.checkpoint.replication import placement
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.totals import Totals
from torchscout.communicators import Job
from torchscout.errors import ScoutError
from torchscout.log import log
from torchscout.utils.network import listening_address

__all__ = ["StateReplication"]


class StateReplication:
    """One rank's replicator; None if the job has one machine, or its machines cannot reach each other."""

    def __init__(self, job: Job, memory: Path, *, wanted: bool) -> None:
        self._job = job
        self._since: float | None = None
        """When the last update began, if there was no check since then."""
        self.replicator: Replicator | None = None
        self.address: list[Any] | None = None
        """Where other ranks send their copies; None if this rank cannot receive any."""
        self.problem: str | None = None
        """Why there are no copies although they were requested."""
        if not wanted or len(set(job.hosts)) < 2:
            return
        try:
            listens, address = listening_address(job.hosts, job.rank, job.address)
            self.replicator = Replicator(job.rank, memory, job.token, listens=(listens, 0))
        except (ScoutError, OSError) as error:
            self._go_without(str(error))
        else:
            self.address = [address, self.replicator.address[1]]

    def connect(self, addresses: Sequence[Any]) -> Sequence[int]:
        """Connect, given every rank's address; returns the ranks whose copies this one keeps."""
        if self.replicator is not None and None in addresses:
            self.close()
            self._go_without(f"rank {[*addresses].index(None)} has no address at which it can be reached")
        if self.replicator is None:
            return ()
        self.replicator.connect([tuple(each) for each in addresses], self._job.hosts)
        return placement.held_ranks(self._job.hosts, self._job.rank)

    def update_begins(self) -> None:
        """Called before every update: measures steps, by which copies are paced."""
        now, since = time.monotonic(), self._since
        self._since = now
        if self.replicator is not None and since is not None:
            self.replicator.step_took(now - since)

    def checked(self) -> None:
        """Called after a check. A step with a check takes longer for another reason than a copy."""
        self._since = None

    def copy(self, path: Path, seconds: float) -> None:
        """Copy this file, and wait for so long: if this machine is lost next, its state must be elsewhere."""
        if self.replicator is None:
            return
        is_over, copied = threading.Event(), list[bool]()

        def over(was_copied: bool) -> None:
            copied.append(was_copied)
            is_over.set()

        self.replicator.send(path, over)
        if not is_over.wait(seconds) or not copied[0]:
            log.warning("another machine has no copy of the loaded state yet: it is lost with this machine")

    @property
    def newest(self) -> int | None:
        """The newest step of which another machine has a copy of this rank's state."""
        held = frozenset() if self.replicator is None else self.replicator.held()
        return max((each.step for each in held), default=None)

    @property
    def totals(self) -> Totals:
        """The copies that another machine has received."""
        return Totals() if self.replicator is None else self.replicator.totals

    def close(self) -> None:
        if self.replicator is not None:
            self.replicator.close()

    def _go_without(self, why: str) -> None:
        self.replicator = None
        self.problem = f"no copies are kept in other machines' memory: {why}"
        log.warning("%s", self.problem)
