"""How soon a hub names a rank among hundreds of real observers, and what that costs it.

    python benchmarks/control_plane.py [--sizes 64 256 ...] [--turns N] [--relays] [--json] [--output FILE]

Records of a job on paper are written by this process: replicas of eight tensor-parallel ranks. Time and again
one rank stops before an all-reduce of its replica group, so that all others wait, and then goes on. Hub,
standby and observers are the product's own. Up to ``PROCESSES`` ranks have an observer process each. In a
larger job only the ranks that may host a hub have one; the others' connections, records and answers
(``Client``, ``TrainerView``, ``RoundClient``) are served by a few processes, so that each still has its own
connections to the hub and to the standby. With ``--relays``, each machine of eight ranks has a relay.

Everything shares this machine's cores, so that these times are upper limits: a job has its own core for an
observer. The last turn of each size is without the hub, which is stopped like a machine that is lost.

Runs in a network namespace of its own where that is permitted, so that nobody else's bytes are counted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from observer import SHARED_MEMORY, cpu_seconds, line_of
from reporting import environment, parser_of, publish

from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Phase
from torchscout.mesh import Mesh
from torchscout.observer.handle import ObserverHandle, launch
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds.client import RoundClient
from torchscout.observer.rounds.protocol import Client
from torchscout.observer.rounds.relay import Relay, relay_endpoint
from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks, relayed_with
from torchscout.observer.trainer import TrainerView
from torchscout.run.folder import Identity
from torchscout.run.reader import Stamped

SIZES = (64, 256, 512, 1_024)
PROCESSES = 512
SHARING = 4
"""Processes that serve the observers without a process of their own."""
TENSOR = 8
STEPS = 24
"""Steps between two hangs: enough operations to fill the record's ring."""
TOKEN = "benchmark" * 4
MODELLED = 131_072
GOAL_SECONDS = 2.0
OWN_NETWORK = "SCOUT_BENCHMARK_NETWORK"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--turns", type=int, default=5, help="hangs of each job")
    parser.add_argument("--relays", action="store_true", help="with a relay for every eight ranks")
    arguments = parser.parse_args()
    enter_own_network()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = [measure(size, arguments.turns, relays=arguments.relays) for size in arguments.sizes]
    report = {
        **environment(),
        "benchmark": "control plane",
        "relays": arguments.relays,
        "results": rows,
        "model": model(rows),
    }
    publish(report, table, arguments)


def enter_own_network() -> None:
    """Start again in a new network namespace, if there may be one."""
    unshare = ["unshare", "--map-root-user", "--net", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh"]
    if OWN_NETWORK in os.environ or shutil.which("unshare") is None or shutil.which("ip") is None:
        return
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0:
        os.environ[OWN_NETWORK] = "1"
        os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def loopback_bytes() -> int | None:
    """Bytes that passed this network's loopback interface, with all headers; None if it is not our own."""
    if OWN_NETWORK not in os.environ:
        return None
    rows = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line]
    return next(int(fields.split()[0]) for name, fields in rows if name.strip() == "lo")


class Trainer:
    """One rank's record, moved by hand."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        first, place = rank - rank % TENSOR, rank % TENSOR
        self.writer = ProgressWriter.create(directory, rank)
        tensor = CommGroup(f"tensor.{first}", tuple(range(first, first + TENSOR)), "tp")
        replica = CommGroup(f"replica.{place}", tuple(range(place, size, TENSOR)), "dp")
        world = CommGroup("world", tuple(range(size)), "world")
        lines = [self.writer.declare(each) for each in (tensor, replica, world)]
        self._program = [lines[index] for index in (0, 0, 0, 1, 2)]
        self._phrase = self.writer.phrase("all_reduce bfloat16[8192,4096] sum", 7)
        self._next = 0

    def go(self, *, until: int) -> None:
        """Issue the operations of this step before number ``until``."""
        self.writer.advance(Phase.BACKWARD)
        while self._next < until:
            self.writer.issue(self._program[self._next], self._phrase)
            self._next += 1

    def step(self) -> None:
        """A whole one, or what is left of it."""
        self.go(until=len(self._program))
        self.writer.next_step()
        self._next = 0


def stop_at(trainers: Sequence[Trainer], late: int) -> None:
    """Let ``late`` stop before its replica group's all-reduce; the others stop in operations."""
    for rank, trainer in enumerate(trainers):
        beside = rank % TENSOR == late % TENSOR
        trainer.go(until=3 if rank == late else 4 if beside else 5)


