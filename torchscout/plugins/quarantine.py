"""The machines that a job must not use, shared among the agents of its machines.

An agent learns them from the restart plan that the workers of its machine leave, and from the other agents,
through the store of their rendezvous: a machine whose disk is blank is known as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from torchscout.errors import RestartPlanError
from torchscout.log import log
from torchscout.run.restart import RestartPlan
from torchscout.utils.identity import is_host_name

__all__ = ["Quarantine"]

_MOST_TRIES = 1000


class Quarantine:
    """The quarantined machines of one job, each with the decision that excluded it."""

    def __init__(self, store: Any, run_id: str, folder: Path) -> None:
        """``store`` is a ``torch.distributed.Store``, ``folder`` that of the restart plan."""
        self._store, self._folder = store, folder
        self._key = f"torchscout.quarantine.{run_id}"
        self.known = RestartPlan()
        """The restart plan of this machine when it was read last."""
        self._published: int | None = None
        """When the plan was written that was published last, in nanoseconds."""
        self._replace("", "{}")  # reading a key that does not exist would block

    def plan(self) -> RestartPlan:
        """Return the restart plan of this machine; one that cannot be relied on is ignored."""
        try:
            self.known = RestartPlan.read(self._folder)
        except RestartPlanError as error:
            log.warning("%s; it is ignored", error)
            self.known = RestartPlan()
        return self.known

    def publish_new(self) -> None:
        """Publish the plan if it was written since: observers may decide after the agent has begun to wait;
        see [Note: the launcher is first]."""
        try:
            written = RestartPlan.path(self._folder).stat().st_mtime_ns
        except OSError:
            return
        if written != self._published:
            self._published = written
            self.publish(self.plan().reasons())

    def publish(self, machines: Mapping[str, str]) -> bool:
        """Quarantine machines, each for its reason, for all agents; return whether any of them is new."""
        stored = self._get()
        for _ in range(_MOST_TRIES):  # other agents may write at the same time
            known = _parsed(stored)
            if not (new := {host: why for host, why in machines.items() if host not in known}):
                return False
            wanted = json.dumps({**known, **new})
            stored = self._replace(stored.decode(), wanted)
            if stored == wanted.encode():
                return True
        return False

    def hosts(self) -> Mapping[str, str]:
        """Return the quarantined machines, each with the reason."""
        return _parsed(self._get())

    def _get(self) -> bytes:
        with _connected():
            value: bytes = self._store.get(self._key)
            return value

    def _replace(self, expected: str, wanted: str) -> bytes:
        """Replace the stored text if it is the expected one; return what is stored then."""
        with _connected():
            value: bytes = self._store.compare_set(self._key, expected, wanted)
            return value


@contextmanager
def _connected() -> Iterator[None]:
    """Raise torch's error for a store that cannot be reached."""
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RendezvousConnectionError(f"the store of the rendezvous cannot be reached: {error}") from error


def _parsed(stored: bytes) -> dict[str, str]:
    """Read the store's value; what is no machine is left out."""
    try:
        document = json.loads(stored)
    except (ValueError, RecursionError):
        return {}
    pairs = document.items() if isinstance(document, dict) else ()
    return {host: why for host, why in pairs if is_host_name(host) and isinstance(why, str)}
