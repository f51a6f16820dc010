"""What a check is held against: the same forward and backward passes alone, one broadcast of their inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training_parts.job import Block, Job

_ROUNDS, _WARM = 8, 3


def reference(job: Job) -> dict[str, Any]:
    """Milliseconds, every sample; on all ranks at once, as in a check."""
    calls = _calls(job)
    inputs = sum(each[1].nbytes for each in calls.values())
    gradients = sum(each[2].nbytes for each in calls.values())
    room = torch.empty(inputs + gradients, dtype=torch.uint8, device=job.device)
    work: dict[str, Callable[[], Any]] = {
        **{name: _pass(job, *call) for name, call in calls.items()},
        "broadcast of inputs": lambda: dist.broadcast(room[:inputs], 0),
        "broadcast of inputs and output gradients": lambda: dist.broadcast(room, 0),
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(_WARM + _ROUNDS):
        for name, run in work.items():
            job.synchronize()
            dist.barrier()
            milliseconds = _timed(job, run)
            if turn >= _WARM:
                found[name].append(milliseconds)
    return {
        "ms": found,
        "bytes": {"inputs": inputs, "output gradients": gradients},
        "layer_activations": _activations(job, calls["layer"]),
    }


_Call = tuple[nn.Module, torch.Tensor, torch.Tensor]
"""A module, its input, and the gradient of its output."""


def _calls(job: Job) -> dict[str, _Call]:
    size, device = job.size, job.device
    dtype = size.computed if job.is_cuda else size.dtype
    shape = (size.batch, size.length, size.width)
    modules: dict[str, nn.Module] = {
        "embedding": nn.Embedding(size.vocabulary, size.width),
        "layer": Block(size.width, size.heads),
        "output": nn.Linear(size.width, size.vocabulary, bias=False),
    }
    tokens = torch.randint(size.vocabulary, shape[:2], device=device)
    calls = {}
    for name, module in modules.items():
        module.to(device, size.dtype)
        given = tokens if name == "embedding" else torch.randn(shape, device=device, dtype=dtype)
        with torch.no_grad(), size.autocast(device):
            out = module(given)
        calls[name] = (module, given, torch.randn_like(out))
    return calls


def _pass(job: Job, module: nn.Module, given: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
    def run() -> None:
        x = given.detach().requires_grad_(given.is_floating_point())
        wanted = [*([x] if x.requires_grad else []), *module.parameters()]
        with job.size.autocast(job.device):
            out = module(x)
        torch.autograd.grad(out, wanted, gradient)

    return run


def _timed(job: Job, run: Callable[[], Any]) -> float:
    """On the device, without what the host needs to start it where that is hidden."""
    if not job.is_cuda:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _activations(job: Job, call: _Call) -> int | None:
    """Bytes that one layer keeps from its forward to its backward pass."""
    if not job.is_cuda:
        return None
    module, given, _ = call
    x = given.detach().requires_grad_()
    before = torch.cuda.memory_allocated()
    with job.size.autocast(job.device):
        out = module(x)
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept
