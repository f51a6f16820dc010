"""The observers' board over real sockets; hub and clients are driven by hand, with an explicit clock."""

from __future__ import annotations

import json
import os
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.incidents import incident_from
from tests.support.small_job import until
from torchscout.config import ObserverConfig
from torchscout.decision.consensus import exact
from torchscout.decision.progress import CommGroup, Phase, Process, Progress, RankReport, Window
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, from_json
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds import hub
from torchscout.observer.rounds.client import RoundClient
from torchscout.observer.rounds.hub import CONFIRMING_SECONDS, Gathered, Hub, Outcome
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.protocol import LIMIT, Client, Message, Tally, connect, decode, encode
from torchscout.observer.rounds.reported_incidents import Finding
from torchscout.observer.trainer import TrainerView
from torchscout.utils import network
from torchscout.utils.packed_lists import unpack

TOKEN = network.new_token()
CONFIG = ObserverConfig(address="127.0.0.1")
LATE = 100.0
WORLD = CommGroup("world", (0, 1, 2), "world")


def incident(*ranks: int) -> Incident:
    record = EvidenceRecord(
        step=3, surface="issued/world", manifestation=Manifestation.HANG, peers=(0, 1), verdict=exact([5, 4])
    )
    return incident_from(record, ranks, sentence=f"ranks {ranks} are late")


def report(
    rank: int,
    process: Process = Process.RUNNING,
    gone_seconds: float | None = None,
    moving: bool = True,
) -> RankReport:
    return RankReport(rank, process, groups=(WORLD,), moving=moving, gone_seconds=gone_seconds)


