"""Asks today's commands what ``test_reports`` asks, about folders that today's classes have written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from click.testing import Result
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from tests.scenarios.today import policy
from tests.support.preflight_jobs import TINY
from tests.support.run_dirs import read_roster
from torchscout.cli.main import app
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact, statistical
from torchscout.decision.types import (
    Action,
    EvidenceRecord,
    Incident,
    Manifestation,
    Resolved,
    Scope,
)
from torchscout.preflight.runner import Preflight
from torchscout.preflight.workload import Workload
from torchscout.run.folder import End, Heartbeat, RankEntry
from torchscout.run.restart import RestartPlan
from torchscout.run.writer import RunWriter, record_one
from torchscout.session.ending import add_run, mark_recovered
from torchscout.session.replay.summary import SummaryRecorder
from torchscout.utils.identity import HOST_VARIABLES

if TYPE_CHECKING:
    from tests.scenarios.test_policy import History
    from tests.scenarios.test_reports import Comparison, Job, Rank, Run

ROOT = Path(__file__).parents[3]
HEALTH = {0: "healthy", 1: "unhealthy", 2: "unknown"}
HOSTS = {0: "nothing", 2: "refused", 3: "replace", 4: "stopped"}


def scout(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})  # no line is folded
    assert isinstance(result.exception, SystemExit | KeyboardInterrupt | None), result.exc_info
    return result


# The state of a run.


def state(run: Run, folder: Path) -> tuple[str, str | None]:
    """Return the exit status of ``scout status``, in words, and the state that it prints."""
    with _made(run, folder / "run"):
        done = scout("status", folder / "run", "--json")
    return HEALTH[done.exit_code], json.loads(done.stdout)["state"] if done.stdout else None


def watched(run: Run, folder: Path) -> str:
    """Return what ``scout status --watch`` does after it has shown the run."""
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 3:
            raise KeyboardInterrupt

    with _made(run, folder / "run"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchscout.cli.status.time", SimpleNamespace(sleep=wait))
        shown = scout("status", folder / "run", "--watch").stdout
    assert str(folder / "run") in shown
    return "goes on" if waits else "ends"


def screen(run: Run, folder: Path) -> str:
    """Return what ``scout status`` prints before the incident."""
    with _made(run, folder / "run"):
        lines = scout("status", folder / "run").stdout.splitlines()
    (place,) = [number for number, line in enumerate(lines) if _incident("sdc").sentence in line]
    return f"{sum('another' in line for line in lines[:place])} lines about ranks"


@contextmanager
def _made(run: Run, run_dir: Path) -> Iterator[None]:
    """The run directory; ranks that are alive end with the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, rank in enumerate(run.ranks):
            started += _rank(run_dir, number, rank, len(run.ranks))
        for kind, how in run.incidents:
            _record(run_dir, _incident(kind), how)
        if run.heard:
            Heartbeat(0, read_roster(run_dir)[0].record, 12, 30.0).write(run_dir)
        if run.heard == "an hour ago":
            long_ago = time.time() - 3600
            os.utime(run_dir / "heartbeat.json", (long_ago, long_ago))
        yield
    finally:
        for each in started:
            each.kill()
            each.communicate()


TRAINER = """
import sys, time
from pathlib import Path
from torchscout.run.folder import RankEntry
from torchscout.observer.record.writer import ProgressWriter
run_dir, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
writer = ProgressWriter.create(run_dir / "records", rank)
writer.next_step()
RankEntry.own(rank, writer.path, size).write(run_dir)
print(flush=True)
time.sleep(600)
"""


