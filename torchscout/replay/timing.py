"""Times what a replay computes apart from what it communicates (paper, section 6.1.2).

[Note: apart] A collective is waited for where it is issued, as if it were synchronous: what is between two
collectives is then this rank's own work, and a rank that waits for a slow partner does not itself look
slow. The wait is bounded, because a program may rely on issuing a second collective before the first is
done. Sends and receives are never waited for, since a ring of them would not get any further; what a pass
computes cannot be told apart from them, and is not timed.

[Note: waiting for a core] Where the host's clock times the work, a machine with more to do than it has cores
delays now this rank and now that one, by far more than a slow layer would. A rank is not slow by itself for
that: the time in which its thread could run and the scheduler gave the cores to others is left out. What the
thread computes, and what it sleeps or waits for, is counted. The waits of other threads that PyTorch computes
with (``torch.set_num_threads``) are not known, and none are where the system does not report them.
Collectives are timed with all waits: others do the transfer meanwhile.

Not seen: what ``collectives.interceptor`` does not see. Whose fault a time is, is not decided here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from torchscout.collectives.call import POINT_TO_POINT, Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.decision.record import Surface
from torchscout.replay.recipe import Observation
from torchscout.utils.procfs import core_wait_seconds
from torchscout.utils.reentrancy import in_backward

__all__ = ["lapped", "timed"]

_PATIENCE_SECONDS = 5.0
_READS = 8
"""How often a clock is read again because the thread had to wait for a core meanwhile."""
_Mark = TypeVar("_Mark")


@contextmanager
def timed(
    device: torch.device, seen: Observation, *, work: Surface | None, communication: str
) -> Iterator[None]:
    """What this block takes is ``seen`` when that is read: its own ``work``, and each collective by its name.

    ``communication`` has a place for the operation: ``time/{}_backward``. A block that fails says nothing.
    """
    clock = _clock_of(device)
    ear = _Ear(clock, device)
    with listen(ear, outermost=True):
        begin = clock.mark()
        yield
        end = clock.mark()

    def read() -> None:
        clock.finish_update()
        for call, marks in ear.laps:
            milliseconds = clock.milliseconds(*marks)
            seen.lap(communication.format(call.operation), call.members, call.elements, milliseconds)
        if work is not None and ear.is_separable:
            laps = sum(clock.own_milliseconds(*marks) for _, marks in ear.laps)
            seen.times[work] = max(0.0, clock.own_milliseconds(begin, end) - laps)

    seen.unread.append(read)


@contextmanager
def lapped(
    device: torch.device, seen: Observation, surface: Surface, members: tuple[int, ...], elements: int
) -> Iterator[None]:
    """This block is one transfer among ``members``, and what it takes is ``seen`` when that is read."""
    clock = _clock_of(device)
    begin = clock.mark()
    yield
    end = clock.mark()

    def read() -> None:
        clock.finish_update()
        seen.lap(surface, members, elements, clock.milliseconds(begin, end))

    seen.unread.append(read)


class _Heard:
    """What is kept of a collective."""

    __slots__ = ("elements", "members", "operation")

    def __init__(self, call: Call) -> None:
        self.operation = call.operation
        self.members = call.group.members
        self.elements = sum(tensor.numel() for tensor in call.tensors)


class _Ear:
    """Hears the collectives of one block."""

    def __init__(self, clock: _Clock[Any], device: torch.device) -> None:
        self.laps: list[tuple[_Heard, tuple[Any, Any]]] = []
        self.is_separable = True
        """Whether all that was communicated could be waited for."""
        self._clock = clock
        self._thread = threading.get_ident()
        self._has_workers = device.type != "cpu"
        """Whether autograd has threads of its own for the device."""

    def before(self, call: Call) -> Any:  # noqa: ARG002  when is all that counts
        return self._clock.mark() if self._is_in_block() else None

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        if token is None or call.group.size == 1:
            return
        # Gloo does a reduce-scatter only while somebody waits for it.
        is_bounded = call.is_async is not False and call.operation != "reduce_scatter"
        if call.operation in POINT_TO_POINT or not _is_done(pending, is_bounded=is_bounded):
            self.is_separable = False
        else:
            self.laps.append((_Heard(call), (token, self._clock.mark())))

    def _is_in_block(self) -> bool:
        """Others' threads communicate too, such as one that writes a checkpoint."""
        return threading.get_ident() == self._thread or (self._has_workers and in_backward())


def _is_done(pending: Pending | None, *, is_bounded: bool) -> bool:
    """Wait, though not for ever where the caller would not. Without ``pending`` its stream waits already."""
    if pending is None:
        return True
    if not is_bounded:
        pending.wait()
        return True
    deadline, pause = time.monotonic() + _PATIENCE_SECONDS, 1e-5
    while not pending.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


class _Clock(Protocol[_Mark]):
    def mark(self) -> _Mark: ...

    def finish_update(self) -> None:
        """Before marks are compared."""
        ...

    def milliseconds(self, begin: _Mark, end: _Mark) -> float: ...

    def own_milliseconds(self, begin: _Mark, end: _Mark) -> float:
        """Without what this rank spent waiting for a core: see [Note: waiting for a core]."""
        ...


def _clock_of(device: torch.device) -> _Clock[Any]:
    return _DeviceClock(device) if device.type == "cuda" else _HostClock()


class _HostMark(NamedTuple):
    at: float
    waited: float
    """Seconds for a core, by then."""


class _HostClock:
    def mark(self) -> _HostMark:
        waited = core_wait_seconds()
        for _ in range(_READS):
            now, before = time.perf_counter(), waited
            waited = core_wait_seconds()
            if waited == before:  # it did not wait between the two readings, so that they fit each other
                break
        return _HostMark(now, waited)

    def finish_update(self) -> None:
        """The host knows its marks at once."""

    def milliseconds(self, begin: _HostMark, end: _HostMark) -> float:
        return 1e3 * (end.at - begin.at)

    def own_milliseconds(self, begin: _HostMark, end: _HostMark) -> float:
        return 1e3 * (end.at - begin.at - (end.waited - begin.waited))


class _DeviceClock:
    """Marks on the stream that is current where they are made: a collective is issued from its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish_update(self) -> None:
        torch.cuda.synchronize(self._device)

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    own_milliseconds = milliseconds
