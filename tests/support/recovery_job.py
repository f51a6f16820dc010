"""A script for torchrun: trains a small model, resumes, and in its first life suffers one fault.

Arguments: a folder; the fault: ``none``, ``stopped``, ``asleep``, ``raises``, ``corrupt`` or
``always_corrupt``; and what SCOUT may do, separated by commas.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchscout import (
    CheckpointConfig,
    ObserverConfig,
    Parallelism,
    RecoveryConfig,
    ReplayConfig,
    enable_resiliency,
)

STEPS, FAULTY_STEP, CULPRIT = 24, 13, 1


def suffer(fault: str, model: nn.Module) -> None:
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "asleep":
        time.sleep(600)
    elif fault == "raises":
        raise RuntimeError("this rank fails")
    elif fault in ("corrupt", "always_corrupt"):
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-3


def main() -> None:
    folder, fault, act = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    # Gradients are summed by parameter: DDP sums them in another order after each start.
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=2),
        observer=ObserverConfig(min_silence_seconds=3.0, silence_multiple=3.0),
        checkpoint=CheckpointConfig(folder / "checkpoints"),
        parallelism=Parallelism(replica=dist.get_world_size()),
        run_dir=folder / f"run-{life}",
        recovery=RecoveryConfig(act=[each for each in act.split(",") if each]),
    )
    resumed = session.resume()
    for step in range(resumed.step, STEPS):
        if step == FAULTY_STEP and rank == CULPRIT and (life == 0 or fault == "always_corrupt"):
            (folder / f"suffered-{life}").touch()
            suffer(fault, model)
        optimizer.zero_grad()
        torch.manual_seed(1000 * step + rank)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(0.1)  # what an incident leads to happens within a few steps
    bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    answer = {"bits": bits.hexdigest(), "resumed": resumed.step, "reason": resumed.reason, "life": life}
    (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
    session.close()
    dist.barrier()
    os._exit(0)  # destroy_process_group() may deadlock over Gloo


if __name__ == "__main__":
    main()
