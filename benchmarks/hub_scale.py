"""How long a hub takes to name a rank of a job with up to 131,072 ranks, all of which ask it at once.

    python benchmarks/hub_scale.py [--ranks 8192 131072 ...] [--json] [--output FILE]

The hub is the product's own, in a process of its own, with a real connection to the relay of each machine of
eight ranks. Relays and observers are simulated: their messages are made before the clock starts, and a few
processes send them as the hub asks for them. So what observers and relays do on their own machines is not
included: an observer reads its record and writes its report in less than a millisecond, a trainer writes its
stacks within ``ObserverConfig.stack_seconds``, and a relay waits 10 ms for the reports of its machine.

The clock runs from the first announcement to the incident. Each connection takes three descriptors of the
hub's process: 131,072 ranks need a limit (``ulimit -n``) of 50,000.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import zmq
from large_round import TENSOR, LargeRound
from reporting import environment, parser_of, publish

from torchscout.config import ObserverConfig
from torchscout.decision.hang import Round, diagnose
from torchscout.mesh import Mesh
from torchscout.observer.rounds.hub import Gathered, Hub, Outcome
from torchscout.observer.rounds.protocol import Tally, connect, decode, encode
from torchscout.observer.rounds.relay import batches
from torchscout.observer.spec import relay_ranks
from torchscout.utils.listener import DESCRIPTORS_EACH
from torchscout.utils.network import new_token

RANKS = (1_024, 8_192, 32_768, 131_072)
GOAL_SECONDS = 5.0
STACK_CHARACTERS = 400
SENDERS = max(1, min(8, (os.cpu_count() or 1) - 2))
"""Processes that stand for all relays."""
CONFIG = ObserverConfig(address="127.0.0.1", min_relayed_ranks=1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks")
    arguments = parser.parse_args()
    most = most_ranks()
    for size in arguments.ranks:
        if size > most:
            print(f"{size} ranks: left out, the limit of descriptors allows {most}", file=sys.stderr)
    rows = [measure(size) for size in arguments.ranks if size <= most]
    publish({**environment(), "benchmark": "hub at scale", "results": rows}, table, arguments)


def measure(size: int) -> dict[str, Any]:
    """One round of one job."""
    context, token = multiprocessing.get_context("spawn"), new_token()
    start = context.Event()
    here, there = context.Pipe()
    hub = context.Process(target=run_hub, args=(size, token, there))
    hub.start()
    port = here.recv()
    pipes, senders = [], []
    for share in range(SENDERS):
        ours, theirs = context.Pipe()
        senders.append(context.Process(target=run_relays, args=(size, share, token, port, start, theirs)))
        senders[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()  # it is connected, and its messages are made
    print(f"{size} ranks: {size // TENSOR} relays are connected", file=sys.stderr)
    here.send("begin")
    begin = time.monotonic()
    start.set()
    figures = here.recv()
    for process in (hub, *senders):
        process.terminate()
        process.join()
    seconds = figures.pop("at") - begin
    row = {"ranks": size, "relays": size // TENSOR, "seconds": round(seconds, 2), **figures}
    reached = seconds <= GOAL_SECONDS and row["right"]
    print(row, file=sys.stderr)
    return {**row, "goal": {"seconds": GOAL_SECONDS}, "reached": reached}


def run_hub(size: int, token: str, pipe: Connection) -> None:
    """What ``ObserverProcess`` does for a hub."""
    allow_descriptors()
    large = LargeRound(size, gone=False)
    hosts = [large.mesh.host_of(rank) for rank in range(size)]
    found: list[Any] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hub = Hub(
        context,
        size=size,
        token=token,
        config=CONFIG,
        conclude=lambda gathered: conclude(gathered, large.mesh),
        compare=lambda _: [],
        record=found.append,
    )
    hub.routes.relays = relay_ranks(hosts, 1)
    pipe.send(hub.port)
    while not pipe.poll(0):
        hub.socket.poll(100)
        hub.tick(time.monotonic())
    cpu = time.process_time()
    while not found:
        hub.socket.poll(100)
        hub.tick(time.monotonic())
    pipe.send(
        {
            "at": time.monotonic(),
            "right": found[0].ranks == (large.culprit,),
            "hub_cpu_s": round(time.process_time() - cpu, 2),
            "hub_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            "malformed": hub.tally.malformed,
        }
    )
    time.sleep(60)  # the parent ends it


def conclude(gathered: Gathered, mesh: Mesh) -> Outcome:
    """What the observer's process does at the end of a round."""
    found = diagnose(Round(gathered.reports, mesh, gathered.is_repeat, gathered.confirmed, gathered.closed))
    return Outcome(found.incidents, found.needs_another_round)


def run_relays(size: int, share: int, token: str, port: int, start: Event, pipe: Connection) -> None:
    """Answer for every machine of this share."""
    machines = range(share, size // TENSOR, SENDERS)
    allow_descriptors()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, len(machines) + 64)
    large = LargeRound(size, gone=False)
    frames = {machine: dict(frames_of(large, machine)) for machine in machines}
    sockets, poller = {}, zmq.Poller()
    for number, machine in enumerate(machines):
        socket = connect(context, token, f"relay {machine * TENSOR}", ("127.0.0.1", port))
        sockets[socket] = machine
        poller.register(socket, zmq.POLLIN)
        if number % 64 == 63:  # as many as a hub accepts at once
            until_connected(socket)
    for socket in sockets:
        until_connected(socket)
    pipe.send("ready")
    start.wait()
    for socket, machine in sockets.items():
        socket.send(frames[machine]["announce"])
    while True:
        for socket, _ in poller.poll(100):
            frame = socket.recv()
            kind = decode(frame[4 * (int.from_bytes(frame[:4], "little") + 1) :], Tally())["kind"]
            if kind in frames[sockets[socket]]:
                socket.send(frames[sockets[socket]][kind])


def frames_of(large: LargeRound, machine: int) -> Iterator[tuple[str, bytes]]:
    """Yield what a hub asks for, and what the relay of a machine then sends."""
    ranks = range(machine * TENSOR, (machine + 1) * TENSOR)
    announcement = encode("announce", is_repeat=True, findings=[])

    def stack(rank: int) -> bytes:
        waiting = rank != large.culprit  # all of these wait in the same place
        return encode("stack", round=1, stack=f"{waiting:<{STACK_CHARACTERS}}", waiting=waiting)

    messages = {"announce": lambda _: announcement, "ask": large.message, "show": stack}
    for kind, message in messages.items():
        (frame,) = batches((rank, message(rank)) for rank in ranks)
        yield kind, frame


def until_connected(socket: zmq.Socket[bytes]) -> None:
    if not socket.poll(300_000, zmq.POLLOUT):
        raise AssertionError("a relay is not connected after 300 s")


def most_ranks() -> int:
    """The largest job whose hub has enough descriptors here, with some of its own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else (most - 512) // DESCRIPTORS_EACH * TENSOR


def allow_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def table(report: dict[str, Any]) -> str:
    names = ["ranks", "relays", "seconds", "hub_cpu_s", "hub_mib", "right", "reached"]
    rows = [names, *([str(row[name]) for name in names] for row in report["results"])]
    lines = ["  ".join(f"{cell:>9}" for cell in row) for row in rows]
    return "\n".join([*lines, f"goal: {GOAL_SECONDS:g} s"])


if __name__ == "__main__":
    main()
