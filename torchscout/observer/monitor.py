"""One rank's share in hang localization: its progress record, its publisher, its observer process (paper,
section 7).

``launch`` starts the observer and configures it. Nothing here waits for the observer beyond a given time,
whatever happened to it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from torchscout.collectives.interceptor import listen
from torchscout.communicators import Communicators, Job
from torchscout.config import ObserverConfig
from torchscout.errors import ObserverError, ScoutError
from torchscout.log import log
from torchscout.observer import stacks
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.directory import reclaim, records_home
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks
from torchscout.utils.child_process import HOME, command
from torchscout.utils.network import listening_address
from torchscout.utils.private_files import is_private, make_folders, make_private_folder, open_file

__all__ = [
    "HangMonitor",
    "ObserverHandle",
    "launch",
    "private_directory",
    "remove_stale_records",
    "start_monitor",
]

_MODULE = "torchscout.observer.process"
_LOG_CHARACTERS = 2000
_MOST_RESTARTS = 3
_RESTART_SECONDS = 1.0
"""Until it is started again, the first time; later twice as long each time."""
_RESTART_PATIENCE_SECONDS = 30.0


def launch(assignment: ObserverSpec, *, timeout: float = 30.0, home: Path = HOME) -> ObserverHandle:
    """Start an observer and wait until it is ready; an ``ObserverError`` says why it is not."""
    observer = ObserverHandle(_started(assignment, home), assignment, home)
    try:
        observer.start(timeout)
    except ObserverError:
        observer.kill()
        observer.close()
        raise
    return observer


def _started(assignment: ObserverSpec, home: Path) -> subprocess.Popen[bytes]:
    with _log_of(assignment) as log:
        return subprocess.Popen(
            command(_MODULE, home=home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )


def _log_of(assignment: ObserverSpec) -> IO[bytes]:
    """Where it writes its own errors; nowhere, if the run directory cannot be written to."""
    try:
        make_folders(assignment.log.parent)
        return os.fdopen(open_file(assignment.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except OSError:
        return Path(os.devnull).open("ab")


class ObserverHandle:
    """A handle. It may be dropped at any time: the observer looks after itself."""

    def __init__(self, process: subprocess.Popen[bytes], assignment: ObserverSpec, home: Path = HOME) -> None:
        self.restarts = 0
        """How often it had to be started again."""
        self.port: int | None = None
        """Where the hub listens that this observer hosts, or will listen once it is elected; None if it hosts
        none."""
        self._assignment, self._home = assignment, home
        self._config = assignment.config
        self._hubs: Sequence[tuple[str, int]] | None = None
        self._asked = 0
        self._closing = False
        self._lock = threading.RLock()
        """Around every use of its pipes: it may be started again meanwhile."""
        self._attach(process)

    def _attach(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._rest = process, b""
        self._input, self._output = process.stdin, process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def config(self) -> ObserverConfig:
        """The settings, as last changed."""
        return self._config

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._write(self._assignment.to_json(), deadline)
        ready = self._read(deadline)
        self.port = ready["port"]

    def configure(self, hubs: Sequence[tuple[str, int]], *, timeout: float = 1.0) -> None:
        """Tell it where hubs listen, or will once they are elected, in the order of ``hub_ranks``. Once."""
        with self._lock:
            self._write({"hubs": [list(address) for address in hubs]}, time.monotonic() + timeout)
            self._hubs = hubs

    def keep_alive(self) -> None:
        """From now on start it again should it end before it is let go, a few times.

        A hub listens where it did before, so that the other observers find it again by themselves.
        """
        threading.Thread(target=self._keep_alive, name="torchscout-observer", daemon=True).start()

    def _keep_alive(self) -> None:
        while self.restarts < _MOST_RESTARTS:
            self._process.wait()
            if self._closing:
                return
            time.sleep(_RESTART_SECONDS * 2**self.restarts)
            self.restarts += 1
            with suppress(ObserverError, OSError):
                self._restart()

    def _restart(self) -> None:
        with self._lock:
            if self._closing:
                return
            place = self._assignment.hub
            port = 0 if self.port is None or place is None else self.port - place
            config = replace(self._config, port=port or self._config.port)
            self._assignment = replace(self._assignment, config=config, is_restarted=True)
            self._input.close()
            self._output.close()
            self._attach(_started(self._assignment, self._home))
            self.start(_RESTART_PATIENCE_SECONDS)
            if self._hubs is not None:
                self.configure(self._hubs)

    def kill(self) -> None:
        self._closing = True
        self._process.kill()

    def change(self, *, timeout: float = 1.0, **settings: Any) -> None:
        """Change fields of the ``ObserverConfig`` while it runs."""
        config = replace(self._config, **settings)  # refuses what is not valid
        with self._lock:
            self._write({"config": settings}, time.monotonic() + timeout)
            self._config = config

    def status(self, *, timeout: float = 1.0) -> Mapping[str, Any]:
        """How it sees its trainer now: silence, threshold, rounds, messages exchanged so far."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise self._error("is being started again")
        try:
            self._asked += 1
            self._write({"status": self._asked}, deadline)
            while (answer := self._read(deadline)).pop("answer", None) != self._asked:
                continue  # it is to an earlier question, whose answer came too late
            return answer
        finally:
            self._lock.release()

    def close(self, *, timeout: float = 1.0) -> None:
        """Let it go. It leaves by itself, at once or, with a hub, after the others; idempotent."""
        self._closing = True
        if self._input.closed:
            return
        with suppress(ObserverError):
            self._write({"close": True}, time.monotonic() + timeout)
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def leave(self) -> None:
        """This process ends; it sees that for itself, and how. Afterwards ``close`` does nothing."""
        self._closing = True
        if not self._input.closed:
            self._input.close()
            self._output.close()

    def _write(self, line: Mapping[str, Any], deadline: float) -> None:
        rest = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                if not _is_ready(self._input, select.POLLOUT, deadline):
                    raise self._error("takes no message")
                # A pipe that is writable takes this much at once: a stopped observer stops nobody.
                rest = rest[os.write(self._input.fileno(), rest[: select.PIPE_BUF]) :]
        except (
            OSError,
            ValueError,
        ) as error:  # the latter if a pipe is closed: it could not be started again
            raise self._error("is gone") from error

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._rest:
            if not _is_ready(self._output, select.POLLIN, deadline):
                raise self._error("does not answer")
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                raise self._error("is gone")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _error(self, state: str) -> ObserverError:
        with suppress(OSError):
            state += (
                f"; its log ends: {self._assignment.log.read_text()[-_LOG_CHARACTERS:].strip() or '(empty)'}"
            )
        return ObserverError(f"the observer of rank {self._assignment.rank} {state}")


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Whether it can be read or written before then, or is closed on the other side.

    Not by ``select``: a rank of a large job has more open files than that can look at.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


