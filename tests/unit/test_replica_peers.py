"""A replicator among faulty peers: real sockets, with the other end driven by hand."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.replica_ranks import files, identity, offer, seal, sealed_pieces, stream
from tests.support.small_job import until
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.replication.streams import PIECE, Secret
from torchscout.errors import CheckpointError
from torchscout.utils.aes_gcm import TAG_BYTES, AesGcm
from torchscout.utils.listener import MAGIC, TICKET_BYTES, Listener
from torchscout.utils.network import new_token

TOKEN = new_token()


class Peer:
    """The other end of a connection."""

    def __init__(self, open_socket: Callable[[Any], Any], address: tuple[str, int] = ("", 0)) -> None:
        self.context: zmq.Context = zmq.Context()
        self.socket = open_socket(self.context)
        self.address = address
        self.connections: list[socket.socket] = []
        """Of streams, in either direction."""

    def stream(self, ready: dict[str, Any], data: bytes) -> None:
        self.connections.append(stream(self.address, ready, data))

    def admit(self, _ticket: bytes, connection: socket.socket) -> bool:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # little is on its way at once
        self.connections.append(connection)
        return True

    def offer(self, transfer: str, data: bytes, announced: bytes | None = None) -> dict[str, Any]:
        """Offer a shard and send these bytes; what the holder says to it."""
        self.send(announced or offer(transfer, len(data)))
        answer = self.receive_next("ready", "refused", transfer=transfer)
        if answer["kind"] == "ready":
            self.stream(answer, data)
            answer = self.receive_next("sealed", "refused", transfer=transfer)
        return answer

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive_next(self, *kinds: str, transfer: str | None = None) -> dict[str, Any]:
        """The next message of these kinds."""

        def found() -> dict[str, Any] | None:
            messages = (each.message for each in wire.receive(self.socket))
            wanted = (each for each in messages if each["kind"] in kinds)
            return next((each for each in wanted if transfer in (None, each["transfer"])), None)

        return until(found, f"{kinds} came")

    def close(self) -> None:
        for each in self.connections:
            each.close()
        self.context.destroy(linger=0)


@pytest.fixture
def replicator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Replicator]:
    """Rank 1, which holds for rank 0. A parameter is its timeout, after which a transfer is dropped."""
    replicator = Replicator(1, tmp_path / "b", TOKEN, timeout_seconds=getattr(request, "param", 30.0))
    yield replicator
    replicator.close()


@pytest.fixture
def owner(replicator: Replicator) -> Iterator[Peer]:
    """Rank 0, by hand."""
    replicator.connect([("127.0.0.1", 9), replicator.address], "ab")
    peer = Peer(lambda context: wire.connect(context, TOKEN, 0, replicator.address), replicator.address)
    yield peer
    peer.close()


@pytest.fixture
def holder(replicator: Replicator) -> Iterator[Peer]:
    """Rank 0 as the holder of rank 1's copy, by hand."""
    name = f"torchscout-test-holder-{os.getpid()}"
    peer = Peer(lambda context: wire.listen(context, TOKEN, f"ipc://@{name}"))
    listener = Listener(("127.0.0.1", 0), name, admit=peer.admit)
    listener.start()
    replicator.connect([("127.0.0.1", listener.port), replicator.address], "ab")
    yield peer
    listener.close()
    peer.close()


def shard(tmp_path: Path, rank: int = 0, step: int = 1) -> bytes:
    return seal(tmp_path / "made", rank, step).read_bytes()


def test_a_flipped_bit_anywhere_is_refused(owner: Peer, tmp_path: Path):
    whole = shard(tmp_path)
    for place in (0, 9, 30, 60, 300, -5000, -1):
        data = bytearray(whole)
        data[place] ^= 16
        assert owner.offer(f"t{place}", bytes(data))["kind"] == "refused"
        until(lambda: files(tmp_path / "b") == [], "nothing is kept of it")


