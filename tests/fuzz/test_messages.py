"""Mutated messages between ranks: hubs, observers and holders of copies drop them and continue.

Over real sockets, with the real diagnosis behind them. The sender has the job's token: a mistake of ours,
or another version.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.mutation import bytes_mutant, text_mutant, tried
from tests.support.replica_ranks import identity, seal, sealed_pieces
from tests.unit.test_board import incident, report
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.receiver import ReplicaReceiver
from torchscout.checkpoint.replication.sender import ReplicaSender
from torchscout.checkpoint.replication.streams import Secret
from torchscout.checkpoint.storage.shards import path_of
from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Phase, RankReport
from torchscout.mesh import Mesh
from torchscout.observer.process import ObserverProcess
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds import protocol
from torchscout.observer.rounds.hub import Hub
from torchscout.observer.rounds.post import HEADER, Post
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.reported_incidents import Finding
from torchscout.observer.spec import ObserverSpec, describe_mesh
from torchscout.observer.trainer import TrainerView
from torchscout.run.folder import Identity
from torchscout.run.reader import incident_lines
from torchscout.utils import network

TOKEN = network.new_token()
CONFIG = ObserverConfig(address="127.0.0.1")
RANKS = 3


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[ProgressWriter]]:
    """Trainers in the middle of a step; the last one is an operation behind."""
    made = [ProgressWriter.create(tmp_path / "records", rank) for rank in range(RANKS)]
    for rank, writer in enumerate(made):
        world = writer.declare(CommGroup("world", tuple(range(RANKS)), "world", timeout=600.0))
        pair = writer.declare(CommGroup("0 -> 1", (0, 1), "0 -> 1", pair=True))
        phrase = writer.phrase("all_to_all float32[8]", 7)
        for _ in range(3):
            writer.advance(Phase.FORWARD)
            if rank < 2:
                writer.issue(pair, phrase)
            writer.issue(world, phrase, [1, 1, 1], [1, 1, 1])
            writer.next_step()
        writer.advance(Phase.FORWARD)
        if rank < RANKS - 1:
            writer.issue(world, phrase, [1, 1, 1], [1, 1, 1])
    yield made
    for writer in made:
        writer.close()


def assigned(writer: ProgressWriter, folder: Path, **changes: Any) -> ObserverSpec:
    return ObserverSpec(
        rank=0,
        size=RANKS,
        record=str(writer.path),
        run=Identity(str(folder / "run")),
        token=TOKEN,
        config=CONFIG,
        **changes,
    )


def reported(writer: ProgressWriter) -> RankReport:
    """What the observer of this trainer would say, had it been silent for long."""
    trainer = TrainerView(writer.path, None)
    trainer.look(time.monotonic())
    return replace(trainer.report(CONFIG, 1e6, time.monotonic()), excused=False, moving=False)


class _Job:
    """A hub as an observer hosts it, and clients of three ranks; the clock is ours."""

    def __init__(self, writers: list[ProgressWriter], folder: Path) -> None:
        mesh = describe_mesh(Mesh.grid(replica=RANKS))
        self.observing = ObserverProcess(assigned(writers[0], folder, hub=0, mesh=mesh))
        assert self.observing._hub is not None
        self.hub: Hub = self.observing._hub
        self.hub.routes.relays = dict.fromkeys(range(RANKS), 0)
        self.context: zmq.Context = zmq.Context()
        self.clients = [
            protocol.Client(self.context, rank, TOKEN, [("127.0.0.1", self.hub.port)])
            for rank in range(RANKS)
        ]
        self.relay = protocol.connect(self.context, TOKEN, "relay 0", ("127.0.0.1", self.hub.port))
        self.now = 0.0
        for each in (self.relay, *(client.sockets[0] for client in self.clients)):
            assert each.poll(10_000, zmq.POLLOUT)
        self.reports = [reported(writer) for writer in writers]

    def send(self, rank: int, message: bytes) -> None:
        self.clients[rank].sockets[0].send(message, zmq.NOBLOCK)
        assert self.hub.socket.poll(10_000)
        self.tick()

    def pass_on(self, frame: bytes) -> None:
        """Send what a relay would."""
        self.relay.send(frame, zmq.NOBLOCK)
        assert self.hub.socket.poll(10_000)
        self.tick()

    def tick(self) -> None:
        self.hub.tick(self.now)
        while self.relay.poll(0):
            self.relay.recv_multipart()
        for client in self.clients:
            for _ in client.receive():
                pass

    def forget(self) -> None:
        """A hub that nobody has left and that has said nothing, as at the beginning of a job."""
        self.hub._left.clear()
        self.hub._reported.__init__()

    def pass_time(self) -> None:
        """Until any round is over, with its reports and its stacks."""
        for _ in range(2):
            self.now += 100.0
            self.tick()

    def holds_a_round(self) -> bool:
        """Whether three ranks that report properly still get the right answer: in the next round or, if the
        hub was told that a rank cannot be reached, once it has heard from it again."""
        return any(self._names_the_last() for _ in range(2))

    def _names_the_last(self) -> bool:
        self.pass_time()
        self.forget()
        self.send(0, protocol.encode("announce", is_repeat=True))
        for rank in range(RANKS):
            self.send(rank, post_of(self.reports[rank], self.hub._rounds))
        self.pass_time()
        return [each.ranks for each in self.hub._reported.findings] == [(RANKS - 1,)]

    def close(self) -> None:
        for each in (self.relay, *self.clients):
            each.close()
        self.observing._close()
        self.context.destroy(linger=0)


@pytest.fixture
def job(writers: list[ProgressWriter], tmp_path: Path) -> Iterator[_Job]:
    job = _Job(writers, tmp_path)
    yield job
    job.close()


def messages_to_a_hub(number: int) -> list[dict[str, Any]]:
    findings = [Finding.of(incident(1), {}).to_json()]
    return [
        {"kind": "announce", "is_repeat": True},
        {"kind": "announce", "is_repeat": True, "findings": findings},
        {"kind": "survey"},
        {"kind": "stack", "round": number, "stack": "File x, line 1", "waiting": True},
        {"kind": "moved", "seconds": 1.5, "findings": findings, "is_reporter": True},
        {"kind": "declined", "round": number},
    ]


def post_mutant(chance: random.Random, reports: list[RankReport], rank: int, number: int) -> bytes:
    """A post with other bytes or, so that more of it is read, with other numbers in its parts."""
    stalled = replace(reports[rank], stalled=reports[rank].progress, near_timeout=True)
    killed = replace(report(rank, gone_seconds=3.0), how="killed", wait_status=9)
    sent = chance.choice([reports[rank], killed, stalled, replace(reports[rank], is_incomplete=True)])
    data = bytearray(post_of(sent, number, chance.choice(("report", "report", "leave"))))
    if chance.random() < 0.5:
        return bytes_mutant(chance, bytes(data))
    rows, operations, runs, phrases, *_ = Post(bytes(data), RANKS).starts
    fixed = HEADER.size - 18  # the lengths stay, or nothing else would be looked at
    for _ in range(chance.choice((1, 2, 8))):
        begin, end = chance.choice([(13, fixed), (rows, operations), (operations, runs), (runs, phrases)])
        if begin < end:
            data[chance.randrange(begin, end)] = chance.choice((0, 1, 2, 3, 127, 255, chance.randrange(256)))
    return bytes(data)


def batch_mutant(chance: random.Random, reports: list[RankReport], number: int) -> bytes:
    """What a relay sends: with other bytes, before or after it is compressed, or in another order."""
    if chance.random() < 0.2:
        return text_mutant(chance, {"kind": "unreachable", "ranks": [0, 2]})
    entries = [(rank, post_mutant(chance, reports, rank, number)) for rank in range(RANKS)]
    entries += [(rank, protocol.encode("announce", is_repeat=True)) for rank in range(RANKS)]
    body = b"".join(
        struct.pack("<III", 1, rank, len(message)) + message for rank, message in chance.sample(entries, 4)
    )
    if chance.random() < 0.3:
        body = bytes_mutant(chance, body)
    frame = zlib.compress(body, 1)
    return bytes_mutant(chance, frame) if chance.random() < 0.2 else frame


def test_a_hub_survives_every_message(job: _Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert job.holds_a_round()

    def attempt(chance: random.Random) -> None:
        if chance.random() < 0.1:
            job.forget()
        if chance.random() < 0.3:
            job.now += chance.choice((0.1, 3.0, 30.0))
        if chance.random() < 0.3:
            job.send(0, protocol.encode("announce", is_repeat=True))
        for _ in range(chance.randrange(4)):  # some answer properly
            rank = chance.randrange(RANKS)
            job.send(rank, post_of(job.reports[rank], job.hub._rounds))
        rank = chance.randrange(RANKS)
        way = chance.random()
        if way < 0.2:
            job.pass_on(batch_mutant(chance, job.reports, job.hub._rounds))
        elif way < 0.7:
            job.send(rank, post_mutant(chance, job.reports, rank, job.hub._rounds))
        else:
            job.send(rank, text_mutant(chance, chance.choice(messages_to_a_hub(job.hub._rounds))))
        if chance.random() < 0.02:
            assert job.holds_a_round()

    tried(attempt, ())
    assert job.holds_a_round()
    assert job.hub.tally.malformed
    assert not (tmp_path / "run" / "records").exists(), "a report kept a round from being diagnosed"
    for line in incident_lines(tmp_path / "run"):
        assert all(rank in range(RANKS) for rank in getattr(line, "ranks", ()))


def test_an_observer_survives_every_message(
    writers: list[ProgressWriter], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    context: zmq.Context = zmq.Context()
    hub, listener = protocol.listen_limited(context, TOKEN, "127.0.0.1", 0)
    listener.start()
    observing = ObserverProcess(assigned(writers[0], tmp_path))
    observing._obey({"hubs": [["127.0.0.1", listener.port]]})
    client, rounds = observing._client, observing._rounds
    assert client is not None
    assert rounds is not None
    assert client.sockets[0].poll(10_000, zmq.POLLOUT)
    finding = json.loads(json.dumps(Finding.of(incident(0, 1), {0: report(0)}).to_json()))
    messages = [
        {"kind": "accepted", "seconds": 9.0},
        {"kind": "ask", "round": 3},
        {"kind": "sample", "round": 3},
        {"kind": "show", "round": 3, "characters": 100},
        {"kind": "outcome", "findings": [finding]},
        {"kind": "outcome", "findings": []},
    ]

    def deliver(message: bytes) -> None:
        hub.send_multipart([b"0", message])
        assert client.sockets[0].poll(10_000)
        observing._act()
        while hub.poll(0):
            frame = hub.recv_multipart()[1]
            assert frame[0] == 1 or protocol.decode(frame, protocol.Tally()) is not None

    def attempt(chance: random.Random) -> None:
        deliver(text_mutant(chance, chance.choice(messages)))
        if chance.random() < 0.05:
            json.dumps(observing._status())

    tried(attempt, ())
    assert client.tally.malformed
    before = rounds.rounds
    deliver(protocol.encode("ask", round=9))
    assert rounds.rounds == before + 1
    hub.close()
    listener.close()
    observing._close()
    context.destroy(linger=0)


class _Copying:
    """A holder of copies, and the rank that sends them; by hand, and the clock is ours."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context = zmq.Context()
        listening = wire.listen(self.context, TOKEN, "tcp://127.0.0.1:*")
        port = int(listening.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.memory = folder / "held"
        self.inbox = ReplicaReceiver(listening, 1, self.memory, 0.5)
        self.inbox.owners = frozenset({0})
        self.sender = wire.connect(self.context, TOKEN, 0, ("127.0.0.1", port))
        assert self.sender.poll(10_000, zmq.POLLOUT)
        self.data = seal(folder / "made", 0, 1, size=3000).read_bytes()
        self.kept = path_of(self.memory, identity(0, 1), 1)
        self.now = 0.0

    def send(self, frame: bytes) -> list[dict[str, Any]]:
        self.sender.send(frame)
        assert self.inbox.socket.poll(10_000)
        self.turn()
        return [received.message for received in wire.receive(self.sender)]

    def turn(self) -> None:
        self.inbox.turn(self.now)
        self.inbox.problems.clear()

    def messages(self, transfer: str) -> list[dict[str, Any]]:
        named = {"identity": identity(0, 1).to_json(), "size": len(self.data)}
        return [
            {"kind": "offer", "transfer": transfer, **named},
            {"kind": "hello"},
            {"kind": "retire", "generations": [[1, 0], [2, 0]]},
        ]

    def stream(self, ready: dict[str, Any], data: bytes) -> None:
        """Send these bytes as the transfer for which the holder is ready, until it has ended."""
        secret = Secret.from_json(ready["secret"])
        near, far = socket.socketpair()
        with near:
            if not self.inbox.admit(secret.ticket, far):  # given up meanwhile
                far.close()
                return
            self.turn()
            near.sendall(data)
        (arrival,) = self.inbox._arrivals.values()
        assert arrival.stream is not None
        arrival.stream.join(10)
        self.turn()

    def close(self) -> None:
        self.inbox.close()
        self.sender.close()
        self.context.destroy(linger=0)


def test_a_holder_of_copies_keeps_only_complete_shards(tmp_path: Path):
    copying = _Copying(tmp_path)

    def attempt(chance: random.Random) -> None:
        copying.now += chance.choice((0.0, 0.0, 0.1, 2.0))
        offer, *others = copying.messages("t")
        message = chance.choice([offer, offer, *others])
        answers = copying.send(text_mutant(chance, message) if chance.random() < 0.5 else _frame(message))
        for ready in [each for each in answers if each["kind"] == "ready"]:
            sent = sealed_pieces(Secret.from_json(ready["secret"]), copying.data)
            copying.stream(ready, bytes_mutant(chance, sent) if chance.random() < 0.7 else sent)
        if copying.kept.exists():
            assert copying.kept.read_bytes() == copying.data, "a damaged copy was kept"
            copying.kept.unlink()
        left = [path for path in tmp_path.rglob("*.shard") if "made" not in path.parts]
        assert not left, "something else was kept"

    tried(attempt, ())
    answers = copying.send(_frame(copying.messages("good")[0]))
    while not (found := [each for each in answers if each.get("transfer") == "good"]):
        assert copying.sender.poll(10_000)
        answers = [received.message for received in wire.receive(copying.sender)]
    (ready,) = found
    copying.stream(ready, sealed_pieces(Secret.from_json(ready["secret"]), copying.data))
    assert copying.kept.read_bytes() == copying.data
    assert not copying.inbox.admit(Secret.from_json(ready["secret"]).ticket, copying.sender)
    copying.close()


def _frame(part: Any) -> bytes:
    return part if isinstance(part, bytes) else json.dumps(part).encode()


class _Sending:
    """A rank that copies a shard, and its holder by hand."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context = zmq.Context()
        self.holder = wire.listen(self.context, TOKEN, "tcp://127.0.0.1:*")
        port = int(self.holder.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.path = seal(folder / "own", 0, 1, size=3000)
        self.size = self.path.stat().st_size
        self.now = 0.0
        self.outbox = ReplicaSender(
            lambda: wire.connect(self.context, TOKEN, 0, ("127.0.0.1", port)),
            ("127.0.0.1", 9),  # where nobody listens
            "rank 1",
            timeout=1e9,
        )
        self.outbox.put(self.path)
        self.transfer = self.offered()

    def offered(self) -> str:
        """The transfer that is offered next."""
        self.now += 1000.0
        until = time.monotonic() + 10
        while time.monotonic() < until:
            self.outbox.turn(self.now)
            self.holder.poll(5)
            for each in wire.receive(self.holder):
                if each.message["kind"] == "offer":
                    return str(each.message["transfer"])
        raise AssertionError("nothing was offered")

    def say(self, frame: bytes) -> None:
        self.holder.send_multipart([b"0", frame])
        assert self.outbox.socket.poll(10_000)
        self.outbox.turn(self.now)
        self.outbox.problems.clear()

    def go_on(self) -> None:
        """Have a transfer under way, if the last one was ended."""
        copy = self.outbox._copy
        if copy is not None and copy.transfer == self.transfer:
            return
        if copy is None and self.outbox._waiting is None:
            self.outbox.put(self.path)
        self.transfer = self.offered()

    def close(self) -> None:
        self.outbox.close()
        self.holder.close()
        self.context.destroy(linger=0)


def test_a_sender_of_copies_rejects_impossible_answers(tmp_path: Path):
    sending = _Sending(tmp_path)

    def attempt(chance: random.Random) -> None:
        messages = [
            {"kind": "holding", "generations": [[1, 0]]},
            {"kind": "ready", "transfer": sending.transfer, "secret": Secret.new().to_json()},
            {"kind": "retired", "generations": [[1, 0]]},
            {"kind": "sealed", "transfer": sending.transfer},
            {"kind": "refused", "transfer": sending.transfer, "why": "no room"},
        ]
        # The last two end a transfer, and a new one takes a connection: they are rarer for that.
        (message,) = chance.choices(messages, weights=(9, 9, 9, 1, 1))
        sending.say(text_mutant(chance, message))
        assert not sending.outbox.held, "a copy counts that was never sent"
        sending.go_on()

    tried(attempt, ())
    sending.close()
