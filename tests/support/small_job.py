"""A job of small trainers without torch, each with a real observer.

A trainer publishes progress and then meets the others in an exchange, which this process relays. It does
what the exchange's answer asks for: sleep, hold the interpreter lock, finish, and so on.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Phase
from torchscout.errors import ObserverError
from torchscout.observer import stacks
from torchscout.observer.handle import launch
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks, relayed_with
from torchscout.run.folder import Identity
from torchscout.run.notify import Webhook
from torchscout.run.reader import Stamped, incident_lines, read
from torchscout.utils.network import new_token

QUICK = ObserverConfig(
    min_silence_seconds=0.6,
    repeat_seconds=1.0,
    poll_seconds=0.05,
    grace_seconds=10.0,
    address="127.0.0.1",
)
STEP_SECONDS = 0.01


class SmallJob:
    """The parent's view of one job."""

    def __init__(
        self,
        size: int,
        run_dir: Path,
        config: ObserverConfig,
        hosts: list[str] | None,
        variables: Mapping[str, str],
        webhook: Webhook | None = None,
    ) -> None:
        from torchscout.mesh import Mesh

        self._webhook = webhook
        self.size, self.run_dir, self.config = size, run_dir, config
        self.steps = [0] * size
        """Exchanges each trainer has entered."""
        self._orders: list[dict[str, Any]] = [{} for _ in range(size)]
        self._memory = tempfile.TemporaryDirectory(prefix="scout-job-")
        self._hubs = hub_ranks(hosts or [None] * size)
        self._mesh = describe_mesh(Mesh.grid(replica=size, hosts=hosts))
        self._token = new_token()
        self._environment = {**os.environ, **variables}
        self.trainers: list[subprocess.Popen[bytes]] = []
        self.observers: list[int] = []
        self._ends: list[socket.socket] = []
        self._replies = [b""] * size
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def start(self) -> None:
        for rank in range(self.size):
            self._start_trainer(rank)
        hellos = [self._answer(rank) for rank in range(self.size)]
        self.observers = [hello["observer"] for hello in hellos]
        self.ports = [hellos[rank]["port"] for rank in self._hubs]
        hubs = [["127.0.0.1", port] for port in self.ports]
        for end in self._ends:
            end.sendall(json.dumps({"hubs": hubs}).encode() + b"\n")
        self._thread.start()

    def order(self, rank: int, **what: Any) -> None:
        """Set what trainer ``rank`` does when its next exchange is over."""
        until(lambda: not self._orders[rank], f"rank {rank} takes its previous order")
        self._orders[rank] = what

    def ask(self, rank: int, **what: Any) -> dict[str, Any]:
        """Send a command as ``order`` does, and return its answer."""
        self._replies[rank] = b""
        self.order(rank, **what)
        until(lambda: b"\n" in self._replies[rank], f"rank {rank} answers {what}")
        return json.loads(self._replies[rank])

    def lines(self) -> list[Any]:
        """Return the incidents recorded so far, and their ends."""
        return [each.item for each in incident_lines(self.run_dir) if isinstance(each, Stamped)]

    def records(self, rank: int) -> list[Any]:
        path = self.run_dir / "records" / f"observer-{rank}.jsonl"
        return [each.item for each in read(path) if isinstance(each, Stamped)] if path.exists() else []

    def end(self) -> None:
        for pid in [*(trainer.pid for trainer in self.trainers), *self.observers]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for trainer in self.trainers:
            trainer.wait()
        for end in self._ends:
            end.close()
        if self._thread.is_alive():
            self._thread.join(10)
        self._memory.cleanup()

    def _start_trainer(self, rank: int) -> None:
        here, there = socket.socketpair()
        place = self._hubs.index(rank) if rank in self._hubs else None
        document = {
            "directory": str(Path(self._memory.name) / "progress"),
            "assignment": ObserverSpec(
                rank=rank,
                size=self.size,
                record="",
                run=Identity(str(self.run_dir)),
                token=self._token,
                config=self.config,
                hub=place,
                mesh=None if place is None else self._mesh,
                machine=relayed_with(rank, self._mesh["hosts"], self.config.min_relayed_ranks),
                webhook=self._webhook,
            ).to_json(),
        }
        command = [sys.executable, "-m", "tests.support.small_job", str(there.fileno())]
        self.trainers.append(subprocess.Popen(command, pass_fds=[there.fileno()], env=self._environment))
        there.close()
        self._ends.append(here)
        here.sendall(json.dumps(document).encode() + b"\n")

    def _answer(self, rank: int) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\n"):
            chunk = self._ends[rank].recv(65536)
            assert chunk, f"trainer {rank} left"
            text += chunk
        return json.loads(text)

    def _relay(self) -> None:
        """Answer all trainers once all have arrived."""
        here: set[int] = set()
        alive = set(range(self.size))
        while alive:
            with suppress(OSError, ValueError):
                ready, _, _ = select.select([self._ends[rank] for rank in alive], [], [], 0.05)
                for end in ready:
                    rank = self._ends.index(end)
                    chunk = end.recv(65536)
                    if not chunk:
                        alive.discard(rank)
                    if chunk == b"." or chunk.endswith(b"\n."):  # an answer, and the next exchange already
                        here.add(rank)
                        self.steps[rank] += 1
                        chunk = chunk[:-1]
                    self._replies[rank] += chunk
            if len(here) == self.size:
                here.clear()
                for rank in range(self.size):
                    order, self._orders[rank] = self._orders[rank], {}
                    with suppress(OSError):  # it may have ended since it arrived
                        self._ends[rank].sendall(json.dumps(order).encode() + b"\n")
            if any(end.fileno() < 0 for end in self._ends):
                return


