"""One rank's share in hang localization: its record, its publisher, its observer (paper, section 7)."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchscout.config import ObserverConfig
from torchscout.errors import ScoutError
from torchscout.evidence.collectives import listen
from torchscout.evidence.observer import stacks
from torchscout.evidence.observer.assignment import Assignment, describe_mesh, hub_ranks
from torchscout.evidence.observer.launch import Observer, launch
from torchscout.evidence.observer.progress import ProgressWriter, reclaim
from torchscout.evidence.observer.publisher import Publisher
from torchscout.integration.communicators import Communicators
from torchscout.integration.roster import Entry
from torchscout.mesh import Mesh

__all__ = ["Job", "Watching", "watch"]

_EVERYWHERE = {"*", "0.0.0.0", "::"}
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks have agreed upon at attach."""

    rank: int
    mesh: Mesh
    hosts: Sequence[str]
    token: str
    """A secret of this run, the same on all ranks."""
    run_dir: Path

    @property
    def hubs(self) -> tuple[int, ...]:
        """The ranks whose observers host the hub and its standby."""
        return hub_ranks(self.hosts)


@dataclass(frozen=True, slots=True)
class Watching:
    """A rank that publishes its progress and has an observer."""

    writer: ProgressWriter
    publisher: Publisher
    observer: Observer
    _undo: ExitStack

    def status(self) -> Mapping[str, Any]:
        return self.observer.status()

    def close(self) -> None:
        """Take everything back, last first; the observer sees a trainer that leaves on purpose."""
        self.writer.finished()
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
        return Watching(writer, publisher, observer, undo.pop_all())  # the session's to close from now on
    raise AssertionError("nothing above is suppressed")


def _watch_alone(
    job: Job, config: ObserverConfig, undo: ExitStack
) -> tuple[ProgressWriter, Publisher, Observer, str | None]:
    """What each rank does by itself, and may fail at; last, where others reach the hub it hosts, if any."""
    hub = job.hubs.index(job.rank) if job.rank in job.hubs else None
    address = None if hub is None else _own_address(job, config.address)
    if address is not None and config.address not in _EVERYWHERE:
        config = replace(config, address=address)
    directory = _private_directory()
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
    Entry.own(job.rank, writer.path).write(job.run_dir)
    return writer, publisher, observer, address


def _private_directory() -> Path:
    """A new directory for this process, in memory where that looks like one; the dead's are cleared away."""
    root = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    home = root / f"torchscout-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    for directory in home.iterdir():
        if reclaim(directory):
            shutil.rmtree(directory, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=home))


def _own_address(job: Job, listens: str) -> str:
    """Where others reach a hub of this machine: not what its own name means here, often loopback."""
    other = next((host for host in job.hosts if host != job.hosts[job.rank]), None)
    for address in _own_addresses(listens, other):
        if other is None or not ipaddress.ip_address(address).is_loopback:
            return address
    if other is None:
        return "127.0.0.1"
    raise ScoutError(
        f"found no address of this machine that {other} could reach: let that name resolve here, or set "
        f"ObserverConfig.address, now {listens!r}, to the name of a network interface or to an address"
    )


def _own_addresses(listens: str, other: str | None) -> Iterator[str]:
    if listens not in _EVERYWHERE:
        yield _address_of(listens)
        return
    # Where the ranks met everybody could go; a machine's name may mean nothing elsewhere.
    for name in filter(None, (os.environ.get("MASTER_ADDR"), other)):
        yield from _addresses_towards(name)


def _addresses_towards(name: str) -> Iterator[str]:
    """Which of its addresses this machine would use to talk to that one."""
    with suppress(socket.gaierror):
        for family, kind, protocol, _, target in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing: only asks which way one would go
                yield probe.getsockname()[0]


def _address_of(interface: str) -> str:
    """Its IPv4 address; an address stands for itself.

    ZeroMQ would take an IPv6 one, and that is mostly one that means nothing beyond the next cable.
    """
    if interface not in (name for _, name in socket.if_nameindex()):
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