def damaged_streams(secret: Secret, data: bytes) -> Iterator[bytes]:
    """What a hostile machine on the way could make of a stream of three pieces."""
    whole = sealed_pieces(secret, data)
    step = PIECE + TAG_BYTES
    first, second, last = whole[:step], whole[step : 2 * step], whole[2 * step :]
    for place in (0, PIECE - 1, PIECE, step - 1, step + 9, len(whole) - 1):
        yield whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    yield second + first + last
    yield first + first + last
    yield sealed_pieces(Secret.new(), data)  # with another key
    yield os.urandom(len(whole))
    yield bytes(len(whole))


def admitted(owner: Peer, transfer: str, size: int) -> Secret:
    """Offer a shard of this size; what the holder expects of its stream."""
    owner.send(offer(transfer, size))
    return Secret.from_json(owner.receive_next("ready", transfer=transfer)["secret"])


def test_what_was_changed_on_its_way_is_refused(owner: Peer, tmp_path: Path):
    data = seal(tmp_path / "made", 0, 1, size=2 * PIECE + 99).read_bytes()
    for number in range(len([*damaged_streams(Secret.new(), data)])):
        secret = admitted(owner, f"t{number}", len(data))
        stream = [*damaged_streams(secret, data)][number]
        with socket.create_connection(owner.address) as connection:
            connection.sendall(MAGIC + secret.ticket + stream)
            answer = owner.receive_next("refused", "sealed", transfer=f"t{number}")
        assert answer["kind"] == "refused", number
        assert "in transit" in answer["why"]
        until(lambda: files(tmp_path / "b") == [], "nothing is kept of it")


def test_a_stream_that_ends_early_leaves_nothing(owner: Peer, tmp_path: Path):
    data = seal(tmp_path / "made", 0, 1, size=2 * PIECE + 99).read_bytes()
    secret = admitted(owner, "t", len(data))
    assert files(tmp_path / "b") != []
    with socket.create_connection(owner.address) as connection:
        connection.sendall(MAGIC + secret.ticket + sealed_pieces(secret, data)[: PIECE + 300])
    until(lambda: files(tmp_path / "b") == [], "it is dropped")


def test_a_process_that_does_not_end_is_killed_and_leaves_nothing(
    replicator: Replicator, owner: Peer, tmp_path: Path
):
    assert replicator.pid is not None
    admitted(owner, "t", len(shard(tmp_path)))
    assert files(tmp_path / "b") != []
    os.kill(replicator.pid, signal.SIGSTOP)
    replicator.close()
    assert files(tmp_path / "b") == []


def is_closed(connection: socket.socket) -> bool:
    """ZeroMQ may greet a connection before it has sent anything."""
    connection.settimeout(20)
    try:
        while connection.recv(100):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_ticket_admits_one_connection_only(owner: Peer, tmp_path: Path):
    data = shard(tmp_path)
    secret = admitted(owner, "t", len(data))
    opening = MAGIC + secret.ticket
    for wrong in (MAGIC + bytes(TICKET_BYTES), b"s" * len(opening), opening[:-1] + bytes([opening[-1] ^ 1])):
        with socket.create_connection(owner.address) as stranger:
            stranger.sendall(wrong + bytes(100_000))
            assert is_closed(stranger)
    with socket.create_connection(owner.address) as connection:
        for number in range(len(opening)):  # however slowly it comes
            connection.sendall(opening[number : number + 1])
        until(lambda: _second_is_closed(owner.address, opening), "nobody else is admitted with it")
        connection.sendall(sealed_pieces(secret, data))
        assert owner.receive_next("sealed", "refused")["kind"] == "sealed"


def _second_is_closed(address: tuple[str, int], opening: bytes) -> bool:
    with socket.create_connection(address) as second:
        second.sendall(opening)
        return is_closed(second)


