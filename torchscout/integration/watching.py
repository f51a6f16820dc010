"""One rank's share in hang localization: its record, its publisher, its observer (paper, section 7)."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchscout.collectives.interceptor import listen
from torchscout.config import ObserverConfig
from torchscout.errors import ObserverError, ScoutError
from torchscout.evidence.observer import stacks
from torchscout.evidence.observer.assignment import Assignment, describe_mesh, hub_ranks
from torchscout.evidence.observer.launch import Observer, launch
from torchscout.evidence.observer.progress_writer import ProgressWriter
from torchscout.evidence.observer.publisher import Publisher
from torchscout.evidence.observer.record_file import reclaim, records_home
from torchscout.integration.addresses import listening_address
from torchscout.integration.communicators import Communicators
from torchscout.log import log
from torchscout.mesh import Mesh
from torchscout.private_files import is_private, make_private_folder

__all__ = ["Job", "Watching", "clear_away_the_dead", "private_directory", "watch"]


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks have agreed upon at attach."""

    rank: int
    mesh: Mesh
    hosts: Sequence[str]
    token: str
    """A secret of this run, the same on all ranks."""
    run_dir: Path
    address: str = "*"
    """See ``ObserverConfig.address``."""

    @property
    def hubs(self) -> tuple[int, ...]:
        """The ranks whose observers host the hub, its standby, and those that are elected in their place."""
        return hub_ranks(self.hosts)


@dataclass(frozen=True, slots=True)
class Watching:
    """A rank that publishes its progress and has an observer."""

    writer: ProgressWriter
    publisher: Publisher
    observer: Observer
    hubs: Sequence[int]
    """As those of ``Job``."""
    _undo: ExitStack

    def status(self) -> Mapping[str, Any]:
        """As ``Observer.status``; ``hub`` is the rank whose observer would be asked, None if none can be."""
        try:
            status = dict(self.observer.status())
        except ObserverError as error:  # it is gone for good, or being started again
            status = {"problem": str(error), "hub": None}
        if status["hub"] is not None:
            status["hub"] = self.hubs[status["hub"]]
        return {**status, "restarts": self.observer.restarts}

    def close(self) -> None:
        """Take everything back, last first; the observer sees a trainer that leaves on purpose."""
        self.writer.finished()
        self._undo.close()

    def leave(self) -> None:
        """The interpreter ends: the observer learns from the exit status whether that was on purpose."""
        self.writer.exiting()
        self.observer.leave()
        self._undo.close()


def watch(job: Job, config: ObserverConfig, communicators: Communicators) -> Watching:
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
        observer.configure([tuple(addresses[rank]) for rank in job.hubs])
        observer.keep_alive()
        return Watching(
            writer, publisher, observer, job.hubs, undo.pop_all()
        )  # the session's to close from now on
    raise AssertionError("nothing above is suppressed")


def _watch_alone(
    job: Job, config: ObserverConfig, undo: ExitStack
) -> tuple[ProgressWriter, Publisher, Observer, str | None]:
    """What each rank does by itself, and may fail at; last, where others reach the hub it hosts, if any."""
    hub = job.hubs.index(job.rank) if job.rank in job.hubs else None
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
        Assignment(
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
    clear_away_the_dead()
    return Path(tempfile.mkdtemp(dir=home))


def clear_away_the_dead() -> None:
    """Remove the records of this user's trainers that are gone and could not do so themselves."""
    home = records_home()
    if not os.path.lexists(home) or not is_private(os.lstat(home), stat.S_ISDIR):
        return
    for directory in home.iterdir():
        if reclaim(directory):
            shutil.rmtree(directory, ignore_errors=True)
