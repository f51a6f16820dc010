"""How long a job takes from a fault to its first new step.

    python benchmarks/recovery.py [--fault NAME ...] [--silence SECONDS] [--json] [--output FILE]

Four torchrun agents, each with another name of a machine, run two Gloo ranks each on this machine. In step 13
rank 3 is killed (``crash``), sleeps (``hang``) or has a wrong weight (``sdc``); SCOUT may act. The time is
divided into ``detect``, until the incident is written; ``decide``, until the decision is; ``stop``, until the
last of the old workers is gone; ``rendezvous``, until all new workers have imported torch and joined the
process group; ``model``, until they have made model and optimizer (PyTorch imports its compiler for the first
optimizer); ``attach``, until torchscout is imported and attached; ``restore``, until a checkpoint is loaded;
and ``step``, until the first step has finished. ``scout`` is the sum of what SCOUT does: detect, decide,
attach and restore. Of the time to detect a hang, ``--silence`` seconds (``min_silence_seconds``) are the
user's setting; no incident but the fault's may be written with it. ``cpu`` is the processor time of a new
worker in each part, the median of all workers, with that of the processes that torchscout has started for it.
A crash is noticed by torchrun and by SCOUT at the same time: where torchrun is first, nothing is decided, and
``stop`` counts from the fault.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reporting import environment, parser_of, publish
from torch import nn

AGENTS, RANKS_EACH = 4, 2
RANKS = AGENTS * RANKS_EACH
STEPS, FAULTY_STEP, CULPRIT = 40, 13, 3
"""So many steps that what an incident leads to happens before the job ends."""
PARTS = ("rendezvous", "model", "attach", "restore", "step")
"""Of a new worker, in this order."""
FAULTS = ("crash", "hang", "sdc")
SECONDS = 240.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be repeated")
    parser.add_argument(
        "--silence", type=float, default=3.0, help="min_silence_seconds (default: %(default)s)"
    )
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "FAULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(Path(arguments.worker[0]), arguments.worker[1], arguments.silence)
        return
    load = os.getloadavg()[0]
    report: dict[str, Any] = {
        **environment("torch"),
        "cores": os.cpu_count(),
        "load": load,
        "ranks": RANKS,
        "agents": AGENTS,
        "silence": arguments.silence,
        "seconds": {},
        "cpu": {},
        "incidents": {},
    }
    for fault in arguments.fault or FAULTS:
        seconds, cpu, incidents = measured(fault, arguments.silence)
        report["seconds"][fault], report["cpu"][fault], report["incidents"][fault] = seconds, cpu, incidents
    publish(report, table, arguments)


def table(report: dict[str, Any]) -> str:
    setting = f"load {report['load']:.1f}, silence {report['silence']:g} s"
    lines = [f"{report['ranks']} ranks, {report['cores']} cores, {setting}"]
    for fault, seconds in report["seconds"].items():
        for title, values in ((fault, seconds), ("  cpu", report["cpu"][fault])):
            parts = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
            lines.append(f"{title:6} {parts} s")
        lines.append(f"  incidents: {'; '.join(report['incidents'][fault])}")
    return "\n".join(lines)


def measured(fault: str, silence: float) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Run the job to its end, and return the parts of the time from the fault to the first new step, the
    processor time of a worker in them, and all incidents."""
    with tempfile.TemporaryDirectory(prefix="scout-recovery-") as name:
        folder = Path(name)
        agents = [start_agent(folder, fault, silence, number) for number in range(AGENTS)]
        try:
            stopped = watch(folder, agents)
        finally:
            for agent in agents:
                agent.terminate()  # an agent that is killed leaves its workers behind
            for agent in agents:
                agent.wait()
        return parts_of(folder, stopped), cpu_of(folder), incidents_of(folder)


