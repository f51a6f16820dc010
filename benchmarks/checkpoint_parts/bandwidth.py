"""How fast a capture brings a device's state to the host, against a plain copy to pinned memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from checkpoint_parts.job import CUDA, Figures, Job, identity, in_memory, ms, not_measured
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.state.collect import State

ROUNDS, WARM = 15, 4
GOAL = 0.9


def bandwidth(megabytes: int) -> Figures:
    if not CUDA:
        return not_measured("no CUDA device")
    torch.manual_seed(0)
    job = Job(megabytes)
    job.step()
    state = job.state()
    room = [torch.zeros(each.shape, dtype=each.dtype, pin_memory=True) for each in state.tensors.values()]
    ours, theirs = [], []
    with in_memory() as folder:
        snapshots = Snapshots(folder, 0)
        snapshots.prepare(state.bytes, state.tensors.values())
        for step in range(1, 1 + ROUNDS + WARM):
            theirs.append(_plain_copy(state, room))
            ours.append(_captured(state, snapshots, step))
        snapshots.close()
    plain = statistics.median(theirs[WARM:])
    begun, copied = (statistics.median(column) for column in zip(*ours[WARM:], strict=True))
    return {
        "state": {"megabytes": round(state.bytes / 2**20, 1), "tensors": len(state.tensors)},
        "plain pinned copy": _row(plain, state.bytes),
        "capture": _row(copied, state.bytes)
        | {"begin_ms": ms(begun), "to_a_plain_copy": round(plain / copied, 3), "goal": GOAL},
    }


def _plain_copy(state: State, room: list[torch.Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for place, each in zip(room, state.tensors.values(), strict=True):
        place.copy_(each, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _captured(state: State, snapshots: Snapshots, step: int) -> tuple[float, float]:
    """From the call until it returns, and until the next update could begin: then all has arrived."""
    assert snapshots.wait_until_ready(60.0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    capture = snapshots.capture(identity(step), TrustLevel.LATEST, state)
    begun = time.perf_counter()
    snapshots.fence()
    torch.cuda.current_stream().synchronize()
    copied = time.perf_counter()
    assert capture.wait(), capture.problem
    return begun - start, copied - start


def _row(seconds: float, size: int) -> dict[str, Any]:
    return {"ms": ms(seconds), "gb_s": round(size / 1e9 / seconds, 2)}
