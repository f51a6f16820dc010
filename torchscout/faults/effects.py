"""The effects of faults on tensors, collectives, processes, kernels and devices.

Tensors are changed in place and behind autograd's back, as a faulty chip would change them, and only in this
rank's memory. A collective is replaced, skipped or issued in another order while the rank's code continues
(``injector.Tampering`` intercepts the calls). A kernel that spins on the device ends by itself, because it
cannot be stopped from outside without ending its process.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchscout.utils._torch import create_work_from_future, cuda_sleep, tree_leaves, tree_map_only

__all__ = [
    "CHANGES",
    "CallEffect",
    "Change",
    "DeviceSpin",
    "FlipBit",
    "FlipBits",
    "Freeze",
    "HoldInterpreter",
    "Issue",
    "Overwrite",
    "PerturbKernel",
    "ProcessEffect",
    "Scale",
    "SetValue",
    "Signal",
    "Skip",
    "Sleep",
    "StayInside",
    "StuckBit",
    "Swap",
    "TensorEffect",
    "done",
]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONGEST_SLEEP = 0.05
"""Seconds. Linux may take a whole sleep for a wait for a core; see ``replay.timing``."""


class TensorEffect(ABC):
    """Changes a tensor at a site."""

    def corrupt(self, tensor: torch.Tensor) -> str | None:
        """Change the tensor in place; return a description, or None if nothing has changed.

        A bit that is stuck at its correct value corrupts nothing, and must not count as a fault.
        """
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.data  # unlike detach(), without the version counter that backward checks
        before = local.clone()
        description = self._change(local)
        return None if _is_same(before, local) else description

    @abstractmethod
    def _change(self, local: torch.Tensor) -> str: ...


@dataclass(frozen=True, slots=True)
class FlipBit(TensorEffect):
    bit: int
    """0 is the least significant."""
    index: int = 0
    """Which element, in row-major order."""

    def _change(self, local: torch.Tensor) -> str:
        mask = _mask(local, [self.bit])
        return f"bit {self.bit} of {_rewrite(local, self.index, lambda bits: bits ^ mask)}"


@dataclass(frozen=True, slots=True)
class FlipBits(TensorEffect):
    """Flips several bits of one element, or of every n-th one, as a failing address line does."""

    bits: tuple[int, ...]
    index: int = 0
    """The first element that is hit."""
    every: int = 0
    """The distance between the elements that are hit; 0 hits only one."""

    def _change(self, local: torch.Tensor) -> str:
        mask = _mask(local, self.bits)
        changed = _rewrite(local, self.index, lambda bits: bits ^ mask, self.every)
        return f"bits {', '.join(map(str, self.bits))} of {changed}"


@dataclass(frozen=True, slots=True)
class StuckBit(TensorEffect):
    """A bit that is always 0, or always 1."""

    bit: int
    value: int
    index: int = 0
    every: int = 0

    def _change(self, local: torch.Tensor) -> str:
        mask = _mask(local, [self.bit])
        stuck = (lambda bits: bits | mask) if self.value else (lambda bits: bits & ~mask)
        return f"bit {self.bit} stuck at {self.value} in {_rewrite(local, self.index, stuck, self.every)}"


@dataclass(frozen=True, slots=True)
class SetValue(TensorEffect):
    value: float
    index: int = 0

    def _change(self, local: torch.Tensor) -> str:
        element = _element(local, self.index)
        before = element.item()
        element.fill_(self.value)
        return f"element {self.index}: {before} -> {element.item()}"


@dataclass(frozen=True, slots=True)
class Scale(TensorEffect):
    factor: float

    def _change(self, local: torch.Tensor) -> str:
        local.mul_(self.factor)
        return f"all {local.numel()} elements times {self.factor}"


@dataclass(frozen=True, slots=True)
class Overwrite(TensorEffect):
    """Overwrites adjacent elements with noise of the tensor's magnitude, or with one value."""

    start: int
    length: int
    seed: int = 0
    value: float | None = None

    def _change(self, local: torch.Tensor) -> str:
        stop = self.start + self.length
        if not 0 <= self.start < stop <= local.numel():
            raise ValueError(f"no elements {self.start} to {stop - 1} in a tensor of {local.numel()}")
        place = torch.arange(local.numel(), device=local.device).view(local.shape)
        written = torch.full_like(local, self.value) if self.value is not None else self._noise(local)
        local.copy_(torch.where((place >= self.start) & (place < stop), written, local))
        return f"elements {self.start} to {stop - 1} overwritten"

    def _noise(self, local: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = local.abs().max().item() or 1.0
        return (size * torch.randn(local.shape, generator=generator, device="cpu")).to(local)


def _rewrite(
    local: torch.Tensor, index: int, become: Callable[[torch.Tensor], torch.Tensor], every: int = 0
) -> str:
    """Change the bits of one element, or of every n-th from there on; return a description."""
    element = _element(local, index)
    before, bits = element.item(), local.view(_INTEGERS[local.element_size()])
    if not every:
        one = _element(bits, index)
        one.copy_(become(one))
        return f"element {index}: {before} -> {element.item()}"
    place = torch.arange(local.numel(), device=local.device).view(local.shape) - index
    hit = (place >= 0) & (place % every == 0)
    bits.copy_(torch.where(hit, become(bits), bits))
    return f"every {every}th element from {index}, {int(hit.sum())} in all"


def _mask(local: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
    width = 8 * local.element_size()
    for bit in bits:
        if not 0 <= bit < width:
            raise ValueError(f"{local.dtype} has bits 0 to {width - 1}, got {bit}")
    if local.element_size() not in _INTEGERS:
        raise ValueError(f"cannot flip a bit of {local.dtype}; flip it in its real view")
    mask = sum(1 << bit for bit in set(bits))
    # The top bit is the sign of a signed integer; only integers of one byte are unsigned here.
    signed = mask - (1 << width) if width > 8 and mask >> (width - 1) else mask
    return torch.tensor(signed, dtype=_INTEGERS[local.element_size()], device=local.device)


def _element(local: torch.Tensor, index: int) -> torch.Tensor:
    """A view of one element, for any strides."""
    if not 0 <= index < local.numel():
        raise ValueError(f"no element {index} in a tensor of {local.numel()}")
    shape = local.shape
    for axis, size in enumerate(shape):
        local = local[index // math.prod(shape[axis + 1 :]) % size]
    return local


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether both have the same bits; a NaN equals itself."""
    if after.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    integers = _INTEGERS[after.element_size()]
    return torch.equal(before.view(integers), after.view(integers))


CHANGES = ("dtype", "operation", "shape")


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective that is about to be issued."""

    operation: str
    group: dist.ProcessGroup
    arguments: tuple[Any, ...]
    call: Callable[..., Any]
    """Issues the operator with the given arguments."""
    returns_tensors: bool
    """Whether the operator returns tensors besides the work."""


class CallEffect(ABC):
    """Replaces a collective."""

    @abstractmethod
    def replace(self, issue: Issue) -> Any:
        """Return the caller's result; None to issue the collective after the rank's next one."""


@dataclass(frozen=True, slots=True)
class Change(CallEffect):
    """Changes the element type or the operation, or doubles the number of elements."""

    what: str

    def __post_init__(self) -> None:
        if self.what not in CHANGES:
            raise ValueError(f"cannot change {self.what!r} of a collective; use one of {', '.join(CHANGES)}")

    def replace(self, issue: Issue) -> Any:
        if self.what == "operation":
            return _result(issue, _other_operation(issue).boxed())
        change = _doubled if self.what == "shape" else _retyped
        issued = issue.call(*tree_map_only(torch.Tensor, change, issue.arguments))
        return _result(issue, issued[-1] if isinstance(issued, tuple) else issued)


@dataclass(frozen=True, slots=True)
class Skip(CallEffect):
    """Does not issue the collective."""

    def replace(self, issue: Issue) -> Any:
        return done(issue)


@dataclass(frozen=True, slots=True)
class Swap(CallEffect):
    """Issues the collective only after the next one has completed."""

    def replace(self, issue: Issue) -> Any:  # noqa: ARG002  nothing is replaced
        return None


def done(issue: Issue) -> Any:
    """The result of a collective that has completed, for its caller."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    tensors = [leaf for leaf in tree_leaves(issue.arguments) if isinstance(leaf, torch.Tensor)]
    future.set_result(tensors[0] if tensors else None)
    return _result(issue, create_work_from_future(future).boxed())


def _result(issue: Issue, work: Any) -> Any:
    """What the operator returns: the output tensors, if it returns them, and the work."""
    return (issue.arguments[0], work) if issue.returns_tensors else work


def _other_operation(issue: Issue) -> dist.Work:
    given = next((leaf for leaf in tree_leaves(issue.arguments) if isinstance(leaf, torch.Tensor)), None)
    own = torch.ones(1, device="cpu") if given is None else given.detach().clone()
    work: dist.Work | None
    if issue.operation == "all_gather":
        work = dist.all_reduce(own, group=issue.group, async_op=True)
    else:
        into = [torch.empty_like(own) for _ in range(issue.group.size())]
        work = dist.all_gather(into, own, group=issue.group, async_op=True)
    assert work is not None, "this rank is in the group"
    return work


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten()] * 2)


def _retyped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32 if tensor.dtype == torch.float64 else torch.float64)


class ProcessEffect(ABC):
    """Happens to the process at a site."""

    def prepare(self) -> None:  # noqa: B027  most effects need nothing
        """Do slow preparations. Called when the fault is armed, before training."""

    @abstractmethod
    def happen(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sleep(ProcessEffect):
    seconds: float

    def happen(self) -> None:
        end = time.monotonic() + self.seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP))


@dataclass(frozen=True, slots=True)
class StayInside(Sleep):
    """Sleeps within a collective that all ranks have entered: the transport is stuck, not the rank."""


@dataclass(frozen=True, slots=True)
class Signal(ProcessEffect):
    number: signal.Signals

    def happen(self) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class Freeze(ProcessEffect):
    """Stops the process by a signal, like a debugger; another process continues it."""

    seconds: float

    def happen(self) -> None:
        waker = f"(sleep {self.seconds}; kill -CONT {os.getpid()}) >/dev/null 2>&1 &"
        subprocess.run(["sh", "-c", waker], check=True)
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class HoldInterpreter(ProcessEffect):
    """Calls a foreign function that holds the interpreter lock, so that no other thread runs."""

    seconds: float

    def happen(self) -> None:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(self.seconds * 1e6)))


@dataclass(frozen=True, slots=True)
class PerturbKernel(ProcessEffect):
    """From now on, computes one work item wrong in each launch that has it. For experts on ``FaultyGemm``."""

    tile: int = 0
    """The tile's number in the order in which programs take tiles."""
    step: int = -1
    """The step of the tile's reduction; -1 is the finished tile."""

    def happen(self) -> None:
        from torchscout.faults.faulty_gemm import activate  # needs Triton, unlike a plan of faults

        activate(self.tile, self.step)


_WARM_CYCLES, _TIMED_CYCLES = 50_000_000, 20_000_000
"""The device is kept busy before its clock rate is measured, since an idle device runs slower."""


@dataclass(frozen=True, slots=True)
class DeviceSpin(ProcessEffect):
    """Keeps the current CUDA stream busy for ``seconds``."""

    seconds: float

    def prepare(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"{self} needs a CUDA device; use a delay or stall of the host instead")
        _cycles_per_second(torch.cuda.current_device())

    def happen(self) -> None:
        cycles = int(self.seconds * _cycles_per_second(torch.cuda.current_device()))
        cuda_sleep(cycles)  # PyTorch's own tests delay streams by it


@cache
def _cycles_per_second(index: int) -> float:
    """The rate of the clock that the kernel counts, measured on a separate stream."""
    stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        cuda_sleep(_WARM_CYCLES)
        begin.record(stream)
        cuda_sleep(_TIMED_CYCLES)
        end.record(stream)
    end.synchronize()
    return 1e3 * _TIMED_CYCLES / float(begin.elapsed_time(end))
