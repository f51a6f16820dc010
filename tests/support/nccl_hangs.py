"""Small jobs on NCCL ranks that hang in every way a job on GPUs can, for a while or until they are
aborted."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import QUICK, incidents
from torchscout.attach import enable_resiliency
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import Parallelism, ReplayConfig
from torchscout.replay import replayer

CULPRIT, STEPS, FAULTY_STEP = 2, 8, 5
STEPS_TO_COME_BACK = 16
"""Enough for checks to come back after one has failed, and to certify the last step."""
STALL = 7.0
"""Seconds; outlasts the threshold by far, and ends: the job then goes on and ends in order."""
CYCLES = 1_900_000_000
"""Of the device, in about a second."""
CONFIG = replace(QUICK, min_silence_seconds=2.0, startup_seconds=30.0)


@dataclass(frozen=True)
class Hang:
    """What goes wrong on the faulty rank, and where the hosts of all ranks wait for their devices."""

    fault: str = "none"
    stop: str = "item"
    compiled: bool = False
    captured: bool = False
    """Forward, backward and the gradients' all-reduce are replayed from a CUDA graph."""
    recovers: bool = True
    """Otherwise every rank aborts its communicators once there is an incident."""
    timeout: float | None = None
    """Of a process group that training uses, after which the watchdog of NCCL ends the process."""
    stall: float = STALL
    """Seconds for which a host that is late sleeps."""


@dataclass(frozen=True)
class Seen:
    """The result of one rank."""

    steps: int
    status: dict[str, Any]


class Net(torch.nn.Sequential):
    def __init__(self, width: int = 256) -> None:
        super().__init__(*(torch.nn.Linear(width, width) for _ in range(4)))


def train(rank: int, run_dir: Path, hang: Hang) -> Seen:
    """Train a DDP job over NCCL whose faulty rank does what ``hang`` says in its fifth step."""
    job = _Job(rank, hang, run_dir)
    settings: dict[str, Any] = {"replay": None, "observer": CONFIG, "run_dir": run_dir}
    if hang.captured:
        settings["parallelism"] = Parallelism(replica=dist.get_world_size())
    with enable_resiliency(job.model, job.optimizer, **settings) as session:
        rescue = threading.Thread(target=_rescue, args=(run_dir, job), daemon=True)
        if not hang.recovers:
            rescue.start()
        # An aborted communicator raises, here or in the next step; NCCL's message is not the point.
        with nullcontext() if hang.recovers else suppress(RuntimeError):
            for batch in session.watch_input(job.batches()):
                job.step(batch)
        job.is_over.set()
        status = session.status()
        if hang.stop == "destroy":
            dist.destroy_process_group()
    return Seen(job.steps, status)


def has_fired(run_dir: Path) -> bool:
    """Whether the fault has happened on its rank, which may have ended since."""
    return (run_dir / "fired").exists()


class _Job:
    def __init__(self, rank: int, hang: Hang, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.rank, self.hang, self.run_dir, self.fired, self.steps = rank, hang, run_dir, False, 0
        self.is_over = threading.Event()
        self.group = None if hang.timeout is None else _impatient(hang.timeout)
        net = Net().cuda()
        self.plain = net
        self.model: torch.nn.Module = net
        if not hang.captured:
            self.model = DistributedDataParallel(net, process_group=self.group)
        if hang.compiled:
            self.model = torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        self.side = torch.cuda.Stream()
        self.pair = dist.new_group(group_desc="second")
        self.graph: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None
        net[2].register_full_backward_hook(lambda *_: self.at("backward"))

    def batches(self, steps: int = STEPS) -> Iterator[torch.Tensor]:
        for _ in range(steps):
            time.sleep(0.02)
            self.at("input")
            yield torch.randn(64, 256, device="cuda")

    def at(self, place: str) -> None:
        """Let the planned fault happen if this is its place, its step and its rank."""
        faulty = {"late_first": 1, "late_last": STEPS}.get(self.hang.fault, FAULTY_STEP)
        if self.rank == CULPRIT and self.steps == faulty - 1 and not self.fired:
            fault = FAULTS[place].get(self.hang.fault)
            if fault is not None:
                self.mark()
                fault(self)

    def step(self, batch: torch.Tensor) -> None:
        self.at("code")
        self.at("forward")
        if self.hang.captured:
            self.graph = self.graph or self._capture()
            graph, loss = self.graph
            graph.replay()
        else:
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
        self.at("after")
        self.optimizer.step()
        if not self.hang.captured:
            self.communicate()
        self.steps += 1
        STOPS[self.hang.stop](loss)

    def communicate(self) -> None:
        """Communicate besides gradients: on two groups, and from the first rank to the last."""
        extra = torch.ones(1024, device="cuda")
        groups = [self.group, self.pair]
        for group in reversed(groups) if self.does("another_order") else groups:
            if not self.does("left_out"):
                dist.all_reduce(extra, group=group)
        # Large: NCCL finishes a small send without its receive.
        large = torch.ones(1 << 24, device="cuda")
        if self.hang.fault == "no_receive" and self.rank == 0:
            dist.send(large, dst=CULPRIT)
        elif self.hang.fault == "no_receive" and self.rank == CULPRIT and not self.does("no_receive"):
            dist.recv(large, src=0)

    def does(self, fault: str) -> bool:
        """Return whether the fault is to happen on this rank now; true at most once."""
        if self.hang.fault != fault or self.rank != CULPRIT or self.steps != FAULTY_STEP - 1 or self.fired:
            return False
        self.mark()
        return True

    def mark(self) -> None:
        self.fired = True
        self.run_dir.mkdir(exist_ok=True)
        (self.run_dir / "fired").touch()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        batch = torch.randn(64, 256, device="cuda")

        def step() -> torch.Tensor:
            loss = self.plain(batch).square().mean()
            loss.backward()
            for parameter in self.plain.parameters():
                dist.all_reduce(parameter.grad)
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=False)
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=False)
        with torch.cuda.graph(graph):
            loss = step()
        return graph, loss


