"""The trainer's side of hang localization: its progress record, publisher and observer process (paper,
section 7).
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchscout.collectives.interceptor import listen
from torchscout.communicators import Communicators, Job
from torchscout.config import ObserverConfig
from torchscout.errors import ObserverError, ScoutError
from torchscout.log import log
from torchscout.observer import stacks
from torchscout.observer.handle import ObserverHandle, launch
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.directory import reclaim, records_home
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks, relayed_with
from torchscout.utils.network import listening_address
from torchscout.utils.private_files import is_private, make_private_folder
from torchscout.utils.procfs import process_stat

__all__ = [
    "HangMonitor",
    "private_directory",
    "remove_stale_records",
    "start_monitor",
]


@dataclass(frozen=True, slots=True)
class HangMonitor:
    """Publishes the progress of this rank, and has an observer watch it."""

    writer: ProgressWriter
    publisher: Publisher
    observer: ObserverHandle
    hubs: Sequence[int]
    """The result of ``hub_ranks``."""
    _undo: ExitStack

    def status(self) -> Mapping[str, Any]:
        """Return ``ObserverHandle.status``; ``hub`` is the rank whose hub would be asked now, or None."""
        try:
            status = dict(self.observer.status())
        except ObserverError as error:  # it is gone for good, or being restarted
            status = {"problem": str(error), "hub": None}
        if status["hub"] is not None:
            status["hub"] = self.hubs[status["hub"]]
        return {**status, "pid": self.observer.pid, "restarts": self.observer.restarts}

    @property
    def is_lost(self) -> bool:
        """Whether the observer has ended for good."""
        return self.observer.is_lost

    def announce_end(self, *, has_failed: bool) -> None:
        """Have the observers find out why this process ends: it has failed, or was asked to."""
        self.observer.let_go()
        (self.writer.failing if has_failed else self.writer.asked)()

    def close(self) -> None:
        """Undo everything, last first; the observer sees that the trainer has finished."""
        self.writer.finished()
        self._undo.close()

    def leave(self) -> None:
        """Like ``close`` while the interpreter exits: the exit status tells the observer how it ended."""
        self.writer.exiting()
        self.observer.leave()
        self._undo.close()


def start_monitor(
    job: Job,
    config: ObserverConfig,
    communicators: Communicators,
    lost: Callable[[ObserverError], object],
    **settings: Any,
) -> HangMonitor:
    """Start publishing and observing on every rank; raises ``ScoutError`` on all ranks if one fails.

    ``lost`` is called once the observer of this rank has ended for good. ``settings`` are further fields of
    ``ObserverSpec``: how its diagnoses judge, and what it may do.
    """
    with ExitStack() as undo:
        problem = None
        try:
            spec = partial(ObserverSpec, **settings)
            writer, publisher, observer, address = _start_alone(job, config, spec, undo)
        except (OSError, ValueError, ScoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        communicators.together(problem)
        addresses = communicators.exchange([address, observer.port])
        hubs = hub_ranks(job.hosts)
        copied = [place for place, rank in enumerate(hubs) if job.copies_from(rank)]
        observer.configure([tuple(addresses[rank]) for rank in hubs], copied=copied)
        observer.keep_alive(lost)
        return HangMonitor(writer, publisher, observer, hubs, undo.pop_all())
    raise AssertionError("nothing above is suppressed")


def _start_alone(
    job: Job, config: ObserverConfig, spec: Callable[..., ObserverSpec], undo: ExitStack
) -> tuple[ProgressWriter, Publisher, ObserverHandle, str | None]:
    """Do what this rank does by itself; the last result is the address of the hub that it hosts, if any."""
    hubs = hub_ranks(job.hosts)
    hub = hubs.index(job.rank) if job.rank in hubs else None
    address = None
    if hub is not None:
        listens, address = listening_address(job.hosts, job.rank, config.address)
        config = replace(config, address=listens)
    hosts = [job.mesh.host_of(rank) for rank in range(len(job.mesh))]
    directory = private_directory()
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    writer = ProgressWriter.create(directory, job.rank)
    undo.callback(writer.close)
    registration = stacks.register(directory, config.stack_signal)
    undo.callback(registration.unregister)
    observer = launch(
        spec(
            rank=job.rank,
            size=len(job.mesh),
            record=str(writer.path),
            run=job.run,
            token=job.token,
            config=config,
            stack=str(registration.path),
            hub=hub,
            mesh=None if hub is None else describe_mesh(job.mesh),
            machine=relayed_with(job.rank, hosts, config.min_relayed_ranks),
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
            launcher=_parent(),
            output=_output(undo),
        )
    )
    undo.callback(observer.close)
    publisher = Publisher(writer)
    undo.callback(publisher.remove)
    undo.callback(listen(publisher).remove)
    return writer, publisher, observer, address


def _parent() -> tuple[int, int] | None:
    """Return the process that has started this one, and when it began."""
    stat = process_stat(os.getppid())
    return None if stat is None else (os.getppid(), stat.started)


def _output(undo: ExitStack) -> int | None:
    """Return a descriptor of the job's output if that is a regular file: whoever opens the file anew has
    another place in it. A pipe must not be held open, since its reader waits for its end."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return None
        copy = os.dup(2)
    except OSError:
        return None
    undo.callback(os.close, copy)
    return copy


def private_directory() -> Path:
    """Return a new directory for this process's records, and remove those of dead processes."""
    home = records_home()
    try:
        make_private_folder(home)
    except OSError as error:  # another user may have taken the name
        log.warning("cannot keep progress records in %s: %s", home, error)
        return Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=home.parent))
    remove_stale_records()
    return Path(tempfile.mkdtemp(dir=home))


def remove_stale_records() -> None:
    """Remove the records of this user's dead trainers that could not do so themselves."""
    home = records_home()
    if not os.path.lexists(home) or not is_private(os.lstat(home), stat.S_ISDIR):
        return
    for directory in home.iterdir():
        if reclaim(directory):
            shutil.rmtree(directory, ignore_errors=True)
