"""Several torchrun agents on this machine, each with the name of another machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tomllib

import torchscout
from tests.support.small_job import until

ROOT = Path(__file__).parents[2]


def installed(folder: Path) -> str:
    """Return a ``PYTHONPATH`` with this source tree and the entry points of its ``pyproject.toml``.

    The metadata of an installation may be that of another source tree.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"torchscout-{torchscout.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torchscout\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(ROOT), str(folder)])


@dataclass
class Agents:
    """The agents of one job."""

    folder: Path
    path: str
    script: Sequence[str]
    options: Sequence[str]
    port: int
    prefix: Sequence[str] = ()
    """What torchrun is an argument of, as in ``scout run``."""
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self, name: str, host: str | None = None, *, hosts_store: bool = False, **settings: str
    ) -> None:
        """Start an agent; ``settings`` are further ``--rdzv-conf``."""
        conf = {"is_host": str(int(hosts_store)), "keep_alive_interval": "1", "last_call_timeout": "2"}
        conf |= {"read_timeout": "20"} | settings
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=scout", "--rdzv-id=job"]
        command += [f"--rdzv-endpoint=localhost:{self.port}", "--monitor-interval=0.2"]
        command += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())]
        # torchrun's own restart needs the second setting over Gloo (see docs/doctor.md).
        environment = {
            "TORCHSCOUT_HOST": host or name,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": self.path,
            "OMP_NUM_THREADS": "1",
        }
        with self.output(name).open("wb") as file:
            self.started[name] = subprocess.Popen(
                [*self.prefix, *command, *self.options, *self.script],
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                start_new_session=True,
            )

    def output(self, name: str) -> Path:
        return self.folder / f"agent-{name}.txt"

    def said(self, name: str) -> str:
        return self.output(name).read_text()

    def until_said(self, name: str, words: str, seconds: float = 90.0) -> None:
        try:
            until(lambda: words in self.said(name), f"{name} says {words!r}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.everything()}") from None

    def wait(self, *names: str, seconds: float = 120.0) -> list[int]:
        """Wait for agents to end, and return their exit statuses."""
        return [self.started[name].wait(seconds) for name in names]

    def everything(self) -> str:
        return "\n".join(f"--- {name}\n{self.said(name)}" for name in self.started)


@contextmanager
def running_agents(
    folder: Path, path: str, script: Sequence[str], *options: str, prefix: Sequence[str] = ()
) -> Iterator[Agents]:
    """Yield agents to start; they and their workers are ended at the end."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    agents = Agents(folder, path, script, options, port, prefix)
    try:
        yield agents
    finally:
        for agent in agents.started.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in agents.started.values():
            _wait(agent)


def _wait(agent: subprocess.Popen[bytes]) -> None:
    try:
        agent.wait(45)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