def test_the_announced_size_and_identity_must_be_those_of_the_bytes(owner: Peer, tmp_path: Path):
    data = shard(tmp_path)
    for number, (announced, sent, reason) in enumerate(
        [
            (offer("0", len(data) - 1), data[:-1], "bytes"),
            (offer("1", len(data) + 1), data + b"x", "bytes"),
            (offer("2", len(data), step=2), data, "announced as the state of rank 0 of 2 at step 2"),
            (offer("3", 1 << 55), data, "has too little space"),
            (offer("4", 0), data, "not the size of a shard"),
            (offer("5", True), data, "not the size of a shard"),
            (offer("6", 10, rank=1), data, "rank 0 offers the state of rank 1"),
            (offer("7", 10, identity={"job": "j"}), data, "identity must have"),
        ]
    ):
        answer = owner.offer(str(number), sent, announced)
        assert answer["kind"] == "refused", number
        assert reason in answer["why"]
        until(lambda: files(tmp_path / "b") == [], "nothing is kept of it")


def test_a_new_offer_gives_up_the_transfer_in_progress(owner: Peer, tmp_path: Path):
    data = shard(tmp_path)
    owner.send(offer("t", PIECE * 3))
    owner.stream(owner.receive_next("ready"), bytes(PIECE))
    assert owner.offer("u", data)["kind"] == "sealed"
    until(lambda: len(files(tmp_path / "b")) == 1, "of the first nothing is left")


def test_a_rank_that_is_not_in_its_care_is_refused(replicator: Replicator, owner: Peer, tmp_path: Path):
    peer = Peer(lambda context: wire.connect(context, TOKEN, 2, replicator.address))
    peer.send(wire.encode("offer", transfer="t", identity=identity(2, 1, 3).to_json(), size=10))
    assert "does not hold copies for rank 2" in peer.receive_next("refused")["why"]
    peer.close()


def rubbish() -> Iterator[list[bytes]]:
    chance = random.Random(5)
    kinds = ["offer", "ready", "hello", "retire", "sealed", "refused", "holding", "retired", "other", 3]
    values = [None, True, -1, 2**70, 0.5, "", "x" * 5000, [], {}, [[1]], [[1, -1]], [["a", 0]], [[2**65, 0]]]
    yield [b""]
    yield [b"[" * 60_000]
    yield [b"{" * 70_000]
    yield [b'{"kind":' + b"9" * 5000 + b"}"]
    yield [b"\xff\xfe", b"x"]
    yield [b'{"kind":"offer"}', b"", b"", b""]
    for _ in range(400):
        names = ("transfer", "identity", "size", "secret", "why", "generations")
        fields = {name: chance.choice(values) for name in names if chance.random() < 0.7}
        yield [
            json.dumps({"kind": chance.choice(kinds), **fields}).encode(),
            os.urandom(chance.randint(0, 99)),
        ]


def test_malformed_messages_of_an_owner_do_no_harm(replicator: Replicator, owner: Peer, tmp_path: Path):
    for frames in rubbish():
        owner.send(*frames)
    for who in ("x", "99999999999", "-1", "²", "0/../../x"):
        stranger = Peer(lambda context, who=who: wire.connect(context, TOKEN, who, replicator.address))
        for frames in rubbish():
            stranger.send(*frames)
        stranger.close()
    assert owner.offer("good", shard(tmp_path))["kind"] == "sealed"
    assert len(files(tmp_path / "b")) == 1
    assert "thread failed" not in " ".join(replicator.problems())


def test_malformed_bytes_from_outside_the_job_do_no_harm(owner: Peer, tmp_path: Path):
    for data in (
        os.urandom(1 << 16),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f" + os.urandom(99),
        MAGIC,
        MAGIC + os.urandom(1 << 16),
    ):
        with socket.create_connection(owner.address) as plain:
            plain.sendall(data)
    assert owner.offer("good", shard(tmp_path))["kind"] == "sealed"


def next_message(holder: Peer, kind: str) -> wire.ReceivedMessage:
    return until(
        lambda: next((h for h in wire.receive(holder.socket) if h.message["kind"] == kind), None), kind
    )


def problem(replicator: Replicator, word: str) -> None:
    problems: list[str] = []

    def is_reported() -> bool:
        problems.extend(replicator.problems())
        return any(word in each for each in problems)

    until(is_reported, f"{word!r}; got {problems}")


