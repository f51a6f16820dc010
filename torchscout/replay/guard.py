"""Keeps a replay from communicating in a way that its recipe did not announce (paper, section 6.1).

A module, an optimizer or a hook may issue collectives that nobody expects. Repeated on some ranks and not on
others, they would make a healthy job hang. So whatever a replay runs is examined at the dispatcher, before
anything is sent: SCOUT's own groups are free, a recipe announces what it or a framework issues, and every
other collective raises ``UnannouncedError``, which ends the replay of that target on all ranks.

Examined are the thread that replays, threads that begin during the replay, and backward passes, which may
run on threads of PyTorch's own. Other threads belong to training: an asynchronous checkpoint may communicate
at any time. A collective that a module hands to a thread pool which is older than the replay is therefore
not refused here; ``Communication`` recognizes it while training itself runs the module.
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
    """What is running on the thread that replays."""

    thread: int = field(default_factory=threading.get_ident)
    others: frozenset[int] = field(
        default_factory=lambda: frozenset(each.ident for each in threading.enumerate() if each.ident)
    )
    """The threads that were there when it began, and belong to training."""
    announced: list[frozenset[int] | None] = field(default_factory=list)
    """Among which ranks collectives are expected, innermost last; None among any."""

    def examine(self, call: Call) -> None:
        group, here = call.group, threading.get_ident()
        if group.is_scouts or group.size == 1:
            return
        if here != self.thread and here in self.others and not in_backward():
            return
        expected = self.announced[-1] if self.announced else frozenset()
        if expected is None or (group.members is not None and expected.issuperset(group.members)):
            return
        raise UnannouncedError(f"it issues {_described(call)}, which a replay must not repeat")


_running: list[_Replay] = []


@contextmanager
def guarded() -> Iterator[None]:
    """Refuse collectives in this block, except those of a block of ``announced`` inside it."""
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
    """Why something is not replayed at all; any other string says what has failed."""

    __slots__ = ()


def attempt(work: Callable[[], _Value]) -> tuple[_Value | None, str | None]:
    """The result, or in words why there is none."""
    try:
        with own_work(), guarded():
            return work(), None
    except ChannelError:
        raise  # the exchange itself is broken: there is nobody left to be in step with
    except ReplayError as error:
        return None, Refusal(describe_error(error))
    except Exception as error:  # noqa: BLE001  see [Note: no rank is stranded] in ``replayer``; the user's modules run in here
        return None, describe_error(error)


@contextmanager
def announced(ranks: Collection[int] | None = None) -> Iterator[None]:
    """Let collectives pass in this block: those among some or all of these ranks; any, if None are given."""
    replay = next((each for each in reversed(_running) if each.thread == threading.get_ident()), None)
    if replay is None:
        yield
        return
    replay.announced.append(None if ranks is None else frozenset(ranks))
    try:
        yield
    finally:
        replay.announced.pop()


class Communication:
    """Listens to what training itself issues while it runs something that may be replayed later."""

    def __init__(self, expected: Collection[int] = ()) -> None:
        """Collectives among some or all of the ``expected`` ranks are not noted."""
        self._expected = frozenset(expected)
        self._handle: Handle | None = None
        self.found: str | None = None
        """The first collective that a replay must not repeat, in words."""

    def begin(self) -> None:
        if self._handle is None:
            self._handle = listen(self)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before(self, call: Call) -> None:
        group = call.group
        is_expected = group.members is not None and self._expected.issuperset(group.members)
        if self.found is None and not (group.is_scouts or group.size == 1 or is_expected or in_own_work()):
            self.found = _described(call)

    def issued(self, call: Call, token: None, pending: Pending | None) -> None:
        """What is issued is known before."""


class StepCommunication:
    """Whether an optimizer's ``step`` issues collectives, found out in its first step and in those that are
    to be replayed. Such an update is never repeated: ranks would not issue the same."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._communication = Communication()
        self._thread = 0
        """On which it steps."""
        self._handle: Handle | None = None
        self._is_wanted = True
        """Whether to listen to the next step."""
        self._has_heard = False
        """Whether a step was listened to, or is right now."""
        self._hook: Any = None
        self.refusal: str | None = None
        """Why its update is not to be repeated for another reason, if so."""

    def start(self) -> None:
        # No hook after the step: replay may end in one, and PyTorch does not permit that one be removed then.
        self._hook = self._optimizer.register_step_pre_hook(lambda *_: self._begin())

    def close(self) -> None:
        self._end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def expect(self, ranks: Collection[int]) -> None:
        """Collectives among some or all of these ranks are a DTensor's own, and a clone makes none."""
        self._communication = Communication(ranks)

    @property
    def may_be_tried(self) -> bool:
        """Whether it is known by now that it does not communicate, or nobody is to find out."""
        return self._has_heard or self._hook is None

    def listen(self) -> None:
        """Listen to the next step."""
        self._is_wanted = True

    @property
    def communicates(self) -> bool:
        return self._communication.found is not None

    def refuse(self) -> None:
        """Raise a ``ReplayError`` if its update is not to be repeated."""
        if self.refusal is not None:
            raise ReplayError(self.refusal)
        if (found := self._communication.found) is not None:
            kind = type(self._optimizer).__name__
            raise ReplayError(f"the step of {kind} issues {found}, which a replay must not repeat")

    def _begin(self) -> None:
        if is_nested_step(self._optimizer):
            return
        self._end()
        if self._is_wanted:
            self._is_wanted, self._has_heard = False, True
            self._thread = threading.get_ident()
            self._handle = listen(self)

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before(self, call: Call) -> None:
        if is_stepping(self._optimizer, self._thread):
            self._communication.before(call)
        else:
            self._end()

    def issued(self, call: Call, token: None, pending: Pending | None) -> None:
        """What is issued is known before."""


def _described(call: Call) -> str:
    group = call.group
    name = group.description if group.description not in ("", "undefined") else group.name
    return f"{call.operation} among {group.size} ranks (process group {name})"
