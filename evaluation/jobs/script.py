"""A job of the catalog as a script for torchrun: ``torchrun ... -m evaluation.jobs.script NAME FOLDER``.

It has checkpoints, resumes from them, and what happens to it happens once. Each rank that comes to the end
says in ``FOLDER/rank-N.json`` what it has: a digest of its model and optimizer, and where it resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evaluation.jobs import job as jobs
from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.contracts import FAULTY
from evaluation.jobs.job import Job, Trial
from torchscout import RecoveryConfig
from torchscout.run.restart import FOLDER_VARIABLE
from torchscout.utils.identity import host_name
from torchscout.utils.procfs import processes_with

STEPS, FAULTY_STEP, LATER_STEP = 24, 14, 20
OTHER = FAULTY + 1
FAULTS = {
    "always_corrupt": {FAULTY: "corrupt"},
    "unheard": {FAULTY: "corrupt"},
    "resuming": {FAULTY: "corrupt"},
    "never_resumes": {FAULTY: "corrupt"},
    "gets_on": {FAULTY: "corrupt"},
    "two": {FAULTY: "stopped", 0: "asleep"},
    "split": {FAULTY: "corrupt", 3: "corrupt"},
    "two_lost": {FAULTY: "lost", OTHER: "lost"},
    "lost_again": {FAULTY: "lost"},
}
"""What happens to ranks before ``FAULTY_STEP``, where it is not the fault of that name to one rank.

``always_corrupt``: after each restart. ``unheard``: another rank is busy when it is to learn of the decision.
``resuming``: another rank is killed while the job resumes. ``never_resumes``: it is killed each time.
``gets_on``: it is killed the first time; the job then comes to ``LATER_STEP``, where the faulty rank is
killed, and the other one once more while the job resumes. ``lost_again``: a machine is lost as soon as it
has.
"""
TRAPS = {"never_resumes": range(1, 9), "gets_on": (1, 3)}
"""The lives of the job in which the other rank is killed while the job resumes; the first one is 0."""


class ScriptJob(Job):
    """A rank that resumes after its fault."""

    def __init__(self, rank: int, trial: Trial, asked: argparse.Namespace) -> None:
        super().__init__(rank, trial)
        self._log.close()  # a script prints what is logged
        self._asked = asked
        self.life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def attach(self, *given: Any, **named: Any) -> None:
        if (fault := self._asked.fault) == "resuming" or fault in TRAPS:
            is_due = self.life in TRAPS[fault] if fault in TRAPS else not self._mark.exists()
            trap = Trap(self._mark if self.rank == OTHER and is_due else None)
            named["states"] = {**(named.get("states") or {}), "trap": trap}
        act = [each for each in self._asked.act.split(",") if each]
        super().attach(*given, recovery=RecoveryConfig(act=act), on_incident=self._on_incident, **named)

    def begin(self, step: int) -> None:
        super().begin(step)
        fault, mine = self._asked.fault, None
        if step == FAULTY_STEP and fault != "none":
            mine = FAULTS.get(fault, {FAULTY: fault}).get(self.rank)
        elif fault == "lost_again" and self.report.resumed and self.rank == OTHER:
            mine = "lost"
        if mine is not None and (fault == "always_corrupt" or not self._mark.exists()):
            self._mark.touch()
            self._suffer(mine)
        if (fault, step, self.rank, self.life) == ("gets_on", LATER_STEP, FAULTY, 2):
            self._suffer("killed")
        time.sleep(0.1)  # what an incident leads to happens within a few steps

    @property
    def _mark(self) -> Path:
        return Path(self._asked.folder, f"suffered-{self.rank}")

    def _on_incident(self, _: object) -> None:
        if self._asked.fault == "unheard" and self.rank == OTHER:
            time.sleep(30)

    def _suffer(self, fault: str) -> None:
        if fault == "lost":
            lose_machine()
        elif fault in ("stopped", "killed"):
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        elif fault == "asleep":
            time.sleep(600)
        elif fault == "stuck":  # a kernel that does not end; the main thread then waits for it
            torch.cuda._sleep(1 << 62)
        elif fault == "raises":
            raise RuntimeError("this rank fails")
        elif fault == "corrupt":
            jobs._flip(jobs.local_of(self._first_matrix()))

    def answer(self) -> dict[str, Any]:
        assert self.resumption is not None
        digest = hashlib.blake2b(digest_size=16)
        for each in self._modules[0].parameters():
            jobs._add(digest, [each, self._optimizers[0].state[each]])
        found = self.resumption
        answer = {"bits": digest.hexdigest(), "host": host_name(), "resumed": found.step}
        return {**answer, "source": found.source, "reason": found.reason}


class Trap:
    """State that kills a rank while it is restored; without a mark it does nothing."""

    def __init__(self, mark: Path | None) -> None:
        self._mark = mark

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: dict[str, int]) -> None:
        if self._mark is not None:
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def lose_machine() -> None:
    """Kill every process of this machine: the agent, its workers and their observers."""
    # The variable is the agent's own; other jobs may use the same names of machines.
    mine = processes_with(f"{FOLDER_VARIABLE}={os.environ[FOLDER_VARIABLE]}")
    for each in (os.getppid(), *mine, os.getpid()):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CATALOG)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="none", help=f"of rank {FAULTY}, or {', '.join(FAULTS)}")
    parser.add_argument("--act", default="", help="what torchscout may do, separated by commas")
    parser.add_argument("--apart", action="store_true", help="each machine has its own disk and memory")
    parser.add_argument("--cuda", action="store_true")
    asked = parser.parse_args()
    folder, life = asked.folder, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if (folder / f"mps-{life}").exists():
        if life and os.environ["RANK"] == "0":
            leave_daemon(folder / f"mps-{life - 1}")
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / f"mps-{life}")
    if asked.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if asked.cuda else "gloo")
    trial = Trial(
        steps=STEPS,
        interval=2,
        run_dir=folder / f"run-{life}",
        min_silence_seconds=3.0,
        address="*",
        checkpoints=folder / (f"kept-{host_name()}" if asked.apart else "kept"),
    )
    job = ScriptJob(dist.get_rank(), trial, asked)
    CATALOG[asked.name].train(job)
    answer = {**job.answer(), "life": life}
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(answer))
    job.finish()
    dist.barrier()
    os._exit(0)  # destroy_process_group() may deadlock over Gloo


if __name__ == "__main__":
    main()
