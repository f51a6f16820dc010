"""Collects the reports of all observers in a round, inside one observer's process (paper, section 7).

    observer -> hub    announce      my trainer is silent, or gone
    hub -> all         ask           report the status of your trainer
    hub -> observer    accepted      to one that announces in a round for which it has reported, and to all
                                     if another round is needed before there is an outcome
    all -> hub         report        or ``declined``: another hub has asked already
    hub -> still       show          all reports are in; send your trainer's stacks
    still -> hub       stack
    hub -> all         news          an incident, or the end of one, after it was recorded
    hub -> all         outcome       the findings that are not over

A round may also be a survey, which compares how long phases take. It is announced by ``survey`` and requested
by ``sample``. It collects no stacks and has no outcome, since the job goes on. A hang takes precedence.

``present`` needs no answer: it shows who is connected. ``leave`` is the last message of an observer, with its
last report, and ``moved`` says that a rank that was named goes on. Between rounds nothing is sent. No round
waits beyond its deadline. An absence counts once it is confirmed in a second round, which begins 3 s after
the first: by then an observer that died has been started again.

The standby is an equal hub that is only asked when the first one does not answer. Further hubs are elected
when neither answers; see ``Election``. In a large job, messages travel through relays; see ``relay``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import zmq

from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Process, RankReport
from torchscout.decision.types import Incident, Resolved
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.protocol import (
    HUBS_AT_FIRST,
    MAX_STACK,
    MISTAKES,
    Message,
    Tally,
    decode,
    encode,
    listen_limited,
)
from torchscout.observer.rounds.relay import Routes
from torchscout.observer.rounds.reported_incidents import Finding, ReportedIncidents
from torchscout.utils.packed_lists import pack

__all__ = ["CONFIRMING_SECONDS", "Compare", "Conclude", "Gathered", "Hub", "Outcome", "Stack"]

_GATHERING_SECONDS = 10.0
"""How long observers may take to find a hub that was restarted."""
_DYING_SECONDS = 0.5
"""How long a trainer that is killed may look alive."""
CONFIRMING_SECONDS = 3.0
"""How much later than the first round the second one begins that confirms an absence."""
_TRANSIT_SECONDS = 0.2
"""Time to request and send stacks, besides the time to take them."""
_STACK_BYTES = 64 << 20
"""Room for the stacks of a round: those of a large job are cut more."""
_MIN_STACK = 400
"""Characters; so short a message is not compressed."""
_TOO_FEW = (
    "the observer of this rank was elected as hub, but only {} of {} observers have found it; it localizes "
    "hangs once more than half of them have"
)
_NEWS_BYTES = 64 << 20
"""What an incident may have in all messages to observers; those of a larger job get the deciding record."""
_DEADLINES, _REPORT_SECONDS = 4, 0.002
"""The longest time for a round, in ``round_deadline_seconds`` and for each observer."""
_MOST_AT_ONCE = 1024
"""Connections that have not authenticated, in a large job."""
_MESSAGES = 256
"""Messages that are handled at the same time; then the clock is read again."""
_FLUSH_SECONDS = 0.5
"""Time for the last messages to pass the listener, once the socket is closed."""


class Stack(NamedTuple):
    """What an observer says of its trainer's stacks."""

    text: str
    waiting: bool | None
    """Whether they show it waiting for a communication."""


@dataclass(frozen=True)
class Gathered:
    """What a hub knows at the end of a round."""

    reports: Mapping[int, RankReport]
    is_repeat: bool = False
    """Whether there was an earlier round of the same silence."""
    confirmed: Collection[int] = ()
    """Ranks that did not answer ``CONFIRMING_SECONDS`` earlier either."""
    closed: Collection[int] = ()
    """Ranks whose observers have closed their connections."""


class Outcome(NamedTuple):
    """What is concluded from a round."""

    incidents: Sequence[Incident] = ()
    needs_another_round: bool = False
    is_early: bool = False