@contextmanager
def small_job(
    size: int,
    run_dir: Path,
    *,
    hosts: list[str] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    webhook: Webhook | None = None,
    **changes: Any,
) -> Iterator[SmallJob]:
    """Start a job; ``variables`` are its environment, ``changes`` its observers' settings."""
    job = SmallJob(size, run_dir, replace(QUICK, **changes), hosts, variables, webhook)
    try:
        job.start()
        until(lambda: min(job.steps) > 3, "the job makes its first steps")
        yield job
    finally:
        job.end()


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Wait until ``condition`` returns a true value, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class _Trainer:
    """One trainer in its own process."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._rest = end, b""
        document = self._hear()
        assignment = ObserverSpec.from_json(document["assignment"])
        directory = Path(document["directory"])
        self._writer = ProgressWriter.create(directory, assignment.rank)
        self._stacks = stacks.register(directory, assignment.config.stack_signal)
        world = CommGroup("world", tuple(range(assignment.size)), "world")
        self._line = self._writer.declare(world)
        self._phrase = self._writer.phrase("all_reduce float32[8] sum", 7)
        paths = {"record": str(self._writer.path), "stack": str(self._stacks.path)}
        self._observer = launch(replace(assignment, **paths))
        self._say({"observer": self._observer.pid, "port": self._observer.port})
        self._observer.configure([tuple(hub) for hub in self._hear()["hubs"]])

    def train(self) -> None:
        going = True
        while going:
            self._writer.advance(Phase.FORWARD)
            time.sleep(STEP_SECONDS)
            going = self.step()

    def step(self) -> bool:
        self._writer.issue(self._line, self._phrase)
        self._end.sendall(b".")
        order = self._hear()
        self._writer.next_step()
        return self._obey(**order)

    def _obey(self, do: str = "", **how: Any) -> bool:
        """Carry out a command; return whether to go on."""
        return getattr(self, "_do_" + do.replace(" ", "_"))(**how) is not False if do else True

    def _do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _do_hold_the_lock(self, seconds: float) -> None:
        library, end = ctypes.PyDLL(None), time.monotonic() + seconds
        while time.monotonic() < end:
            library.usleep(100_000)  # unlike a call through CDLL, with the lock held

    def _do_checkpoint(self, seconds: float) -> None:
        self._writer.advance(Phase.CHECKPOINT_WRITE)
        time.sleep(seconds)

    def _do_pause(self, seconds: float) -> None:
        self._writer.pause()
        time.sleep(seconds)
        self._writer.resume()

    def _do_status(self) -> None:
        try:
            self._say(dict(self._observer.status(timeout=10)))
        except ObserverError as error:
            self._say({"problem": str(error), "connected": []})

    def _do_keep(self) -> None:
        self._observer.keep_alive()

    def _do_time(self) -> None:
        self._say({"time": time.time()})

    def _do_change(self, **settings: Any) -> None:
        self._observer.change(**settings)

    def _do_exit(self, status: int, suddenly: bool = False) -> None:
        """Exit as a script does that never closes its session."""
        if suddenly:
            os._exit(status)
        self._writer.exiting()
        sys.exit(status)

    def _do_finish(self) -> bool:
        self._writer.finished()
        self._observer.close()
        self._stacks.unregister()
        self._writer.close()
        return False

    def _hear(self) -> dict[str, Any]:
        # The topmost frame of a trainer that waits is this one, as that of a user's own `work.wait()`.
        while b"\n" not in self._rest:
            chunk = self._end.recv(65536)
            if not chunk:
                sys.exit("the test is over")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _say(self, answer: dict[str, Any]) -> None:
        self._end.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _Trainer(socket.socket(fileno=int(sys.argv[1]))).train()
