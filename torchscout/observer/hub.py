"""The one place where a round comes together, inside an observer's process (paper, section 7).

    an observer  announce  ->  hub          my trainer is silent, or gone
    hub          heard     ->  that one
    hub          ask       ->  everybody    post where you stand
    everybody    post      ->  hub          or, ``elsewhere``: another hub asked me already
    hub          show      ->  the still    now that all have been read: show your trainer's stacks
    the still    stack     ->  hub
    hub          news      ->  everybody    an incident, or that one is resolved, once it is written down
    hub          outcome   ->  everybody    which incident stands now

A round may also be a survey, which compares how long phases take. It is announced by ``survey``
and asked for by ``sample``; no stacks are shown and no outcome is told, since the job goes on. A hang
has precedence over it.

Besides, ``present`` asks nothing and is not answered: it shows who is connected. ``leave`` is the last
word of an observer, with its last post, and ``moved`` says that a rank that was named goes on. Between rounds
nothing is sent. Nobody is waited for longer than a round's deadline: absence is evidence.

The standby is a hub like the other, which is only asked when that one does not answer. Further hubs are
elected when neither does, see ``Election``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import zmq

from torchscout.config import ObserverConfig
from torchscout.decision.progress import Shared
from torchscout.decision.record import Incident, Resolved
from torchscout.observer.protocol import (
    HUBS_AT_FIRST,
    LIMIT,
    MISTAKES,
    Message,
    RankReport,
    Tally,
    decode,
    encode,
    listen_limited,
)
from torchscout.observer.reported_incidents import Finding, ReportedIncidents

__all__ = ["Compare", "Conclude", "Hub", "Round"]

_GATHERING_SECONDS = 10.0
"""How long observers may take to find a hub that was started again."""
_ON_THE_WAY_SECONDS = 0.2
"""For the stacks to be asked for and sent, besides the time to take them."""
_MOST_SHARED = 1 << 16
"""Of what the last posts have in common; beyond, it is begun anew, which costs memory and nothing else."""
_TOO_FEW = (
    "the observer of this rank was elected as hub, but only {} of {} observers have found it; it localizes "
    "hangs once more than half of them have"
)
_LAST_WORDS_SECONDS = 0.5
"""For what was sent last to pass the listener, once the socket is closed."""

Conclude = Callable[[Mapping[int, RankReport], bool], Incident | None]
"""From the posts of a round, and whether its silence was looked at before, to an incident."""
Compare = Callable[[Mapping[int, RankReport]], Sequence[Incident]]
"""From the posts of a survey to incidents."""


class Round:
    """Posts, and then stacks, as they come in.

    Not together: to be asked for its stacks interrupts a trainer, and may end the very wait that
    the others are to tell of.
    """

    def __init__(
        self, number: int, deadline: float, *, insistent: bool = False, survey: bool = False
    ) -> None:
        self.number = number
        self.deadline = deadline
        self.insistent = insistent
        self.is_survey = survey
        self.awaited: set[int] = set()
        self.posts: dict[int, RankReport] = {}
        self.shared: Shared = {}
        """What its posts have in common."""
        self.has_posts = False
        """Whether it is the stacks' turn."""

    def add(self, rank: int, post: RankReport) -> None:
        if rank in self.awaited and not self.has_posts:
            self.awaited.discard(rank)
            self.posts[rank] = post

    def add_stack(self, rank: int, stack: str, waiting: bool | None) -> None:
        if rank in self.awaited and self.has_posts:
            self.awaited.discard(rank)
            standing = replace(self.posts[rank].standing, stack=stack, waiting=waiting)
            self.posts[rank] = replace(self.posts[rank], standing=standing)

    def is_over(self, now: float) -> bool:
        return not self.awaited or now >= self.deadline


