"""An observer's part in rounds: when it announces one, what it reports, and which hub it asks (paper,
section 7).

Every observer knows the order of the ranks that may host a hub (``hub_ranks``). The first two listen from the
beginning: the hub and its standby. The others have reserved a port. An observer that cannot reach any known
hub for ``election_seconds``, or gets no answer from them, connects to the next candidate as well; if it is
that candidate itself, it opens its hub. So all observers find the same hub, and nothing is sent while the job
is healthy. Once the last candidate is lost, there is no hub.

Perhaps only one observer has lost its connections. Therefore an elected hub holds rounds only with a majority
of the observers. Once it has held one, earlier hubs are neither asked nor answered any more: if they come
back, they do not know what was found since.

This module is given the time and the messages; ``process`` owns sockets, pipes and the end of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchscout.config import ObserverConfig
from torchscout.decision.progress import RankReport
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.observer import stacks
from torchscout.observer.rounds.protocol import HUBS_AT_FIRST, Client, Message
from torchscout.observer.rounds.reported_incidents import Finding
from torchscout.observer.silence import SilenceDetector, seconds_for
from torchscout.observer.trainer import Ending, SurveySchedule, TrainerView

__all__ = ["Election", "RoundClient"]

_CONCLUDING_SECONDS = 2.0
"""How long a hub may take to conclude after the deadline of the reports."""
_LONGEST_SECONDS = 600.0
"""How long an observer waits for a round at most, whatever its hub says."""
_LINGER_SECONDS = 1.0
"""How long an observer stays after the verdict on its trainer's death: other hubs may be asking."""


class Election:
    """Which hub one observer uses."""

    def __init__(self, client: Client, on_election: Callable[[int], None]) -> None:
        """``on_election`` is called with the position in ``hub_ranks`` of each further hub that is tried."""
        self.in_office = 0
        """The elected hub that answered last; 0 if none has."""
        self.is_exhausted = False
        """Whether no hub answered when one was last asked, and no candidate was left."""
        self._client = client
        self._on_election = on_election
        self._lost_since: float | None = None
        self._until = -math.inf
        """Until when the last candidate has time to be found."""

    def order(self) -> list[int]:
        """Return the hubs in the order in which to ask them: elected ones first."""
        known = len(self._client.sockets)
        hubs = [*range(HUBS_AT_FIRST, known), *range(min(known, HUBS_AT_FIRST))]
        return [hub for hub in hubs if hub >= self.in_office]

    def hub(self) -> int | None:
        """Return the first hub that is reachable now; None if none is."""
        return next(filter(self._client.is_connected, self.order()), None)

    def tick(self, now: float, seconds: float) -> None:
        """Try the next candidate if no hub was reachable for so many seconds. Sends nothing."""
        if self.hub() is not None:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= seconds:
            self.hold(now, seconds)

    def hold(self, now: float, seconds: float) -> bool:
        """Try the next candidate, since no hub has answered; return whether one may answer in ``seconds``."""
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


@dataclass(slots=True)
class _Announcement:
    """A round that was announced and has no outcome yet."""

    hub: int | None
    """The hub that was asked; None while a connection may be coming up."""
    until: float
    """When the hub, or every hub, counts as lost."""


class _Named(NamedTuple):
    """Findings that name this rank and are not over."""

    step: int
    since: float
    """When the silence of this rank began."""
    findings: Sequence[Finding]
    hub: int
    """The hub that sent them last."""


