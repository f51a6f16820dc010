"""A job under torchrun in which rank 2 dies at a step: ``dying_job.py HOW URL RUN_DIR TEXTFILE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from torchscout import Webhook, enable_resiliency
from torchscout.config import MetricsConfig
from torchscout.metrics.export import export_metrics

VICTIM, STEP = 2, 20
EXCEPTION = "bad batch 17"


def die(how: str, device: torch.device) -> None:
    match how:
        case "killed" | "container":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborts":
            os.abort()
        case "exits":
            os._exit(3)
        case "raises":
            raise ValueError(EXCEPTION)
        case "mismatch":
            dist.all_reduce(torch.ones(7, device=device))
        case "memory":  # its cgroup has less
            _ = [bytearray(16 << 20) for _ in range(4096)]


@record
def main() -> None:
    how, url, run_dir, textfile = sys.argv[1:]
    backend = os.environ.get("DYING_BACKEND", "gloo")
    dist.init_process_group(backend)
    rank, device = dist.get_rank(), torch.device("cuda" if backend == "nccl" else "cpu")
    if how == "memory" and rank == VICTIM:
        Path(os.environ["CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = enable_resiliency(model, optimizer, run_dir=run_dir, on_incident=Webhook(url))
    exporter = export_metrics(session, MetricsConfig(textfile=textfile, interval_seconds=3600))
    for step in range(1, 30 if how == "healthy" else 10_000):
        optimizer.zero_grad()
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        if step == STEP and rank == VICTIM:
            exporter.refresh()
            Path(run_dir, "fired").write_text(how)
            if how == "container":  # which takes its observer along
                os.kill(session.status()["observer"]["pid"], signal.SIGKILL)
            die(how, device)
    session.close()
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
