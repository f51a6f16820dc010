"""What checkpoints cost: how long training is held, and what else it loses.

    python benchmarks/checkpoint.py [--part NAME ...] [--megabytes N] [--json] [--output FILE]

``capture`` snapshots one rank's state into memory, on CUDA where there is one: the time training's thread is
held, in ``capture`` and in the ``fence`` before the next update, against one plain copy of the same state to
memory that is there already, against ``torch.save`` into the same file system and against
``torch.distributed.checkpoint.async_save``, all of the same state, call by call in turn. The time between
capture and fence is a forward and backward pass; how much longer a step gets while a capture is in flight is
measured beside it, and, without training, the time until all is kept. On a CPU training computes with one
thread, as one of several ranks of a machine would. Every ratio is taken within one run.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from torchscout.checkpoint.generation import Generation, Role
from torchscout.checkpoint.shard_format import Identity
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.state import State, collect

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROUNDS, WARM = 9, 3

Figures = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    parser.add_argument("--megabytes", type=int, default=8192 if CUDA else 384, help="of state, about")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--output", type=Path, help="write the JSON document to this file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "megabytes": arguments.megabytes,
        "results": {name: PARTS[name](arguments.megabytes) for name in arguments.part or PARTS},
    }
    document = json.dumps(report, indent=2)
    if arguments.output:
        arguments.output.write_text(document + "\n")
    print(document if arguments.json else table(report))


class Job:
    """A model whose parameters and two slots each are about so large."""

    def __init__(self, megabytes: int) -> None:
        width = 4096 if CUDA else 1024
        layers = max(1, (megabytes << 20) // (3 * 4 * width * width))
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)
        ]
        self.model = nn.Sequential(*blocks).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randn(4096 if CUDA else 128, width, device=DEVICE)

    def forward_and_backward(self) -> None:
        self.model(self.batch).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return collect(self.model, [self.optimizer], {})

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


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

    def begin(self) -> None:
        self.count += 1
        identity = Identity(job="job", mesh="", world_size=1, rank=0, generation=Generation(self.count))
        self.capture = self.snapshots.capture(identity, Role.LATEST, self.job.state())

    def before_update(self) -> None:
        self.snapshots.fence()

    def finish(self) -> None:
        assert self.capture.wait(), self.capture.problem

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
        _synchronize()


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
    with _memory() as folder, _alone(folder):
        made = {name: kind(job, _made(folder / name)) for name, kind in contenders.items()}
        job.forward_and_backward()
        job.update()
        times: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for _ in range(ROUNDS + WARM):
            for name, each in made.items():
                times[name].append(_one_step(job, each) | {"alone": _without_training(each)})
        for each in made.values():
            each.close()
    size = job.state().bytes
    middle = {
        name: {key: statistics.median(row[key] for row in rows[WARM:]) for key in rows[0]}
        for name, rows in times.items()
    }
    return _figures(middle, size)


def _one_step(job: Job, contender: Contender) -> dict[str, float]:
    """Begin right after an update, train one step, finish; the parts that training waits for are held."""
    _synchronize()
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
    _synchronize()
    start = time.perf_counter()
    contender.begin()
    contender.before_update()
    contender.finish()
    return time.perf_counter() - start


def _figures(middle: dict[str, dict[str, float]], size: int) -> Figures:
    copy, bare, ours = middle["plain copy"]["held"], middle["nothing"], middle["snapshot"]
    figures: Figures = {"state": {"megabytes": round(size / 2**20, 1), "step_ms": _ms(bare["step"])}}
    for name in ("plain copy", "snapshot", "torch.save", "DCP async_save"):
        row = middle[name]
        figures[name] = {
            "held_ms": _ms(row["held"]),
            "to_a_plain_copy": round(row["held"] / copy, 3),
            "step_ms": _ms(row["step"]),
            "until_kept_ms": _ms(row["alone"]),
        }
    figures["snapshot"] |= {
        "begin_ms": _ms(ours["begin"]),
        "fence_ms": _ms(ours["fence"]),
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


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _current_done() -> None:
    """Training's own work, and not what goes on beside it."""
    if CUDA:
        torch.cuda.current_stream().synchronize()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _memory() -> Iterator[Path]:
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="torchscout-benchmark-", dir=root) as name:
        yield Path(name)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A process group of this process alone, which ``async_save`` asks for."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def table(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['device']}; {versions}; {report['date']}"]
    for part, figures in report["results"].items():
        lines += ["", part]
        for name, row in figures.items():
            cells = ", ".join(f"{key} {value}" for key, value in row.items() if value is not None)
            lines.append(f"  {name:20} {cells}")
    return "\n".join(lines)


PARTS: dict[str, Callable[[int], Figures]] = {"capture": capture}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
