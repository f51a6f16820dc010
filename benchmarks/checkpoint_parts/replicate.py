"""How fast a copy gets into another process' memory, and how much slower training is meanwhile.

Both ends are on this machine. The yardstick is the same file over a plain TCP connection, neither encrypted
nor verified, into the same file system; for training, steps beside two processes that only compute, because a
copy keeps about a core busy at each end.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checkpoint_parts.job import Figures, Job, identity, in_memory, made, ms, not_measured, synchronize
from torchscout.checkpoint.generation import TrustLevel
from torchscout.checkpoint.snapshot.snapshots import Snapshots

__all__ = ["replicate"]

ROUNDS, WARM = 5, 1
STEPS = 3
"""Of training alone, in every round."""
SECONDS = 600


def replicate(megabytes: int) -> Figures:
    if importlib.util.find_spec("zmq") is None:
        return not_measured("no pyzmq here")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = Job(megabytes)
    job.step()
    with in_memory() as folder, _ends(folder) as (replicator, plain):
        snapshots = Snapshots(made(folder / "owner"), 0, copies=2)
        rounds = [_one_round(job, snapshots, replicator, plain, number) for number in range(ROUNDS + WARM)]
        problems = replicator.problems()
        snapshots.close()
    assert not problems, problems
    return _figures(rounds[WARM:])


def _one_round(
    job: Job, snapshots: Snapshots, replicator: Any, plain: tuple[str, int], number: int
) -> dict[str, Any]:
    """A plain copy, a copy alone, steps alone and beside busy processes, and steps during a copy."""
    first, second = identity(2 * number + 1), identity(2 * number + 2)
    found: dict[str, Any] = {}
    for name, each in (("alone", first), ("beside training", second)):
        capture = snapshots.capture(each, TrustLevel.LATEST, job.state())
        snapshots.fence()
        assert capture.wait(), capture.problem
        with snapshots.held(each.generation) as path:
            assert path is not None
            found["bytes"] = path.stat().st_size
            if name == "alone":
                found["plain"] = _timed(lambda path=path: _sent_plainly(path, plain))
                found["steps"] = [_timed(lambda: _step(job)) for _ in range(STEPS)]
                with _busy(2):
                    found["steps beside others"] = [_timed(lambda: _step(job)) for _ in range(STEPS)]
            start = time.perf_counter()
            replicator.send(path)
            steps = _until(lambda each=each: each.generation in replicator.held(), job, name != "alone")
            found[name] = time.perf_counter() - start
            if steps:
                found["steps during it"] = steps
        snapshots.retire(each.generation)
        replicator.retire([each.generation])
    return found


def _until(is_held: Callable[[], bool], job: Job, trains: bool) -> list[float]:
    """Wait, or train; the times of the steps that ended before."""
    steps: list[float] = []
    deadline = time.monotonic() + SECONDS
    while not is_held():
        assert time.monotonic() < deadline, "the copy does not come"
        if trains:
            seconds = _timed(lambda: _step(job))
            if not is_held():
                steps.append(seconds)
        else:
            time.sleep(0.001)
    return steps


def _step(job: Job) -> None:
    job.step()
    synchronize()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Processes that do nothing else than computing."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)  # until they have started
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _sent_plainly(path: Path, address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection, path.open("rb") as file:
        connection.sendall(path.stat().st_size.to_bytes(8, "little"))
        connection.sendfile(file)
        assert connection.recv(1) == b"!"


@contextmanager
def _ends(folder: Path) -> Iterator[tuple[Any, tuple[str, int]]]:
    """This process' end, connected to the other process, and where that one takes plain bytes."""
    from torchscout.checkpoint.replication.replicator import Replicator
    from torchscout.utils.network import new_token

    token = new_token()
    program = [sys.executable, str(Path(__file__).with_name("holder.py"))]
    holder = subprocess.Popen(
        [*program, str(made(folder / "holder")), token], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    replicator = Replicator(0, folder / "owner", token)
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        there, plain = (tuple(each) for each in json.loads(holder.stdout.readline()))
        addresses = [replicator.address, there]
        holder.stdin.write(json.dumps(addresses).encode() + b"\n")
        holder.stdin.flush()
        replicator.connect(addresses, ["a", "b"])
        yield replicator, plain
    finally:
        replicator.close()
        holder.kill()
        holder.communicate()


def _figures(rounds: list[dict[str, Any]]) -> Figures:
    size = rounds[0]["bytes"]
    plain, copy, beside = (
        statistics.median(row[key] for row in rounds) for key in ("plain", "alone", "beside training")
    )
    bare, others, during = (
        [step for row in rounds for step in row.get(key, ())]
        for key in ("steps", "steps beside others", "steps during it")
    )
    return {
        "state": {"megabytes": round(size / 2**20, 1), "step_ms": ms(statistics.median(bare))},
        "plain TCP": _row(plain, size),
        "copy": _row(copy, size) | {"to_plain_tcp": round(plain / copy, 3)},
        "copy, training": _row(beside, size),
        "steps during it": _inflation(during, bare),
        "beside 2 processes": _inflation(others, bare),
    }


def _inflation(steps: list[float], bare: list[float]) -> dict[str, Any]:
    if not steps:
        return {"not measured": "no step is shorter than a copy; give more megabytes"}
    return {
        "steps": len(steps),
        "step_inflation": round(statistics.median(steps) / statistics.median(bare) - 1, 3),
    }


def _row(seconds: float, size: int) -> dict[str, Any]:
    return {"ms": ms(seconds), "mb_s": round(size / 1e6 / seconds)}
