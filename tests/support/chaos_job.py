"""A job with all parts on that is disturbed while it trains: its ranks, and one machine's launcher of them.

``python -m tests.support.chaos_job FOLDER RANK...``: for each file ``life-N.json`` that appears in FOLDER,
the launcher starts its ranks, and writes their exit codes down once all have ended. If one fails, the others
are ended, as launchers do. A file ``over`` ends the launcher.

Ranks write what they see, a JSON object a line, to ``life-N/rank-R``; they obey ``life-N/order-R``.
"""

from __future__ import annotations

import atexit
import copy
import errno
import gc
import hashlib
import json
import multiprocessing
import os
import re
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.checkpoint_jobs import Loader, ddp
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.session.session import Session

INTERVAL = 4
_LOOK = 4
"""Steps from one look at ``status`` to the next."""
_AFTER_FAILURE_SECONDS = 3.0
_PERF = "/tmp/perf-N.map"
"""A file that training opens without SCOUT as well."""
_EXHAUSTED_STEPS = 2 * INTERVAL + 2
"""For so many steps no file can be opened: at least two checks are among them."""
OBSERVER = ObserverConfig(min_silence_seconds=8.0, grace_seconds=6.0, election_seconds=4.0)


@dataclass(frozen=True)
class Life:
    """One start of the job."""

    number: int
    folder: Path
    """Where ranks write what they see."""
    run_dir: Path
    directory: Path
    memory: Path
    ranks: int

    @property
    def last(self) -> Path:
        """The file that names the last step, once that is known."""
        return self.folder / "last"

    def order(self, rank: int) -> Path:
        return self.folder / f"order-{rank}"

    def seen(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"rank-{rank}"
        lines = (
            path.read_text().split("\n")[:-1] if path.exists() else []
        )  # a killed rank's last is not whole
        return [json.loads(line) for line in lines]

    def write(self, path: Path) -> None:
        texts = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}
        _put(path, json.dumps(texts))

    @classmethod
    def read(cls, path: Path) -> Life:
        given = json.loads(path.read_text())
        folders = {key: Path(given[key]) for key in ("folder", "run_dir", "directory", "memory")}
        return cls(given["number"], ranks=given["ranks"], **folders)


