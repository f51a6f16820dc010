"""An observer's part in rounds: when it announces one, what it reports, when it gives up, and which hub it
asks (paper, section 7).

The ranks that may host a hub have an order that every observer knows (``hub_ranks``). The first two listen
from the beginning: the hub and its standby. The others have reserved a port. An observer that cannot reach
any hub that it knows of for ``election_seconds``, or that gets no answer from them, connects to the next
one in that order as well; if it is itself that one, it opens its hub. So all come to the same hub, and
nothing is sent while the job is healthy. There are only so many candidates: with the last one lost, there
is no hub.

Perhaps only one observer has lost its connections. Therefore an elected hub holds rounds only with a
majority of the observers. Once it has held one, earlier hubs are neither asked nor answered any more: if
they come back, they do not know what was found since.

It receives the time and what has arrived; sockets, pipes and the end of the process are for ``process``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchscout.config import ObserverConfig
from torchscout.decision.record import EvidenceRecord, Manifestation
from torchscout.observer import stacks
from torchscout.observer.protocol import HUBS_AT_FIRST, Client, Message
from torchscout.observer.reported_incidents import Finding
from torchscout.observer.silence import SilenceDetector
from torchscout.observer.trainer import Ending, Surveying, TrainerView

__all__ = ["Election", "RoundClient"]


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


_CONCLUDING_SECONDS = 2.0
"""What a hub may take to conclude, once the deadline of the posts has passed."""
_AFTERWARDS_SECONDS = 1.0
"""How long an observer stays after the verdict on its trainer's death: others may be asking."""


@dataclass(slots=True)
class _Announcement:
    """A round that was asked for and has no outcome yet."""

    hub: int | None
    """Who was asked; None while a connection may be coming up."""
    until: float
    """When the hub counts as lost, or both do."""


class _Place(NamedTuple):
    """Where this rank stood when it posted."""

    step: int
    since: float
    """When its silence began."""


class _Named(NamedTuple):
    """An incident that names this rank."""

    place: _Place
    finding: Finding
    hub: int
    """The hub that reported it last."""


