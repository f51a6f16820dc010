"""The connection that carries a shard's bytes."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.replica_ranks import seal, sealed_pieces
from tests.support.small_job import until
from torchscout.checkpoint.replication.pace import RateLimit
from torchscout.checkpoint.replication.streams import OutgoingStream, Secret
from torchscout.utils.listener import MAGIC


def test_what_the_other_end_sends_does_not_discard_what_is_on_its_way(tmp_path: Path):
    """As it was seen: a listener sends ZeroMQ's greeting before it knows that a stream comes."""
    path, secret = seal(tmp_path, 0, 1), Secret.new()
    size = path.stat().st_size
    with socket.create_server(("127.0.0.1", 0)) as server, path.open("rb") as file:
        stream = OutgoingStream(server.getsockname(), secret, file.fileno(), size, lambda: None, RateLimit())
        stream.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(64))
            until(lambda: stream.moved == size, "all is sent")
            stream.join(0.3)  # in which it may close the connection
            received = b""
            while data := connection.recv(1 << 16):
                received += data
        stream.join(10)
    assert received == MAGIC + secret.ticket + sealed_pieces(secret, path.read_bytes())
    assert stream.succeeded


def test_a_stream_to_nobody_fails_with_the_reason_and_closes_its_file(tmp_path: Path):
    path = seal(tmp_path, 0, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    before = len([*Path("/proc/self/fd").iterdir()])
    with path.open("rb") as file:
        stream = OutgoingStream(
            address, Secret.new(), file.fileno(), path.stat().st_size, lambda: None, RateLimit()
        )
        stream.start()
        stream.join(20)
    assert stream.ended
    assert not stream.succeeded
    assert isinstance(stream.error, ConnectionRefusedError)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
