"""Runs the jobs of ``test_faulty_jobs``: real ranks over Gloo, with a session, an observer and its faults.

Also a script, which torchrun starts.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.scenarios.rows import Finding
from tests.support.hangs import incidents
from tests.support.http_server import http_server
from tests.support.ranks import RankError, run_ranks
from tests.support.replayed_job import Net, flip_in_memory, loss_of
from tests.support.small_job import until
from torchscout.attach import enable_resiliency
from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.decision.types import Action, Incident
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.observer import handle
from torchscout.run.notify import Webhook
from torchscout.session.session import Session
from torchscout.testing.local_ranks import preload
from torchscout.utils.procfs import is_running

if TYPE_CHECKING:
    from tests.scenarios.test_faulty_jobs import Fault, Job

preload("tests.scenarios.today.jobs")
ROOT = Path(__file__).parents[3]
ACTIONS = {
    Action.RESTART: "restart",
    Action.INSPECT: "inspect",
    Action.PREFLIGHT: "preflight",
    Action.REPLACE: "replace",
    Action.STOP: "stop",
}
PATIENT = {"round_deadline_seconds": 10.0, "failover_seconds": 10.0, "grace_seconds": 20.0}
"""Nothing depends on how soon an observer or a hub answers, since a test machine may be busy."""
SLOW_SECONDS = 0.25
LAST = r".*torchscout: rank 0: \w+ after step"
"""How the last line of rank 0 begins."""


def reported(job: Job, folder: Path) -> list[Finding]:
    """The incidents of a job, in order, once all its processes have ended."""
    folder.mkdir()
    with suppress(RankError):  # ranks that end early; what they leave behind is looked at below
        run_ranks(_rank, job.ranks, job, folder, timeout=120)
    _wait_for_observers(job, folder)
    _require_faults(job, folder)
    return [finding_of(each) for each in incidents(folder / "run")]


def notified(job: Job, folder: Path) -> tuple[list[int], list[int], str]:
    """Run a job under torchrun; return the ranks that are named to a webhook and in the job's output, and
    what rank 0 says of incidents in its last line."""
    folder.mkdir()
    (folder / "job").write_bytes(pickle.dumps(job))
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}"]
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", __name__, str(folder)]
    with http_server() as received, (folder / "output").open("wb") as output:
        done = subprocess.run(
            [*torchrun, *options, received.url],
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            timeout=120,
            check=False,
        )
        _wait_for_observers(job, folder)
    _require_faults(job, folder)
    assert done.returncode != 0
    posted = [rank for each in received.bodies for rank in json.loads(each)["ranks"]]
    lines = [line for line in _lines(folder) if "incident (" in line]
    # What follows a semicolon is about the ranks that failed because of it.
    lines = [line.partition(" at step ")[2].partition(";")[0] for line in lines]
    named = [
        rank for rank in range(job.ranks) if any(re.search(rf"[Rr]ank {rank}\b", each) for each in lines)
    ]
    return posted, named, _said_last(folder)


def known(job: Job, folder: Path) -> tuple[bool, bool, bool, str]:
    """Whether log, failures and status of rank 0 say that its observer is gone, and its last line."""
    folder.mkdir()
    run_ranks(_rank, job.ranks, job, folder, timeout=120)
    _require_faults(job, folder)
    assert incidents(folder / "run") == []
    last = json.loads((folder / "last-0.json").read_text())
    said = [line.replace(str(folder), "") for line in _lines(folder) if not re.match(LAST, line)]
    log = [each for each in said if re.search("observer|hang detection is (?!on:)", each)]
    return bool(log), bool(last["failures"]), "problem" in last["observer"], _said_last(folder)


def finding_of(incident: Incident) -> Finding:
    deciding = incident.records[0]
    kind = incident.manifestation.value
    if deciding.surface == "process" or (deciding.progress or {}).get("process") == "gone":
        kind = "crash"
    scope = incident.scope.value.replace("_", " ")
    return Finding(kind, tuple(incident.ranks), scope, ACTIONS[incident.action])


def _wait_for_observers(job: Job, folder: Path) -> None:
    """Wait until all have ended, so that nothing is said any more."""
    observers = [int((folder / f"observer-{rank}").read_text()) for rank in range(job.ranks)]
    until(lambda: not any(map(is_running, observers)), "all observers have ended", 60.0)


def _require_faults(job: Job, folder: Path) -> None:
    assert [each for each in job.faults if not _mark(folder, each).exists()] == []


def _lines(folder: Path) -> list[str]:
    return [each for each in (folder / "output").read_text().splitlines() if "torchscout: " in each]


def _said_last(folder: Path) -> str:
    (line,) = [each for each in _lines(folder) if re.match(LAST, each)]
    return "no incidents" if "no incidents" in line else "not that there were none"


def _mark(folder: Path, fault: Fault) -> Path:
    return folder / "-".join(map(str, fault)).replace(" ", "-")


def _rank(rank: int, job: Job, folder: Path) -> None:
    """One rank, which ends like a script: it writes to the job's output, and an exception ends it."""
    os.sched_setaffinity(0, {*sorted(os.sched_getaffinity(0))[: job.cores]})
    output = os.open(folder / "output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        _train(rank, job, folder)
    except Exception as error:  # noqa: BLE001  as at the end of a script
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        os._exit(1)


def _train(rank: int, job: Job, folder: Path, on_incident: Callable[[Incident], None] | None = None) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    is_checked = any(each.what in ("flips a bit", "is slow") for each in job.faults)
    with Injector(_slowness(job), rank, net, optimizer) as injector:
        session = enable_resiliency(
            model,
            optimizer,
            replay=ReplayConfig(interval=1) if is_checked else None,
            observer=ObserverConfig(min_silence_seconds=job.silence, address="127.0.0.1", **PATIENT),
            run_dir=folder / "run",
            on_incident=on_incident,
        )
        (folder / f"observer-{rank}").write_text(str(session.status()["observer"]["pid"]))
        for step in range(1, job.steps + 1):
            for fault in job.faults:
                if (fault.rank, fault.step) == (rank, step):
                    _mark(folder, fault).touch()
                    _suffer(fault.what, session, net)
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            time.sleep(0.01)
        assert injector.unfired == []
    last = {"observer": session.status()["observer"], "failures": session.failures}
    (folder / f"last-{rank}.json").write_text(json.dumps(last, default=str))
    dist.barrier()
    session.close()


def _slowness(job: Job) -> FaultPlan:
    """Every layer is slow in the checks of four steps, which is long enough to be sure."""
    plan = FaultPlan()
    for _, rank, step in (each for each in job.faults if each.what == "is slow"):
        for layer in (0, 1):
            at, steps = f"stack.{layer}/forward", range(step, step + 4)
            plan = plan.delay(rank=rank, at=at, step=steps, seconds=SLOW_SECONDS, calls=None)
    return plan


def _suffer(what: str, session: Session, net: Net) -> None:
    if what == "sleeps":
        before = len(incidents(session.run_dir))
        until(lambda: len(incidents(session.run_dir)) > before, "it is late, and somebody says so", 60.0)
    elif what == "flips a bit":
        assert flip_in_memory(net.stack[1].up.weight, bit=20)
    elif what == "raises":
        raise ValueError("the script is wrong")
    elif what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "loses its observer":
        _lose_observer(session)
    else:
        assert what == "is slow", what


def _lose_observer(session: Session) -> None:
    """Kill it until it is not started again."""
    handle._RESTART_SECONDS = 0.05  # only the pauses between its starts

    def restarted(times: int) -> Any:
        seen = session.status()["observer"]
        return seen["restarts"] == times and "problem" not in seen and seen["pid"]

    for times in range(handle._MAX_RESTARTS + 1):
        pid = until(partial(restarted, times), f"it was started {times} times again")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_running(pid), "it has ended")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    _train(dist.get_rank(), pickle.loads((folder / "job").read_bytes()), folder, Webhook(sys.argv[2]))
