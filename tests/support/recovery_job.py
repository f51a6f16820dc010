"""A script for torchrun: trains a small model, resumes, and suffers a fault once.

Arguments: a folder; the fault: ``none``, ``stopped``, ``asleep``, ``stuck``, ``raises``, ``corrupt``,
``lost``, ``two``, ``split``, ``again``, ``resuming``, ``two_lost``, ``lost_again``, ``always_corrupt`` or
``unheard`` (as ``corrupt``, but a rank is busy when it is to learn of the decision); what SCOUT may do,
separated by commas; ``apart`` if each machine has a disk and a memory of its own; ``cuda`` for training on a
device, over NCCL.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
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
from torchscout.decision.recovery.restart_plan import FOLDER_VARIABLE
from torchscout.utils.identity import host_name
from torchscout.utils.procfs import processes_with

STEPS, FAULTY_STEP, CULPRIT = 24, 13, 1


def suffer(fault: str, model: nn.Module) -> None:
    if fault == "lost":
        lose_machine()
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "asleep":
        time.sleep(600)
    elif fault == "stuck":  # a kernel that does not end; the main thread then waits for it
        torch.cuda._sleep(1 << 62)
    elif fault == "raises":
        raise RuntimeError("this rank fails")
    elif fault in ("corrupt", "always_corrupt", "split", "unheard"):
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-3


def lose_machine() -> None:
    """Kill every process of this machine: the agent, its workers and their observers."""
    # The variable is the agent's own; other jobs may use the same names of machines.
    mine = processes_with(f"{FOLDER_VARIABLE}={os.environ[FOLDER_VARIABLE]}")
    others = [os.getppid(), *mine]
    for each in (*others, os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def control_daemon(pipes: Path, *options: str, command: str = "") -> str:
    """Call the program that controls the MPS daemon with these pipes."""
    directories = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    answered = subprocess.run(
        ["nvidia-cuda-mps-control", *options],
        input=command,
        stdout=None if options else subprocess.PIPE,  # a daemon would keep the pipe open
        text=True,
        timeout=60,
        env=os.environ | directories | {"LD_PRELOAD": ""},
        check=False,
    )
    return answered.stdout or ""


def leave_daemon(pipes: Path) -> None:
    """End the MPS servers of the earlier ranks: kernels of those that were killed still run in them."""
    for each in control_daemon(pipes, command="get_server_list\n").split():
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(each), signal.SIGKILL)
    time.sleep(2)  # until the driver has reset the device, which would end new kernels too


AGAIN = {"again": ("corrupt", "raises"), "lost_again": ("lost", "lost")}
"""What happens to the culprit, and then to the next rank as soon as the job has resumed."""


def fault_of(fault: str, rank: int, step: int, folder: Path, *, has_resumed: bool) -> str:
    """What happens to this rank now."""
    if fault == "two" and step == FAULTY_STEP and rank in (0, CULPRIT):  # at once
        fault = "stopped" if rank == CULPRIT else "asleep"
    elif fault == "split" and step == FAULTY_STEP:
        fault = "split" if rank % 2 else "none"
    elif fault == "two_lost" and step == FAULTY_STEP and rank in (CULPRIT, CULPRIT + 1):
        fault = "lost"
    elif fault in AGAIN and rank == CULPRIT + 1 and has_resumed:
        fault = AGAIN[fault][1]
    elif step != FAULTY_STEP or rank != CULPRIT:
        return "none"
    elif fault in AGAIN:
        fault = AGAIN[fault][0]
    elif fault == "resuming":
        fault = "corrupt"
    mark = folder / f"suffered-{rank}"
    if mark.exists() and fault != "always_corrupt":
        return "none"
    mark.touch()
    return fault


class Trap:
    """State that kills a rank while it is restored, once; without a mark it does nothing."""

    def __init__(self, mark: Path | None) -> None:
        self._mark = mark

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: dict[str, int]) -> None:
        if self._mark is not None and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, fault, act = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    directory = folder / "checkpoints"
    if "apart" in sys.argv[4:]:
        directory = folder / f"disk-{host_name()}"
        os.environ["TORCHSCOUT_MEMORY"] = str(folder / f"memory-{host_name()}")
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    device = torch.device("cuda" if "cuda" in sys.argv[4:] else "cpu")
    if (folder / f"mps-{life}").exists():
        if life and os.environ["RANK"] == "0":
            leave_daemon(folder / f"mps-{life - 1}")
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / f"mps-{life}")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # Gradients are summed by parameter: DDP sums them in another order after each start.
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(device)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=2),
        observer=ObserverConfig(min_silence_seconds=3.0, silence_multiple=3.0),
        checkpoint=CheckpointConfig(directory),
        parallelism=Parallelism(replica=dist.get_world_size()),
        run_dir=folder / f"run-{life}",
        on_incident=lambda _: time.sleep(30 if (fault, rank) == ("unheard", CULPRIT + 1) else 0),
        recovery=RecoveryConfig(act=[each for each in act.split(",") if each]),
    )
    if fault == "resuming":
        mark = folder / f"suffered-{rank}" if rank == CULPRIT + 1 else None
        session.register_state("trap", Trap(mark))
    resumed = session.resume()
    for step in range(resumed.step, STEPS):
        suffer(fault_of(fault, rank, step, folder, has_resumed=resumed.step > 0), model)
        optimizer.zero_grad()
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(4, 16).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()  # on a device, the main thread waits here
        time.sleep(0.1)  # what an incident leads to happens within a few steps
    bits = hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters()))
    answer = {"bits": bits.hexdigest(), "resumed": resumed.step, "reason": resumed.reason, "life": life}
    answer |= {"source": resumed.source, "host": host_name()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
    session.close()
    dist.barrier()
    os._exit(0)  # destroy_process_group() may deadlock over Gloo


if __name__ == "__main__":
    main()
