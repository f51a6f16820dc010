"""Several machines on one: each with its own network, host name, processes and shared memory.

Linux namespaces, made without being root. Machines are joined by a switch, a bridge in a namespace of its
own; they share the file system.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.small_job import until

INTERFACE, OTHER_INTERFACE = "eth0", "eth1"
"""Of every machine, to the switch."""
_NAMESPACES = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_LISTEN = "0A"
_BOOT = """
hostname "$0"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /etc/hosts
ip link set lo up
touch "$1.read"
exec sleep infinity
"""


@dataclass(frozen=True)
class Machine:
    name: str
    number: int
    init: int
    """Its first process; they all end with this one."""
    switch: int

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def other_address(self) -> str:
        return f"10.78.0.{self.number}"

    @property
    def shared_memory(self) -> Path:
        """Return the path of its ``/dev/shm`` as seen from here."""
        return Path(f"/proc/{self.init}/root/dev/shm")

    def start(self, command: Sequence[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Run a command on the machine."""
        enter = ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid"]
        with output.open("wb") as file:
            return subprocess.Popen(
                [*_as_owner_of(self.switch), *enter, f"--wd={Path.cwd()}", *command],
                stdout=file,
                stderr=file,
                env=_environment(variables),
            )

    def processes(self, word: str) -> list[int]:
        """Return its live processes whose command contains the word."""
        pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
        return [pid for pid in pids if self._has(pid, word)]

    def listens_on(self, address: str) -> bool:
        """Return whether a process there listens on exactly this address, and not on any."""
        word = socket.inet_aton(address)[::-1].hex().upper()
        tables = [Path(f"/proc/{self.init}/net/{table}").read_text() for table in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table.splitlines()]
        return any(row[1].partition(":")[0].endswith(word) and row[3] == _LISTEN for row in rows)

    def unplug(self) -> None:
        """Drop all packets that the machine sends, without an error."""
        for interface in (INTERFACE, OTHER_INTERFACE):
            _run(self.switch, "ip", "link", "set", _port(self, interface), "down")

    def degrade(self, *, delay: float, loss: float) -> subprocess.Popen[bytes]:
        """Delay what the machine sends and receives on ``INTERFACE`` by so many seconds, and lose a share.

        Returns the process that is the link; end it.
        """
        port, inner, outer = _port(self, INTERFACE), f"{self.name}-in", f"{self.name}-out"
        _run(self.switch, "ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
        _run(self.switch, "ip", "link", "set", port, "nomaster")
        _run(self.switch, "ip", "link", "set", outer, "master", "switch", "up")
        _run(self.switch, "ip", "link", "set", inner, "up")
        link = [sys.executable, "-m", "tests.support.bad_link", port, inner, str(delay), str(loss)]
        enter = ["nsenter", "--target", str(self.switch), "--net"]
        return subprocess.Popen([*_as_owner_of(self.switch), *enter, *link], env=_environment({}))

    def kill(self) -> None:
        os.kill(self.init, 9)

    def _has(self, pid: int, word: str) -> bool:
        try:
            here = Path(f"/proc/{pid}/ns/pid").readlink() == Path(f"/proc/{self.init}/ns/pid").readlink()
        except OSError:  # it has just ended
            return False
        return here and word in _command(pid)


@contextmanager
def machines(folder: Path, hosts: Mapping[str, Sequence[str]]) -> Iterator[list[Machine]]:
    """Make one machine for each name, with the given lines of ``/etc/hosts``.

    Their addresses are 10.77.0.1, 10.77.0.2 and so on; by the other interface 10.78.0.1 and so on.
    """
    started = [subprocess.Popen(["unshare", "--map-root-user", "--net", "sleep", "infinity"])]
    switch = started[0].pid
    try:
        until(lambda: _command(switch).startswith("sleep"), "the switch is there")
        _run(switch, "ip", "link", "add", "switch", "type", "bridge")
        _run(switch, "ip", "link", "set", "switch", "up")
        made = []
        for number, (name, lines) in enumerate(hosts.items(), 1):
            path = folder / f"hosts-{name}"
            path.write_text("\n".join([*lines, ""]))
            command = ["unshare", *_NAMESPACES, "sh", "-e", "-c", _BOOT, name, str(path)]
            started.append(subprocess.Popen([*_as_owner_of(switch), *command], env=_environment({})))
            until((folder / f"hosts-{name}.read").exists, f"machine {name} is there")
            machine = Machine(name, number, _child(started[-1].pid), switch)
            _plug_in(machine, INTERFACE, machine.address)
            _plug_in(machine, OTHER_INTERFACE, machine.other_address)
            made.append(machine)
        yield made
    finally:
        for process in reversed(started):  # --kill-child: a machine's processes go with it
            process.kill()
            process.wait()


def why_impossible() -> str | None:
    """Return what this system lacks or does not permit, if anything."""
    search = _environment({})["PATH"]
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool, path=search) is None]:
        return f"there is no {' and no '.join(missing)} here"
    attempt = ["unshare", "--map-root-user", *_NAMESPACES, "ip", "link", "add", "switch", "type", "bridge"]
    tried = subprocess.run(attempt, check=False, capture_output=True, text=True, env=_environment({}))
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


def _plug_in(machine: Machine, interface: str, address: str) -> None:
    port, init = _port(machine, interface), str(machine.init)
    peer = ["peer", "name", interface, "netns", init]
    _run(machine.switch, "ip", "link", "add", port, "type", "veth", *peer)
    _run(machine.switch, "ip", "link", "set", port, "master", "switch", "up")
    inside = ["nsenter", "--target", init, "--net", "ip"]
    _run(machine.switch, *inside, "address", "add", f"{address}/24", "dev", interface)
    _run(machine.switch, *inside, "link", "set", interface, "up")


def _run(switch: int, *command: str) -> None:
    enter = ["nsenter", "--target", str(switch), "--net"]
    subprocess.run([*_as_owner_of(switch), *enter, *command], check=True, env=_environment({}))


def _as_owner_of(switch: int) -> list[str]:
    """Return a command prefix that enters the user namespace of the switch, as its root."""
    return ["nsenter", "--target", str(switch), "--user", "--preserve-credentials"]


def _port(machine: Machine, interface: str) -> str:
    return f"{machine.name}-{interface}"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    # Tools of the administrator are often not on a user's path.
    return {**os.environ, **variables, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
