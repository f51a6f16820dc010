"""Cells in which SCOUT restarts a job by itself: four torchrun agents of two ranks, and perhaps a standby."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchscout.campaign.cells.cell import Cell, Processes, Row
from torchscout.campaign.cells.loop_job import FAULTS, undisturbed
from torchscout.campaign.grading import Flaw, Grade, unfired
from torchscout.campaign.results import Result, graded
from torchscout.decision.types import Action, Decision, Incident
from torchscout.faults.injector import Firing
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import FOLDER_VARIABLE
from torchscout.testing.local_ranks import run_ranks
from torchscout.utils.child_process import HOME

__all__ = ["LOOP_ROWS", "loop_cells", "recovered", "run_loop"]

LOOP_ROWS = (
    Row("restart", "Restart in place", "rank 3 sleeps, or is stopped by a signal"),
    Row("standby", "Replacement by a standby", "a wrong weight of rank 3; one machine waits"),
    Row("empty-pool", "Replacement without a standby", "a wrong weight of rank 3; no machine waits"),
    Row("loop-clean", "Recovery, fault-free", "nothing; one machine waits"),
)
_AGENTS, _RANKS_EACH = 4, 2
_CULPRIT, _STEP = 3, 9
_SECONDS = 240.0
_JOIN_SECONDS = 30
"""How long a job waits for a machine that is missing."""
_TOO_FEW = "the job ends: too few machines joined in time"


def loop_cells(seed: int) -> list[Cell]:
    """All cells; the same for any seed."""
    wrong = FaultPlan().flip_bit(rank=_CULPRIT, at="1/weight", step=_STEP, bit=22, index=5)
    asleep = FaultPlan().stall(rank=_CULPRIT, at="step", step=_STEP, seconds=600.0)
    stopped = FaultPlan().freeze(rank=_CULPRIT, step=_STEP, seconds=600.0)
    faults = [("restart", "asleep", asleep), ("restart", "stopped", stopped), ("standby", "wrong", wrong)]
    faults += [("empty-pool", "wrong", wrong), ("loop-clean", "clean", FaultPlan())]
    return [Cell(row, name, "ddp-8", Processes.LOOP, plan, seed=seed) for row, name, plan in faults]


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a job."""

    statuses: dict[str, int]
    """The exit status of each machine's agent."""
    answers: Sequence[dict[str, Any]]
    """Of the ranks that trained to the end."""
    decisions: Sequence[Decision]
    log: str


