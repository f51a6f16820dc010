"""How far a trainer's CUDA device is, which may be far behind its host (paper, section 7).

An event is recorded at the end of each training step, and a small thread asks which of them the device
has passed. Nothing here waits for the device; what its coordinate means is for the diagnosis to say.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Iterable

import torch

from torchscout.evidence.observer.progress import ProgressWriter

__all__ = ["DeviceCoordinate", "device_of"]

_log = logging.getLogger("torchscout")

_POLL_SECONDS = 0.05
_OUTSTANDING = 64
_CLOSING_SECONDS = 1.0
_UNKNOWN = -1
"""What ``ProgressWriter.device_step`` takes where nothing is known."""

# From cuda.h.
_THREAD_LOCAL_CAPTURE = 1
_SUCCESS, _NOT_READY = 0, 600


def device_of(modules: Iterable[torch.nn.Module]) -> torch.device | None:
    """The CUDA device of these modules, the first one of several; None where they have none."""
    return next((each.device for module in modules for each in module.parameters() if each.is_cuda), None)


class DeviceCoordinate:
    """Publishes how many steps the device has finished, as ``ProgressWriter.step`` counts the host's.

    Where CUDA reports an error it gives up, and the coordinate is unknown from then on: an old one would
    look like a device that is behind.
    """

    def __init__(self, writer: ProgressWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device
        self._first = writer.step
        # Full, it forgets its oldest: a sample less, but the newest step is always among them.
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_OUTSTANDING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchscout-device", daemon=True)
        self._thread.start()

    def step_finished(self, step: int) -> None:
        """Called by the trainer when its host has finished ``step`` steps."""
        if self._stop.is_set():
            return
        try:
            with torch.cuda.device(self._device):
                if torch.cuda.is_current_stream_capturing():
                    return  # the event would become part of the user's graph
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        except RuntimeError as error:
            self._give_up(error)
            return
        self._pending.append((step, event))

    def close(self) -> None:
        """Stop the thread; again is no mistake."""
        self._stop.set()
        self._thread.join(_CLOSING_SECONDS)  # no longer: the driver may be stuck

    def _run(self) -> None:
        try:
            driver = _Driver(self._device)
            self._writer.device_step(self._first)
            self._poll(driver)
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        finally:
            self._pending.clear()
            self._writer.device_step(_UNKNOWN)

    def _poll(self, driver: _Driver) -> None:
        oldest: tuple[int, torch.cuda.Event] | None = None
        while not self._stop.wait(_POLL_SECONDS):
            while oldest or self._pending:
                oldest = oldest or self._pending.popleft()
                step, event = oldest
                if not driver.has_passed(event):
                    break
                self._writer.device_step(step)
                oldest = None

    def _give_up(self, error: Exception) -> None:
        self._stop.set()
        _log.warning("the device coordinate is unknown from now on: %s", error)


class _Driver:
    """Asks the CUDA driver from a thread of its own, unnoticed by the others.

    ``torch.cuda.Event.query`` does not serve: it keeps the interpreter's lock, while the driver may make it
    wait for another thread's call. And a query may void a CUDA graph that another thread is capturing, as
    those of PyTorch's own watchdog did (pytorch/pytorch#148594), unless the thread that asks minds only its
    own captures.
    """

    def __init__(self, device: torch.device) -> None:
        """For the thread that calls it."""
        self._library = ctypes.CDLL("libcuda.so.1")  # releases the interpreter's lock during calls
        torch.cuda.set_device(device)  # this thread's; or the next line would make a context on another
        mode = ctypes.c_int(_THREAD_LOCAL_CAPTURE)
        _check(self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def has_passed(self, event: torch.cuda.Event) -> bool:
        status: int = self._library.cuEventQuery(ctypes.c_void_p(event.cuda_event))
        if status == _NOT_READY:
            return False
        _check(status)
        return True


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"the CUDA driver reports error {status}")