def test_an_acknowledgement_of_an_unsent_shard_is_rejected(
    replicator: Replicator, holder: Peer, tmp_path: Path
):
    replicator.send(seal(tmp_path / "b", 1, 4))
    name, message = next_message(holder, "offer")
    holder.send(name, wire.encode("sealed", transfer=message["transfer"]))
    problem(replicator, "step 4 of rank 1 has no copy at rank 0")
    assert replicator.held() == frozenset()


@pytest.mark.parametrize("replicator", [0.5], indirect=True)
def test_a_holder_that_takes_nothing_or_answers_malformed_messages_is_reported(
    replicator: Replicator, holder: Peer, tmp_path: Path
):
    replicator.send(seal(tmp_path / "b", 1, 4))
    name, message = next_message(holder, "offer")
    for secret in (None, 9, "", "00", "x" * 64, "00" * 33, "²" * 32):
        holder.send(name, wire.encode("ready", transfer=message["transfer"], secret=secret))
    for frames in rubbish():
        holder.send(name, *frames)
    problem(replicator, "did not answer for 0.5 s")
    assert replicator.held() == frozenset()


@pytest.mark.parametrize("replicator", [2.0], indirect=True)
def test_a_slow_holder_is_reported_and_its_copy_counts(replicator: Replicator, holder: Peer, tmp_path: Path):
    path = seal(tmp_path / "b", 1, 4, size=30 * PIECE)
    replicator.send(path)
    name, message = next_message(holder, "offer")
    secret = Secret.new()
    holder.send(name, wire.encode("ready", transfer=message["transfer"], secret=secret.to_json()))
    until(lambda: holder.connections, "the stream came")
    (connection,) = holder.connections
    assert connection.recv(99, socket.MSG_PEEK)
    size, cipher, taken = path.stat().st_size, AesGcm(secret.key, encrypts=False), b""
    for number in range(-(-size // PIECE)):
        length = min(PIECE, size - number * PIECE)
        sealed = bytearray()
        while len(sealed) < length + TAG_BYTES:
            sealed += connection.recv(length + TAG_BYTES - len(sealed))
        cipher.decrypt(number, memoryview(sealed)[:length], memoryview(sealed)[length:])
        taken += sealed[:length]
        holder.socket.poll(100)
    assert replicator.held() == frozenset()
    holder.send(name, wire.encode("sealed", transfer=message["transfer"]))
    until(replicator.held, "the copy counts")
    problem(replicator, "is slow")
    assert taken == path.read_bytes()


def test_an_address_that_is_taken_is_a_clear_error(replicator: Replicator, tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot listen at 127"):
        Replicator(0, tmp_path, TOKEN, listens=replicator.address)


def test_a_rank_beyond_the_addresses_is_a_mistake(replicator: Replicator):
    with pytest.raises(ValueError, match=r"rank 1 .* got 1, 1"):
        replicator.connect([("127.0.0.1", 1)], ["a"])


def test_a_refusal_among_other_messages_does_not_end_the_reading_of_them(
    replicator: Replicator, holder: Peer, tmp_path: Path
):
    """It closes the connection while what came over it is read."""
    replicator.send(seal(tmp_path / "b", 1, 4))
    name, message = next_message(holder, "offer")
    with suppress(zmq.ZMQError):  # it may close the connection before all are sent
        for _ in range(20):
            holder.send(name, wire.encode("refused", transfer=message["transfer"], why="no room"))
    next_message(holder, "offer")  # it tries again
    problems = replicator.problems()
    assert any("it was refused: no room" in each for each in problems)
    assert not any("copying shards to other machines: " in each for each in problems)


def test_a_generation_beyond_any_name_is_refused(owner: Peer):
    owner.send(wire.encode("retire", generations=[[10**300, 0]], transfer="t"))
    assert "a generation is a step and a lineage" in owner.receive_next("refused")["why"]
