"""What the stacks of real, waiting ranks say: the classification against the PyTorch that is installed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchscout.collectives.interceptor import listen
from torchscout.observer import stacks

SIGNAL = 46


def all_reduce() -> None:
    dist.all_reduce(torch.ones(4))


def barrier() -> None:
    dist.barrier()


def monitored_barrier() -> None:
    dist.monitored_barrier()


def receive() -> None:
    dist.recv(torch.ones(4), src=1) if dist.get_rank() == 0 else dist.send(torch.ones(4), dst=0)


def objects() -> None:
    dist.all_gather_object([None, None], "object")


def functional_collective() -> None:
    functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()


def own_wait() -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait()


def backward() -> None:
    models[DistributedDataParallel](torch.ones(4)).sum().backward()


def schedule() -> None:
    stage = (torch.ones(4, 4),) if dist.get_rank() == 1 else ()
    target = {"target": torch.ones(4, 4)} if dist.get_rank() == 0 else {}
    models[ScheduleGPipe].step(*stage, **target)


models: dict[type, Callable] = {}

EXPECTED = {
    all_reduce: True,
    barrier: True,
    monitored_barrier: True,
    receive: True,
    objects: True,
    functional_collective: True,
    schedule: True,
    own_wait: None,  # a C++ method: the frame on top is the user's
    backward: None,  # C++ as well
}


def observed(rank: int) -> dict[str, bool | None] | None:
    """Rank 0 enters everything early and waits; rank 1 looks at its stack before it follows."""
    prepare_models(rank)
    handle = listen(Deaf())
    with tempfile.TemporaryDirectory() as folder:
        registration = stacks.register(Path(folder), SIGNAL)
        place = [(os.getpid(), registration.path)]
        dist.broadcast_object_list(place, src=0)
        seen = {}
        for enter in EXPECTED:
            dist.barrier()
            if rank == 1:
                seen[enter.__name__] = classify(*place[0], enter.__name__)
            enter()
        registration.unregister()
    handle.remove()
    return seen or None


class Deaf:
    def before(self, call: object) -> None: ...

    def issued(self, call: object, token: object, pending: object) -> None: ...


def prepare_models(rank: int) -> None:
    models[DistributedDataParallel] = DistributedDataParallel(torch.nn.Linear(4, 4))
    # Stage 0 on rank 1, so that rank 0 is the one to wait for an activation.
    stage = PipelineStage(torch.nn.Linear(4, 4), 1 - rank, 2, torch.device("cpu"), group=reversed_group())
    models[ScheduleGPipe] = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).sum())
    for warm in (backward, schedule):  # the first calls exchange shapes and build buckets
        warm()


def reversed_group() -> dist.ProcessGroup:
    return dist.new_group([1, 0], sort_ranks=False)


def classify(pid: int, path: Path, function: str) -> bool | None:
    """Once the rank has stood in ``function`` for a moment."""
    deadline, before = time.monotonic() + 20, ""
    while time.monotonic() < deadline:
        stack = stacks.take(pid, path, SIGNAL, 2.0)
        if stack == before and f" in {function}" in stack:
            return stacks.is_waiting(stack)
        before = stack
        time.sleep(0.05)
    raise AssertionError(f"rank 0 did not come to wait in {function}: {before}")


def test_a_rank_that_waits_is_seen_to_wait_where_that_can_be_seen():
    _, seen = run_ranks(observed, 2, timeout=90)
    assert seen == {enter.__name__: waiting for enter, waiting in EXPECTED.items()}
