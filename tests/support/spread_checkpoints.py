"""One machine's ranks of a job that keeps checkpoints, as a launcher starts them.

``python -m tests.support.spread_checkpoints PLAN OUTCOMES RANK... [--here]``; what each rank has to tell, or
what ended it, is written to a file in the folder OUTCOMES. With ``--here`` these are all ranks there are.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.checkpoint_jobs import Plan, Result, train
from tests.support.machines import INTERFACE, Machine

_MODULE = "tests.support.spread_checkpoints"


def spread(hosts: Sequence[Machine], plan: Plan, folder: Path, seconds: float = 120.0) -> list[Result | str]:
    """Run a job with a rank on each machine; return each result, what it raised, or "killed"."""
    for each in started(hosts, plan, folder):
        each.wait(seconds)
    return outcomes(folder, len(hosts))


def started(hosts: Sequence[Machine], plan: Plan, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The same job, and one does not wait for its end."""
    folder.mkdir()
    (folder / "plan").write_bytes(pickle.dumps(plan))
    common = {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29533",
        "WORLD_SIZE": str(len(hosts)),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = [sys.executable, "-m", _MODULE, str(folder / "plan"), str(folder)]
    return [
        host.start([*command, str(rank)], folder / f"output-{rank}", **common)
        for rank, host in enumerate(hosts)
    ]


def trainers(host: Machine) -> list[int]:
    """The processes of a machine's ranks; they are children of the one that started them."""
    found = host.processes(_MODULE)
    return [pid for pid in found if _parent(pid) in found]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return None


def outcomes(folder: Path, ranks: int) -> list[Result | str]:
    return [_outcome(folder, rank) for rank in range(ranks)]


def _outcome(folder: Path, rank: int) -> Result | str:
    path = folder / f"outcome-{rank}"
    if path.exists():
        outcome: Result | str = pickle.loads(path.read_bytes())
        return outcome
    said = (folder / f"output-{rank}").read_text() if (folder / f"output-{rank}").exists() else "nothing"
    return "killed" if "exit code -9" in said else said


def _run(rank: int, plan: Plan, folder: Path, here: int) -> None:
    torch.set_num_threads(1)
    if here:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / "store"), here)
        dist.init_process_group("gloo", rank=rank, world_size=here, store=store)
    else:
        dist.init_process_group("gloo", rank=rank)
    outcome: Result | str
    try:
        outcome = train(rank, plan)
    except Exception:  # noqa: BLE001  whatever ended it is the answer
        outcome = traceback.format_exc()
    (folder / f"outcome-{rank}").write_bytes(pickle.dumps(outcome))
    os._exit(0)


def main(plan: Path, folder: Path, *arguments: str) -> None:
    ranks = [each for each in arguments if each != "--here"]
    here = len(ranks) if "--here" in arguments else 0
    context = multiprocessing.get_context("fork")
    read = pickle.loads(plan.read_bytes())
    processes = [context.Process(target=_run, args=(int(rank), read, folder, here)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        print("exit code", process.exitcode, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