@dataclass(frozen=True)
class Job:
    size: int
    trainers: list[Trainer]
    observers: dict[int, ObserverHandle]
    """Those with a process of their own."""
    incidents: Path
    config: ObserverConfig
    connect_seconds: float

    def descriptors(self, rank: int) -> int:
        return len(list(Path(f"/proc/{self.observers[rank].pid}/fd").iterdir()))

    def mib(self, rank: int) -> float:
        status = Path(f"/proc/{self.observers[rank].pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def a_job(size: int, *, relays: bool) -> Iterator[Job]:
    """Trainers with observers that are all connected."""
    # Polling takes 0.4% of a core for each observer at 0.2 s. Many notice a hang, so the first does at once.
    poll = 0.2 if size <= 64 else 1.0
    config = ObserverConfig(
        poll_seconds=poll, address="127.0.0.1", min_relayed_ranks=1 if relays else size + 1
    )
    hosts = [f"host{rank // TENSOR}" for rank in range(size)]
    hubs = hub_ranks(hosts)
    own = range(size) if size <= PROCESSES else hubs
    mesh = describe_mesh(Mesh.grid(replica=size // TENSOR, tensor=TENSOR, hosts=hosts))
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=base) as records,
        tempfile.TemporaryDirectory() as run_dir,
        ExitStack() as undo,
    ):
        trainers = [Trainer(Path(records), rank, size) for rank in range(size)]
        stop_moving = keep_moving(trainers)
        undo.callback(stop_moving.set)

        def start(rank: int) -> ObserverHandle:
            place = hubs.index(rank) if rank in hubs else None
            return launch(
                ObserverSpec(
                    rank=rank,
                    size=size,
                    record=str(trainers[rank].writer.path),
                    run=Identity(str(run_dir)),
                    token=TOKEN,
                    config=config,
                    hub=place,
                    mesh=None if place is None else mesh,
                    machine=relayed_with(rank, hosts, config.min_relayed_ranks),
                ),
                timeout=120.0,
            )

        with ThreadPoolExecutor(4) as starters:
            observers = dict(zip(own, starters.map(start, own), strict=True))
        for observer in observers.values():
            undo.callback(observer.kill)
        addresses = [("127.0.0.1", observers[rank].port) for rank in hubs]
        begin = time.monotonic()
        for observer in observers.values():
            observer.configure(addresses, timeout=30.0)
        rest = [rank for rank in range(size) if rank not in observers]
        undo.enter_context(served([(r, trainers[r].writer.path) for r in rest], addresses, config))
        clients = size // TENSOR if relays else size
        until_connected(observers[0].pid, clients)
        until_connected(observers[hubs[1]].pid, clients)
        connected = time.monotonic() - begin
        stop_moving.set()
        incidents = Path(run_dir) / "incidents" / "observer-0.jsonl"
        yield Job(size, trainers, observers, incidents, config, connected)


def keep_moving(trainers: Sequence[Trainer]) -> threading.Event:
    """Let the trainers train while observers start, so that none of them looks silent."""
    over = threading.Event()

    def move() -> None:
        while not over.wait(0.2):
            for trainer in trainers:
                trainer.step()

    threading.Thread(target=move, daemon=True).start()
    return over


def until_connected(pid: int, clients: int) -> None:
    """Wait until a hub has a connection, which takes three descriptors, to each client."""
    deadline = time.monotonic() + 120
    while len(list(Path(f"/proc/{pid}/fd").iterdir())) < 3 * clients:
        if time.monotonic() > deadline:
            raise AssertionError(f"not all of {clients} clients are connected after 120 s")
        time.sleep(0.1)
    time.sleep(3.0)  # handshakes, and observers that look for their relay again


@contextmanager
def served(
    records: Sequence[tuple[int, Path]], hubs: Sequence[tuple[str, int]], config: ObserverConfig
) -> Iterator[None]:
    """Serve these ranks' observers in a few processes."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    shares = [[each for each in records if each[0] // TENSOR % SHARING == share] for share in range(SHARING)]
    processes = [context.Process(target=serve, args=(share, hubs, config, over)) for share in shares if share]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        over.set()
        for process in processes:
            process.join()


def serve(
    records: Sequence[tuple[int, Path]],
    hubs: Sequence[tuple[str, int]],
    config: ObserverConfig,
    over: Event,
) -> None:
    """What ``ObserverProcess`` does, for many ranks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8 * len(records) + 64)
    poller = zmq.Poller()
    rounds: list[RoundClient] = []
    clients: list[Client] = []
    relays: list[Relay] = []
    for rank, path in records:
        machine = range(rank - rank % TENSOR, rank - rank % TENSOR + TENSOR)
        is_relayed = config.min_relayed_ranks == 1
        if is_relayed and rank == machine[0]:
            relays.append(Relay(context, TOKEN, machine, hubs, poller))
        relay = partial(relay_endpoint, TOKEN, machine[0]) if is_relayed else None
        client = Client(context, rank, TOKEN, hubs, relay=relay, poller=poller)
        ignore: Any = lambda *_: None  # noqa: E731
        rounds.append(RoundClient(TrainerView(path, None), client, config, ignore, ignore, ignore))
        clients.append(client)
    of = {socket: number for number, client in enumerate(clients) for socket in client.sockets}
    next_tick = [time.monotonic() + config.poll_seconds * n / len(clients) for n in range(len(clients))]
    while not over.is_set():
        flushes = [relay.deadline for relay in relays if relay.deadline is not None]
        wait = max(0.0, min([*next_tick, *flushes]) - time.monotonic())
        called = {of[socket] for socket, _ in poller.poll(int(1000 * wait) + 1) if socket in of}
        for relay in relays:
            relay.tick(time.monotonic())
        now = time.monotonic()
        for number in called | {n for n, at in enumerate(next_tick) if at <= now}:
            each = rounds[number]
            each.trainer.look(time.monotonic())
            for hub, message in clients[number].receive():
                if message["kind"] != "news":
                    each.handle(hub, message, time.monotonic())
            each.tick(time.monotonic())
            next_tick[number] = time.monotonic() + (0.05 if each.is_announcing else config.poll_seconds)
    for end in (*clients, *relays):
        end.close()
    context.term()