class RoundClient:
    """One rank's."""

    def __init__(
        self,
        trainer: TrainerView,
        client: Client,
        config: ObserverConfig,
        record: Callable[[EvidenceRecord], None],
        on_outcome: Callable[[int, Finding | None], None],
        on_election: Callable[[int], None],
    ) -> None:
        self.trainer = trainer
        self.watch = SilenceDetector(config)
        self.surveying = Surveying(config)
        self.rounds = 0
        """Rounds taken part in."""
        self.election = Election(client, on_election)
        self._client = client
        self._record = record
        self._on_outcome = on_outcome
        self._announcement: _Announcement | None = None
        self._hub_in_charge: int | None = None
        """Who was asked for the rounds of the present silence."""
        self._surveying_hub = 0
        """Who is asked for the next survey: the one that held the last, or else the other one."""
        self._finding: Finding | None = None
        """The last outcome of a round."""
        self._posted: _Place | None = None
        self._named: _Named | None = None
        """Its part in an incident that stands."""
        self._has_announced_end = False
        self._concluded_at: float | None = None
        self._goodbye: dict[str, Any] | None = None
        """The last post, once it was made."""
        self._aware: set[int] = set()
        """Hubs that have been told of it."""

    @property
    def is_conferring(self) -> bool:
        return self._announcement is not None

    def tick(self, now: float) -> None:
        """Act on what the last look at the trainer showed, and on what is overdue."""
        if self.trainer.ending is None:
            self._mind_silence(now)
            self._mind_phases(now)
        elif self.trainer.ending is Ending.FAILED and not self._has_announced_end:
            self._has_announced_end, self._concluded_at = True, None
            self._announce(now)
        self.election.tick(now, self.watch.config.election_seconds)
        self._mind_hub(now)
        self._mind_incident(now)

    def hear(self, hub: int, message: Message, now: float) -> None:
        """A hub says something."""
        kind, number = message["kind"], message.get("round")
        if kind == "heard":
            self._grant_time(hub, now)
        elif kind == "sample":
            self._answer_survey(hub, number, now)
        elif kind == "ask":
            self._answer(hub, number, now)
        elif kind == "show":
            stack = self.trainer.stack(self.watch.config)
            self._client.send(hub, "stack", round=number, stack=stack, waiting=stacks.is_waiting(stack))
        elif kind == "outcome":
            self._take_outcome(hub, message.get("finding"), now)

    def is_done(self, now: float) -> bool:
        """Its trainer is at its end, and there is nothing more to learn from it."""
        if self.trainer.ending is not Ending.FAILED:
            return self.trainer.ending is not None
        concluded = self._concluded_at
        return self._has_announced_end and concluded is not None and now - concluded > _AFTERWARDS_SECONDS

    def leave(self, now: float) -> bool:
        """The last word; what this rank has issued still counts when others wait.

        Whether all hubs have it. Again is no mistake: a connection may only be coming up.
        """
        if self._goodbye is None:
            self._mind_incident(now)
            self._goodbye = self.trainer.post(self.watch.config, 0.0, now).to_json()
        hubs = set(range(len(self._client.sockets)))
        self._aware |= {
            hub for hub in hubs - self._aware if self._client.send(hub, "leave", post=self._goodbye)
        }
        return self._aware == hubs

    def _mind_silence(self, now: float) -> None:
        progress, reader = self.trainer.progress, self.trainer.reader
        if progress is None:
            return
        due = self.watch.is_due(
            progress,
            reader.step_seconds(),
            paused=reader.paused,
            now=now,
            is_pressed=self.trainer.is_pressed,
        )
        if not due and self._announcement is not None and self._announcement.hub is None:
            self._announcement = None  # it moves again, and no hub has heard of it
        if due and self._announcement is None:
            self._announce(now)
        elif self.watch.rounds == 0 and self._announcement is None:
            self._hub_in_charge = None

    def _mind_phases(self, now: float) -> None:
        """Slowness can wait: during a silence, a pause or an incident nobody is asked about it."""
        trainer = self.trainer
        due = self.surveying.is_due(trainer.phase_seconds(), trainer.reader.step_seconds(), now)
        if due and self._announcement is None and self._named is None and not trainer.reader.paused:
            self._client.send(self._surveying_hub, "survey")
            self.surveying.announced(now)
            self._surveying_hub = (self._surveying_hub + 1) % len(self._client.sockets)

    def _announce(self, now: float) -> None:
        self._announcement = _Announcement(None, now + self.watch.config.failover_seconds)
        self._call(self.election.order(), now)

    def _call(self, hubs: Sequence[int], now: float) -> None:
        """Ask the next hub for a round. Where none answers, wait for the one that is elected then; where no
        candidate is left, say so locally."""
        assert self._announcement is not None
        config, is_looked_at = self.watch.config, self.watch.rounds > 0
        finding = self._finding.to_json() if is_looked_at and self._finding is not None else None
        for hub in hubs:
            if self._client.send(hub, "announce", insistent=is_looked_at, finding=finding):
                self._announcement = _Announcement(hub, now + config.failover_seconds)
                if hub < HUBS_AT_FIRST:  # an elected one is in charge once it has answered
                    self._hub_in_charge = hub
                return
        if self._announcement.hub is None and now < self._announcement.until:
            return  # a connection may be coming up
        if self.election.hold(now, config.election_seconds):
            self._announcement = _Announcement(None, now + config.failover_seconds)
        else:
            self._announcement = None
            self._give_up(now)

    def _mind_hub(self, now: float) -> None:
        announcement = self._announcement
        if announcement is None:
            return
        hubs = self.election.order()
        if announcement.hub is None:
            self._call(hubs, now)
        elif now >= announcement.until or not self._client.is_connected(announcement.hub):
            passed = hubs.index(announcement.hub) + 1 if announcement.hub in hubs else 0
            self._call(hubs[passed:], now)

    def _mind_incident(self, now: float) -> None:
        """Tell the hubs once this rank goes on after it was named. One of them writes that down: the one that
        reported the incident or, if that is lost, the first one that can be reached."""
        named, progress = self._named, self.trainer.progress
        if named is None or progress is None:
            return
        if progress.step <= named.place.step and self.trainer.ending is not Ending.FINISHED:
            return
        hubs = (named.hub, *self.election.order())
        reporter = next(filter(self._client.is_connected, hubs), None)
        if reporter is None:
            return  # another hub may be elected soon
        told = {"seconds": now - named.place.since, "finding": named.finding.to_json()}
        for hub in range(len(self._client.sockets)):
            self._client.send(hub, "moved", is_reporter=hub == reporter, **told)
        self._named = None

    def _grant_time(self, hub: int, now: float) -> None:
        self.election.answered(hub)
        if self._announcement is not None and self._announcement.hub == hub:
            patience = self.watch.config.round_deadline_seconds + _CONCLUDING_SECONDS
            self._announcement.until = now + patience

    def _answer(self, hub: int, number: object, now: float) -> None:
        if max(self._hub_in_charge or 0, self.election.in_office) > hub:
            # It did not answer and was passed over. Now it is back, with what it was told long ago.
            self._client.send(hub, "elsewhere", round=number)
            return
        self._grant_time(hub, now)
        self.rounds += 1
        self.trainer.look(now)
        progress = self.trainer.progress
        silent = 0.0 if progress is None else self.watch.silent_seconds(progress, now)
        post = self.trainer.post(self.watch.config, silent, now)
        self._client.send(hub, "post", round=number, post=post.to_json())
        if progress is not None:
            self._posted = _Place(progress.step, now - progress.silent_seconds)
        self.watch.round_held(None if progress is None else progress.coordinate, now)

    def _answer_survey(self, hub: int, number: object, now: float) -> None:
        """It says nothing about anybody's silence."""
        self.rounds += 1
        self._surveying_hub = hub
        progress = self.trainer.progress
        silent = 0.0 if progress is None else self.watch.silent_seconds(progress, now)
        post = self.trainer.post(self.watch.config, silent, now)
        self._client.send(hub, "post", round=number, post=post.to_json())
        self.surveying.held(self.trainer.phase_seconds(), now)

    def _take_outcome(self, hub: int, document: Mapping[str, Any] | None, now: float) -> None:
        finding = None if document is None else Finding.from_json(document)
        self._announcement = None
        self._concluded_at, self._finding = now, finding
        self._on_outcome(hub, finding)
        place = self._posted if self._named is None else self._named.place
        if finding is not None and self.trainer.rank in finding.ranks and place is not None:
            self._named = _Named(place, finding, hub)

    def _give_up(self, now: float) -> None:
        """Nobody to confer with: what is known here is written down here."""
        progress, rank = self.trainer.progress, self.trainer.rank
        silent = 0.0 if progress is None else progress.silent_seconds
        state = (
            f"is silent for {silent:.1f} s" if self.trainer.ending is None else "ended before it had finished"
        )
        self._record(
            EvidenceRecord(
                step=0 if progress is None else progress.step,
                surface="progress",
                manifestation=Manifestation.HANG,
                peers=(rank,),
                reason=f"the trainer of rank {rank} {state}; no hub answers, and no other can be elected",
                progress=None if progress is None else {"step": progress.step, "phase": progress.phase.value},
                stall_seconds=silent,
            )
        )
        self._hub_in_charge, self._concluded_at = None, now
        self.watch.round_held(None if progress is None else progress.coordinate, now)