class Board:
    """A hub and the clients that reached it."""

    def __init__(self, place: int = 0) -> None:
        self.context: zmq.Context = zmq.Context()
        self.rounds: list[Gathered] = []
        self.surveys: list[dict[int, RankReport]] = []
        self.written: list[Any] = []
        self.verdict: Incident | None = None
        self.confirms = False
        """Whether it concludes nothing while an absence is not confirmed."""
        self.clients: dict[int, Client] = {}
        self.inbox: dict[int, list[Message]] = {}
        self.now = 0.0
        self.hub = Hub(
            self.context,
            size=3,
            token=TOKEN,
            config=CONFIG,
            conclude=self._conclude,
            compare=self._compare,
            record=self.written.append,
            place=place,
        )

    def _conclude(self, gathered: Gathered) -> Outcome:
        self.rounds.append(gathered)
        absent = {*range(3)} - gathered.reports.keys() - {*gathered.confirmed}
        if self.confirms and absent:
            return Outcome(needs_another_round=True)
        return Outcome() if self.verdict is None else Outcome([self.verdict])

    def _compare(self, reports: dict[int, RankReport]) -> list[Incident]:
        self.surveys.append(dict(reports))
        return [] if self.verdict is None else [self.verdict]

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            self.clients[rank] = Client(self.context, rank, TOKEN, [("127.0.0.1", self.hub.port)])
            self.inbox[rank] = []
            self.until(lambda rank=rank: self.reaches(rank))
            self.clients[rank].sockets[0].recv()

    def reaches(self, rank: int) -> bool:
        """Whether the hub can send to ``rank``; past the ends, so that it is not counted."""
        try:
            self.hub.socket.send_multipart([str(rank).encode(), b"probe"], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def turn(self) -> None:
        self.hub.tick(self.now)
        for rank, client in self.clients.items():
            self.inbox[rank] += [message for _, message in client.receive()]

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.turn()
            time.sleep(0.001)

    def kinds(self, rank: int) -> list[str]:
        return [message["kind"] for message in self.inbox[rank]]

    def announce(self, rank: int, *, is_repeat: bool = False) -> None:
        self.clients[rank].send(0, "announce", is_repeat=is_repeat)

    @property
    def answered(self) -> list[list[int]]:
        """The ranks that answered in each round."""
        return [[*each.reports] for each in self.rounds]

    def report_all(self, *ranks: int) -> None:
        """Everybody answers the latest question."""
        for rank in ranks:
            self.until(lambda rank=rank: {"ask", "sample"} & {*self.kinds(rank)})
            asked = [message for message in self.inbox[rank] if message["kind"] in {"ask", "sample"}][-1]
            self.clients[rank].post(0, "report", report(rank), asked["round"])

    def hold_round(self, *ranks: int) -> None:
        concluded = len(self.rounds)
        for inbox in self.inbox.values():
            inbox.clear()
        self.announce(ranks[0])
        for rank in ranks:  # A question of before may still be on its way to some.
            self.until(lambda rank=rank: "ask" in self.kinds(rank))
        self.report_all(*ranks)
        self.until(lambda: len(self.rounds) > concluded)
        for rank in ranks:
            self.until(lambda rank=rank: "outcome" in self.kinds(rank))

    def hold_round_until_deadline(self, *ranks: int, is_announced: bool = True) -> Gathered:
        """Hold a round in which only ``ranks`` answer; return what is known at its end."""
        concluded, told = len(self.rounds), {"accepted", "outcome"}
        for inbox in self.inbox.values():
            inbox.clear()
        if is_announced:
            self.announce(ranks[0])
        self.report_all(*ranks)
        self.until(lambda: self.hub._round is None or len(self.hub._round.posts) == len(ranks))
        if self.hub._round is not None:
            self.now = self.hub._round.deadline
        self.until(lambda: len(self.rounds) > concluded and told.intersection(self.kinds(ranks[0])))
        return self.rounds[-1]

    def messages(self) -> int:
        ends = [self.hub, *self.clients.values()]
        return sum(end.tally.sent + end.tally.received for end in ends)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    yield board
    for end in (*board.clients.values(), board.hub):
        end.close()
    board.context.destroy(linger=0)


def test_nothing_is_exchanged_before_the_first_announcement(board: Board):
    board.join(0, 1, 2)
    for _ in range(50):
        board.turn()
        time.sleep(0.002)
    assert board.messages() == 0


def test_a_round_asks_all_ranks_and_sends_the_findings_to_all(board: Board):
    board.join(0, 1, 2)
    board.hold_round(0, 1, 2)
    assert (board.written, board.inbox[2][-1]) == ([], {"kind": "outcome", "findings": []})
    board.verdict = incident(2)
    board.hold_round(1, 0, 2)
    reports = board.rounds[1].reports
    assert board.answered == [[0, 1, 2], [0, 1, 2]]
    assert (reports[2].rank, reports[2].groups) == (2, (WORLD,))
    assert not board.rounds[1].is_repeat
    assert board.written == [board.verdict]
    assert [board.kinds(rank) for rank in range(3)] == [["ask", "news", "outcome"]] * 3
    assert board.inbox[0][-1]["findings"] == [Finding.of(board.verdict, reports).to_json()]


def test_an_incident_that_compares_many_ranks_is_sent_in_few_bytes(board: Board):
    record = replace(
        incident(2).records[0], peers=tuple(range(40_000)), verdict=exact([5] * 20_000 + [4] + [5] * 19_999)
    )
    board.join(0, 1, 2)
    board.verdict = incident_from(record, tuple(range(0, 40_000, 8)), sentence="a group is late")
    board.hold_round(1, 0, 2)
    (news,) = [each for each in board.inbox[0] if each["kind"] == "news"]
    assert len(json.dumps(news)) < 2048
    assert from_json(unpack(news["item"])) == board.verdict
    outcome = board.inbox[0][-1]
    assert len(json.dumps(outcome)) < 512
    assert Finding.from_json(outcome["findings"][0]).ranks == board.verdict.ranks


def test_long_messages_are_compressed_and_never_grow_beyond_the_limit():
    long = encode("stack", round=9, stack="File x, line 1\n" * 500, waiting=True)
    assert len(long) < 200
    tally = Tally()
    message = decode(long, tally)
    assert message is not None
    assert len(message["stack"]) == 7500
    bomb = zlib.compress(b" " * (LIMIT + 1))
    for frame in (long[:-1], long[:9], b"x", bomb):
        assert decode(frame, tally) is None
    assert (tally.received, tally.malformed) == (5, 4)


def test_in_a_large_job_observers_receive_the_deciding_record(board: Board, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "_NEWS_BYTES", 4000)
    board.join(0, 1, 2)
    deciding = incident(2)
    stack = EvidenceRecord(
        step=3, surface="stack", manifestation=Manifestation.HANG, peers=(2,), reason=os.urandom(1000).hex()
    )
    board.verdict = replace(deciding, records=(*deciding.records, stack))
    board.hold_round(1, 0, 2)
    (news,) = [each for each in board.inbox[0] if each["kind"] == "news"]
    assert from_json(unpack(news["item"])) == deciding
    assert board.written == [board.verdict]


def test_a_round_does_not_wait_for_an_unconnected_rank(board: Board):
    board.join(0, 2)
    board.hold_round(0, 2)
    assert board.answered == [[0, 2]]
    assert board.now == 0.0


@pytest.mark.parametrize(
    ("late", "last"), [(0.0, 1.0), (0.9, 1.9)], ids=["in time", "a deadline is counted from the last answer"]
)
def test_a_rank_that_does_not_report_is_absent_after_the_deadline(board: Board, late: float, last: float):
    seconds = CONFIG.round_deadline_seconds
    board.join(0, 1, 2)
    board.announce(0)
    board.report_all(0)
    board.until(lambda: board.hub.tally.received == 2)
    board.now = late * seconds
    board.report_all(1)
    board.until(lambda: board.hub.tally.received == 3)
    board.now = last * seconds - 0.01
    board.turn()
    assert board.rounds == []
    board.now = last * seconds
    board.turn()
    assert board.answered == [[0, 1]]
    assert (board.rounds[0].confirmed, board.rounds[0].closed) == (set(), set())


def test_a_round_ends_however_late_reports_arrive(board: Board):
    board.join(0, 1, 2)
    board.announce(0)
    board.until(lambda: "ask" in board.kinds(0))
    asked = board.inbox[0][board.kinds(0).index("ask")]
    board.now = asked["seconds"] - 0.01
    board.report_all(0)
    board.until(lambda: board.rounds or board.hub.tally.received == 2)
    assert board.hub.deadline is None or board.hub.deadline <= asked["seconds"]


@pytest.mark.parametrize(
    ("answers", "confirmed"), [((0,), {1, 2}), ((0, 1), {2})], ids=["still silent", "it was late"]
)
def test_an_absence_is_confirmed_by_a_second_round(board: Board, answers: tuple[int, ...], confirmed: set):
    """Rank 1 does not answer, and rank 2 is not connected."""
    board.confirms = True
    board.join(0, 1)
    first = board.hold_round_until_deadline(0)
    assert (first.confirmed, first.closed) == (set(), {2})
    assert board.kinds(0) == ["ask", "accepted"], "nobody is told that this is over"
    ended = board.now
    board.now += CONFIRMING_SECONDS - 0.01
    board.turn()
    assert board.hub.deadline == ended + CONFIRMING_SECONDS
    board.now = ended + CONFIRMING_SECONDS
    second = board.hold_round_until_deadline(*answers, is_announced=False)
    assert (second.confirmed, second.closed, second.is_repeat) == (confirmed, {2}, True)
    assert board.hub.deadline is None
    assert board.kinds(0)[-2:] == ["ask", "outcome"]


def test_a_round_that_comes_too_early_confirms_no_absence_and_delays_nothing(board: Board):
    board.confirms = True
    board.join(0, 1)
    board.hold_round_until_deadline(0)
    due = board.hub.deadline
    early = board.hold_round_until_deadline(0)
    assert (early.confirmed, board.hub.deadline) == (set(), due)
    board.join(2)
    board.hold_round(0, 1, 2)
    assert board.hub.deadline is None, "all have answered"


def test_only_still_ranks_are_asked_for_stacks_and_after_all_reports(board: Board):
    board.join(0, 1, 2)
    board.announce(0)
    board.until(lambda: "ask" in board.kinds(1))  # connections are not read in the order of their messages
    board.clients[0].post(0, "report", report(0, moving=False), 1)
    board.clients[1].post(0, "report", report(1, moving=False), 1)
    board.clients[0].send(0, "stack", round=1, stack="too early", waiting=True)
    board.until(lambda: board.hub.tally.received == 4)
    assert "show" not in board.kinds(0) + board.kinds(1)
    board.clients[2].post(0, "report", report(2, moving=True), 1)
    for rank in (0, 1):
        board.until(lambda rank=rank: "show" in board.kinds(rank))
        board.clients[rank].post(0, "report", report(rank, Process.STOPPED), 1)  # too late
        board.clients[rank].send(0, "stack", round=1, stack=f"File {rank}", waiting=rank == 0)
    board.until(lambda: board.rounds)
    reports = board.rounds[0].reports
    assert [(reports[rank].stack, reports[rank].waiting) for rank in range(3)] == [
        ("File 0", True),
        ("File 1", False),
        ("", None),
    ]
    assert reports[0].process is reports[1].process is Process.RUNNING
    assert "show" not in board.kinds(2)


def test_a_round_does_not_wait_for_a_missing_stack(board: Board):
    board.join(0)
    board.announce(0)
    board.clients[0].post(0, "report", report(0, moving=False), 1)
    board.until(lambda: "show" in board.kinds(0))
    assert board.rounds == []
    board.now = CONFIG.stack_seconds + 0.3
    board.turn()
    assert board.rounds[0].reports[0].waiting is None


def test_the_end_of_a_trainer_during_a_round_does_not_make_that_round_a_repeated_one(
    board: Board, tmp_path: Path
):
    board.join(0, 1, 2)
    writer = ProgressWriter.create(tmp_path, 1)
    trainer = TrainerView(writer.path, None)
    rounds = RoundClient(trainer, board.clients[1], CONFIG, print, print, print, 3)
    board.announce(0)
    board.until(lambda: "ask" in board.kinds(1))
    rounds.handle(0, board.inbox[1][0], 0.0)
    writer.failing()
    trainer.look(0.0)
    rounds.tick(0.0)
    board.until(lambda: board.hub.tally.received == 4)
    board.report_all(0, 2)
    board.until(lambda: board.rounds)
    assert [each.is_repeat for each in board.rounds] == [False]
    writer.close()


@pytest.mark.parametrize(("mark", "words"), [("asked", "was terminated"), ("failing", "failed")])
def test_without_a_hub_an_observer_records_how_its_trainer_ended(
    board: Board, tmp_path: Path, mark: str, words: str
):
    writer, found = ProgressWriter.create(tmp_path, 1), list[EvidenceRecord]()
    writer.advance(Phase.FORWARD)
    trainer, client = TrainerView(writer.path, None), Client(board.context, 1, TOKEN, [])
    rounds = RoundClient(trainer, client, CONFIG, found.append, print, print, 3)
    getattr(writer, mark)()
    trainer.look(0.0)
    rounds.tick(0.0)
    assert rounds.is_in_round
    rounds.tick(LATE)
    assert [each.reason for each in found] == [
        f"the trainer of rank 1 {words}; no hub answers, and no other can be elected"
    ]
    assert not rounds.is_in_round
    writer.close()


def test_announcements_during_a_round_join_it(board: Board):
    board.join(0, 1, 2)
    for rank in (0, 1, 2):
        board.announce(rank, is_repeat=rank == 1)
    board.until(lambda: board.hub.tally.received == 3)
    board.report_all(0, 1, 2)
    board.until(lambda: board.rounds)
    assert [each.is_repeat for each in board.rounds] == [True]
    assert board.kinds(2).count("ask") == 1


def test_a_report_of_an_earlier_round_is_dropped(board: Board):
    board.join(0, 1, 2)
    board.hold_round(0, 1, 2)
    board.announce(0)
    board.clients[2].post(0, "report", report(2), 1)
    board.until(lambda: board.hub.tally.received == 6)
    board.now = 5.0
    board.turn()
    assert board.answered[1] == []


@pytest.mark.parametrize("in_round", [False, True], ids=["before the round", "during the round"])
def test_the_last_report_of_an_observer_that_left_counts(board: Board, in_round: bool):
    board.join(0, 1)
    if in_round:
        board.announce(0)
        board.until(lambda: board.kinds(0) == ["ask"])
    board.join(2)  # during the round it is too late to ask it
    board.clients[2].post(0, "leave", report(2, Process.GONE, gone_seconds=1.0))
    board.until(lambda: board.hub.left == {2})
    board.now = 0.25
    if not in_round:
        board.announce(0)
    board.report_all(0, 1)
    board.until(lambda: board.rounds)
    assert board.answered == [[0, 1, 2]]
    assert board.rounds[0].reports[2].gone_seconds == 1.25, "counted until now"
    assert board.kinds(2) == []


@pytest.mark.parametrize("in_round", [True, False], ids=["in a round", "before any round"])
def test_the_report_of_a_trainer_that_has_ended_counts_in_later_rounds(board: Board, in_round: bool):
    """Its container may be removed with its observer before an absence is confirmed."""
    board.join(0, 1)
    board.confirms = True
    if in_round:
        board.announce(0)
        board.until(lambda: "ask" in board.kinds(1))
        board.report_all(0)
    board.clients[1].post(0, "report", report(1, Process.GONE, gone_seconds=1.0), int(in_round))
    board.until(lambda: board.rounds if in_round else board.hub.tally.received)
    board.clients.pop(1).close()
    board.until(lambda: not board.reaches(1))
    board.now = CONFIRMING_SECONDS
    last = board.hold_round_until_deadline(0, is_announced=not in_round)
    assert board.answered == [[0, 1]] * (1 + in_round)
    assert (last.confirmed, board.hub.left) == ({2} if in_round else set(), set())
    assert last.reports[1].gone_seconds == 4.0


@pytest.mark.parametrize("in_round", [True, False], ids=["in the round", "after the round"])
@pytest.mark.parametrize(("step", "is_over"), [(4, True), (3, False)], ids=["went on", "did not"])
def test_an_incident_is_over_if_its_rank_goes_on_and_leaves_before_it_knows(
    board: Board, step: int, is_over: bool, in_round: bool
):
    board.join(0, 1, 2)
    board.verdict = incident(2)
    progress = Progress(2, step, 0, Phase.FORWARD, {}, Window(), at_communication=False, silent_seconds=0.0)
    last = RankReport(2, progress=progress, groups=(WORLD,))

    def leave() -> None:
        board.clients[2].post(0, "leave", last)
        board.until(lambda: 2 in board.hub.left)

    board.announce(0)
    board.report_all(2)
    if in_round:
        leave()
    board.report_all(0, 1)
    board.until(lambda: board.written)
    if not in_round:
        leave()
    assert board.written[0] == board.verdict
    assert [each.ranks for each in board.written[1:]] == [(2,)] * is_over


def test_a_round_taken_over_by_another_hub_is_cancelled(board: Board):
    board.join(0, 1, 2)
    board.announce(0)
    board.until(lambda: "ask" in board.kinds(0))
    board.clients[0].send(0, "declined", round=1)
    board.until(lambda: board.hub.deadline is None)
    board.now = 5.0
    board.turn()
    assert board.rounds == []


def test_an_incident_of_another_hub_is_not_reported_again(board: Board):
    board.join(0, 1, 2)
    board.verdict = incident(2)
    board.hub.adopt([Finding.of(board.verdict, {})])
    board.hold_round(0, 1, 2)
    assert board.written == []
    board.clients[2].send(0, "moved", seconds=7.5, findings=[], is_reporter=False)
    board.hold_round(0, 1, 2)
    assert board.written == [board.verdict], "it was over, and happened again"


def test_the_end_of_a_lost_hubs_incident_is_written_by_the_reporter(board: Board):
    board.join(0, 1, 2)
    findings = [Finding.of(incident(2), {}).to_json()]
    for is_reporter in (False, True):
        received = board.hub.tally.received
        board.clients[2].send(0, "moved", seconds=7.5, findings=findings, is_reporter=is_reporter)
        board.until(lambda received=received: board.hub.tally.received > received)
        assert len(board.written) == is_reporter
    assert board.written[0].sentence == incident(2).sentence


def test_a_wrong_token_is_refused(board: Board):
    board.join(0)
    stranger = Client(board.context, 1, network.new_token(), [("127.0.0.1", board.hub.port)])
    with socket.create_connection(("127.0.0.1", board.hub.port)) as plain:
        plain.sendall(b"announce\n" * 100)
        for _ in range(100):
            board.turn()
            time.sleep(0.005)
    assert stranger.connected() == [False]
    assert not stranger.send(0, "announce", is_repeat=False)
    assert board.hub.tally.received == board.hub.tally.malformed == 0
    board.hold_round(0)
    assert board.answered == [[0]], "rank 1 was not asked: nobody with its token is there"
    stranger.close()


def test_a_rank_outside_the_job_is_dropped(board: Board):
    board.join(0)
    for rank in (3, -1):
        board.clients[rank] = Client(board.context, rank, TOKEN, [("127.0.0.1", board.hub.port)])
        board.inbox[rank] = []
        board.until(lambda rank=rank: board.clients[rank].send(0, "announce", is_repeat=False))
    board.until(lambda: board.hub.tally.malformed == 2)
    assert board.hub.deadline is None


def test_a_message_beyond_the_limit_ends_its_connection_only(board: Board):
    board.join(0, 1)
    assert not board.clients[1].send(0, "announce", is_repeat="x" * LIMIT)
    client = board.clients[1].sockets[0]
    events = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.send(b"x" * (LIMIT + 1))
    assert events.poll(10_000), "the hub ends the connection"
    client.disable_monitor()
    time.sleep(0.2)  # until the hub's socket knows as well
    board.until(lambda: board.clients[1].connected() == [True] and board.reaches(1))  # anew
    board.hold_round(0, 1)
    assert board.hub.tally.malformed == 0


def test_a_client_knows_when_its_hub_is_gone(board: Board):
    board.join(0)
    board.hub.close()
    until(lambda: board.clients[0].connected() == [False], "the client knows", 10)
    assert not board.announce(0)


def test_a_client_that_reconnects_replaces_its_lost_connection(board: Board):
    board.join(0, 1, 2)
    again = connect(board.context, TOKEN, 2, ("127.0.0.1", board.hub.port))
    board.until(lambda: board.reaches(2) and again.poll(10))
    again.recv()
    board.announce(0)
    board.until(lambda: again.poll(0))
    while again.poll(0):
        last = again.recv()
    asked = json.loads(last)
    assert (asked["kind"], asked["round"]) == ("ask", 1)
    again.close()


def test_keys_depend_on_token_purpose_and_role():
    assert network.derive(TOKEN, "board", "hub") == network.derive(TOKEN, "board", "hub")
    ends = [(TOKEN, "board", "hub"), (TOKEN, "board", "client"), (TOKEN + "x", "board", "hub")]
    pairs = [network.derive(*end) for end in (*ends, (TOKEN, "replica", "hub"))]
    assert len({pair.secret for pair in pairs}) == len({pair.public for pair in pairs}) == 4
    with pytest.raises(ValueError, match="at least 16 characters, got 5"):
        network.derive("short", "board", "hub")


def test_a_survey_asks_all_ranks_and_sends_them_its_finding(board: Board):
    board.join(0, 1, 2)
    board.verdict = incident(2)
    board.clients[2].send(0, "survey")
    board.report_all(0, 1, 2)
    board.until(lambda: board.surveys)
    assert sorted(board.surveys[0]) == [0, 1, 2]
    assert board.written == [incident(2)]
    board.until(lambda: all("news" in board.kinds(rank) for rank in range(3)))
    assert board.rounds == []
    assert [board.kinds(rank) for rank in range(3)] == [["sample", "news"]] * 3, "no stacks, no outcome"


def test_announcements_that_cross_are_one_survey(board: Board):
    board.join(0, 1, 2)
    for wait, held in [(0.0, 1), (CONFIG.repeat_seconds - 0.1, 1), (0.1, 2)]:
        board.now += wait
        for inbox in board.inbox.values():
            inbox.clear()
        received = board.hub.tally.received
        board.clients[2].send(0, "survey")
        board.until(lambda received=received: board.hub.tally.received > received)
        if board.hub.deadline is not None:
            board.report_all(0, 1, 2)
            board.until(lambda: board.hub.deadline is None)
        assert len(board.surveys) == held
        received = board.hub.tally.received
        board.clients[1].send(0, "survey")
        board.until(lambda received=received: board.hub.tally.received > received)
        assert board.hub.deadline is None, "the second one is none"


def test_a_survey_ends_at_its_deadline(board: Board):
    board.join(0, 1, 2)
    board.clients[2].send(0, "survey")
    board.report_all(0, 2)
    board.until(lambda: board.hub.tally.received == 3)
    assert board.surveys == []
    board.now += CONFIG.round_deadline_seconds
    board.until(lambda: board.surveys)
    assert sorted(board.surveys[0]) == [0, 2]


def test_a_silence_ends_a_survey(board: Board):
    board.join(0, 1, 2)
    board.clients[2].send(0, "survey")
    board.report_all(0)
    board.hold_round(1, 0, 2)
    assert board.answered == [[0, 1, 2]]
    assert board.surveys == []


def test_there_is_no_survey_during_a_round_or_an_open_incident(board: Board):
    board.join(0, 1, 2)
    board.verdict = incident(2)
    board.announce(0)
    board.until(lambda: "ask" in board.kinds(1))
    board.clients[1].send(0, "survey")
    board.report_all(0, 1, 2)
    board.until(lambda: "outcome" in board.kinds(1))
    received = board.hub.tally.received
    board.clients[1].send(0, "survey")
    board.until(lambda: board.hub.tally.received > received)
    assert (board.hub.deadline, board.surveys, len(board.rounds)) == (None, [], 1)


STALLED = Progress(1, 1, 2, Phase.FORWARD, {"w": 1}, Window(), True, 3.0)
NESTED = b"[" * 900 + b"]" * 900
MALFORMED = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[1]",
    b"\x01",
    b"[" * 100_000,
    b'{"kind": 3}',
    b'{"kind": "dance"}',
    b'{"kind": "announce"}',
    b'{"kind": "announce", "is_repeat": true, "findings": [{"ranks": [0]}]}',
    b'{"kind": "report", "round": 1, "report": 7}',
    b'{"kind": "moved", "seconds": [], "findings": [], "is_reporter": true}',
    b'{"kind": "moved", "seconds": {}, "findings": [], "is_reporter": true}',
    b'{"kind": "moved", "seconds": 1.0, "findings": [{"ranks": [0]}], "is_reporter": true}',
    b'{"kind": "moved", "seconds": NaN}',
    b'{"kind": "moved", "seconds": 1e999}',
    b'{"kind": "moved", "seconds": ' + b"9" * 400 + b"}",
    b'{"kind": "moved", "seconds": ' + NESTED + b"}",
    b'{"kind": "stack", "round": 1, "stack": "", "waiting": "perhaps"}',
    b'{"kind": "stack", "round": [], "stack": {}, "waiting": []}',
    post_of(report(0))[:-1],
    post_of(report(0)) + b" ",
    post_of(report(1)),  # of another rank
    post_of(report(2), kind="leave"),
    post_of(replace(report(0), groups=(replace(WORLD, members=tuple(range(100_000))),))),
    post_of(replace(report(0), stalled=STALLED)),
]