class RoundClient:
    """One observer's part in rounds and surveys."""

    def __init__(
        self,
        trainer: TrainerView,
        client: Client,
        config: ObserverConfig,
        record: Callable[[EvidenceRecord], None],
        on_outcome: Callable[[int, Sequence[Finding]], None],
        on_election: Callable[[int], None],
        size: int = 1,
    ) -> None:
        """``size``: the number of ranks, with which time limits grow."""
        self.trainer = trainer
        self._size = size
        self.silence = SilenceDetector(config)
        self.surveys = SurveySchedule(config)
        self.rounds = 0
        """Rounds and surveys that it has taken part in."""
        self.election = Election(client, on_election)
        self._client = client
        self._record = record
        self._on_outcome = on_outcome
        self._announcement: _Announcement | None = None
        self._hub_in_charge: int | None = None
        """The hub that was asked for the rounds of the present silence."""
        self._survey_hub = 0
        """The hub to ask for the next survey: the one that held the last or, failing that, the next."""
        self._findings: Sequence[Finding] = ()
        """The last outcome of a round of the present silence."""
        self._reported: tuple[int, float] | None = None
        """Step and begin of the silence in the last report."""
        self._named: _Named | None = None
        self._since: float | None = None
        """Time of the first ``tick``."""
        self._is_asked = self._has_announced_end = False
        self._concluded_at: float | None = None
        self._last_report: RankReport | None = None
        """What ``leave`` sends."""
        self._left_hubs: set[int] = set()
        """Hubs that have received it."""

    @property
    def _failover_seconds(self) -> float:
        return seconds_for(self.silence.config.failover_seconds, self._size)

    @property
    def is_announcing(self) -> bool:
        return self._announcement is not None

    @property
    def is_in_round(self) -> bool:
        """Whether a round was announced, or is held, whose outcome is not known yet."""
        is_due = self.trainer.is_verdict_due and self._concluded_at is None
        return self._announcement is not None or self._is_asked or is_due

    def tick(self, now: float) -> None:
        """Act on the last look at the trainer, and on what is overdue."""
        if self.trainer.ending is None:
            self._check_silence(now)
            self._check_phases(now)
        elif self.trainer.is_verdict_due and not self._has_announced_end:
            self._has_announced_end, self._concluded_at = True, None
            # To every hub, because this machine may be gone before it is asked by the one that finds out.
            report = self.trainer.report(self.silence.config, 0.0, now)
            for hub in range(len(self._client.sockets)):
                self._client.post(hub, "report", report)
            self._announce(now)
        self._check_relay(now)
        self.election.tick(now, self.silence.config.election_seconds)
        self._check_hub(now)
        self._check_incident(now)

    def handle(self, hub: int, message: Message, now: float) -> None:
        """Handle a message from a hub; raises one of ``MISTAKES`` if it is malformed."""
        kind, number = message["kind"], message.get("round")
        if kind == "accepted":
            self._extend_wait(hub, message, now)
        elif kind == "sample":
            self._send_report(hub, number, now)
            self._survey_hub = hub
            self.surveys.held(self.trainer.phase_seconds(), now)
        elif kind == "ask":
            self._answer(hub, message, now)
        elif kind == "show":
            self._show(hub, number, int(message["characters"]))
        elif kind == "outcome":
            self._handle_outcome(hub, message["findings"], now)

    def is_done(self, now: float) -> bool:
        """Return whether the trainer has ended, and its observer is not needed for a verdict any more."""
        if not self.trainer.is_verdict_due:
            return self.trainer.ending is not None
        concluded = self._concluded_at
        return self._has_announced_end and concluded is not None and now - concluded > _LINGER_SECONDS

    def leave(self, now: float) -> bool:
        """Send the last report: what this rank has issued still counts while others wait.

        Return whether all hubs have it. May be repeated, because a connection may be coming up.
        """
        if self._last_report is None:
            self._check_incident(now)
            self._last_report = self.trainer.report(self.silence.config, 0.0, now)
        hubs = set(range(len(self._client.sockets)))
        self._left_hubs |= {
            hub for hub in hubs - self._left_hubs if self._client.post(hub, "leave", self._last_report)
        }
        return self._left_hubs == hubs

    def _check_silence(self, now: float) -> None:
        progress, reader = self.trainer.progress, self.trainer.reader
        if progress is None:
            return
        due = self.silence.is_due(
            progress,
            reader.step_seconds(),
            paused=reader.paused,
            now=now,
            near_timeout=self.trainer.near_timeout,
        )
        if not due and self._announcement is not None and self._announcement.hub is None:
            self._announcement = None  # it moves again, and no hub has received the announcement
        if due and self._announcement is None:
            self._announce(now)
        elif self.silence.rounds == 0 and self._announcement is None:
            self._hub_in_charge, self._findings = None, ()  # what was found of an earlier silence is over

    def _check_phases(self, now: float) -> None:
        """Announce a survey if one is due, but not during a silence, a pause or an incident."""
        trainer = self.trainer
        due = self.surveys.is_due(trainer.phase_seconds(), trainer.reader.step_seconds(), now)
        if due and self._announcement is None and self._named is None and not trainer.reader.paused:
            self._client.send(self._survey_hub, "survey")
            self.surveys.announced(now)
            self._survey_hub = (self._survey_hub + 1) % len(self._client.sockets)

    def _announce(self, now: float) -> None:
        self._announcement = _Announcement(None, now + self._failover_seconds)
        self._ask_one_of(self.election.order(), now)

    def _ask_one_of(self, hubs: Sequence[int], now: float) -> None:
        """Ask the first reachable hub for a round. If there is none, wait for one to be elected; if no
        candidate is left, record what is known here."""
        assert self._announcement is not None
        # The round that it is in does not count: its trainer may end right after it was asked for that one.
        config, is_repeat = self.silence.config, self.silence.rounds > int(self._is_asked)
        findings = [each.to_json() for each in self._findings] if is_repeat else []
        for hub in hubs:
            if self._client.send(hub, "announce", is_repeat=is_repeat, findings=findings):
                self._announcement = _Announcement(hub, now + self._failover_seconds)
                if hub < HUBS_AT_FIRST:  # an elected one is in charge once it has answered
                    self._hub_in_charge = hub
                return
        if self._announcement.hub is None and now < self._announcement.until:
            return  # a connection may be coming up
        if self.election.hold(now, config.election_seconds):
            self._announcement = _Announcement(None, now + self._failover_seconds)
        else:
            self._announcement = None
            self._give_up(now)

    def _check_relay(self, now: float) -> None:
        self._since = now if self._since is None else self._since
        seconds = self.silence.config.election_seconds / 2
        self._client.check_relay(may_be_starting=now - self._since < seconds)

    def _check_hub(self, now: float) -> None:
        announcement = self._announcement
        if announcement is None:
            return
        hubs = self.election.order()
        if announcement.hub is None:
            self._ask_one_of(hubs, now)
            return
        is_connected = self._client.is_connected(announcement.hub)
        if now < announcement.until and is_connected:
            return
        tried = hubs.index(announcement.hub) + 1 if announcement.hub in hubs else 0
        rest = hubs[tried:]
        # Perhaps it is a stopped relay that does not answer; an elected hub first waits for a majority.
        if is_connected and announcement.hub < HUBS_AT_FIRST and self._client.go_direct(announcement.hub):
            rest += hubs[:tried]
        self._ask_one_of(rest, now)

    def _check_incident(self, now: float) -> None:
        """Tell the hubs once this rank goes on after it was named. One of them records that: the one that
        sent the finding or, if that is lost, the first one that can be reached."""
        named, progress = self._named, self.trainer.progress
        if named is None or progress is None:
            return
        if progress.step <= named.step and self.trainer.ending is not Ending.FINISHED:
            return
        reporter = named.hub if self._client.is_connected(named.hub) else self.election.hub()
        if reporter is None:
            return  # another hub may be elected soon
        fields = {"seconds": now - named.since, "findings": [each.to_json() for each in named.findings]}
        for hub in range(len(self._client.sockets)):
            self._client.send(hub, "moved", is_reporter=hub == reporter, **fields)
        self._named = None

    def _extend_wait(self, hub: int, message: Message, now: float) -> None:
        """Wait for as long as the hub says that its round may take."""
        self.election.answered(hub)
        if self._announcement is not None and self._announcement.hub == hub:
            seconds = max(float(message.get("seconds", 0)), self.silence.config.round_deadline_seconds)
            self._announcement.until = now + min(seconds, _LONGEST_SECONDS) + _CONCLUDING_SECONDS

    def _answer(self, hub: int, message: Message, now: float) -> None:
        number = message["round"]
        if max(self._hub_in_charge or 0, self.election.in_office) > hub:
            # It did not answer and was passed over. Now it is back, with an old announcement.
            self._client.send(hub, "declined", round=number)
            return
        self._extend_wait(hub, message, now)
        self._is_asked = True
        self.trainer.look(now)
        self._send_report(hub, number, now)
        progress = self.trainer.progress
        if progress is not None:
            self._reported = progress.step, now - progress.silent_seconds
        self.silence.round_held(None if progress is None else progress.coordinate, now)

    def _send_report(self, hub: int, number: Any, now: float) -> None:
        self.rounds += 1
        progress = self.trainer.progress
        silent = 0.0 if progress is None else self.silence.silent_seconds(progress, now)
        report = self.trainer.report(self.silence.config, silent, now)
        self._client.post(hub, "report", report, number)

    def _show(self, hub: int, number: Any, characters: int) -> None:
        stack = self.trainer.stack(self.silence.config)
        shown = stacks.trim(stack, max(0, characters))
        self._client.send(hub, "stack", round=number, stack=shown, waiting=stacks.is_waiting(stack))

    def _handle_outcome(self, hub: int, documents: Sequence[Mapping[str, Any]], now: float) -> None:
        findings = [Finding.from_json(each) for each in documents]
        self._announcement, self._is_asked = None, False
        self._concluded_at, self._findings = now, findings
        self._on_outcome(hub, findings)
        place = self._reported if self._named is None else self._named[:2]
        here = [each for each in findings if self.trainer.rank in each.ranks]
        if here and place is not None:
            self._named = _Named(*place, here, hub)

    def _give_up(self, now: float) -> None:
        """Record what is known here, since no hub answers."""
        progress, rank = self.trainer.progress, self.trainer.rank
        silent = 0.0 if progress is None else progress.silent_seconds
        state = (
            f"has been silent for {silent:.1f} s"
            if self.trainer.ending is None
            else self.trainer.report(self.silence.config, silent, now).ended
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
        self.silence.round_held(None if progress is None else progress.coordinate, now)
