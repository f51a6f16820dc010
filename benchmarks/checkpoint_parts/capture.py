"""How long training is held by a capture, against other ways to keep the same state."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from checkpoint_parts.job import CUDA, Figures, Job, alone, identity, in_memory, made, ms, synchronize
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot import Snapshots

ROUNDS, WARM = 9, 3
_SECONDS = 60.0


class Contender:
    """One way to keep the state: what training waits for, and when all is done."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.count = 0

    def begin(self) -> None:
        """Right after an update."""

    def before_update(self) -> None:
        """Right before the next."""

    def finish(self) -> None:
        """Until the state is kept."""

    def close(self) -> None:
        """Give everything back."""


class Scout(Contender):
    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        self.snapshots = Snapshots(folder, 0)
        state = job.state()
        # Two slots of each parameter are expected, as when a job attaches.
        self.snapshots.prepare(3 * state.bytes, state.tensors.values())

    def begin(self) -> None:
        self.count += 1
        self.capture = self.snapshots.capture(identity(self.count), TrustLevel.LATEST, self.job.state())

    def before_update(self) -> None:
        self.snapshots.fence()

    def finish(self) -> None:
        assert self.capture.wait(), self.capture.problem
        assert self.snapshots.wait_until_ready(_SECONDS)

    def close(self) -> None:
        self.snapshots.close()


class PlainCopy(Contender):
    """The yardstick: one copy of every tensor, in turn, into memory that has been written to before."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        self.room: list[torch.Tensor] = []

    def begin(self) -> None:
        tensors = list(self.job.state().tensors.values())
        if not self.room:
            self.room = [torch.zeros(each.shape, dtype=each.dtype, pin_memory=CUDA) for each in tensors]
        for place, each in zip(self.room, tensors, strict=True):
            if CUDA:
                place.copy_(each, non_blocking=True)
            else:
                ctypes.memmove(place.data_ptr(), each.data_ptr(), each.nbytes)
        synchronize()


class TorchSave(Contender):
    def begin(self) -> None:
        torch.save(self.job.state_dict(), self.folder / "saved.pt")


class AsyncSave(Contender):
    def begin(self) -> None:
        self.count += 1
        shutil.rmtree(self.folder / f"dcp-{self.count - 2}", ignore_errors=True)
        path = self.folder / f"dcp-{self.count}"
        self.future = dcp.async_save(self.job.state_dict(), checkpoint_id=str(path))

    def finish(self) -> None:
        self.future.result()


def capture(megabytes: int) -> Figures:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = Job(megabytes)
    contenders: dict[str, Callable[[Job, Path], Contender]] = {
        "nothing": Contender,
        "plain copy": PlainCopy,
        "snapshot": Scout,
        "torch.save": TorchSave,
        "DCP async_save": AsyncSave,
    }
    with in_memory() as folder, alone(folder):
        ways = {name: kind(job, made(folder / name)) for name, kind in contenders.items()}
        job.step()
        times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS + WARM):
            for name, each in ways.items():
                times[name].append(_one_step(job, each) | {"alone": _without_training(each)})
        for each in ways.values():
            each.close()
    size = job.state().bytes
    middle = {
        name: {key: statistics.median(row[key] for row in rows[WARM:]) for key in rows[0]}
        for name, rows in times.items()
    }
    return _figures(middle, size)


def _one_step(job: Job, contender: Contender) -> dict[str, float]:
    """Begin right after an update, train one step, finish; the parts that training waits for are held."""
    synchronize()
    start = time.perf_counter()
    contender.begin()
    begun = time.perf_counter()
    job.forward_and_backward()
    if CUDA:
        # The device runs behind: what a fence costs is the wait it puts into the device's order.
        torch.cuda.current_stream().synchronize()
    computed = time.perf_counter()
    contender.before_update()
    if CUDA:
        torch.cuda.current_stream().synchronize()
    fenced = time.perf_counter()
    job.update()
    _current_done()
    stepped = time.perf_counter()
    contender.finish()  # not timed: whatever is left of it does not hold training up
    return {
        "begin": begun - start,
        "fence": fenced - computed,
        "held": begun - start + fenced - computed,
        "step": stepped - start,
        "compute": computed - begun,
    }


def _without_training(contender: Contender) -> float:
    """Until everything is kept."""
    synchronize()
    start = time.perf_counter()
    contender.begin()
    contender.before_update()
    contender.finish()
    return time.perf_counter() - start


def _figures(middle: dict[str, dict[str, float]], size: int) -> Figures:
    copy, bare, ours = middle["plain copy"]["held"], middle["nothing"], middle["snapshot"]
    figures: Figures = {"state": {"megabytes": round(size / 2**20, 1), "step_ms": ms(bare["step"])}}
    for name in ("plain copy", "snapshot", "torch.save", "DCP async_save"):
        row = middle[name]
        figures[name] = {
            "held_ms": ms(row["held"]),
            "to_a_plain_copy": round(row["held"] / copy, 3),
            "step_ms": ms(row["step"]),
            "until_kept_ms": ms(row["alone"]),
        }
    figures["snapshot"] |= {
        "begin_ms": ms(ours["begin"]),
        "fence_ms": ms(ours["fence"]),
        "kept_gb_s": round(size / 1e9 / ours["alone"], 2),
        "goal_to_a_plain_copy": None if CUDA else 1.0,
    }
    figures["DCP async_save"] |= {
        "held_to_snapshot": round(middle["DCP async_save"]["held"] / ours["held"], 1),
        "goal": 10 if CUDA else None,
    }
    figures["torch.save"]["held_to_snapshot"] = round(middle["torch.save"]["held"] / ours["held"], 1)
    figures["a capture in flight"] = {
        "compute_inflation": round(ours["compute"] / bare["compute"] - 1, 3),
        "step_inflation": round(ours["step"] / bare["step"] - 1, 3),
        "of_async_save": round(middle["DCP async_save"]["step"] / bare["step"] - 1, 3),
    }
    return figures


def _current_done() -> None:
    """Training's own work, and not what goes on beside it."""
    if CUDA:
        torch.cuda.current_stream().synchronize()
