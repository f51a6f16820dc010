"""A fault on the device's side: a kernel that spins, while the process's own code goes on.

The host issues it and does not wait, as with any other kernel: what comes after it on the same stream starts
later. It ends by itself, because a kernel cannot be stopped from outside without ending its process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torchscout.faults.process_effects import ProcessEffect

__all__ = ["DeviceSpin"]

_WARM_CYCLES, _TIMED_CYCLES = 50_000_000, 20_000_000
"""An idle device runs at a lower clock rate, so that it is kept busy before its rate is measured."""


@dataclass(frozen=True, slots=True)
class DeviceSpin(ProcessEffect):
    """The current CUDA stream is busy for ``seconds``."""

    seconds: float

    def prepare(self) -> None:
        import torch  # a plan of faults needs no device

        if not torch.cuda.is_available():
            raise RuntimeError(f"{self} needs a CUDA device: use a delay or stall of the host instead")
        _cycles_per_second(torch.cuda.current_device())

    def happen(self) -> None:
        import torch

        cycles = int(self.seconds * _cycles_per_second(torch.cuda.current_device()))
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # PyTorch's own tests delay streams by it


@cache
def _cycles_per_second(index: int) -> float:
    """Of the clock that the kernel counts by. Measured on a stream of its own: nobody else waits for it."""
    import torch

    stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_WARM_CYCLES)  # type: ignore[no-untyped-call]
        begin.record(stream)
        torch.cuda._sleep(_TIMED_CYCLES)  # type: ignore[no-untyped-call]
        end.record(stream)
    end.synchronize()
    return 1e3 * _TIMED_CYCLES / float(begin.elapsed_time(end))
