"""Connections that do not authenticate take little from a trainer or a hub, and keep nobody else out."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from tests.support.replica_ranks import identity, offer, seal, stream
from tests.support.small_job import until
from tests.unit.test_board import CONFIG, TOKEN, Board
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.storage.shards import path_of
from torchscout.errors import CheckpointError
from torchscout.observer.rounds.protocol import Client, connect, listen_limited
from torchscout.utils.listener import Limits, Listener
from torchscout.utils.network import new_token
from torchscout.utils.procfs import is_running

STRANGERS = 500


def descriptors(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def active_children() -> set[str]:
    return {pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def come_and_wait(stack: ExitStack, address: tuple[str, int], count: int = STRANGERS) -> list[socket.socket]:
    """Connections that say nothing."""
    return [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


@pytest.fixture
def replicator(tmp_path: Path) -> Iterator[Replicator]:
    replicator = Replicator(1, tmp_path / "b", TOKEN, timeout_seconds=20)
    replicator.connect([("127.0.0.1", 9), replicator.address], "ab")
    yield replicator
    replicator.close()


def test_a_trainer_has_no_listener_that_the_network_can_reach(replicator: Replicator):
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            own.add(str(each.readlink()))
    inodes = {
        f"socket:[{line.split()[9]}]"
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"  # listens
    }
    assert inodes, "the port is open somewhere"
    assert not own & inodes


_VICTIM = """
import os, resource, sys, time
from pathlib import Path
from torchscout.checkpoint.replication.replicator import Replicator
replicator = Replicator(1, Path(sys.argv[1]), sys.argv[2], timeout_seconds=20)
replicator.connect([("127.0.0.1", 9), replicator.address], "ab")
limit = len(os.listdir("/proc/self/fd")) + 60
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(replicator.address[1], flush=True)
import torch.utils.data
loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
for line in sys.stdin:
    with open(os.devnull), open(os.devnull):
        print(sum(int(each) for each in loader), len(os.listdir("/proc/self/fd")), limit, flush=True)
replicator.close()
"""


@pytest.mark.slow
def test_idle_connections_leave_a_trainer_its_descriptors_and_its_time(tmp_path: Path):
    """As it was seen: they exhausted the trainer's descriptors, its own files and DataLoaders failed."""
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(tmp_path / "b"), TOKEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdin is not None
    assert victim.stdout is not None

    def works() -> None:
        print(file=victim.stdin, flush=True)
        loaded, opened, limit = map(int, victim.stdout.readline().split())
        assert loaded == 28
        assert opened < limit - 20

    with victim, ExitStack() as stack:
        stack.callback(victim.stdin.close)
        address = "127.0.0.1", int(victim.stdout.readline())
        works()
        before, since = cpu_seconds(victim.pid), time.monotonic()
        idle = come_and_wait(stack, address)
        for _ in range(3):
            works()
        time.sleep(max(0.0, 3 - (time.monotonic() - since)))
        assert cpu_seconds(victim.pid) - before < 0.5 * (time.monotonic() - since), "it waits"
        send_a_copy(address, tmp_path)
        assert len(idle) == STRANGERS
        works()