def run_loop(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """Run one cell after another; the evidence of those that fail stays in ``folder``."""
    bits = run_ranks(undisturbed, _AGENTS * _RANKS_EACH, timeout=120.0)[0]
    for cell in cells:
        place = folder / f"{cell.row}-{cell.name}"
        shutil.rmtree(place, ignore_errors=True)  # left by an interrupted run
        result = _run(cell, place, bits)
        if result.grade.passed:
            shutil.rmtree(place)
        yield result


def _run(cell: Cell, place: Path, bits: str) -> Result:
    begin, reports = time.monotonic(), IncidentLog(place / "run")
    (place / "firings").mkdir(parents=True)
    (place / FAULTS).write_bytes(pickle.dumps(cell.faults))
    hosts = [f"node-{number}" for number in range(_AGENTS + (cell.row in ("standby", "loop-clean")))]
    failures: list[str] = []
    try:
        statuses = _statuses(place, hosts)
    except (subprocess.TimeoutExpired, OSError) as error:
        statuses, failures = {}, [f"the job did not end: {error}"]
    found = reports.new()
    fired = [Firing(**json.loads(line)) for path in (place / "firings").iterdir() for line in path.open()]
    answers = [json.loads(path.read_text()) for path in sorted(place.glob("rank-*.json"))]
    log = "".join(path.read_text() for path in sorted(place.glob("agent-*.txt")))
    ended = Ended(statuses, answers, reports.decisions, log)
    return graded(
        cell,
        found,
        fired,
        time.monotonic() - begin,
        unfired=unfired(cell.faults, {(firing.rank, firing.at) for firing in fired}),
        failures=[*failures, *(failure for each in answers for failure in each["failures"])],
        further=lambda incidents: recovered(cell.row, ended, incidents, bits),
    )


def recovered(row: str, ended: Ended, incidents: Sequence[Incident], bits: str) -> Grade:
    """Whether the right thing was decided and done, and the job ended as it should."""
    wanted = {"restart": Action.RESTART, "loop-clean": None}.get(row, Action.REPLACE)
    bad = {host for each in incidents for host in each.hosts} if wanted is Action.REPLACE else set[str]()
    reason = _wrong_decision(wanted, ended)
    if reason is None:
        reason = _not_ended(ended, bad) if row == "empty-pool" else _not_trained(ended, bad, bits)
    if reason is None and wanted is not None and not all(each["resumed"] for each in ended.answers):
        reason = "the job started over"
    return Grade() if reason is None else Grade(Flaw.NOT_RECOVERED, reason)


def _wrong_decision(wanted: Action | None, ended: Ended) -> str | None:
    decided = [each.action for each in ended.decisions]
    if decided != ([] if wanted is None else [wanted]):
        return f"{', '.join(each.value for each in decided) or 'nothing'} was decided"
    is_done = all(each.is_carried_out for each in ended.decisions)
    return None if is_done else "the decision was not carried out"


def _not_ended(ended: Ended, bad: set[str]) -> str | None:
    """What is wrong about a job that lacks a machine: it must end with an error that says so."""
    failed = {host for host, status in ended.statuses.items() if status}
    if ended.answers or failed != ended.statuses.keys() - bad:
        return f"without a standby the agents ended with {ended.statuses}"
    return None if _TOO_FEW in ended.log else "the log does not say that machines are missing"


def _not_trained(ended: Ended, bad: set[str], bits: str) -> str | None:
    if any(ended.statuses.values()) or len(ended.answers) != _AGENTS * _RANKS_EACH:
        return f"the agents ended with {ended.statuses}"
    if {each["bits"] for each in ended.answers} != {bits}:
        return "the job has other bits than an undisturbed one"
    used = bad & {each["host"] for each in ended.answers}
    return f"the job ended on {used.pop()}, which was replaced" if used else None


def _statuses(place: Path, hosts: Sequence[str]) -> dict[str, int]:
    """Run the job to its end; raises ``TimeoutExpired`` if it does not end."""
    deadline = time.monotonic() + _SECONDS
    with _agents(place, hosts) as agents:
        return {host: agent.wait(max(1.0, deadline - time.monotonic())) for host, agent in agents.items()}


@contextmanager
def _agents(place: Path, hosts: Sequence[str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start an agent for each machine. The last ones are standbys, and start once the job runs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    agents: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, host in enumerate(hosts):
            deadline = time.monotonic() + _SECONDS / 2
            while number == _AGENTS and not (place / "run").exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            agents[host] = _started(place, host, port, is_host=number == 0)
        yield agents
    finally:
        for agent in agents.values():
            agent.terminate()  # an agent that is killed leaves its workers behind
        for agent in agents.values():
            agent.wait()


def _started(place: Path, host: str, port: int, *, is_host: bool) -> subprocess.Popen[bytes]:
    conf = {"is_host": int(is_host), "last_call_timeout": 2, "join_timeout": _JOIN_SECONDS}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={_AGENTS}"]
    command += [f"--nproc-per-node={_RANKS_EACH}", "--max-restarts=3", "--monitor-interval=0.2"]
    command += ["--rdzv-backend=scout", "--rdzv-id=cell", f"--rdzv-endpoint=localhost:{port}"]
    command += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())]
    command += [f"--local-addr={_own_address()}", "-m", "torchscout.campaign.cells.loop_job", str(place)]
    environment = {
        "TORCHSCOUT_HOST": host,
        "TORCHSCOUT_MEMORY": str(place / f"memory-{host}"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # for restarts over Gloo: see docs/doctor.md
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")]),
    }
    inherited = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    with (place / f"agent-{host}.txt").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=inherited | environment, start_new_session=True
        )


def _own_address() -> str:
    """An address of this machine that is not loopback: ranks of different machines need one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