def measure(size: int, turns: int, *, relays: bool) -> dict[str, Any]:
    """One job: some hangs, and a last one without the hub."""
    print(f"{size} ranks", file=sys.stderr)
    with a_job(size, relays=relays) as job:
        figures = [one_hang(job, turn) for turn in range(turns)]
        row = {
            "ranks": size,
            "observer_processes": len(job.observers),
            "connect_s": round(job.connect_seconds, 1),
            "idle_bytes": idle_bytes(job),
            "seconds": round(statistics.median(each["seconds"] for each in figures), 3),
            "worst_s": round(max(each["seconds"] for each in figures), 3),
            "named_rightly": sum(each["right"] for each in figures),
            "turns": turns,
            "hub_cpu_s": round(statistics.median(each["hub_cpu_s"] for each in figures), 3),
            "hub_mib": round(job.mib(0), 1),
            "hub_descriptors": job.descriptors(0),
        }
        if figures[0]["bytes"] is not None:
            row["bytes_per_observer"] = round(statistics.median(each["bytes"] for each in figures) / size)
        os.kill(job.observers[0].pid, signal.SIGSTOP)
        lost = one_hang(job, turns, lost_hub=True)
        row |= {"lost_hub_s": round(lost["seconds"], 3), "lost_hub_named_rightly": lost["right"]}
        os.kill(job.observers[0].pid, signal.SIGCONT)
    print(json.dumps(row), file=sys.stderr)
    reached = row["worst_s"] <= GOAL_SECONDS and row["named_rightly"] == turns
    return {**row, "goal": {"worst_s": GOAL_SECONDS}, "reached": reached}