def start_agent(folder: Path, fault: str, silence: float, number: int) -> subprocess.Popen[bytes]:
    port_file = folder / "port"
    if not port_file.exists():
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port_file.write_text(str(probe.getsockname()[1]))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={AGENTS}"]
    command += [f"--nproc-per-node={RANKS_EACH}", "--max-restarts=3", "--monitor-interval=0.2"]
    command += ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=localhost:{port_file.read_text()}"]
    command += [
        "--rdzv-conf",
        f"is_host={int(number == 0)},last_call_timeout=2",
        f"--local-addr={own_address()}",
    ]
    environment = {
        "TORCHSCOUT_HOST": f"node-{number}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # for restarts over Gloo: see docs/doctor.md
        "TORCHSCOUT_MEMORY": str(folder / f"memory-{number}"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package is not compiled in each process
    }
    with (folder / f"agent-{number}.txt").open("wb") as log:
        return subprocess.Popen(
            [*command, __file__, f"--silence={silence}", "--worker", str(folder), fault],
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            start_new_session=True,
        )


def own_address() -> str:
    """An address of this machine that is not loopback: ranks of different machines need one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def watch(folder: Path, agents: list[subprocess.Popen[bytes]]) -> float:
    """Wait for the job to end, and return when the last worker of its first start was gone."""
    deadline, stopped = time.time() + SECONDS, 0.0
    while any(agent.poll() is None for agent in agents):
        if time.time() > deadline:
            logs = "\n".join(path.read_text() for path in sorted(folder.glob("agent-*.txt")))
            raise TimeoutError(f"the job did not end within {SECONDS:.0f} s\n{logs[-20_000:]}")
        first = [path.name.split("-")[1] for path in folder.glob("worker-*-0")]
        if not stopped and len(first) == RANKS and not any(Path("/proc", each).exists() for each in first):
            stopped = time.time()
        time.sleep(0.02)
    if failed := [agent.returncode for agent in agents if agent.returncode]:
        raise RuntimeError(f"agents ended with {failed}: {(folder / 'agent-0.txt').read_text()[-5000:]}")
    return stopped


def parts_of(folder: Path, stopped: float) -> dict[str, float]:
    from torchscout.decision.types import Decision, Incident  # workers import it when they attach

    fault = float((folder / "fault").read_text())
    found = {type(line.item): line.time for line in reversed(lines_of(folder))}  # the first one of each
    points = [("fault", fault), ("detect", found.get(Incident)), ("decide", found.get(Decision))]
    points += [("stop", stopped), *((name, max(marks(folder, name, 0))) for name in PARTS)]
    parts, before = {}, fault
    for name, at in points[1:]:
        if at is not None and at >= before:
            parts[name], before = at - before, at
    scout = sum(parts.get(name, 0.0) for name in ("detect", "decide", "attach", "restore"))
    return parts | {"scout": scout, "whole": before - fault}


def incidents_of(folder: Path) -> list[str]:
    from torchscout.decision.types import Incident

    return [
        f"{line.item.manifestation.value}, {line.item.scope.value}, ranks {[*line.item.ranks]}"
        for line in lines_of(folder)
        if isinstance(line.item, Incident)
    ]


def lines_of(folder: Path) -> list[Any]:
    """What was recorded in the run directory, with times."""
    from torchscout.run.reader import Stamped, incident_lines

    return [line for line in incident_lines(folder / "run") if isinstance(line, Stamped)]


def cpu_of(folder: Path) -> dict[str, float]:
    used = {name: marks(folder, name, 1) for name in PARTS}
    before = dict(zip(PARTS[1:], PARTS, strict=False))
    return {
        name: statistics.median(after - begin for after, begin in zip(used[name], used[first], strict=True))
        for name, first in before.items()
    }


def marks(folder: Path, name: str, column: int) -> list[float]:
    """When each rank of the second start was there, or with ``column`` 1, what it had used until then."""
    return [float((folder / f"{name}-{rank}").read_text().split()[column]) for rank in range(RANKS)]


def cpu_seconds() -> float:
    """The processor time of this process and of those that it has started."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[1]) == os.getpid() and int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def train(folder: Path, fault: str, silence: float) -> None:
    # TORCHELASTIC_RESTART_COUNT is 0 on agents that restart because another one does.
    life = int((folder / "fault").exists())
    (folder / f"worker-{os.getpid()}-{life}").touch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def mark(name: str) -> None:
        if life == 1:
            now = time.time()
            (folder / f"{name}-{rank}").write_text(f"{now} {cpu_seconds()}")

    mark("rendezvous")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mark("model")
    from torchscout import (
        CheckpointConfig,
        ObserverConfig,
        Parallelism,
        RecoveryConfig,
        ReplayConfig,
        enable_resiliency,
    )

    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1),
        # A step takes 0.4 s on 2 cores, and three of them would be more than one second.
        observer=ObserverConfig(min_silence_seconds=silence, silence_multiple=2.0),
        checkpoint=CheckpointConfig(folder / "checkpoints"),
        parallelism=Parallelism(replica=RANKS),
        run_dir=folder / "run",
        recovery=RecoveryConfig(act=["restart", "replace"]),
    )
    mark("attach")
    session.resume()
    mark("restore")
    for step in range(session.step, STEPS):
        if (step, rank, life) == (FAULTY_STEP, CULPRIT, 0):
            (folder / "fault").write_text(repr(time.time()))
            suffer(fault, model)
        optimizer.zero_grad()
        torch.manual_seed(1000 * step + rank)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if not (folder / f"step-{rank}").exists():
            mark("step")
    session.close()
    dist.barrier()
    os._exit(0)  # destroy_process_group() may deadlock over Gloo


def suffer(fault: str, model: nn.Module) -> None:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        time.sleep(600)
    else:
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-3


if __name__ == "__main__":
    main()