class _LateOnce:
    """Delays the faulty rank before the first NCCL operation of SCOUT's own in the faulty step."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def before(self, call: Call) -> None:
        job = self._job
        is_turn = job.rank == CULPRIT and job.steps == FAULTY_STEP - 1 and not job.fired
        if is_turn and call.group.is_scouts and call.device is not None and call.device.type == "cuda":
            job.mark()
            time.sleep(
                2 * STALL
            )  # the first checks compile kernels: what counts as silence is longer for a while

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        pass


def late_in_a_check(rank: int, run_dir: Path) -> Seen:
    """Train; the faulty rank is late in a check, longer than replay waits for a rank on the host."""
    job = _Job(rank, Hang(), run_dir)
    replay = ReplayConfig(interval=1, timeout_seconds=STALL)
    with (
        enable_resiliency(
            job.model, job.optimizer, replay=replay, observer=CONFIG, run_dir=run_dir
        ) as session,
        listen(_LateOnce(job)),
    ):
        for batch in session.watch_input(job.batches(STEPS_TO_COME_BACK)):
            job.step(batch)
        status = session.status()
    return Seen(job.steps, status)


def failing_in_a_check(rank: int, run_dir: Path) -> Seen:
    """Train; the faulty rank fails in a check before it takes part in the broadcast of the inputs."""
    job, receive_together = _Job(rank, Hang(), run_dir), replayer.receive_together

    def receive_or_fail(*args: Any) -> None:
        if job.rank == CULPRIT and job.steps == FAULTY_STEP - 1 and not job.fired:
            job.mark()
            raise MemoryError("no memory for the inputs of a check")
        receive_together(*args)

    replayer.receive_together = receive_or_fail  # type: ignore[assignment]
    replay = ReplayConfig(interval=1, timeout_seconds=2.0)
    with enable_resiliency(
        job.model, job.optimizer, replay=replay, observer=None, run_dir=run_dir
    ) as session:
        for batch in session.watch_input(job.batches()):
            job.step(batch)
        status = session.status()
    return Seen(job.steps, status)


def _impatient(seconds: float) -> dist.ProcessGroup:
    import datetime

    return dist.new_group(timeout=datetime.timedelta(seconds=seconds), group_desc="training")


def _sleep(job: _Job) -> None:
    time.sleep(job.hang.stall)


def _stop(_: _Job) -> None:
    """Stop this process by a signal, and continue it by another one."""
    subprocess.Popen(["sh", "-c", f"sleep {STALL}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _compute(_: _Job) -> None:
    """Compute for long on the host, as a user's own code might."""
    end = time.monotonic() + STALL
    while time.monotonic() < end:
        sum(range(10_000))


def _spin(job: _Job) -> None:
    torch.cuda._sleep(int(STALL * CYCLES))


def _spin_aside(job: _Job) -> None:
    with torch.cuda.stream(job.side):
        torch.cuda._sleep(int(STALL * CYCLES))
    torch.cuda.current_stream().wait_stream(job.side)


def _slow(job: _Job) -> None:
    """Take a hundred times as long as usual for a step, in pieces."""
    for _ in range(50):
        torch.cuda._sleep(int(STALL * CYCLES / 50))
        torch.ones(8, device="cuda").add_(1)


def _another_size(job: _Job) -> None:
    dist.all_reduce(torch.ones(4096, device="cuda"), group=job.group)


def _another_operation(job: _Job) -> None:
    dist.all_gather_into_tensor(
        torch.ones(3 * 1024, device="cuda"), torch.ones(1024, device="cuda"), group=job.group
    )


def _raise(_: _Job) -> None:
    raise ValueError("the culprit gives up")


FAULTS: dict[str, dict[str, Callable[[_Job], None]]] = {
    "input": {"late_input": _sleep},
    "code": {
        "late_code": _compute,
        "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
        "stopped": _stop,
        "raises": _raise,
    },
    "forward": {
        "late_first": lambda _: time.sleep(20),
        "late_forward": _sleep,
        "late_last": _sleep,
        "spin": _spin,
        "spin_aside": _spin_aside,
        "slow": _slow,
    },
    "backward": {"late_backward": _sleep, "spin_backward": _spin},
    "after": {
        "another_size": _another_size,
        "another_operation": _another_operation,
        "too_many": _another_size,
    },
}


def _by_event(_: torch.Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


STOPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _: None,
    "item": lambda loss: loss.item(),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
    "event": _by_event,
    "copy": lambda loss: loss.cpu(),
    "barrier": lambda _: dist.barrier(),
    "destroy": lambda _: None,  # at the end of training
}


def _rescue(run_dir: Path, job: _Job) -> None:
    """Abort communicators that would wait for ever, so that their kernels end."""
    deadline = time.monotonic() + 25
    while not incidents(run_dir) and time.monotonic() < deadline and not job.is_over.is_set():
        time.sleep(0.1)
    time.sleep(1.0)
    if not job.is_over.is_set():
        for group in (job.group, job.pair, dist.group.WORLD):
            if group is not None:
                group.abort()
