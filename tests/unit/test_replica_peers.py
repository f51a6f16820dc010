"""A replicator among faulty peers: real sockets, with the other end driven by hand."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.replica_ranks import files, identity, seal
from tests.support.small_job import until
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.storage.shards import path_of
from torchscout.errors import CheckpointError
from torchscout.utils.network import new_token

TOKEN = new_token()


class Peer:
    """The other end of a connection."""

    def __init__(self, open_socket: Callable[[Any], Any]) -> None:
        self.context: zmq.Context = zmq.Context()
        self.socket = open_socket(self.context)

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
        self.context.destroy(linger=0)


@pytest.fixture
def replicator(tmp_path: Path) -> Iterator[Replicator]:
    """Rank 1, which holds for rank 0."""
    replicator = Replicator(1, tmp_path / "b", TOKEN, timeout_seconds=0.5)
    yield replicator
    replicator.close()


@pytest.fixture
def owner(replicator: Replicator) -> Iterator[Peer]:
    """Rank 0, by hand."""
    replicator.connect([("127.0.0.1", 9), replicator.address], "ab")
    peer = Peer(lambda context: wire.connect(context, TOKEN, 0, replicator.address))
    yield peer
    peer.close()


@pytest.fixture
def holder(replicator: Replicator) -> Iterator[Peer]:
    """Rank 0 as the holder of rank 1's copy, by hand."""
    peer = Peer(lambda context: wire.listen(context, TOKEN, "tcp://127.0.0.1:*"))
    port = int(peer.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    replicator.connect([("127.0.0.1", port), replicator.address], "ab")
    yield peer
    peer.close()


def offer(transfer: str, size: Any, rank: int = 0, step: int = 1, **changes: Any) -> bytes:
    fields = {"identity": identity(rank, step).to_json(), "size": size, **changes}
    return wire.encode("offer", transfer=transfer, **fields)


def chunk(transfer: str, offset: Any) -> bytes:
    return wire.encode("chunk", transfer=transfer, offset=offset)


def shard(tmp_path: Path, rank: int = 0, step: int = 1) -> bytes:
    return seal(tmp_path / "made", rank, step).read_bytes()


def test_a_valid_shard_is_received_and_sealed(owner: Peer, tmp_path: Path):
    data = shard(tmp_path)
    owner.send(offer("t", len(data)))
    assert owner.receive_next("credit", "refused")["upto"] == len(data)
    for start in range(0, len(data), 4000):
        owner.send(chunk("t", start), data[start : start + 4000])
    owner.receive_next("sealed")
    assert path_of(tmp_path / "b", identity(0, 1), 1).read_bytes() == data


@pytest.mark.parametrize("place", [0, 9, 30, 60, 300, -5000, -1])
def test_a_flipped_bit_anywhere_is_refused(owner: Peer, tmp_path: Path, place: int):
    data = bytearray(shard(tmp_path))
    data[place] ^= 16
    owner.send(offer("t", len(data)))
    owner.send(chunk("t", 0), bytes(data))
    assert owner.receive_next("refused", "sealed")["kind"] == "refused"
    assert files(tmp_path / "b") == []


def test_the_announced_size_and_identity_must_be_those_of_the_bytes(owner: Peer, tmp_path: Path):
    data = shard(tmp_path)
    for number, (announced, reason) in enumerate(
        {
            offer("0", len(data) - 1): "bytes",
            offer("1", len(data) + 1): "bytes",
            offer("2", len(data), step=2): "announced as the state of rank 0 of 2 at step 2",
            offer("3", 1 << 55): "has too little space",
            offer("4", 0): "not the size of a shard",
            offer("5", True): "not the size of a shard",
            offer("6", 10, rank=1): "rank 0 offers the state of rank 1",
            offer("7", 10, identity={"job": "j"}): "identity must have",
        }.items()
    ):
        owner.send(announced)
        owner.send(chunk(str(number), 0), data + b"x" * (number == 1))
        answer = owner.receive_next("refused", "sealed", transfer=str(number))
        assert answer["kind"] == "refused", number
        assert reason in answer["why"]
        assert files(tmp_path / "b") == []


def test_pieces_out_of_order_beyond_the_credit_or_of_nothing_are_refused(owner: Peer, tmp_path: Path):
    data = shard(tmp_path)
    for offset, piece in (
        (1, data),
        (-1, data),
        (True, data),
        ("0", data),
        (None, data),
        (0, b""),
        (0, data + b"x"),
    ):
        owner.send(offer("t", len(data)))
        owner.send(chunk("t", offset), piece)
        assert owner.receive_next("refused", "sealed")["kind"] == "refused", offset
    owner.send(chunk("unknown", 0), data)
    assert "no such transfer is in progress" in owner.receive_next("refused")["why"]
    owner.send(offer("t", wire.WINDOW * 3))
    for offset in range(0, wire.WINDOW + wire.CHUNK, wire.CHUNK):
        owner.send(chunk("t", offset), bytes(wire.CHUNK))
    owner.receive_next("credit")
    assert files(tmp_path / "b") != [], "what is within the credit is taken"
    owner.send(offer("u", len(data)))
    owner.send(chunk("u", 0), data)
    owner.receive_next("sealed")
    assert len(files(tmp_path / "b")) == 1, "who begins anew has given up what was under way"


def test_a_rank_that_is_not_in_its_care_is_refused(replicator: Replicator, owner: Peer, tmp_path: Path):
    peer = Peer(lambda context: wire.connect(context, TOKEN, 2, replicator.address))
    peer.send(wire.encode("offer", transfer="t", identity=identity(2, 1, 3).to_json(), size=10))
    assert "does not hold copies for rank 2" in peer.receive_next("refused")["why"]
    peer.close()


def rubbish() -> Iterator[list[bytes]]:
    chance = random.Random(5)
    kinds = [
        "offer",
        "chunk",
        "hello",
        "retire",
        "credit",
        "sealed",
        "refused",
        "holding",
        "retired",
        "other",
        3,
    ]
    values = [None, True, -1, 2**70, 0.5, "", "x" * 5000, [], {}, [[1]], [[1, -1]], [["a", 0]], [[2**65, 0]]]
    yield [b""]
    yield [b"[" * 60_000]
    yield [b"{" * 70_000]
    yield [b'{"kind":' + b"9" * 5000 + b"}"]
    yield [b"\xff\xfe", b"x"]
    yield [b'{"kind":"offer"}', b"", b"", b""]
    for _ in range(400):
        names = ("transfer", "identity", "size", "offset", "upto", "why", "generations")
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
    data = shard(tmp_path)
    owner.send(offer("good", len(data)))
    owner.send(chunk("good", 0), data)
    owner.receive_next("sealed")
    assert len(files(tmp_path / "b")) == 1
    assert "thread failed" not in " ".join(replicator.problems())


def test_malformed_messages_from_outside_the_job_do_no_harm(
    replicator: Replicator, owner: Peer, tmp_path: Path
):
    for data in (
        os.urandom(1 << 16),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f" + os.urandom(99),
    ):
        with socket.create_connection(replicator.address) as plain:
            plain.sendall(data)
    whole = shard(tmp_path)
    owner.send(offer("good", len(whole)))
    owner.send(chunk("good", 0), whole)
    owner.receive_next("sealed")


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
    name, message, _ = next_message(holder, "offer")
    holder.send(name, wire.encode("sealed", transfer=message["transfer"]))
    problem(replicator, "step 4 of rank 1 has no copy at rank 0")
    assert replicator.held() == frozenset()


def test_a_holder_that_takes_nothing_or_answers_malformed_messages_is_reported(
    replicator: Replicator, holder: Peer, tmp_path: Path
):
    replicator.send(seal(tmp_path / "b", 1, 4))
    name, message, _ = next_message(holder, "offer")
    for upto in (-1, 0, 1 << 60, None, "9", 0.5):
        holder.send(name, wire.encode("credit", transfer=message["transfer"], upto=upto))
    for frames in rubbish():
        holder.send(name, *frames)
    problem(replicator, "did not answer for 0.5 s")
    assert replicator.held() == frozenset()


def test_a_slow_holder_is_reported_and_its_copy_counts(replicator: Replicator, holder: Peer, tmp_path: Path):
    path = seal(tmp_path / "b", 1, 4)
    replicator.send(path)
    name, message, _ = next_message(holder, "offer")
    taken, size = bytearray(), path.stat().st_size
    while len(taken) < size:
        upto = min(size, len(taken) + 1 + size // 6)
        holder.send(name, wire.encode("credit", transfer=message["transfer"], upto=upto))
        received = next_message(holder, "chunk")
        assert received.message["offset"] == len(taken)
        taken += received.data
        assert len(taken) <= upto, "never more than there is room for"
        holder.socket.poll(250)
    holder.send(name, wire.encode("sealed", transfer=message["transfer"]))
    until(replicator.held, "the copy counts")
    problem(replicator, "is slow")
    assert bytes(taken) == path.read_bytes()


def test_an_address_that_is_taken_is_a_clear_error(replicator: Replicator, tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot listen at 127"):
        Replicator(0, tmp_path, TOKEN, listens=replicator.address)


def test_a_rank_beyond_the_addresses_is_a_mistake(replicator: Replicator):
    with pytest.raises(ValueError, match="rank 1 needs an address and a host per rank, got 1, 1"):
        replicator.connect([("127.0.0.1", 1)], ["a"])


def test_a_refusal_among_other_messages_does_not_end_the_reading_of_them(
    replicator: Replicator, holder: Peer, tmp_path: Path
):
    """It closes the connection while what came over it is read."""
    replicator.send(seal(tmp_path / "b", 1, 4))
    name, message, _ = next_message(holder, "offer")
    for _ in range(20):
        holder.send(name, wire.encode("refused", transfer=message["transfer"], why="no room"))
    next_message(holder, "offer")  # it tries again
    problems = replicator.problems()
    assert any("it was refused: no room" in each for each in problems)
    assert not any("copying shards to other machines: " in each for each in problems)


def test_a_generation_beyond_any_name_is_refused(owner: Peer):
    owner.send(wire.encode("retire", generations=[[10**300, 0]], transfer="t"))
    assert "a generation is a step and a lineage" in owner.receive_next("refused")["why"]