def _rank(run_dir: Path, number: int, rank: Rank, size: int) -> list[subprocess.Popen[bytes]]:
    """Write what is known of this rank; return its process, if there is one."""
    entry = RankEntry.own(number, run_dir / f"record of {number}", size)
    if rank.elsewhere:
        entry = replace(entry, host="another", hostname="another")
    if rank.ended is not None:
        End(number, rank.ended, 12, entry.record, "ValueError: no").write(run_dir)  # type: ignore[arg-type]
    if rank.process is None:
        if rank.is_listed:
            entry.write(run_dir)
        return []
    command = [sys.executable, "-c", TRAINER, str(run_dir), str(number), str(size)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    if rank.process == "killed":
        process.send_signal(signal.SIGKILL)
        process.wait()
    return [process]


def _incident(kind: str) -> Incident:
    record = EvidenceRecord(
        step=7,
        surface="layer.3/output",
        manifestation=Manifestation(kind),
        peers=(0, 1, 2),
        verdict=exact([7, 9, 7]),
    )
    return Incident(
        manifestation=record.manifestation,
        scope=Scope.RANK,
        step=record.step,
        ranks=(1,),
        hosts=("another",),
        records=(record,),
        action=Action.INSPECT,
        sentence=f"This is an incident: {kind}.",
    )


def _record(run_dir: Path, incident: Incident, how: str) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    record_one(run_dir, 0, incident)
    if how == "resolved":
        about = {name: getattr(incident, name) for name in ("step", "ranks", "sentence")}
        record_one(run_dir, 0, Resolved(incident=incident.id, **about, stalled_seconds=6.0))
    if how == "recovered":
        checkpoints = run_dir.with_name("checkpoints")
        checkpoints.mkdir()
        add_run(checkpoints, run_dir)
        mark_recovered(checkpoints, incident.step - 1)


# The machines to replace.


def hosts(job: Job, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Return the exit status of ``scout hosts``, in words, and the machines that it lists."""
    checkpoints = folder / "checkpoints"
    policy.done(job.history, checkpoints)
    runs = sorted(checkpoints.glob("run-*"))  # less than ten
    for run_dir in runs:
        add_run(checkpoints, run_dir)
    plan = RestartPlan.path(checkpoints)
    if job.repaired:
        document = json.loads(plan.read_text())
        document["excluded"] = [each for each in document["excluded"] if each not in job.repaired]
        plan.write_text(json.dumps(document))
    if job.is_plan_removed:
        plan.unlink()
    if job.is_plan_damaged:
        plan.write_text(plan.read_text()[:-9])
    if job.then_finished_on:
        for rank, host in enumerate(job.then_finished_on):
            entry = replace(RankEntry.own(rank, run_dir / "record", len(job.then_finished_on)), host=host)
            entry.write(run_dir)
            End(rank, "finished", 200_000, entry.record).write(run_dir)
    done = scout("hosts", run_dir if job.asked == "run directory" else checkpoints)
    return HOSTS[done.exit_code], tuple(done.stdout.split())


# The recipe for Slurm in docs/recovery.md.


def left_to_torchrun(_: str, folder: Path) -> list[str]:
    """Return the options that the recipe leaves to torchrun's defaults."""
    _recipe(folder, srun='printf "%s\\0" "$@" > arguments; exit 0')
    _, *options = (folder / "arguments").read_text().split("\0")[:-1]
    parser = get_args_parser()
    found, default = parser.parse_args(options), parser.parse_args(["train.py"])
    names = ("max_restarts", "nproc_per_node", "rdzv_id")
    return [name for name in names if getattr(found, name) == getattr(default, name)]


def after_a_hang(history: History, folder: Path) -> str:
    """Run the recipe with a real torchrun, whose only worker leaves once as if to be restarted."""
    (folder / "train.py").write_text(
        "import os, pathlib, sys\n"
        "with open('lives', 'a') as lives: print(os.environ['LOCAL_RANK'], file=lives)\n"
        f"sys.exit({policy.EXIT_STATUS} if pathlib.Path('lives').read_text().count('0') == 1 else 0)\n"
    )
    assert policy.done(history, folder / "checkpoints")[-1] == "restart"
    calls = _recipe(folder, srun='exec "$@"')
    lives = (folder / "lives").read_text().split().count("0")
    if any(each.startswith("sbatch") for each in calls):
        return "is submitted again"
    return "trains again" if lives > 1 else "does not run any more"


def commands_after(history: History, folder: Path) -> list[str]:
    """Return what the recipe asks Slurm for, after a job that ended."""
    policy.done(history, folder / "checkpoints")
    return _recipe(folder, srun="exit 1")


def _recipe(folder: Path, srun: str) -> list[str]:
    """Run the recipe with this srun; return how Slurm's other commands were called."""
    text = (ROOT / "docs" / "recovery.md").read_text()
    found = re.search(r"<!-- recipe: slurm -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (folder / "bin").mkdir()
    (folder / "checkpoints").mkdir(exist_ok=True)
    scripts = {
        **{name: f'echo {name} "$@" >> calls' for name in ("sbatch", "scontrol")},
        "srun": srun,
        "scout": f'exec {sys.executable} -m torchscout "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HEAD": "localhost:0"}
    environment |= {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}
    subprocess.run(["sh", "-c", found[1]], cwd=folder, env=environment, check=False, timeout=100)
    calls = folder / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


# The names of machines in a preflight.


def names_in_preflight(name: str, _: Path) -> list[str]:
    """Return what a preflight calls this machine if a variable has its name, for each such variable."""
    found = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for variable in HOST_VARIABLES:
            with pytest.MonkeyPatch.context() as patch:
                for each in HOST_VARIABLES:
                    patch.delenv(each, raising=False)
                patch.setenv(variable, name)
                # A preflight of one rank ends at once: there is nobody to compare with.
                report = Preflight(Workload(torch.device("cpu"), TINY), seconds=1.0).run()
            found.append(report.devices[0].host)
    finally:
        dist.destroy_process_group()
    return ["the hostname" if each == socket.gethostname() else each for each in found]


# What is written about comparisons.


def written(comparison: Comparison, folder: Path) -> str:
    """Return whether a comparison is written with all its numbers, or only counted."""
    peers = tuple(range(len(comparison.values)))
    is_time = comparison.of == "times"
    record = EvidenceRecord(
        step=1,
        surface="time/module" if is_time else "layer.3/output",
        manifestation=Manifestation.STRAGGLER if is_time else Manifestation.SDC,
        peers=peers,
        verdict=(statistical if is_time else exact)(comparison.values),
    )
    recorder = SummaryRecorder(RunWriter(folder, 0), StragglerConfig())
    recorder.record(record)
    recorder.close()
    (line,) = (folder / "records" / "rank-0.jsonl").read_text().splitlines()
    return {"evidence": "with its numbers", "agreements": "counted"}[json.loads(line)["kind"]]
