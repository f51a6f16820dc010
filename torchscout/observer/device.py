"""Publishes the progress of a trainer's CUDA device, which may be far behind its host (paper, section 7).

With NCCL a host does not block inside a collective: it issues the operation, runs ahead, and stops where it
needs a result. So the device's progress is evidence of its own. An event is recorded on the current stream
before each operation that the device enters, and at the end of each training step; a small thread asks which
events the device has passed. Nothing here waits for the device, launches a kernel or keeps a tensor alive.

Operations inside a replayed CUDA graph are not seen, since no operator is called then.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable

import torch

from torchscout.log import log
from torchscout.observer.flight_recorder import open_operations
from torchscout.observer.record.writer import ProgressWriter
from torchscout.utils._torch import current_raw_stream
from torchscout.utils.cuda_graphs import ignore_other_threads

__all__ = ["DeviceProgress", "Track", "device_of"]

_POLL_SECONDS = 0.05
_QUIET_SECONDS = 0.5
"""Silence of the host after which its device is asked whether it has work left."""
_SILENT_SECONDS = 1.5
"""Silence of the host after which the Flight Recorder is read."""
_RECORDER_SECONDS = 30.0
"""Pause between two reads: the hosts of some healthy jobs are silent for seconds in every step."""
_OUTSTANDING = 256
"""Events of one track. CUDA blocks a host after about a thousand outstanding launches, and an operation takes
several."""
_MAX_STREAMS = 16
_CLOSING_SECONDS = 1.0

# From cuda.h.
_SUCCESS, _NOT_READY = 0, 600


def device_of(modules: Iterable[torch.nn.Module]) -> torch.device | None:
    """Return the first CUDA device of these modules; None if they have none."""
    return next((each.device for module in modules for each in module.parameters() if each.is_cuda), None)


class Track:
    """The last events along one sequence of numbers, such as the operations of a process group.

    One thread records while another polls. The count is raised last, so only recorded events are polled. An
    event that is recorded again while it is polled looks for a moment as if it had not been passed.
    """

    def __init__(self, publish: Callable[[int], None]) -> None:
        self._publish = publish
        self._events: list[torch.cuda.Event] = []
        self._handles: list[int | None] = [None] * _OUTSTANDING
        """Handles of the events. A number without an event has that of the number before it, if there is
        one: the device does not pass it earlier."""
        self._numbers = [0] * _OUTSTANDING
        self._recorded = self._passed = 0

    def record(self, number: int, stream: int | None, driver: _Driver) -> None:
        """Note that the host has reached ``number``, and record an event if there is a stream."""
        place = self._recorded % _OUTSTANDING
        before = self._handles[place - 1] if self._recorded else None
        self._handles[place] = before if stream is None else self._record(place, stream, driver)
        self._numbers[place] = number
        self._recorded += 1

    def poll(self, driver: _Driver) -> None:
        """Publish the last number that the device has passed, if it has changed."""
        low, high = max(self._passed, self._recorded - _OUTSTANDING + 1), self._recorded
        if low >= high:
            return
        if self._has_passed(high - 1, driver):
            low = high
        while low < high - 1:  # everything before ``low`` is passed, and ``high - 1`` is not
            middle = (low + high - 1) // 2
            if self._has_passed(middle, driver):
                low = middle + 1
            else:
                high = middle + 1
        if low > self._passed and self._recorded - low < _OUTSTANDING:
            number = self._numbers[(low - 1) % _OUTSTANDING]
            self._passed = low
            self._publish(number)

    def _record(self, place: int, stream: int, driver: _Driver) -> int:
        if place < len(self._events):
            handle = int(self._events[place].cuda_event)
            driver.record(handle, stream)
            return handle
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        return int(event.cuda_event)

    def _has_passed(self, index: int, driver: _Driver) -> bool:
        handle = self._handles[index % _OUTSTANDING]
        return handle is None or driver.has_passed(handle)


class DeviceProgress:
    """Publishes what a device has passed, until ``close``.

    After a CUDA error the device's progress is unknown: an old value would look like a device that is behind.
    """

    def __init__(self, writer: ProgressWriter, device: torch.device) -> None:
        self._writer, self._device = writer, device
        self._index = device.index or 0
        self._steps = Track(writer.device_step)
        self._first_step = writer.step
        self._tracks: list[Track] = [self._steps]
        self._streams: set[int] = set()
        """Handles of the streams that issue operations. PyTorch never destroys its streams."""
        self._stop = threading.Event()
        self._driver: _Driver | None = None
        try:
            self._driver = _Driver()
        except OSError as error:
            self._give_up(error)
        self._thread = threading.Thread(target=self._run, name="torchscout-device", daemon=True)
        self._thread.start()

    def track(self, line: int) -> Track:
        """Return a new track for the operations on one line of the record."""
        track = Track(lambda number: self._writer.device_entered(line, number))
        self._writer.device_entered(line, 0)
        self._tracks.append(track)
        return track

    def record(self, track: Track, number: int) -> None:
        """Record an event; called by the trainer before it issues an operation."""
        if self._stop.is_set() or self._driver is None:
            return
        try:
            # An event on a capturing stream would become part of the user's graph.
            captures = torch.cuda.is_current_stream_capturing()
            stream = None if captures else current_raw_stream(self._index)
            track.record(number, stream, self._driver)
        except RuntimeError as error:
            self._give_up(error)
            return
        if stream is None:
            self._writer.captured()
        elif len(self._streams) < _MAX_STREAMS:
            self._streams.add(stream)

    def step_finished(self, step: int) -> None:
        """Record an event; called by the trainer when its host has finished ``step`` steps."""
        self.record(self._steps, step)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop.set()
        self._thread.join(_CLOSING_SECONDS)  # with a timeout, because the driver may hang

    def _run(self) -> None:
        try:
            if self._driver is not None:
                self._driver.enter_thread(self._device)
                self._writer.device_step(self._first_step)
                self._poll(self._driver)
        except RuntimeError as error:
            self._give_up(error)
        finally:
            self._tracks.clear()
            self._writer.device_unknown()

    def _poll(self, driver: _Driver) -> None:
        coordinate, since, next_read = self._writer.coordinate, time.monotonic(), 0.0
        while not self._stop.wait(_POLL_SECONDS):
            for track in tuple(self._tracks):
                track.poll(driver)
            now = time.monotonic()
            if self._writer.coordinate != coordinate:
                coordinate, since = self._writer.coordinate, now
            if now - since > _SILENT_SECONDS and now >= next_read:
                next_read = now + _RECORDER_SECONDS
                self._writer.show_operations(open_operations())
            # A host that moves issues more work, so this only matters once it is quiet.
            quiet = now - since > _QUIET_SECONDS
            self._writer.device_asked(self._is_busy(driver) if quiet else None, now)

    def _is_busy(self, driver: _Driver) -> bool | None:
        streams = [stream for stream in tuple(self._streams) if not driver.is_capturing(stream)]
        return any(driver.has_work(stream) for stream in streams) if streams else None

    def _give_up(self, error: Exception) -> None:
        self._stop.set()
        log.warning("the progress of the device is unknown from now on: %s", error)


class _Driver:
    """Calls the CUDA driver without the interpreter's lock.

    The methods of ``torch.cuda.Event`` hold that lock while the driver may make them wait, for another
    thread's call or for room in a queue that a stuck device does not empty. And a query may invalidate a CUDA
    graph: see [Note: captures in other threads] in ``utils.cuda_graphs``.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")  # releases the interpreter's lock during calls

    def enter_thread(self, device: torch.device) -> None:
        """Prepare the calling thread for queries about ``device``."""
        torch.cuda.set_device(device)  # otherwise the next call would create a context on another device
        ignore_other_threads()

    def record(self, event: int, stream: int) -> None:
        _check(self._library.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream)))

    def has_passed(self, event: int) -> bool:
        return _is_ready(self._library.cuEventQuery(ctypes.c_void_p(event)))

    def has_work(self, stream: int) -> bool:
        return not _is_ready(self._library.cuStreamQuery(ctypes.c_void_p(stream)))

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        _check(self._library.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)))
        return status.value != 0


def _is_ready(status: int) -> bool:
    if status == _NOT_READY:
        return False
    _check(status)
    return True


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"the CUDA driver reports error {status}")