def test_malformed_messages_are_counted_and_dropped_without_much_memory(board: Board):
    board.join(0, 1, 2)
    for raw in MALFORMED:
        before = board.hub.tally.malformed
        tracemalloc.start()
        try:
            board.clients[0].sockets[0].send(raw)
            board.until(lambda before=before: board.hub.tally.malformed > before)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20, raw[:80]
        finally:
            tracemalloc.stop()
    board.hold_round(0, 1, 2)  # it lives on


def test_a_diagnosis_that_raises_does_not_end_a_hub(board: Board):
    board.join(0, 1, 2)
    board.verdict = "not an incident"  # type: ignore[assignment]
    board.announce(0)
    board.report_all(0, 1, 2)
    board.until(lambda: board.hub.tally.malformed)
    board.verdict = None
    board.hold_round(0, 1, 2)


def test_observers_of_another_version_fail_at_the_handshake(board: Board):
    board.join(0)
    older = network.CurveSockets("board 1", LIMIT)
    other = older.connect(board.context, TOKEN, 1, ("127.0.0.1", board.hub.port))
    assert not other.poll(500, zmq.POLLOUT)
    other.close()
    board.turn()
    assert not board.reaches(1)


def test_a_connection_that_never_authenticates_is_closed(board: Board):
    with socket.create_connection(("127.0.0.1", board.hub.port)) as stranger:
        stranger.settimeout(0.2)
        ended = []

        def has_ended() -> bool:
            try:
                ended.extend([1] if not stranger.recv(4096) else [])
            except TimeoutError:
                return False
            except ConnectionError:
                return True
            return bool(ended)

        board.until(has_ended)
