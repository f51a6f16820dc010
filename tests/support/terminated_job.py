"""A job on several machines that torchrun terminates: ``terminated_job.py HOW URL ADDRESS RUN_DIR``.

``HOW`` says on which machine each rank runs, one letter a rank. At a step, machines in capitals die with all
their processes. Their connections stay open, as without power, so that the survivors are blocked in a
collective when torchrun terminates them. If no machine dies, a rank sends SIGTERM to torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.small_job import until
from torchscout import ObserverConfig, Webhook, enable_resiliency

STEP = 20
_MOST_SECONDS = 300


def hold_connections() -> None:
    """Start a process that has all files of this one; the test kills it."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(_MOST_SECONDS)
        os._exit(0)


def kill_all(dying: list[int], run_dir: Path) -> None:
    """Kill these ranks, this one last, each with its observer."""
    for rank in reversed(dying):
        path = run_dir / f"processes-{rank}"
        for pid in until(path.exists, f"rank {rank} is ready") and path.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def main() -> None:
    how, url, address, run_dir = *sys.argv[1:4], Path(sys.argv[4])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dying = [each for each, machine in enumerate(how) if machine.isupper()]
    os.environ["TORCHSCOUT_HOST"] = f"machine-{how[rank].lower()}"
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Nobody is silent for so long: what is found, is found because of SIGTERM.
    observer = ObserverConfig(min_silence_seconds=600.0, address=address)
    session = enable_resiliency(
        model, optimizer, run_dir=run_dir, observer=observer, replay=None, on_incident=Webhook(url)
    )
    for step in range(1, 1_000_000):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if step == STEP // 2 and rank in dying:
            hold_connections()
            ready = run_dir / f"processes-{rank}.new"
            ready.write_text(f"{session.status()['observer']['pid']} {os.getpid()}")
            ready.rename(run_dir / f"processes-{rank}")
        if step == STEP and rank == min(dying, default=0):
            (run_dir / "fired").write_text(how)
            if not dying:
                os.kill(os.getppid(), signal.SIGTERM)
            kill_all(dying, run_dir)


if __name__ == "__main__":
    main()
