"""Stops a replay from issuing collectives that its recipe did not announce (paper, section 6.1).

A module, an optimizer or a hook may issue collectives of its own. If a replay repeated them on some ranks
only, a healthy job would hang. So every collective of a replay is examined in the dispatcher before anything
is sent: SCOUT's own groups are always allowed, a recipe announces what it or a framework issues, and any
other collective raises ``UnannouncedError``, which ends the replay of that target on all ranks.

Examined are the thread that replays, threads started during the replay, and backward passes, which may run on
PyTorch's own threads. All other threads belong to training: an asynchronous checkpoint may communicate at any
time. So a collective that a module hands to an older thread pool is not refused here; ``Communication``
detects it while training itself runs the module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.optim import Optimizer

from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Handle, Pending, examine, listen
from torchscout.errors import ChannelError, ReplayError, describe_error
from torchscout.utils.reentrancy import in_backward, in_own_work, is_nested_step, is_stepping, own_work

__all__ = [
    "CallListener",
    "Communication",
    "Refusal",
    "StepCommunication",
    "UnannouncedError",
    "announced",
    "attempt",
    "guarded",
]

_Value = TypeVar("_Value")


class UnannouncedError(ReplayError):
    """A replay was about to issue a collective that its recipe did not announce; nothing was sent."""


@dataclass(slots=True)
class _Replay:
    """One replay on the thread that runs it."""

    thread: int = field(default_factory=threading.get_ident)
    older_threads: frozenset[int] = field(
        default_factory=lambda: frozenset(each.ident for each in threading.enumerate() if each.ident)
    )
    """Threads that existed when the replay began. They belong to training."""
    announced: list[frozenset[int] | None] = field(default_factory=list)
    """Ranks among which collectives are expected, innermost block last; None for any ranks."""

    def examine(self, call: Call) -> None:
        group, thread = call.group, threading.get_ident()
        if group.is_scouts or group.size == 1:
            return
        if thread != self.thread and thread in self.older_threads and not in_backward():
            return
        expected = self.announced[-1] if self.announced else frozenset()
        if expected is None or (group.members is not None and expected.issuperset(group.members)):
            return
        raise UnannouncedError(f"it issues {_described(call)}, which a replay must not repeat")


_running: list[_Replay] = []


@contextmanager
def guarded() -> Iterator[None]:
    """Refuse collectives in this block, except inside of ``announced``."""
    if _running and _running[-1].thread == threading.get_ident() and not _running[-1].announced:
        yield
        return
    replay = _Replay()
    _running.append(replay)
    try:
        with examine(replay.examine):
            yield
    finally:
        _running.remove(replay)


class Refusal(str):
    """Why something is never replayed. Any other string describes a failure."""

    __slots__ = ()


def attempt(work: Callable[[], _Value]) -> tuple[_Value | None, str | None]:
    """Return the result of ``work`` and None, or None and a description of the error."""
    try:
        with own_work(), guarded():
            return work(), None
    except ChannelError:
        raise  # ranks can no longer exchange anything, so they cannot stay in step
    except ReplayError as error:
        return None, Refusal(describe_error(error))
    except Exception as error:  # noqa: BLE001  runs users' modules; see [Note: no rank is stranded] in ``replayer``
        return None, describe_error(error)


@contextmanager
def announced(ranks: Collection[int] | None = None) -> Iterator[None]:
    """Allow collectives in this block: among any of these ranks, or all collectives if ``ranks`` is None."""
    replay = next((each for each in reversed(_running) if each.thread == threading.get_ident()), None)
    if replay is None:
        yield
        return
    replay.announced.append(None if ranks is None else frozenset(ranks))
    try:
        yield
    finally:
        replay.announced.pop()


class CallListener:
    """Base class of listeners to this process's collectives that can be switched on and off."""

    _handle: Handle | None = None

    @property
    def is_listening(self) -> bool:
        return self._handle is not None

    def listen(self) -> None:
        """Idempotent."""
        if self._handle is None:
            self._handle = listen(self)

    def stop(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before(self, call: Call) -> None:
        """Called before a collective is issued."""
        raise NotImplementedError

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Not needed: ``before`` has the same call."""


class Communication(CallListener):
    """Detects collectives of training in code that may be replayed later."""

    def __init__(self, expected: Collection[int] = ()) -> None:
        """Collectives among any of the ``expected`` ranks are ignored."""
        self._expected = frozenset(expected)
        self.found: str | None = None
        """Description of the first collective that a replay must not repeat."""

    def before(self, call: Call) -> None:
        group = call.group
        is_expected = group.members is not None and self._expected.issuperset(group.members)
        if self.found is None and not (group.is_scouts or group.size == 1 or is_expected or in_own_work()):
            self.found = _described(call)


class StepCommunication(CallListener):
    """Detects collectives in an optimizer's ``step``: in its first step and in those that are to be replayed.

    An update that communicates is never replayed, because ranks would not issue the same collectives.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._communication = Communication()
        self._thread = 0
        """The thread that steps."""
        self._is_wanted = True
        """Whether to listen to the next step."""
        self._was_observed = False
        """Whether a step has been listened to, or is being listened to."""
        self._hook: Any = None
        self.refusal: str | None = None
        """Another reason not to replay its update, if there is one."""

    def start(self) -> None:
        # No post-step hook: replay may end inside of one, and PyTorch does not allow removing it there.
        self._hook = self._optimizer.register_step_pre_hook(lambda *_: self._step_begins())

    def close(self) -> None:
        self.stop()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def expect(self, ranks: Collection[int]) -> None:
        """Ignore collectives among any of these ranks: DTensor issues them, and a clone does not."""
        self._communication = Communication(ranks)

    @property
    def may_be_tried(self) -> bool:
        """Whether a step was observed, or none will be because ``start`` was not called."""
        return self._was_observed or self._hook is None

    def observe_next(self) -> None:
        """Listen to the next step."""
        self._is_wanted = True

    @property
    def communicates(self) -> bool:
        return self._communication.found is not None

    def refuse(self) -> None:
        """Raise ``ReplayError`` if its update must not be replayed."""
        if self.refusal is not None:
            raise ReplayError(self.refusal)
        if (found := self._communication.found) is not None:
            kind = type(self._optimizer).__name__
            raise ReplayError(f"the step of {kind} issues {found}, which a replay must not repeat")

    def _step_begins(self) -> None:
        if is_nested_step(self._optimizer):
            return
        self.stop()
        if self._is_wanted:
            self._is_wanted, self._was_observed = False, True
            self._thread = threading.get_ident()
            self.listen()

    def before(self, call: Call) -> None:
        if is_stepping(self._optimizer, self._thread):
            self._communication.before(call)
        else:
            self.stop()


def _described(call: Call) -> str:
    group = call.group
    name = group.description if group.description not in ("", "undefined") else group.name
    return f"{call.operation} among {group.size} ranks (process group {name})"
