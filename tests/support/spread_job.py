"""One machine's ranks of a small DDP job, as a launcher starts them.

``python -m tests.support.spread_job RUN_DIR STALLS RANK...``
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import FAULTY_STEP, QUICK, STEPS, Net, give_up_soon, wait_for_incident
from torchscout.attach import enable_resiliency
from torchscout.decision.types import Incident


def train(rank: int, run_dir: Path, stalls: str) -> None:
    """Train; rank ``stalls`` stalls until it is found; with "nobody" the job never ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank)
    # Long enough for an incident, short enough for a test: who waits for a lost machine gives up then.
    patience = float(os.environ.get("GIVE_UP_SECONDS", "5"))
    model = DistributedDataParallel(Net(), process_group=give_up_soon(patience))
    optimizer = torch.optim.AdamW(model.parameters())
    config = replace(
        QUICK,
        grace_seconds=8.0,
        min_silence_seconds=float(os.environ.get("MIN_SILENCE", QUICK.min_silence_seconds)),
        address=os.environ.get("HUB_ADDRESS", "*"),
    )
    reports = Path(os.environ.get("REPORTS", run_dir)) / f"incidents-{rank}"
    session = enable_resiliency(
        model,
        optimizer,
        observer=config,
        run_dir=run_dir,
        on_incident=lambda each: append_incident(each, reports),
    )
    for step in itertools.count(1) if stalls == "nobody" else range(1, STEPS + 1):
        time.sleep(0.02)
        if step == FAULTY_STEP:
            (run_dir / f"connected-{rank}").write_text(str(session.status()["observer"]["connected"]))
            if str(rank) == stalls:
                wait_for_incident(run_dir)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    time.sleep(1)  # the end of an incident reaches the other machine while the job goes on
    session.close()


def append_incident(incident: Incident, path: Path) -> None:
    """Append one line for an incident."""
    with path.open("a") as file:
        file.write(f"{incident.manifestation.value} {incident.ranks}\n")


def main(run_dir: Path, stalls: str, *ranks: str) -> int:
    context = multiprocessing.get_context("fork")  # torch is imported once
    processes = [context.Process(target=train, args=(int(rank), run_dir, stalls)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