def idle_bytes(job: Job, seconds: float = 3.0) -> int | None:
    """Bytes that observers exchange while the job is healthy, some seconds after an incident."""
    if loopback_bytes() is None:
        return None
    run_healthy(job, seconds)
    before = loopback_bytes() or 0
    run_healthy(job, seconds)
    return (loopback_bytes() or 0) - before


def run_healthy(job: Job, seconds: float) -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        for trainer in job.trainers:
            trainer.step()
        time.sleep(0.05)


def one_hang(job: Job, turn: int, *, lost_hub: bool = False) -> dict[str, Any]:
    """One rank stops and goes on; returns seconds from the threshold to the incident on disk."""
    for _ in range(STEPS):
        for trainer in job.trainers:
            trainer.step()
        time.sleep(0.01)
    late = (5 + 13 * turn) % (job.size - 2) + 1
    before = len(job.incidents.read_text().splitlines()) if job.incidents.exists() else 0
    cpu, sent = cpu_seconds(job.observers[0].pid), loopback_bytes()
    begin = time.monotonic()
    stop_at(job.trainers, late)
    incident = whole_line(job.incidents, before)
    time.sleep(0.5)  # news and outcome
    figures = {
        "seconds": incident.monotonic - begin - job.config.min_silence_seconds,
        "right": incident.item.ranks == (late,),
        "hub_cpu_s": cpu_seconds(job.observers[0].pid) - cpu,
        "bytes": None if sent is None else (loopback_bytes() or 0) - sent,
    }
    if not figures["right"]:
        print(f"named {incident.item.ranks}, not {late}: {incident.item.sentence}", file=sys.stderr)
    for trainer in job.trainers:
        trainer.step()
    if figures["right"] and not lost_hub:
        whole_line(job.incidents, before + 1)  # that it has ended
    return figures


def whole_line(path: Path, number: int) -> Stamped:
    """That line of a file; a line of many kilobytes may be seen before it is complete."""
    for _ in range(200):
        if isinstance(found := line_of(path, number), Stamped):
            return found
        time.sleep(0.01)
    raise AssertionError(str(found))


def model(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the hub would need in a larger job, if it grew as it did here: straight lines through the figures.

    An expectation, not a measurement.
    """
    if len(rows) < 2:
        return {}
    ranks = [row["ranks"] for row in rows]
    lines = {
        name: np.polyfit(ranks, [row[name] for row in rows], 1)
        for name in ("hub_cpu_s", "hub_mib", "hub_descriptors")
    }
    return {
        "ranks": MODELLED,
        **{f"{name}_per_rank": float(f"{line[0]:.3g}") for name, line in lines.items()},
        **{name: float(f"{np.polyval(line, MODELLED):.3g}") for name, line in lines.items()},
    }


def table(report: dict[str, Any]) -> str:
    names = [name for name in report["results"][0] if name not in {"goal", "reached"}]
    rows = [names, *([str(row.get(name)) for name in names] for row in report["results"])]
    lines = ["  ".join(f"{cell:>{len(name)}}" for cell, name in zip(row, names, strict=True)) for row in rows]
    goals = [
        f"{row['ranks']} ranks: {'reached' if row['reached'] else 'MISSED'}" for row in report["results"]
    ]
    return "\n".join([*lines, f"goal {GOAL_SECONDS} s: {', '.join(goals)}", f"model: {report['model']}"])


if __name__ == "__main__":
    main()