class Hub:
    """It reads what has arrived, answers, and never waits."""

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
        """``place`` is that in ``hub_ranks``: from the third on it is opened once it is elected."""
        self.tally = Tally()
        port = config.port and config.port + place
        self.socket, self._listener = listen_limited(context, token, config.address, port)
        self.port = self._listener.port
        self.is_elected = place >= HUBS_AT_FIRST
        self.is_open = False
        """Whether it accepts connections."""
        self.problem: str | None = None
        """Why it holds no rounds, if it does not."""
        self._size = size
        self.config = config
        self._conclude = conclude
        self._compare = compare
        self._record = record
        self._round: Round | None = None
        self._rounds = 0
        self._next_survey = -math.inf
        self.is_restarted = False
        """Whether others have yet to find it again."""
        self._has_majority = False
        self._since: float | None = None
        """When it was first asked for something."""
        self._left: dict[int, tuple[RankReport, float]] = {}
        self._shared: Shared = {}  # what their last posts have in common
        self._docket = ReportedIncidents()
        if not self.is_elected:
            self.open()

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, should nothing arrive before."""
        return None if self._round is None else self._round.deadline

    @property
    def left(self) -> frozenset[int]:
        """Ranks whose observers have said goodbye."""
        return frozenset(self._left)

    @property
    def is_needed(self) -> bool:
        """Whether others rely on it: not if it was elected, and a majority has not come."""
        return self.is_open and (not self.is_elected or self._has_majority)

    def open(self) -> None:
        self._listener.start()
        self.is_open = True

    def tick(self, now: float) -> None:
        """Read what has arrived, and conclude a round that is over."""
        self._since = now if self._since is None else self._since
        while self.socket.poll(0, zmq.POLLIN):
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            message = decode(b"".join(frames), self.tally)
            if message is not None:
                self._take(identity, message, now)
        try:
            self._mind_round(now)
        except MISTAKES:  # what was posted cannot be understood: the next round may be better
            self.tally.malformed += 1
            self._round = None

    def _mind_round(self, now: float) -> None:
        if self._round is None or not self._round.is_over(now):
            return
        if self._round.is_survey:
            self._finish_survey(self._round)
            return
        if not self._round.has_posts:
            self._ask_for_stacks(self._round, now)
        if self._round.is_over(now):
            self._finish(self._round, now)

    def adopt(self, finding: Finding | None) -> None:
        """The other hub has concluded a round."""
        self._docket.adopt(finding)

    def close(self) -> None:
        self.socket.close()
        self._listener.close(_LAST_WORDS_SECONDS)

    def _take(self, identity: bytes, message: Message, now: float) -> None:
        # What a peer sends is data: if it does not have the shape it should have, it is dropped.
        try:
            rank = int(identity)
            if not 0 <= rank < self._size:
                raise ValueError(f"rank {rank} of {self._size}")
            self._act_on(rank, message, now)
        except MISTAKES:
            self.tally.malformed += 1

    def _act_on(self, rank: int, message: Message, now: float) -> None:
        match message["kind"]:
            case "announce":
                self._learn(message.get("finding"))
                self._hold_round(rank, now, insistent=bool(message["insistent"]))
            case "survey":
                self._hold_survey(now)
            case "post":
                shared = {} if self._round is None else self._round.shared
                self._add(rank, _post_of(rank, message, shared, self._size), message["round"])
            case "stack":
                self._add_stack(rank, message)
            case "elsewhere":
                self._call_off(message["round"])
            case "leave":
                self._say_goodbye(rank, _post_of(rank, message, self._shared, self._size), now)
            case "moved":
                self._resolve(rank, message)
            case kind:
                raise ValueError(f"unknown kind {kind}")

    def _hold_round(self, rank: int, now: float, *, insistent: bool) -> None:
        standing = self._docket.finding
        if standing is not None and standing.job_ended:
            self._deliver(rank, self._outcome())
            return
        if self._is_gathering(now):
            return  # not answered, so that the standby is asked
        self._send(rank, "heard")
        if self._round is not None and not self._round.is_survey:
            self._round.insistent |= insistent
            return
        self._round = self._ask_everybody(now, insistent=insistent)

    def _learn(self, document: Mapping[str, Any] | None) -> None:
        """What another hub has found of the present silence, where this one knows nothing: it was started
        since, and must not report it again."""
        if document is not None and self._docket.finding is None:
            self._docket.adopt(Finding.from_json(document))

    def _is_gathering(self, now: float) -> bool:
        """Whether observers are still on their way here: who has not come yet is not absent.

        An elected hub waits for a majority, however long that takes: most have then lost the hubs before it,
        and answer those no more, so that nothing is reported twice. And absence from a hub that most have not
        found is no evidence.
        """
        seconds = self.config.election_seconds if self.is_elected else _GATHERING_SECONDS
        is_late = self._since is not None and now - self._since > seconds
        if not self.is_elected and (is_late or not self.is_restarted):
            return False
        came = sum(rank in self._left or self._send(rank, "present") for rank in range(self._size))
        if not self.is_elected:
            return came < self._size
        self._has_majority = 2 * came > self._size
        self.problem = None if self._has_majority else _TOO_FEW.format(came, self._size)
        return not self._has_majority or (came < self._size and not is_late)

    def _hold_survey(self, now: float) -> None:
        """Unless there is something worse to attend to; it is announced again.

        Or the last one was a moment ago: two announcements that crossed are not two surveys, of which the
        second would confirm the first by the same durations.
        """
        if self._round is None and self._docket.finding is None and now >= self._next_survey:
            self._next_survey = now + self.config.repeat_seconds
            self._round = self._ask_everybody(now, survey=True)

    def _ask_everybody(self, now: float, *, insistent: bool = False, survey: bool = False) -> Round:
        self._rounds += 1
        deadline = now + self.config.round_deadline_seconds
        asked = Round(self._rounds, deadline, insistent=insistent, survey=survey)
        kind = "sample" if survey else "ask"
        for rank in range(self._size):
            if rank not in self._left and self._send(rank, kind, round=asked.number):
                asked.awaited.add(rank)
        return asked

    def _add(self, rank: int, post: RankReport, number: object) -> None:
        if self._round is not None and self._round.number == number:
            self._round.add(rank, post)

    def _add_stack(self, rank: int, message: Message) -> None:
        stack, waiting = str(message["stack"]), message["waiting"]
        if waiting not in {True, False, None}:
            raise ValueError(f"waiting is {waiting!r}")
        if self._round is not None and self._round.number == message["round"]:
            self._round.add_stack(rank, stack, waiting)

    def _ask_for_stacks(self, posted: Round, now: float) -> None:
        posted.has_posts = True
        posted.deadline = now + self.config.stack_seconds + _ON_THE_WAY_SECONDS
        still = [rank for rank, post in posted.posts.items() if post.is_still and rank not in self._left]
        posted.awaited = {rank for rank in still if self._send(rank, "show", round=posted.number)}

    def _call_off(self, number: object) -> None:
        if self._round is not None and self._round.number == number:
            self._round = None

    def _resolve(self, rank: int, message: Message) -> None:
        named_by = None if message["finding"] is None else Finding.from_json(message["finding"])
        resolved = self._docket.moved(rank, float(message["seconds"]), named_by)
        if resolved is not None and message["is_reporter"]:
            self._report(resolved)

    def _say_goodbye(self, rank: int, post: RankReport, now: float) -> None:
        if len(self._shared) > _MOST_SHARED:
            self._shared = {}
        self._left[rank] = post, now
        if self._round is not None:
            self._round.add(rank, post)

    def _finish(self, finished: Round, now: float) -> None:
        self._round = None
        # With the last words of those who have left, also since it began: a trainer that fails is soon gone.
        finished.posts = {
            rank: _aged(post, now - at) for rank, (post, at) in self._left.items()
        } | finished.posts
        incident = self._conclude(finished.posts, finished.insistent)
        if incident is not None:
            incident = self._docket.traced(incident, finished.posts)
        if incident is not None and self._docket.report(incident, finished.posts):
            self._report(incident)
        outcome = self._outcome()
        for rank in range(self._size):
            if rank not in self._left:
                self._deliver(rank, outcome)

    def _finish_survey(self, finished: Round) -> None:
        self._round = None
        for incident in self._compare(finished.posts):
            self._report(incident)

    def _report(self, item: Incident | Resolved) -> None:
        """Write it down, and send it to every observer: its trainer may not see this run directory."""
        self._record(item)
        message = encode("news", item=item.to_json())
        for rank in range(self._size):
            self._deliver(rank, message)

    def _outcome(self) -> bytes:
        """What stands, whether of this round or of an earlier one."""
        finding = self._docket.finding
        return encode("outcome", finding=None if finding is None else finding.to_json())

    def _send(self, rank: int, kind: str, **fields: Any) -> bool:
        """Whether ``rank`` is connected."""
        return self._deliver(rank, encode(kind, **fields))

    def _deliver(self, rank: int, message: bytes) -> bool:
        if len(message) > LIMIT:
            return False
        try:
            self.socket.send_multipart([str(rank).encode(), message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            return False
        self.tally.sent += 1
        return True


def _post_of(rank: int, message: Message, shared: Shared, size: int) -> RankReport:
    post = RankReport.from_json(message["post"], shared, size)
    if post.standing.rank != rank:
        raise ValueError(f"rank {rank} posts for rank {post.standing.rank}")
    return post


def _aged(post: RankReport, seconds: float) -> RankReport:
    """What an observer said that left so long ago."""
    return post if post.gone_seconds is None else replace(post, gone_seconds=post.gone_seconds + seconds)
