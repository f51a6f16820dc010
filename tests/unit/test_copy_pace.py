"""How fast copies are sent, given how long training's steps take."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from tests.support.replica_ranks import seal, sealed_pieces
from torchscout.checkpoint.replication.pace import SLOWEST, CopyPace, RateLimit
from torchscout.checkpoint.replication.streams import OutgoingStream, Secret
from torchscout.utils.listener import MAGIC

GIGABYTE = 1 << 30


def paced(*, usual: int = 8) -> CopyPace:
    pace = CopyPace()
    for _ in range(usual):
        pace.step_took(0.1, during_copy=False)
    return pace


def test_copies_that_do_not_slow_steps_are_not_limited():
    pace = paced()
    assert not any(pace.step_took(0.104, during_copy=True) for _ in range(20))
    assert pace.rate is None


def test_each_slowed_step_halves_the_rate_down_to_a_minimum_and_others_double_it():
    pace = paced()
    rates = []
    for seconds in (0.2, 0.2, 0.2, 0.1, 0.1, 0.1):
        assert pace.step_took(seconds, during_copy=True)
        rates.append(pace.rate)
    assert rates == [GIGABYTE, GIGABYTE // 2, GIGABYTE // 4, GIGABYTE // 2, GIGABYTE, None]
    for _ in range(20):
        pace.step_took(0.2, during_copy=True)
    assert pace.rate == SLOWEST
    assert not pace.step_took(0.2, during_copy=True)


def test_slow_steps_without_a_copy_limit_nothing_and_become_usual():
    pace = paced()
    assert not any(pace.step_took(0.3, during_copy=False) for _ in range(40))
    assert not pace.step_took(0.3, during_copy=True)
    assert pace.rate is None


@pytest.mark.parametrize("usual", [0, 3])
def test_nothing_is_concluded_from_too_few_steps(usual: int):
    pace = paced(usual=usual)
    assert not pace.step_took(9.0, during_copy=True)


def test_a_limited_stream_sends_the_same_bytes(tmp_path: Path):
    path, secret, limit = seal(tmp_path, 0, 1, 3 << 20), Secret.new(), RateLimit()
    limit.rate = 4 << 20
    received = bytearray()

    def receive(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 16):
                received.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as server, path.open("rb") as file:
        reader = threading.Thread(target=receive, args=(server,))
        reader.start()
        size = path.stat().st_size
        stream = OutgoingStream(server.getsockname(), secret, file.fileno(), size, lambda: None, limit)
        began = time.monotonic()
        stream.start()
        stream.join(30)
        reader.join(30)
    assert stream.succeeded
    assert bytes(received) == MAGIC + secret.ticket + sealed_pieces(secret, path.read_bytes())
    assert time.monotonic() - began >= size / (4 << 20)
