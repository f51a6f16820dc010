"""Relays and the routes of a hub, over real sockets; hub, relay and clients are driven by hand."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import zmq

from tests.unit.test_board import TOKEN, Board, incident, report
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.protocol import Client, Tally, connect, encode
from torchscout.observer.rounds.relay import Relay, Routes, batches, relay_endpoint
from torchscout.observer.spec import relay_ranks, relayed_with

RELAYS = {0: 0, 1: 0, 2: 0}


class RelayedBoard(Board):
    """A hub, the relay of its three ranks, and their observers."""

    def __init__(self) -> None:
        super().__init__()
        self.hub.routes.relays = RELAYS
        self.start_relay()

    def start_relay(self) -> None:
        hubs = [("127.0.0.1", self.hub.port)]
        self.relay: Relay | None = Relay(self.context, TOKEN, RELAYS, hubs, zmq.Poller())

    def lose_relay(self) -> None:
        assert self.relay is not None
        self.relay.close()
        self.relay = None

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            self.clients[rank] = Client(
                self.context,
                rank,
                TOKEN,
                [("127.0.0.1", self.hub.port)],
                relay=partial(relay_endpoint, TOKEN, 0),
            )
            self.inbox[rank] = []
            self.until(lambda rank=rank: self.clients[rank].is_connected(0))

    def reaches_relay(self) -> bool:
        try:
            self.hub.socket.send_multipart([b"relay 0", bytes(4)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def turn(self) -> None:
        if self.relay is not None:
            self.relay.tick(time.monotonic())
        super().turn()


@pytest.fixture
def board() -> Iterator[RelayedBoard]:
    board = RelayedBoard()
    yield board
    if board.relay is not None:
        board.lose_relay()
    for end in (*board.clients.values(), board.hub):
        end.close()
    board.context.destroy(linger=0)


def test_the_first_rank_of_each_machine_with_several_is_its_relay():
    hosts = ["a", "b", "b", "a", "c", "b"]
    assert relay_ranks(hosts, 6) == {0: 0, 3: 0, 1: 1, 2: 1, 5: 1}
    assert relay_ranks(hosts, 7) == {}, "a smaller job needs none"
    assert relay_ranks([*hosts[:-1], None], 2) == relay_ranks(None, 2) == {}, "the machines are unknown"
    assert [relayed_with(rank, hosts, 6) for rank in (5, 0, 4)] == [(1, 2, 5), (0, 3), ()]


def test_a_round_asks_a_machine_once_and_reads_its_reports_together(board: RelayedBoard):
    board.join(0, 1, 2)
    board.verdict = incident(2)
    before = board.hub.tally.sent
    board.hold_round(1, 0, 2)
    assert board.answered == [[0, 1, 2]]
    assert [board.kinds(rank) for rank in range(3)] == [["ask", "news", "outcome"]] * 3
    assert board.hub.tally.sent - before == 3, "each of these once for three ranks"


def test_equal_messages_travel_once_and_none_overtakes_another_of_its_rank():
    same, other = encode("announce", is_repeat=True, findings=[]), encode("stack", round=1)
    sent = [(0, same), (1, same), (2, same), (0, other), (1, same)]
    (frame,) = batches(sent)
    assert zlib.decompress(frame).count(same) == 2
    routes = Routes(cast("Any", None), dict.fromkeys(range(3), 0), Tally(), lambda _: None)
    assert list(routes.read(b"relay 0", frame)) == [((0, 1, 2), same), ((0,), other), ((1,), same)]


def test_an_observer_that_the_relay_does_not_reach_is_not_awaited(board: RelayedBoard):
    board.join(0, 1)
    board.hold_round(0, 1)
    assert board.answered == [[0, 1]]
    assert board.now == 0.0, "the clock stands still: no deadline has ended the round"


def test_an_observer_that_went_past_its_relay_is_asked_directly(board: RelayedBoard):
    board.join(0, 1, 2)
    assert board.clients[2].go_direct(0)
    assert not board.clients[2].go_direct(0)
    board.until(lambda: board.reaches(2))
    board.clients[2].sockets[0].recv()
    board.hold_round(0, 1, 2)
    assert board.answered == [[0, 1, 2]]


def test_a_relay_is_needed_until_all_observers_have_left_or_connected_themselves(board: RelayedBoard):
    board.join(0, 1, 2)
    board.until(lambda: board.relay.is_needed)
    board.clients[2].go_direct(0)
    for rank in (0, 1):
        assert board.relay.is_needed
        board.clients[rank].post(0, "leave", report(rank))
        board.until(lambda rank=rank: rank in board.hub.left)
    board.until(lambda: not board.relay.is_needed)


def test_a_hub_waits_for_observers_whose_relay_is_lost(board: RelayedBoard):
    board.join(0, 1)
    board.clients[0].go_direct(0)
    board.until(lambda: board.reaches(0))
    board.clients[0].sockets[0].recv()
    board.lose_relay()
    board.until(lambda: not board.reaches_relay())
    board.announce(0)
    board.report_all(0)
    board.until(lambda: len(board.hub._round.posts) == 1)
    assert not board.rounds, "rank 1 has not noticed yet"
    board.clients[1].check_relay(may_be_starting=True)
    board.clients[1].go_direct(0)
    board.report_all(1)
    board.until(lambda: len(board.hub._round.posts) == 2)
    board.now = 100.0
    board.until(lambda: board.rounds)
    assert board.answered == [[0, 1]], "rank 2 never came"


def test_an_observer_notices_that_its_relay_is_lost_or_never_came(board: RelayedBoard):
    board.join(0)
    client = board.clients[0]
    board.until(lambda: client._presence is not None and client._presence.poll(0, zmq.POLLOUT))
    client.check_relay(may_be_starting=False)
    assert client._relay is not None
    board.lose_relay()
    time.sleep(0.2)
    client.check_relay(may_be_starting=True)
    assert client._relay is None
    board.until(lambda: client.is_connected(0))
    never = Client(
        board.context,
        1,
        TOKEN,
        [("127.0.0.1", board.hub.port)],
        relay=partial(relay_endpoint, TOKEN, 5),
    )
    board.clients[1], board.inbox[1] = never, []
    never.check_relay(may_be_starting=True)
    assert never._relay is not None
    never.check_relay(may_be_starting=False)
    board.until(lambda: never.is_connected(0))


def entry(rank: int, message: bytes) -> bytes:
    return struct.pack("<III", 1, rank, len(message)) + message


def test_a_hub_drops_what_a_relay_must_not_send(board: RelayedBoard):
    hostile = [
        b"batch",  # not compressed
        zlib.compress(entry(0, post_of(report(0), 1)))[:-5],
        zlib.compress(entry(0, post_of(report(0), 1))[:-1]),
        zlib.compress(entry(0, b"")[:-1]),
        zlib.compress(struct.pack("<II", 1 << 31, 0)),  # ranks are cut
        zlib.compress(entry(4, post_of(report(1), 1))),  # of another machine
        zlib.compress(entry(0, post_of(report(1), 1))),  # of another rank
        zlib.compress(bytes(64 << 20)),
        encode("unreachable"),
        encode("unreachable", ranks=[[]]),
    ]
    board.join(0, 1, 2)
    stranger: Any = connect(board.context, TOKEN, "relay 0", ("127.0.0.1", board.hub.port))
    assert stranger.poll(10_000, zmq.POLLOUT)
    for count, each in enumerate(hostile, 1):
        stranger.send(each)
        board.until(lambda count=count: board.hub.tally.malformed == count)
    stranger.close()
    board.lose_relay()
    time.sleep(0.2)  # its sockets are closed
    board.start_relay()
    board.until(lambda: all(board.clients[rank].is_connected(0) for rank in range(3)))
    board.hold_round(0, 1, 2)
    assert board.answered == [[0, 1, 2]]