Conclude = Callable[[Gathered], Outcome]
Compare = Callable[[Mapping[int, RankReport]], Sequence[Incident]]
"""From the reports of a survey to incidents."""


@dataclass(slots=True)
class _Round:
    """Collects first reports and then stacks.

    Not both at once: taking stacks interrupts a trainer, and may end the very wait that the others report.
    """

    number: int
    deadline: float
    is_repeat: bool = False
    is_survey: bool = False
    takes_stacks: bool = False
    question: bytes = b""
    """What all observers were asked."""
    searching: set[int] = field(default_factory=set)
    """Ranks that are awaited but could not be asked yet: their relay is lost."""
    awaited: set[int] = field(default_factory=set)
    posts: dict[int, Post] = field(default_factory=dict)
    came: dict[int, float] = field(default_factory=dict)
    """When each of them came."""
    began: float = 0.0
    closed: set[int] = field(default_factory=set)
    """Ranks that could not be asked, because they are not connected."""
    stacks: dict[int, Stack] = field(default_factory=dict)
    patience: float = 0.0
    """How long to wait for the next answer."""
    latest: float = math.inf
    """When it ends, however many answers still arrive."""

    def add(self, rank: int, post: Post, now: float) -> None:
        if rank in self.awaited and not self.takes_stacks:
            self.awaited.discard(rank)
            self.posts[rank], self.came[rank] = post, now

    def add_stack(self, rank: int, stack: Stack) -> None:
        if stack.waiting not in {True, False, None}:
            raise ValueError(f"waiting is {stack.waiting!r}")
        if rank in self.awaited and self.takes_stacks:
            self.awaited.discard(rank)
            self.stacks[rank] = stack

    def answered(self, now: float) -> None:
        """Wait a while longer: if one observer answers late, so do others, on a busy machine or in a large
        job. Observers that are gone cost no more than that."""
        self.deadline = max(self.deadline, min(now + self.patience, self.latest))

    def is_over(self, now: float) -> bool:
        return not self.awaited or now >= self.deadline


