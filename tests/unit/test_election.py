"""Hubs that are elected: when an observer looks for one, and when one may decide. Real sockets, no clock."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq

from tests.unit.test_board import TOKEN, Board, incident
from torchscout.observer.rounds.client import Election
from torchscout.observer.rounds.protocol import Client
from torchscout.observer.rounds.reported_incidents import Finding

NOBODY = ("127.0.0.1", 9)
SECONDS = 5.0


@pytest.fixture
def board() -> Iterator[Board]:
    """Of a hub that was elected, but for its opening."""
    board = Board(place=2)
    yield board
    for end in (*board.clients.values(), board.hub):
        end.close()
    board.context.destroy(linger=0)


@pytest.fixture
def client() -> Iterator[Client]:
    """Of an observer that reaches nobody; there are four candidates."""
    with zmq.Context() as context:
        client = Client(context, 1, TOKEN, [NOBODY] * 4)
        yield client
        client.close()


def test_a_candidate_has_a_port_and_refuses_connections_until_it_is_elected(board: Board):
    assert not board.hub.is_open
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", board.hub.port))
    board.hub.open()
    socket.create_connection(("127.0.0.1", board.hub.port)).close()


def test_an_elected_hub_decides_nothing_without_a_majority(board: Board):
    board.hub.open()
    board.join(0)
    board.turn()
    board.now = 1000.0
    board.announce(0)
    board.until(lambda: board.hub.problem)
    assert "1 of 3 observers" in board.hub.problem
    assert not board.hub.is_needed
    board.join(2)
    board.hold_round(0, 2)
    assert board.hub.problem is None
    assert board.hub.is_needed
    assert board.answered == [[0, 2]]


def test_an_elected_hub_gives_the_others_time_to_find_it(board: Board):
    board.hub.open()
    board.join(0, 1)
    board.announce(0)
    board.until(lambda: board.hub.tally.received)
    assert board.kinds(0) in ([], ["present"])
    board.now = board.hub.config.election_seconds + 1
    board.hold_round(0, 1)


def test_another_hubs_finding_about_the_same_silence_is_not_reported_again(board: Board):
    board.hub.open()
    board.join(0, 1, 2)
    board.verdict = incident(1)
    known = Finding.of(incident(1), {}).to_json()
    board.clients[0].send(0, "announce", is_repeat=True, findings=[known])
    board.until(lambda: "ask" in board.kinds(0))
    board.report_all(0, 1, 2)
    board.until(lambda: "outcome" in board.kinds(0))
    assert (len(board.rounds), board.written) == (1, [])


def test_candidates_are_looked_for_one_after_the_other_and_then_none_is_left(client: Client):
    elected: list[int] = []
    election = Election(client, elected.append)
    for now in range(60):
        election.tick(float(now), SECONDS)
    assert elected == [2, 3]
    assert election.is_exhausted
    assert election.order() == [2, 3, 0, 1]
    election.answered(3)
    assert not election.is_exhausted
    assert election.order() == [3], "earlier hubs know nothing of what was found since"


def test_a_hub_that_is_lost_for_a_moment_is_not_replaced(client: Client):
    elected: list[int] = []
    election = Election(client, elected.append)
    election.tick(0.0, SECONDS)
    election.tick(SECONDS - 0.1, SECONDS)
    assert elected == []


def test_a_candidate_has_time_to_be_found_before_the_next_one_is_looked_for(client: Client):
    elected: list[int] = []
    election = Election(client, elected.append)
    assert [election.hold(now, SECONDS) for now in (0.0, 1.0, SECONDS, 2 * SECONDS)] == [
        True,
        True,
        True,
        False,
    ]
    assert elected == [2, 3]
