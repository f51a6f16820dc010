"""Which hub an observer asks, and when it looks for another one (paper, section 7).

The ranks that may host a hub have an order that every observer knows (``hub_ranks``). The first two listen
from the beginning: the hub and its standby. The others have reserved a port. An observer that cannot reach
any hub that it knows of for ``election_seconds``, or that gets no answer from them, connects to the next one
in that order as well; if it is itself that one, it opens its hub. So all come to the same hub, and nothing is
sent while the job is healthy. There are only so many candidates: with the last one lost, there is no hub.

Perhaps only one observer has lost its connections. Therefore an elected hub holds rounds only with a majority
of the observers. Once it has held one, earlier hubs are neither asked nor answered any more: should they come
back, they do not know what was found since.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torchscout.evidence.observer.board import HUBS_AT_FIRST, Client

__all__ = ["Election"]


class Election:
    """One observer's."""

    def __init__(self, client: Client, on_election: Callable[[int], None]) -> None:
        """``on_election`` is called with the place in ``hub_ranks`` of each hub that is looked for."""
        self.in_office = 0
        """The place of the elected hub that has answered last; 0 where none has."""
        self.is_exhausted = False
        """Whether no hub answered when one was last asked, and no candidate was left."""
        self._client = client
        self._on_election = on_election
        self._lost_since: float | None = None
        self._until = -math.inf
        """Until when a candidate has time to be found."""

    def order(self) -> list[int]:
        """The hubs to ask, one after the other: elected ones first, where there are any."""
        known = len(self._client.sockets)
        hubs = [*range(HUBS_AT_FIRST, known), *range(min(known, HUBS_AT_FIRST))]
        return [hub for hub in hubs if hub >= self.in_office]

    def tick(self, now: float, seconds: float) -> None:
        """Look for the next candidate where no hub was reachable for so long. Sends nothing."""
        if any(self._client.is_connected(hub) for hub in self.order()):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= seconds:
            self.hold(now, seconds)

    def hold(self, now: float, seconds: float) -> bool:
        """No hub has answered; whether there is a candidate that may do so within ``seconds``."""
        if now < self._until:
            return True
        if not self._client.connect_next():
            self.is_exhausted = True
            return False
        self._until = now + seconds
        self._on_election(len(self._client.sockets) - 1)
        return True

    def answered(self, hub: int) -> None:
        self.is_exhausted = False
        if hub >= HUBS_AT_FIRST:
            self.in_office = hub