class Diary:
    """The log of a rank; its file stays open, since at times no other can be opened."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, **what: Any) -> None:
        os.write(self._file, json.dumps(what).encode() + b"\n")


class Orders:
    """Commands that a rank carries out besides training."""

    def __init__(self, path: Path, diary: Diary) -> None:
        self._path, self._diary = path, diary
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._opened: list[int] = []
        self._until = 0

    @property
    def is_exhausted(self) -> bool:
        """Return whether no file can be opened now."""
        return bool(self._opened)

    def obey(self, step: int) -> None:
        if self.is_exhausted and step < self._until:
            return
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        while self._opened:
            os.close(self._opened.pop())
        if self._path.exists():
            order = self._path.read_text()
            self._path.unlink()
            getattr(self, f"_{order}")(step)

    def _fork(self, step: int) -> None:
        """Start a child that ends at once, one that ends as a script does, and one that stays for a while."""
        for kind in ("at once", "as a script", "later"):
            child = os.fork()
            if not child:
                if kind == "as a script":
                    atexit._run_exitfuncs()
                if kind == "later":
                    time.sleep(1.0)
                os._exit(0)
            if kind != "later":
                os.waitpid(child, 0)
        self._diary.write(did="fork", step=step)

    def _descriptors(self, step: int) -> None:
        used = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 2, self._limits[1]))
        self._until = step + _EXHAUSTED_STEPS
        with suppress(OSError):
            while True:
                self._opened.append(os.open(os.devnull, os.O_RDONLY))
        try:
            os.open(os.devnull, os.O_RDONLY)
        except OSError as error:
            self._diary.write(did="descriptors", step=step, seen=errno.errorcode[error.errno])

    def _time(self, step: int) -> None:
        self._diary.write(did="time", step=step, seen=time.time())


def train(rank: int, life: Life) -> None:
    """Train to the last step with all parts of torchscout on."""
    diary = Diary(life.folder / f"rank-{rank}")
    model, optimizer, loader, accumulate = _work(rank)
    dist.all_reduce(torch.zeros(1))  # connections are made when they are used first
    before = _held()
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=INTERVAL, timeout_seconds=30.0),
        observer=OBSERVER,
        checkpoint=CheckpointConfig(life.directory, persist_every=2, timeout_seconds=30.0),
        run_dir=life.run_dir,
        on_incident=lambda incident: diary.write(
            incident=incident.manifestation.value, ranks=incident.ranks, sentence=incident.sentence
        ),
    )
    session.register_state("loader", loader)
    resumed = session.resume()
    diary.write(pid=os.getpid(), resumed=resumed.step, why=resumed.reason, swept=str(resumed.swept))
    diary.write(step=session.step, bits=_bits(model, optimizer))
    orders = Orders(life.order(rank), diary)
    for batches in session.watch_input(loader):
        begin = time.monotonic()
        optimizer.zero_grad()
        accumulate(batches, 1.0)
        optimizer.step()
        seconds = time.monotonic() - begin
        diary.write(step=session.step, bits=_bits(model, optimizer), seconds=seconds)
        orders.obey(session.step)
        if orders.is_exhausted:
            continue  # neither can be asked then: they read files
        if session.step % _LOOK == 0:
            diary.write(status=_status(session))
        if life.last.exists() and session.step >= int(life.last.read_text()):
            break
    diary.write(status=_status(session))
    dist.barrier()
    session.close()
    diary.write(closed=session.failures, left=_left(before))
    dist.barrier()


def alone(rank: int, lives: Sequence[tuple[int, int]]) -> list[dict[int, str]]:
    """The state after each step of the same lives without SCOUT and undisturbed, each with its first and last
    step: it begins where an earlier one was at that step.

    A start shows in the bits: DDP sums gradients in another order until it has seen a backward pass.
    """
    kept: dict[int, Any] = {}
    found = []
    for first, last in lives:
        model, optimizer, loader, accumulate = _work(rank)
        if first:
            parameters, slots, position, random = kept[first]
            model.load_state_dict(parameters)
            optimizer.load_state_dict(slots)
            loader.position = position
            torch.set_rng_state(random)
        bits = {first: _bits(model, optimizer)}
        for step, batches in zip(range(first + 1, last + 1), loader, strict=False):
            optimizer.zero_grad()
            accumulate(batches, 1.0)
            optimizer.step()
            bits[step] = _bits(model, optimizer)
            if step in {each for each, _ in lives}:
                state = model.state_dict(), optimizer.state_dict(), loader.position, torch.get_rng_state()
                kept[step] = copy.deepcopy(state)
        found.append(bits)
    return found


def _work(rank: int) -> tuple[Any, torch.optim.Optimizer, Loader, Any]:
    torch.manual_seed(0)
    work = ddp(rank)
    trained = [each for each in work.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    torch.manual_seed(rank)  # dropout is each rank's own
    return work.model, optimizer, Loader(work.replica), work.accumulate


def _status(session: Session) -> dict[str, Any]:
    status = session.status()
    observer, checkpoint, replay = (
        status["observer"] or {},
        status["checkpoint"] or {},
        status["replay"] or {},
    )
    return {
        "step": status["step"],
        "verified": checkpoint.get("verified"),
        "problems": checkpoint.get("problems"),
        "certified": replay.get("certified"),
        "off": replay.get("off"),
        "hub": observer.get("hub"),
        "problem": observer.get("problem"),
        "restarts": observer.get("restarts"),
        "failures": status["failures"],
        "incidents": [(each.manifestation.value, each.ranks) for each in session.incidents],
    }


def _bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    digest = hashlib.blake2b(digest_size=16)
    for each in [*model.parameters(), *slots, torch.get_rng_state()]:
        digest.update(each.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _held() -> Counter[str]:
    """Count threads, and descriptors by kind."""
    held = Counter(each.name for each in threading.enumerate())
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            held[re.sub(r"\d+", "N", str(path.readlink()))] += 1
    return held


def _left(before: Counter[str]) -> dict[str, int]:
    """Return what is held beyond that, once threads had time to end and cycles were collected."""
    deadline = time.monotonic() + 10
    before[_PERF] += 1
    while (more := _held() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    return dict(more)


def _run(rank: int, life: Life) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_PORT": str(29600 + life.number), "TORCHSCOUT_MEMORY": str(life.memory)}
    dist.init_process_group("gloo", rank=rank, timeout=timedelta(seconds=120))
    train(rank, life)
    sys.stdout.flush()
    os._exit(0)


def _lived(life: Life, ranks: list[int]) -> dict[int, int | None]:
    """Run the ranks to their end; return exit codes by rank."""
    context = multiprocessing.get_context("fork")  # torch is imported once, and nothing was computed yet
    processes = {rank: context.Process(target=_run, args=(rank, life)) for rank in ranks}
    for process in processes.values():
        process.start()
    over = life.folder / "failed"  # on any machine
    ends_at = None
    while any(process.is_alive() for process in processes.values()):
        if any(process.exitcode for process in processes.values()):
            over.touch()
        if over.exists() and ends_at is None:
            ends_at = time.monotonic() + _AFTER_FAILURE_SECONDS
        if ends_at is not None and time.monotonic() > ends_at:
            for process in processes.values():
                process.kill()
        time.sleep(0.05)
    return {rank: process.exitcode for rank, process in processes.items()}


def _put(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def main(folder: Path, *names: str) -> None:
    ranks, number = [int(name) for name in names], 0
    (folder / f"ready-{names[0]}").touch()
    while not (folder / "over").exists():
        path = folder / f"life-{number}.json"
        if path.exists():
            exits = _lived(Life.read(path), ranks)
            _put(folder / f"exits-{number}-{names[0]}.json", json.dumps(exits))
            number += 1
        time.sleep(0.05)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), *sys.argv[2:])