_EXHAUSTED = """
import os, resource, sys, time
from pathlib import Path
import zmq
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.observer.rounds.protocol import listen_limited
folder, token, what, free = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
if what == "trainer":
    replicator = Replicator(1, folder, token, timeout_seconds=20)
    replicator.connect([("127.0.0.1", 9), replicator.address], "ab")
    port = replicator.address[1]
else:
    hub, listener = listen_limited(zmq.Context(), token, "127.0.0.1", 0)
    listener.start()
    port = listener.port
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError as error:
    print(error.strerror, port, flush=True)
for _ in range(free):
    os.close(opened.pop())
sys.stdin.readline()
for each in opened:
    os.close(each)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print("it lives", flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize(("what", "free"), [("trainer", 0), ("hub", 0), ("hub", 1), ("hub", 2)])
def test_a_connection_does_not_end_a_process_that_has_no_descriptors_left(
    tmp_path: Path, what: str, free: int
):
    """As it was seen: ZeroMQ ended the trainer."""
    victim = subprocess.Popen(
        [sys.executable, "-c", _EXHAUSTED, str(tmp_path / "b"), TOKEN, what, str(free)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdin is not None
    assert victim.stdout is not None
    with victim, ExitStack() as stack:
        stack.callback(victim.stdin.close)
        said, _, port = victim.stdout.readline().rpartition(" ")
        assert said == "Too many open files"
        come_and_wait(stack, ("127.0.0.1", int(port)), 3)
        time.sleep(1.0)
        print(file=victim.stdin, flush=True)
        assert victim.stdout.readline() == "it lives\n"
        if what == "trainer":
            send_a_copy(("127.0.0.1", int(port)), tmp_path)


def send_a_copy(address: tuple[str, int], folder: Path) -> None:
    """A peer with the token gets through, and its copy is kept."""
    context: zmq.Context = zmq.Context()
    peer = wire.connect(context, TOKEN, 0, address)
    data = seal(folder / "made", 0, 1).read_bytes()
    peer.sndtimeo = peer.rcvtimeo = 30_000
    peer.send(offer("t", len(data)))
    ready = json.loads(peer.recv())
    assert ready["kind"] == "ready", ready
    connection = stream(address, ready, data)
    kept = path_of(folder / "b", identity(0, 1), 1)
    until(kept.exists, "the copy arrived")
    assert kept.read_bytes() == data
    connection.close()
    context.destroy(linger=0)


@pytest.fixture
def guarded() -> Iterator[Listener]:
    """A listener with a shorter time than ZeroMQ's own, in front of a holder of copies."""
    context: zmq.Context = zmq.Context()
    holder = wire.listen(context, TOKEN, "ipc://@torchscout-test-guarded-" + str(os.getpid()))
    name = holder.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").removeprefix("ipc://@")
    listener = Listener(("127.0.0.1", 0), name, Limits(seconds=1.0))
    listener.start()
    yield listener
    listener.close()
    holder.close(linger=0)
    context.destroy(linger=0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def seconds_until_closed(port: int, said: bytes) -> float:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        began = time.monotonic()
        stranger.sendall(said)
        with suppress(ConnectionError):
            while stranger.recv(64):
                pass
        return time.monotonic() - began


def test_an_unauthenticated_connection_is_closed_in_time(guarded: Listener):
    assert 0.9 < seconds_until_closed(guarded.port, GREETING) < 4


def test_a_connection_that_sends_more_than_a_handshake_is_closed_at_once(guarded: Listener):
    """ZeroMQ would keep what comes of a message of 4 MiB until the time is over."""
    message = b"\x06" + (4 << 20).to_bytes(8, "big") + bytes(8192)
    assert seconds_until_closed(guarded.port, GREETING + message) < 0.9


@pytest.mark.parametrize(
    ("token", "listens", "error"),
    [("short", ("127.0.0.1", 0), ValueError), (TOKEN, ("203.0.113.9", 9), CheckpointError)],
    ids=["a short token", "an address of another machine"],
)
def test_a_replicator_that_cannot_be_made_leaves_nothing_open(
    tmp_path: Path, token: str, listens: tuple[str, int], error: type[Exception]
):
    """An open socket keeps its ZeroMQ context, and with it an interpreter that exits, waiting forever."""
    before, children = descriptors(), active_children()
    with pytest.raises(error) as raised:
        Replicator(0, tmp_path, token, listens=listens)
    assert raised.tb is not None, "which keeps everything that its frames refer to"
    assert descriptors() <= before
    assert active_children() == children


def test_sockets_that_cannot_be_made_leave_nothing_open():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    Client(context, 0, TOKEN, [("127.0.0.1", 9)]).close()  # a context opens descriptors of its own
    before = descriptors()
    with pytest.raises(ValueError, match="token") as no_hub:
        listen_limited(context, "short", "127.0.0.1", 0)
    with pytest.raises(zmq.ZMQError) as no_client:
        Client(context, 0, TOKEN, [("127.0.0.1", 9), ("not a host", 9)])
    assert no_hub.tb is not no_client.tb, "which keep everything that their frames refer to"
    until(lambda: descriptors() <= before, "the sockets are closed")  # a thread of ZeroMQ does so
    context.term()


def test_a_process_that_is_killed_is_started_again_where_it_was(replicator: Replicator, tmp_path: Path):
    killed = replicator.pid
    assert killed is not None
    os.kill(killed, 9)
    until(lambda: replicator.pid not in (None, killed), "it was noticed")
    send_a_copy(replicator.address, tmp_path)
    assert any("was restarted" in each for each in replicator.problems())


def test_a_process_ends_with_its_trainer_even_if_children_live_on(tmp_path: Path):
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from torchscout.checkpoint.replication.replicator import Replicator\n"
        f"r = Replicator(1, Path({str(tmp_path)!r}), {TOKEN!r})\n"
        "print(r.pid, flush=True)\n"
        "child = os.fork()\n"
        "if child == 0: os.close(1); time.sleep(60); os._exit(0)\n"
        "print(child, flush=True); os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    listener, child = map(int, process.stdout.split())
    try:
        until(lambda: not is_running(listener), "it ended")
        assert is_running(child), "its standard input was still open"
    finally:
        os.kill(child, 9)


def test_idle_connections_leave_a_hub_its_descriptors():
    board = Board()
    try:
        with ExitStack() as stack:
            board.join(0)
            before = descriptors()
            idle = come_and_wait(stack, ("127.0.0.1", board.hub.port))
            until(lambda: len(board.hub._listener._unauthenticated) >= 64, "the listener is full")
            assert descriptors() - before - STRANGERS <= 3 * 64 + 8
            board.join(1, 2)
            assert len(idle) == STRANGERS
        board.hold_round(0, 1, 2)
    finally:
        for end in (*board.clients.values(), board.hub):
            end.close()
        board.context.destroy(linger=0)


def test_an_accept_that_fails_is_tried_again_without_a_busy_loop():
    context: zmq.Context = zmq.Context()
    hub, listener = listen_limited(context, TOKEN, CONFIG.address, 0)
    listener.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stranger = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        before = time.process_time()
        stranger.connect(("127.0.0.1", listener.port))
        until(lambda: not listener._listens, "new connections are left waiting")
        time.sleep(1.0)
        assert time.process_time() - before < 0.3
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        peer = connect(context, TOKEN, 0, ("127.0.0.1", listener.port))
        assert peer.poll(10_000, zmq.POLLOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stranger.close()
        hub.close(linger=0)
        listener.close()
        context.destroy(linger=0)


def test_another_token_does_not_count_as_authenticated():
    context: zmq.Context = zmq.Context()
    hub, listener = listen_limited(context, TOKEN, CONFIG.address, 0)
    listener.start()
    try:
        known, unknown = (
            connect(context, token, 0, ("127.0.0.1", listener.port)) for token in (TOKEN, new_token())
        )
        assert known.poll(10_000, zmq.POLLOUT)
        assert not unknown.poll(500, zmq.POLLOUT)
        until(
            lambda: len(listener._connections) - len(listener._unauthenticated) == 1, "one has authenticated"
        )
    finally:
        hub.close(linger=0)
        listener.close()
        context.destroy(linger=0)


def test_a_door_that_cannot_listen_says_so(replicator: Replicator, tmp_path: Path):
    with pytest.raises(OSError, match="use"):
        Listener(replicator.address, "nobody", Limits())
    with pytest.raises(CheckpointError, match="cannot listen at 127"):
        Replicator(0, tmp_path, TOKEN, listens=replicator.address)


_COPYING = """
import os, sys, threading, time
from pathlib import Path
from torchscout.checkpoint.replication.replicator import Replicator
path, folder, token = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
before = len(os.listdir("/proc/self/fd"))
one, other = (Replicator(rank, folder / str(rank), token) for rank in (0, 1))
for each in (one, other):
    each.connect([one.address, other.address], "ab")
copied = []
one.send(path, copied.append)
deadline = time.monotonic() + 30
while not copied and time.monotonic() < deadline:
    time.sleep(0.02)
one.close()
other.close()
print(copied, len(os.listdir("/proc/self/fd")) - before, len(threading.enumerate()))
"""


def test_copying_leaves_neither_threads_nor_descriptors_in_a_trainer(tmp_path: Path):
    """As it was seen: ZeroMQ's zero-copy sending keeps a thread and a context of its own."""
    path = seal(tmp_path / "0", 0, 1, size=200_000)
    command = [sys.executable, "-c", _COPYING, str(path), str(tmp_path), TOKEN]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert said == "[True] 0 1\n"
