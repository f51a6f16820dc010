"""Measures computation and communication of a replay separately (paper, section 6.1.2).

[Note: separate timers] A collective is waited for where it is issued, as if it were synchronous. The time
between two collectives is then this rank's own work, and a rank that waits for a slow partner does not look
slow. The wait is bounded, because a program may rely on issuing a second collective before the first has
finished. Sends and receives are never waited for, since a ring of them would deadlock; computation cannot be
separated from them, and is not timed then.

[Note: waiting for a core] On the host, a machine with more threads than cores delays ranks at random, by far
more than a slow layer would. So the time in which a thread was runnable but had no core is subtracted. What
the thread computes, sleeps or waits for is counted. Such waits of PyTorch's other threads
(``torch.set_num_threads``) are not known, and none are if the system does not report them. Times of
collectives include these waits, because the transfer goes on meanwhile.

Linux 6.18 sometimes counts a sleep as such a wait: on a busy machine, one in a hundred sleeps of 100 ms was
counted almost in full. A rank that is slow because it sleeps is then as fast as its peers in that check, and
is reported some checks later.

[Note: the host's lead] Small kernels take less time than it takes to launch them. The clock of a device that
waits for its host shows the host's pace, and a host is often late by chance. Where it matters
(``host_ahead``), the device is kept busy before the block begins, so that the host is up to 10 ms ahead.

Collectives that ``collectives.interceptor`` does not see are not timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchscout.collectives.call import POINT_TO_POINT, Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.decision.types import Surface
from torchscout.replay.recipe import Observation
from torchscout.utils._torch import cuda_sleep
from torchscout.utils.procfs import core_wait_seconds
from torchscout.utils.reentrancy import in_backward

__all__ = ["host_ahead", "timed", "timed_transfer"]

_TIMEOUT_SECONDS = 5.0
_READS = 8
"""How often a clock is read again if the thread had to wait for a core in between."""
_LEAD_CYCLES = 20_000_000
"""Cycles of a device's clock: about 10 ms."""
_gives_lead = False


@contextmanager
def host_ahead() -> Iterator[None]:
    """Keep CUDA devices busy before each block that is timed in here. See [Note: the host's lead]."""
    global _gives_lead  # noqa: PLW0603  only the thread that trains replays
    _gives_lead = True
    try:
        yield
    finally:
        _gives_lead = False


@contextmanager
def timed(
    device: torch.device, seen: Observation, *, work: Surface | None, communication: str
) -> Iterator[None]:
    """Record the times of this block when ``seen`` is read: its own ``work``, and each collective.

    ``communication`` has a placeholder for the operation: ``time/{}_backward``. A block that fails is not
    timed.
    """
    clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
    listener = _Stopwatch(clock, device)
    with listen(listener, outermost=True):
        if _gives_lead and device.type == "cuda":
            cuda_sleep(_LEAD_CYCLES)
        begin = clock.mark()
        yield
        end = clock.mark()

    def read() -> None:
        clock.synchronize()
        for call, marks in listener.laps:
            milliseconds = clock.milliseconds(*marks)
            seen.lap(communication.format(call.operation), call.members, call.elements, milliseconds)
        if work is not None and listener.is_separable:
            laps = sum(clock.own_milliseconds(*marks) for _, marks in listener.laps)
            seen.times[work] = max(0.0, clock.own_milliseconds(begin, end) - laps)

    seen.unread.append(read)


@contextmanager
def timed_transfer(
    device: torch.device, seen: Observation, surface: Surface, members: tuple[int, ...], elements: int
) -> Iterator[None]:
    """Record the time of this block, one transfer among ``members``, when ``seen`` is read."""
    clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
    begin = clock.mark()
    yield
    end = clock.mark()

    def read() -> None:
        clock.synchronize()
        seen.lap(surface, members, elements, clock.milliseconds(begin, end))

    seen.unread.append(read)


class _Collective(NamedTuple):
    operation: str
    members: tuple[int, ...] | None
    elements: int


class _Stopwatch:
    """Times the collectives of one block."""

    def __init__(self, clock: _HostClock, device: torch.device) -> None:
        self.laps: list[tuple[_Collective, tuple[Any, Any]]] = []
        self.is_separable = True
        """Whether every communication could be waited for."""
        self._clock = clock
        self._thread = threading.get_ident()
        self._has_workers = device.type != "cpu"
        """Whether autograd runs on threads of its own for this device."""

    def before(self, _: Call, /) -> Any:
        return self._clock.mark() if self._is_in_block() else None

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        if token is None or call.group.size == 1:
            return
        # Gloo executes a reduce-scatter only while it is waited for.
        is_bounded = call.is_async is not False and call.operation != "reduce_scatter"
        if call.operation in POINT_TO_POINT or not _is_done(pending, is_bounded=is_bounded):
            self.is_separable = False
        else:
            end, elements = self._clock.mark(), sum(tensor.numel() for tensor in call.tensors)
            self.laps.append((_Collective(call.operation, call.group.members, elements), (token, end)))

    def _is_in_block(self) -> bool:
        """Whether the caller is not another thread of training, such as one that writes a checkpoint."""
        return threading.get_ident() == self._thread or (self._has_workers and in_backward())


def _is_done(pending: Pending | None, *, is_bounded: bool) -> bool:
    """Wait, with a time limit if ``is_bounded``. Without ``pending`` the stream already waits."""
    if pending is None:
        return True
    if not is_bounded:
        pending.wait()
        return True
    deadline, pause = time.monotonic() + _TIMEOUT_SECONDS, 1e-5
    while not pending.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


class _HostMark(NamedTuple):
    at: float
    waited: float
    """Seconds that the thread has waited for a core so far."""


class _HostClock:
    def mark(self) -> Any:
        waited = core_wait_seconds()
        for _ in range(_READS):
            now, before = time.perf_counter(), waited
            waited = core_wait_seconds()
            if waited == before:  # it did not wait between the two readings, so that they fit each other
                break
        return _HostMark(now, waited)

    def synchronize(self) -> None:
        """Called before marks are compared."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        return 1e3 * float(end.at - begin.at)

    def own_milliseconds(self, begin: Any, end: Any) -> float:
        """Without the time in which the thread waited for a core."""
        return self.milliseconds(begin, end) - 1e3 * float(end.waited - begin.waited)


class _DeviceClock(_HostClock):
    """Records events on the current stream; a collective is issued from its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    own_milliseconds = milliseconds