@dataclass(frozen=True, slots=True)
class HangMonitor:
    """A rank that publishes its progress and has an observer."""

    writer: ProgressWriter
    publisher: Publisher
    observer: ObserverHandle
    hubs: Sequence[int]
    """As those of ``Job``."""
    _undo: ExitStack

    def status(self) -> Mapping[str, Any]:
        """As ``ObserverHandle.status``; ``hub`` is the rank whose observer is asked, None if none can be."""
        try:
            status = dict(self.observer.status())
        except ObserverError as error:  # it is gone for good, or being started again
            status = {"problem": str(error), "hub": None}
        if status["hub"] is not None:
            status["hub"] = self.hubs[status["hub"]]
        return {**status, "pid": self.observer.pid, "restarts": self.observer.restarts}

    def close(self) -> None:
        """Take everything back, last first; the observer sees a trainer that leaves on purpose."""
        self.writer.finished()
        self._undo.close()

    def leave(self) -> None:
        """The interpreter ends: the observer learns from the exit status whether that was on purpose."""
        self.writer.exiting()
        self.observer.leave()
        self._undo.close()


def start_monitor(job: Job, config: ObserverConfig, communicators: Communicators) -> HangMonitor:
    """Start publishing and observing: on every rank, or with a ``ScoutError`` on none."""
    with ExitStack() as undo:
        problem = None
        try:
            alone = _watch_alone(job, config, undo)
        except (OSError, ValueError, ScoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        communicators.together(problem)
        writer, publisher, observer, address = alone
        addresses = communicators.exchange([address, observer.port])
        observer.configure([tuple(addresses[rank]) for rank in hub_ranks(job.hosts)])
        observer.keep_alive()
        return HangMonitor(
            writer, publisher, observer, hub_ranks(job.hosts), undo.pop_all()
        )  # the session's to close from now on
    raise AssertionError("nothing above is suppressed")


def _watch_alone(
    job: Job, config: ObserverConfig, undo: ExitStack
) -> tuple[ProgressWriter, Publisher, ObserverHandle, str | None]:
    """What each rank does by itself, and may fail at; last, where others reach the hub it hosts, if any."""
    hub = hub_ranks(job.hosts).index(job.rank) if job.rank in hub_ranks(job.hosts) else None
    address = None
    if hub is not None:
        listens, address = listening_address(job.hosts, job.rank, config.address)
        config = replace(config, address=listens)
    directory = private_directory()
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    writer = ProgressWriter.create(directory, job.rank)
    undo.callback(writer.close)
    registration = stacks.register(directory, config.stack_signal)
    undo.callback(registration.unregister)
    observer = launch(
        ObserverSpec(
            rank=job.rank,
            size=len(job.mesh),
            record=str(writer.path),
            run_dir=str(job.run_dir.absolute()),
            token=job.token,
            config=config,
            stack=str(registration.path),
            hub=hub,
            mesh=None if hub is None else describe_mesh(job.mesh),
        )
    )
    undo.callback(observer.close)
    publisher = Publisher(writer)
    undo.callback(publisher.remove)
    undo.callback(listen(publisher).remove)
    return writer, publisher, observer, address


def private_directory() -> Path:
    """A new directory for this process; those of the dead are cleared away."""
    home = records_home()
    try:
        make_private_folder(home)
    except OSError as error:  # another user, or anything else, may have taken the name
        log.warning("%s cannot hold progress records: %s", home, error)
        return Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=home.parent))
    remove_stale_records()
    return Path(tempfile.mkdtemp(dir=home))


def remove_stale_records() -> None:
    """Remove the records of this user's trainers that are gone and could not do so themselves."""
    home = records_home()
    if not os.path.lexists(home) or not is_private(os.lstat(home), stat.S_ISDIR):
        return
    for directory in home.iterdir():
        if reclaim(directory):
            shutil.rmtree(directory, ignore_errors=True)
