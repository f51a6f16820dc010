"""The worker of recovery cells: ``python -m torchscout.campaign.cells.loop_job FOLDER``, under torchrun.

It trains a small model, resumes, and suffers the cell's fault once, before the first restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, Parallelism, RecoveryConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.utils.identity import host_name

__all__ = ["FAULTS", "STEPS", "undisturbed"]

STEPS = 20
FAULTS = "faults.pickle"
"""The file in the folder with the cell's faults."""
_PAUSE_SECONDS = 0.2
"""Between steps, so that what an incident leads to happens before the job ends."""


def undisturbed(rank: int) -> str:
    """Train without SCOUT; return a digest of the weights."""
    model, optimizer = _built()
    _train(model, optimizer, rank, 0)
    return _bits(model)


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    # Gradients are added up by parameter: DDP adds them in another order after each start.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda each: dist.all_reduce(each.grad)
        )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    done: int,
    pause: Callable[[], None] = lambda: None,
) -> None:
    for step in range(done, STEPS):
        optimizer.zero_grad()
        torch.manual_seed(1000 * step + rank)
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        pause()


def _bits(model: nn.Module) -> str:
    tensors = (each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, log = dist.get_rank(), folder / "firings" / f"rank-{dist.get_rank()}.jsonl"
    faults: FaultPlan = pickle.loads((folder / FAULTS).read_bytes())
    model, optimizer = _built()
    with ExitStack() as faulty:
        if not log.exists():
            faulty.enter_context(Injector(faults, rank, model, optimizer, log=log))
        session = enable_resiliency(
            model,
            optimizer,
            replay=ReplayConfig(interval=1),
            observer=ObserverConfig(min_silence_seconds=3.0),
            checkpoint=CheckpointConfig(folder / "checkpoints"),
            parallelism=Parallelism(replica=dist.get_world_size()),
            run_dir=folder / "run",
            recovery=RecoveryConfig(act=["restart", "replace"]),
        )
        resumed = session.resume()
        _train(model, optimizer, rank, resumed.step, lambda: time.sleep(_PAUSE_SECONDS))
        answer = {"bits": _bits(model), "resumed": resumed.step, "host": host_name()}
        answer |= {"failures": session.failures}
        (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
        session.close()
    dist.barrier()
    os._exit(0)  # destroy_process_group() may deadlock over Gloo


if __name__ == "__main__":
    main()
