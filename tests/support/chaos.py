"""Disturbances of a job on two machines from outside: its processes, memory, disks and clock.

Each disturbance is looked for after it was made: one that did not happen proves nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.chaos_job import Life
from tests.support.machines import INTERFACE, Machine
from tests.support.small_job import until
from tests.support.wall_clock import WallClock
from torchscout.faults.storage import fill_file_system
from torchscout.observer.spec import hub_ranks
from torchscout.utils.procfs import is_running

_HOUR = 3600
_OBSERVER, _LISTENER = "torchscout.observer.process", "torchscout.utils.listener"
_LAUNCHER = "tests.support.chaos_job"
MEMORY = Path("/dev/shm/memory")


@dataclass
class Chaos:
    """Disturbs the present start of a job."""

    hosts: Sequence[Machine]
    folder: Path
    """Shared by all machines."""
    disk: Path
    """Each machine's own."""
    clock: WallClock
    chance: random.Random
    ranks: int
    life: Life = field(init=False)
    happened: Counter[str] = field(default_factory=Counter)

    @property
    def beside(self) -> int:
        """The number of ranks on each machine."""
        return self.ranks // len(self.hosts)

    def machine_of(self, rank: int) -> Machine:
        return self.hosts[rank // self.beside]

    def begin(self, number: int) -> None:
        """Start the job and wait until it trains."""
        folder = self.folder / f"life-{number}"
        folder.mkdir()
        self.life = Life(number, folder, self.folder / "run", self.disk, MEMORY, self.ranks)
        self.life.write(self.folder / f"life-{number}.json")
        until(lambda: self.is_over or steps_of(self.life), "the job trains", 180)
        assert steps_of(self.life), f"life {number} ended before it trained: {self.exits}"

    @property
    def is_over(self) -> bool:
        return any(self.folder.glob(f"exits-{self.life.number}-*.json"))

    @property
    def exits(self) -> dict[int, int]:
        """Wait until all ranks have ended; return exit codes by rank."""
        return ended(self.folder, self.life, self.ranks, self.beside)

    def goes_on(self) -> None:
        """Wait until the job has trained through at least two checks."""
        before = steps_of(self.life)
        until(lambda: self.is_over or steps_of(self.life) >= before + 10, "training goes on", 120)
        assert not self.is_over, f"life {self.life.number} ended over {dict(self.happened)}: {self.exits}"

    def disturb(self, kind: str) -> None:
        print(f"{time.monotonic():.1f} s, step {steps_of(self.life)}: {kind}", flush=True)
        DISTURBANCES[kind](self)
        self.happened[kind] += 1

    def meanwhile(self) -> None:
        """Run something else while a disturbance lasts."""
        self.chance.choice((kill_observer, kill_listener, time_passes))(self)

    def any_rank(self) -> int:
        return self.chance.randrange(self.ranks)

    def trainer(self, rank: int) -> int:
        """Return the trainer's process as seen from this machine."""
        inside = self.life.seen(rank)[0]["pid"]
        found = self.machine_of(rank).processes(_LAUNCHER)
        return next(pid for pid in found if _number_inside(pid) == inside)

    def child(self, rank: int, word: str) -> int | None:
        """Return a process that a rank has started; None while there is none."""
        trainer = self.trainer(rank)
        found = [
            pid
            for pid in self.machine_of(rank).processes(word)
            if _parent(pid) == trainer and is_running(pid)
        ]
        return found[-1] if found else None

    def order(self, rank: int, what: str) -> dict[str, object]:
        """Send a command to a rank and return its answer."""
        self.life.order(rank).with_suffix(".new").write_text(what)
        self.life.order(rank).with_suffix(".new").replace(self.life.order(rank))
        known = sum("did" in line for line in self.life.seen(rank))
        return until(
            lambda: [line for line in self.life.seen(rank) if "did" in line][known:],
            f"rank {rank} does {what}",
            60,
        )[0]


def time_passes(chaos: Chaos) -> None:
    time.sleep(chaos.chance.uniform(0.5, 1.5))


def kill_trainer(chaos: Chaos) -> None:
    """Kill a trainer; the job ends, and the caller starts it again."""
    rank = chaos.any_rank()
    os.kill(chaos.trainer(rank), signal.SIGKILL)
    assert until(lambda: chaos.exits, "the job ends", 60)[rank] == -signal.SIGKILL


def stop_trainer(chaos: Chaos) -> None:
    with _stopped(chaos.trainer(chaos.any_rank())):
        chaos.meanwhile()


def kill_observer(chaos: Chaos) -> None:
    _kill(chaos, chaos.any_rank(), _OBSERVER)


def kill_hub(chaos: Chaos) -> None:
    _kill(chaos, _hubs(chaos)[0], _OBSERVER)


def kill_hub_and_standby(chaos: Chaos) -> None:
    for rank in _hubs(chaos)[:2]:
        _kill(chaos, rank, _OBSERVER)


def stop_hub_and_standby(chaos: Chaos) -> None:
    hub, standby = (chaos.child(rank, _OBSERVER) for rank in _hubs(chaos)[:2])
    with _stopped(*(pid for pid in (hub, standby) if pid is not None)):
        chaos.meanwhile()


def stop_observer(chaos: Chaos) -> None:
    pid = chaos.child(chaos.any_rank(), _OBSERVER)
    with _stopped(*(() if pid is None else (pid,))):
        chaos.meanwhile()


def kill_listener(chaos: Chaos) -> None:
    _kill(chaos, chaos.any_rank(), _LISTENER)


def fill_memory(chaos: Chaos) -> None:
    with _full(chaos.chance.choice(chaos.hosts).shared_memory):
        chaos.goes_on()
        chaos.meanwhile()


def fill_disk(chaos: Chaos) -> None:
    with _full(_seen_from_here(chaos.chance.choice(chaos.hosts), chaos.disk)):
        chaos.goes_on()
        chaos.meanwhile()


def remove_run_folder(chaos: Chaos) -> None:
    run_dir = chaos.life.run_dir
    assert run_dir.exists()
    while run_dir.exists():  # somebody may write there meanwhile
        shutil.rmtree(run_dir, ignore_errors=True)


def exhaust_descriptors(chaos: Chaos) -> None:
    assert chaos.order(chaos.any_rank(), "descriptors")["seen"] == "EMFILE"
    chaos.meanwhile()


def shift_clock(chaos: Chaos) -> None:
    hours = chaos.chance.choice((-48, -1, 1, 48))
    chaos.clock.shift(hours * _HOUR)
    seen = chaos.order(chaos.any_rank(), "time")["seen"]
    assert isinstance(seen, float)
    assert round((seen - time.time()) / _HOUR) == hours


def fork_in_user_code(chaos: Chaos) -> None:
    chaos.order(chaos.any_rank(), "fork")


DISTURBANCES: dict[str, Callable[[Chaos], None]] = {
    each.__name__: each
    for each in (
        *(kill_trainer, stop_trainer, kill_observer, stop_observer, kill_hub, kill_hub_and_standby),
        *(stop_hub_and_standby, kill_listener, fill_memory, fill_disk, remove_run_folder),
        *(exhaust_descriptors, shift_clock, fork_in_user_code),
    )
}


@contextmanager
def launched(
    hosts: Sequence[Machine], folder: Path, disk: Path, ranks: int, clock: WallClock
) -> Iterator[None]:
    """Start launchers on all machines, which have small disks and little shared memory."""
    beside, started = ranks // len(hosts), []
    variables = {
        "MASTER_ADDR": hosts[0].address,
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        **clock.variables,
    }
    disk.mkdir(mode=0o700)
    for number, host in enumerate(hosts):
        mounts = f"mount -o remount,size=32m /dev/shm && mount -t tmpfs -o mode=0700,size=16m tmpfs {disk}"
        assert host.start(["sh", "-c", mounts], folder / f"mount-{number}").wait() == 0
        own = map(str, range(number * beside, (number + 1) * beside))
        command = [sys.executable, "-m", _LAUNCHER, str(folder), *own]
        started.append(host.start(command, folder / f"output-{number}", **variables))
    try:
        until(lambda: len([*folder.glob("ready-*")]) == len(hosts), "launchers are ready", 120)
        yield
        (folder / "over").touch()
        for each in started:
            assert each.wait(60) == 0
    finally:
        for each in started:
            with suppress(subprocess.TimeoutExpired):
                each.kill()
                each.wait(10)


def steps_of(life: Life) -> int:
    """Return the last step that every rank has done; 0 before all train."""
    seen = [[line["step"] for line in life.seen(rank) if "step" in line] for rank in range(life.ranks)]
    return min((steps[-1] if steps else 0) for steps in seen)


def ended(folder: Path, life: Life, ranks: int, beside: int) -> dict[int, int]:
    """Return exit codes by rank, or nothing until all ranks have ended."""
    paths = [folder / f"exits-{life.number}-{first}.json" for first in range(0, ranks, beside)]
    if not all(map(Path.exists, paths)):
        return {}
    return {int(rank): code for path in paths for rank, code in json.loads(path.read_text()).items()}


def _hubs(chaos: Chaos) -> tuple[int, ...]:
    return hub_ranks([chaos.machine_of(rank).name for rank in range(chaos.ranks)])


def _kill(chaos: Chaos, rank: int, word: str) -> None:
    """Kill a process unless it has ended already."""
    pid = chaos.child(rank, word)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_running(pid), "it is gone")
        chaos.happened[f"{word} ended"] += 1


@contextmanager
def _stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(_state(pid) == "T" for pid in pids), "they are stopped")
        yield
        time.sleep(1.0)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    fill_file_system(folder)
    try:
        with (folder / "more").open("wb") as file, pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), 0, 1 << 16)
        yield
    finally:
        (folder / "filler").unlink()
        (folder / "more").unlink()


def _seen_from_here(host: Machine, path: Path) -> Path:
    return Path(f"/proc/{host.init}/root{path}")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _parent(pid: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _number_inside(pid: int) -> int | None:
    """Return the process number on the machine itself."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))
    return None