class Hub:
    """Handles messages as they arrive. It never waits."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        size: int,
        token: str,
        config: ObserverConfig,
        conclude: Conclude,
        compare: Compare,
        record: Callable[[Incident | Resolved], None],
        place: int = 0,
    ) -> None:
        """``place`` is the position in ``hub_ranks``: a hub from the third on is opened once it is elected.

        Raises ``OSError`` if the address is not available.
        """
        self.tally = Tally()
        port = config.port and config.port + place
        self.socket, self._listener = listen_limited(context, token, config.address, port)
        # All observers of a job connect at the same time, and on a busy machine a handshake takes a while.
        at_once = min(max(size, self._listener.limits.connections), _MOST_AT_ONCE)
        self._listener.limits = replace(self._listener.limits, connections=at_once)
        self.port = self._listener.port
        self.routes = Routes(self.socket, {}, self.tally, self._not_reached)
        self.is_elected = place >= HUBS_AT_FIRST
        self.is_open = False
        """Whether it accepts connections."""
        self.is_restarted = False
        """Whether the observers must first find it again."""
        self.problem: str | None = None
        """Why it holds no rounds, if it does not."""
        self.config = config
        self._size = size
        self._conclude, self._compare, self._record = conclude, compare, record
        self._round: _Round | None = None
        self._rounds = 0
        self._next_survey = -math.inf
        self._has_majority = False
        self._since: float | None = None
        """Time of the first ``tick``."""
        self._left: set[int] = set()
        self._last_posts: dict[int, tuple[Post, float]] = {}
        """Of observers that have left, or whose trainers have ended, and when they came: a container that is
        removed takes such an observer along, perhaps before the next round."""
        self._absent: dict[int, float] = {}
        """Rank -> when the first round began that it did not answer, nor any since."""
        self._confirm_at: float | None = None
        """When to hold another round, to confirm that ranks do not answer."""
        self._groups: dict[bytes, CommGroup] = {}
        self._last: tuple[bytes | None, Message | None] = None, None
        """The last message, as it came and decoded."""
        self._accepted: list[int] = []
        """Ranks whose announcements are answered next."""
        self._reported = ReportedIncidents()
        if not self.is_elected:
            self.open()

    @property
    def deadline(self) -> float | None:
        """When to call ``tick`` if nothing arrives before."""
        return self._confirm_at if self._round is None else self._round.deadline

    @property
    def left(self) -> frozenset[int]:
        """Ranks whose observers have left."""
        return frozenset(self._left)

    @property
    def is_needed(self) -> bool:
        """Whether observers rely on it; an elected hub is needed once a majority has found it."""
        return self.is_open and (not self.is_elected or self._has_majority)

    def open(self) -> None:
        self._listener.start()
        self.is_open = True

    def tick(self, now: float) -> None:
        """Handle the messages that have arrived, and conclude a round that is over."""
        self._since = now if self._since is None else self._since
        for _ in range(_MESSAGES):
            if not self.socket.poll(0, zmq.POLLIN):
                break
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            self._read(identity, b"".join(frames), now)
        if self._accepted:
            self.routes.send(self._accepted, encode("accepted", seconds=self._round_seconds))
            self._accepted = []
        if self._round is None and self._confirm_at is not None and now >= self._confirm_at:
            self._confirm_at = None
            self._round = self._ask_all(now, is_repeat=True)
        try:
            self._advance_round(now)
        except MISTAKES:  # the reports make no sense: the next round may be better
            self.tally.malformed += 1
            self._round = None

    def adopt(self, findings: Sequence[Finding]) -> None:
        """Take over the outcome of another hub's round."""
        self._reported.adopt(findings)

    def close(self) -> None:
        self.socket.close()
        self._listener.close(_FLUSH_SECONDS)

    def _read(self, identity: bytes, frame: bytes, now: float) -> None:
        try:
            for ranks, message in self.routes.read(identity, frame):
                self._handle(ranks, message, now)
        except MISTAKES:
            self.tally.malformed += 1

    def _handle(self, ranks: Sequence[int], frame: bytes, now: float) -> None:
        if frame == self._last[0]:  # all ranks of a job announce a hang in the same words
            self.tally.received += 1
        else:
            self._last = frame, decode(frame, self.tally)
        message = self._last[1]
        if message is None:
            return
        try:
            for rank in ranks:
                if not 0 <= rank < self._size:
                    raise ValueError(f"rank {rank} of {self._size}")
                self._act_on(rank, message, now)
        except MISTAKES:  # messages are data: a malformed one is dropped
            self.tally.malformed += 1

    def _act_on(self, rank: int, message: Message, now: float) -> None:
        match message["kind"]:
            case "announce":
                self._learn(message.get("findings", ()))
                self._hold_round(rank, now, is_repeat=bool(message["is_repeat"]))
            case "survey":
                self._hold_survey(now)
            case "post":
                self._take(rank, Post(message["post"], self._size), now)
            case "stack":
                stack = Stack(str(message["stack"])[:MAX_STACK], message["waiting"])
                self._round_of(message["round"]).add_stack(rank, stack)
                self._round_of(message["round"]).answered(now)
            case "declined":
                self._round = None if self._round is self._round_of(message["round"]) else self._round
            case "moved":
                self._resolve(rank, message)
            case kind:
                raise ValueError(f"unknown kind {kind}")

    def _take(self, rank: int, post: Post, now: float) -> None:
        if post.header.rank != rank:
            raise ValueError(f"rank {rank} reports for rank {post.header.rank}")
        if post.kind == "leave" or post.process is Process.GONE:
            self._last_posts[rank] = post, now
        if post.kind == "report":
            self._round_of(post.header.round).add(rank, post, now)
            self._round_of(post.header.round).answered(now)
            return
        self._left.add(rank)
        if self._round is not None:
            self._round.add(rank, post, now)
        self._resolve_left(rank)

    def _round_of(self, number: int) -> _Round:
        """Return the current round if a message belongs to it, or one that drops what is added."""
        current = self._round
        return current if current is not None and current.number == number else _Round(number, 0.0)

    def _hold_round(self, rank: int, now: float, *, is_repeat: bool) -> None:
        if self._reported.job_ended:
            self.routes.send([rank], self._outcome())
            return
        if self._is_gathering(now):
            return  # without an answer the observer asks the standby
        current = self._round
        if current is None or current.is_survey:
            self._round = self._ask_all(now, is_repeat=is_repeat)
            return
        current.is_repeat |= is_repeat
        if rank not in current.awaited or current.takes_stacks:
            self._accepted.append(rank)
        elif self.routes.is_direct(rank):
            self.routes.send([rank], current.question)  # its relay, which was asked, does not pass it on

    def _learn(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Take over an earlier hub's findings about the present silence, so as not to report them again."""
        if documents and not self._reported.findings:
            self._reported.adopt([Finding.from_json(each) for each in documents])

    def _is_gathering(self, now: float) -> bool:
        """Return whether observers are still looking for this hub, so that absence is not evidence yet.

        An elected hub waits for a majority, however long that takes. Most observers have then lost the
        earlier hubs and no longer answer them, so nothing is reported twice.
        """
        seconds = self.config.election_seconds if self.is_elected else _GATHERING_SECONDS
        is_late = self._since is not None and now - self._since > seconds
        if not self.is_elected and (is_late or not self.is_restarted):
            return False
        others = set(range(self._size)) - self.left
        found = self._size - len(others) + len(self.routes.send(others, encode("present")))
        if not self.is_elected:
            return found < self._size
        self._has_majority = 2 * found > self._size
        self.problem = None if self._has_majority else _TOO_FEW.format(found, self._size)
        return not self._has_majority or (found < self._size and not is_late)

    def _hold_survey(self, now: float) -> None:
        """Start a survey unless a round or an incident takes precedence; it will be announced again.

        Two announcements at almost the same time are one survey: a second one would confirm the first by the
        same durations.
        """
        if self._round is None and not self._reported.findings and now >= self._next_survey:
            self._next_survey = now + self.config.repeat_seconds
            self._round = self._ask_all(now, survey=True)

    def _ask_all(self, now: float, *, is_repeat: bool = False, survey: bool = False) -> _Round:
        self._rounds += 1
        patience = self._patience
        started = _Round(self._rounds, now + patience, is_repeat, survey, patience=patience)
        started.latest = now + self._round_seconds
        kind = "sample" if survey else "ask"
        started.question = encode(kind, round=started.number, seconds=self._round_seconds)
        present = set(range(self._size)) - self.left
        reached = self.routes.send(present, started.question)
        started.searching = {rank for rank in present - reached if self.routes.is_searching(rank)}
        started.awaited = reached | started.searching
        started.began, started.closed = now, present - started.awaited
        return started

    def _not_reached(self, ranks: Sequence[int]) -> None:
        """Try without the relay what it could not deliver; do not wait for observers that are not there."""
        current = self._round
        if current is not None and not current.takes_stacks:
            lost = current.awaited.intersection(ranks)
            current.awaited -= lost - self.routes.send(lost, current.question)

    @property
    def _patience(self) -> float:
        """How long a round waits for the next report. An observer whose relay is stopped first asks the hub
        and the standby through it, and then connects to the hub itself."""
        relayed = HUBS_AT_FIRST * self.config.failover_seconds if self.routes.relays else 0.0
        return self.config.round_deadline_seconds + relayed

    @property
    def _round_seconds(self) -> float:
        """The longest time for a round: it grows with the number of reports to read."""
        return _DEADLINES * self._patience + _REPORT_SECONDS * self._size

    def _advance_round(self, now: float) -> None:
        current = self._round
        if current is not None and current.searching:
            current.searching -= self.routes.send(current.searching, current.question)
        if current is None or not current.is_over(now):
            return
        if current.is_survey:
            self._round = None
            for incident in self._compare({rank: post.report() for rank, post in current.posts.items()}):
                self._publish(incident)
            return
        if not current.takes_stacks:
            self._ask_for_stacks(current, now)
        if current.is_over(now):
            self._finish(current, now)

    def _ask_for_stacks(self, current: _Round, now: float) -> None:
        current.takes_stacks = True
        current.searching = set()
        current.patience = self.config.stack_seconds + _TRANSIT_SECONDS
        current.deadline = now + current.patience
        still = [rank for rank, each in current.posts.items() if each.is_still and rank not in self._left]
        characters = min(MAX_STACK, max(_MIN_STACK, _STACK_BYTES // max(1, len(still))))
        message = encode("show", round=current.number, characters=characters)
        current.awaited = self.routes.send(still, message)

    def _finish(self, finished: _Round, now: float) -> None:
        self._round = None
        gathered = self._gathered(finished, now)
        found = self._conclude(gathered)
        everybody = set(range(self._size)) - self.left
        if found.needs_another_round:
            if self._confirm_at is None:
                self._confirm_at = now + (_DYING_SECONDS if found.is_early else CONFIRMING_SECONDS)
            # Without an outcome, the observers of trainers that have ended wait for the verdict.
            seconds = CONFIRMING_SECONDS + self._round_seconds
            self.routes.send(everybody, encode("accepted", seconds=seconds))
            return
        self._confirm_at = None
        for resolved in self._reported.gone_on(gathered.reports):
            self._publish(resolved)
        for each in found.incidents:
            incident = self._reported.traced(each, gathered.reports)
            if incident is not None and self._reported.report(incident, gathered.reports):
                self._publish(incident)
                for rank in self.left.intersection(incident.ranks):
                    self._resolve_left(rank)
        self.routes.send(everybody, self._outcome())

    def _gathered(self, finished: _Round, now: float) -> Gathered:
        """Return all reports, also the last ones of trainers that have ended. Times since an end are counted
        until now."""
        came = {rank: at for rank, (_, at) in self._last_posts.items()} | finished.came
        posts = {rank: post for rank, (post, _) in self._last_posts.items()} | finished.posts
        reports = {}
        for rank in sorted(posts):
            report = posts[rank].report(self._groups)
            if report.gone_seconds is not None:
                report = replace(report, gone_seconds=report.gone_seconds + now - came[rank])
            if (stack := finished.stacks.get(rank)) is not None:
                report = replace(report, stack=stack.text, waiting=stack.waiting)
            reports[rank] = report
        absent = set(range(self._size)) - reports.keys()
        self._absent = {rank: self._absent.get(rank, finished.began) for rank in absent}
        confirmed = {
            rank for rank, since in self._absent.items() if finished.began - since >= CONFIRMING_SECONDS
        }
        return Gathered(reports, finished.is_repeat, confirmed, absent & finished.closed)

    def _resolve_left(self, rank: int) -> None:
        for resolved in self._reported.left(self._last_posts[rank][0].report(self._groups)):
            self._publish(resolved)

    def _resolve(self, rank: int, message: Message) -> None:
        named_by = [Finding.from_json(each) for each in message["findings"]]
        for resolved in self._reported.moved(rank, float(message["seconds"]), named_by):
            if message["is_reporter"]:
                self._publish(resolved)

    def _publish(self, item: Incident | Resolved) -> None:
        """Record it, and send it to every observer: its trainer may not share this run directory."""
        self._record(item)
        message = _news(item)
        if isinstance(item, Incident) and len(message) * self._size > _NEWS_BYTES:
            message = _news(replace(item, records=item.records[:1]))
        self.routes.send(range(self._size), message)

    def _outcome(self) -> bytes:
        """The findings that are not over, of this round or of earlier ones."""
        return encode("outcome", findings=[each.to_json() for each in self._reported.findings])


def _news(item: Incident | Resolved) -> bytes:
    return encode("news", item=pack(item.to_json()))
