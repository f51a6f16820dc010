"""How fast a copy gets into another process' memory, and how much slower training is meanwhile.

Both ends are on this machine. Copies beside training are paced by its steps, as in a job. The yardstick is
the same file over a plain TCP connection, neither encrypted nor verified, into the same file system; for
training, steps beside two processes that only compute. The share of a core is that of the process that
copies, at each end. ``aes_gb_s`` is what one core encrypts, and with it the bound of what an encrypted copy
can reach.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoint_parts.job import Figures, Job, identity, in_memory, made, ms, not_measured, synchronize
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.storage import shards

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
    with in_memory() as folder, _ends(folder) as (replicator, plain, holder):
        snapshots = Snapshots(made(folder / "owner"), 0, copies=2)
        snapshots.prepare(job.state().bytes, job.state().tensors.values())
        ends = Ends(replicator, plain, (replicator.pid, holder))
        rounds = [_one_round(job, snapshots, ends, number) for number in range(ROUNDS + WARM)]
        problems = replicator.problems()
        snapshots.close()
    assert not problems, problems
    return _figures(rounds[WARM:])


class Ends(NamedTuple):
    replicator: Any
    plain: tuple[str, int]
    """Where the other end takes plain bytes."""
    processes: tuple[int, int]
    """Which copy: the owner's and the holder's."""

    def cpu_seconds(self) -> list[float]:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.processes]
        return [(int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for each in fields]


def _one_round(job: Job, snapshots: Snapshots, ends: Ends, number: int) -> dict[str, Any]:
    """A plain copy, a copy alone, steps alone and beside busy processes, and steps during a copy."""
    replicator = ends.replicator
    first, second = identity(2 * number + 1), identity(2 * number + 2)
    found: dict[str, Any] = {}
    for name, each in (("alone", first), ("beside training", second)):
        assert snapshots.wait_until_ready(60.0)
        capture = snapshots.capture(each, TrustLevel.LATEST, job.state())
        snapshots.fence()
        assert capture.wait(), capture.problem
        with snapshots.held(each.generation) as path:
            assert path is not None
            found["bytes"] = size = shards.inspect(path).size
            if name == "alone":
                found["plain"] = _timed(lambda path=path, size=size: _sent_plainly(path, size, ends.plain))
                found["steps"] = [_paced_step(job, replicator) for _ in range(STEPS)]
                with _busy(2):
                    found["steps beside others"] = [_timed(lambda: _step(job)) for _ in range(STEPS)]
            used, start = ends.cpu_seconds(), time.perf_counter()
            replicator.send(path)
            trains = job if name != "alone" else None
            steps = _until(lambda each=each: each.generation in replicator.held(), trains, replicator)
            found[name] = time.perf_counter() - start
            found[f"{name}, cpu"] = [b - a for a, b in zip(used, ends.cpu_seconds(), strict=True)]
            if steps:
                found["steps during it"] = steps
        snapshots.retire(each.generation)
        replicator.retire([each.generation])
    return found


def _until(is_held: Callable[[], bool], job: Job | None, replicator: Any) -> list[float]:
    """Wait, or train; the times of all steps that the copy was a part of."""
    steps: list[float] = []
    deadline = time.monotonic() + SECONDS
    while not is_held():
        assert time.monotonic() < deadline, "the copy does not come"
        if job is not None:
            steps.append(_paced_step(job, replicator))
        else:
            time.sleep(0.001)
    return steps


def _paced_step(job: Job, replicator: Any) -> float:
    seconds = _timed(lambda: _step(job))
    replicator.step_took(seconds)
    return seconds


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


def _sent_plainly(path: Path, size: int, address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection, path.open("rb") as file:
        connection.sendall(size.to_bytes(8, "little"))
        connection.sendfile(file, count=size)
        assert connection.recv(1) == b"!"


@contextmanager
def _ends(folder: Path) -> Iterator[tuple[Any, tuple[str, int], int]]:
    """This process' end, connected to the other; where that takes plain bytes, and which process copies."""
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
        there, plain, copying = json.loads(holder.stdout.readline())
        addresses = [replicator.address, tuple(there)]
        holder.stdin.write(json.dumps(addresses).encode() + b"\n")
        holder.stdin.flush()
        replicator.connect(addresses, ["a", "b"])
        yield replicator, tuple(plain), copying
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
        "AES-128-GCM": {"aes_gb_s": round(_encrypted_per_second() / 1e9, 2)},
        "plain TCP": _row(plain, size),
        "copy": _row(copy, size) | _cores(rounds, "alone") | {"to_plain_tcp": round(plain / copy, 3)},
        "copy, training": _row(beside, size) | _cores(rounds, "beside training"),
        "steps during it": _inflation(during, bare),
        "beside 2 processes": _inflation(others, bare),
    }


def _cores(rounds: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Cores that the processes at both ends kept busy while a copy was made."""
    shares = [[seconds / row[name] for seconds in row[f"{name}, cpu"]] for row in rounds]
    sends, receives = (round(statistics.median(column), 2) for column in zip(*shares, strict=True))
    return {"cores_sending": sends, "cores_receiving": receives}


def _encrypted_per_second() -> float:
    from torchscout.utils.aes_gcm import KEY_BYTES, TAG_BYTES, AesGcm

    size = 1 << 20
    cipher, plain, sealed = (
        AesGcm(bytes(KEY_BYTES), encrypts=True),
        bytearray(size),
        bytearray(size + TAG_BYTES),
    )
    return size / min(_timed(lambda: cipher.encrypt(0, plain, sealed)) for _ in range(200))


def _inflation(steps: list[float], bare: list[float]) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "step_inflation": round(statistics.median(steps) / statistics.median(bare) - 1, 3),
    }


def _row(seconds: float, size: int) -> dict[str, Any]:
    return {"ms": ms(seconds), "mb_s": round(size / 1e6 / seconds)}
