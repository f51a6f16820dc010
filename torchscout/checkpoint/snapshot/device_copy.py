"""Copies tensors into host memory while training goes on (paper, section 8).

``_Side`` and ``Pinning`` contain everything specific to accelerators: a side stream, events, and pinned
memory. Nothing synchronizes a whole device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from torchscout.checkpoint.storage.encoding import fill

__all__ = ["Copies", "Pinning", "Stage", "TensorCopy"]

_CHUNK = 32 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class TensorCopy(NamedTuple):
    """A tensor and the destination of its bytes."""

    source: torch.Tensor
    memory: torch.Tensor
    """Host memory, as bytes."""
    first: int
    """The offset in it, a multiple of 64."""

    @property
    def place(self) -> torch.Tensor:
        """The destination as a dense tensor of the same dtype and shape."""
        data = self.memory[self.first : self.first + self.source.nbytes]
        return data.view(self.source.dtype).view(self.source.shape)


class Copies:
    """Copies the tensors of one snapshot, from host memory and from devices."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Call on the training thread, after the last update was issued."""
        self.sides = [_Side(device) for device in {each.device for each in tensors} if device.type != "cpu"]
        """One for each accelerator."""

    def issue(self, copies: Sequence[TensorCopy], pinned: bool) -> None:
        """Copy host tensors and start copying device tensors. Call on a background thread.

        May be called again with more; ``fence`` orders training after the first call's copies only.
        """
        for side in self.sides:
            side.issue([each for each in copies if each.source.device == side.device], pinned)
        for each in copies:
            if each.source.is_cpu:
                _copy_on_host(each)

    def fence(self) -> None:
        """Order all further work of the training thread after the copies. Call after ``issue``."""
        for side in self.sides:
            side.module.current_stream(side.device).wait_event(side.done[0])

    def wait(self) -> None:
        """Wait until all copies are complete. Call on a background thread, after ``issue``."""
        for side in self.sides:
            side.done[-1].synchronize()


class _Side:
    """The side stream of one device."""

    _streams: ClassVar[dict[torch.device, Any]] = {}

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.done: list[Any] = []
        """An event after each batch of copies."""
        self._ready = self.module.Event()
        self._ready.record(self.module.current_stream(device))
        if device not in self._streams:
            self._streams[device] = self.module.Stream(device=device)
        self._stream = self._streams[device]

    def issue(self, copies: Sequence[TensorCopy], pinned: bool) -> None:
        with self.module.device(self.device), self.module.stream(self._stream):
            self._stream.wait_event(self._ready)
            if pinned:
                for each in copies:
                    fill(each.place, each.source, wait=False)
            else:
                self._in_chunks(copies)
            done = self.module.Event()
            done.record(self._stream)
        self.done.append(done)

    def _in_chunks(self, copies: Sequence[TensorCopy]) -> None:
        """Copy synchronously through a small pinned buffer, which is slower."""
        chunk = torch.empty(_CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True)
        for source, memory, start in copies:
            dense = torch.empty_like(source, memory_format=torch.contiguous_format)
            fill(dense, source)
            data, room = dense.view(-1).view(torch.uint8), memory[start : start + source.nbytes]
            for first in range(0, len(data), _CHUNK):
                piece = data[first : first + _CHUNK]
                chunk[: len(piece)].copy_(piece, non_blocking=True)
                self._stream.synchronize()
                room[first : first + len(piece)] = chunk[: len(piece)]


class Pinning:
    """Mapped memory that is registered with CUDA until ``undo``."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self.done = not int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if not self.done:
            self._forget_error()

    def undo(self) -> None:
        if self.done:
            self._runtime.cudaHostUnregister(self._memory.data_ptr())
            self.done = False

    @staticmethod
    def _forget_error() -> None:
        """Clear the error, which the runtime would otherwise report for this thread's next kernel."""
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            return


class Stage:
    """Reusable memory for tensors that must be copied immediately."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy these tensors, on devices in the current stream; valid until the next call."""
        on_host = {name: each for name, each in tensors.items() if each.device.type == "cpu"}
        needed = sum(_aligned(each.nbytes) for each in on_host.values())
        if needed > len(self._memory):
            self._memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
        staged: dict[str, torch.Tensor] = {}
        offset = 0
        for name, each in tensors.items():
            if name not in on_host:
                staged[name] = each.detach().clone()
                continue
            place = self._memory[offset : offset + each.nbytes].view(each.dtype).view(each.shape)
            fill(place, each)
            staged[name] = place
            offset += _aligned(each.nbytes)
        return staged


def _copy_on_host(copy: TensorCopy) -> None:
    source = copy.source
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # Single-threaded and without the GIL, so that it does not take CPU threads from training.
        ctypes.memmove(copy.memory.data_ptr() + copy.first, source.data_ptr(), source.nbytes)
    else:
        fill(copy.place, source)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
