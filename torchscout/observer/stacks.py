"""Where a trainer stands: its Python stacks, on request (paper, section 7; docs/design.md, "The observer").

The trainer registers ``faulthandler`` on a real-time signal. Its handler is C code that takes no
lock and no GIL, so it answers inside a collective, inside a loop that never releases the GIL, and
without any right to trace the process. It shows Python frames only: what a C++ call inside
the topmost frame does is not known, and ``is_waiting`` says so.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import secrets
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchscout.utils.private_files import open_private

__all__ = ["Registration", "is_waiting", "register", "take", "trim"]

_SETTLED_SECONDS = 0.03  # a dump has no end mark: it is whole once it stops growing
_LOOK_SECONDS = 0.005
_MOST_BYTES = 4 << 20


class Registration:
    """A trainer's promise to write its stacks to ``path`` whenever ``number`` is sent to it."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self._registered = True

    def unregister(self) -> None:
        """Take it back; idempotent."""
        if not self._registered:
            return
        self._registered = False
        self.path.unlink(missing_ok=True)
        handler = _handlers[self.number]
        handler.names.remove(self.path)
        if not handler.names:
            del _handlers[self.number]
            faulthandler.unregister(self.number)
            os.close(handler.descriptor)


@dataclass(slots=True)
class _Handler:
    """What a signal does in this process: there can be one, however many sessions there are."""

    descriptor: int
    """Of the file that dumps are written to."""
    names: list[Path]
    """Of that file: each session has its own."""


_handlers: dict[int, _Handler] = {}
"""By the number of the signal."""


def register(directory: Path, number: int) -> Registration:
    """Called by the trainer, in its main thread; ``directory`` is private to the user."""
    if (handler := _handlers.get(number)) is not None:
        path = directory / f"stack-{secrets.token_hex(8)}"
        os.link(handler.names[0], path)
        handler.names.append(path)
        return Registration(path, number)
    if signal.getsignal(number) not in {signal.SIG_DFL, signal.SIG_IGN}:
        raise ValueError(f"signal {number} is in use here; set ObserverConfig.stack_signal to another one")
    # What `unregister` puts back. By default a late request would end the trainer.
    signal.signal(number, signal.SIG_IGN)
    descriptor, name = tempfile.mkstemp(prefix="stack-", dir=directory)  # owner-only
    # Appending, so that the observer may cut the file between two dumps.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    _handlers[number] = _Handler(descriptor, [Path(name)])
    return Registration(Path(name), number)


def take(pid: int, path: Path, number: int, timeout: float) -> str:
    """Called by the observer: the trainer's stacks, or nothing if it gives none in time.

    A stopped process gives none. One that does not catch the signal is not sent it.
    """
    try:
        if not _catches(pid, number):
            return ""
        file = open_private(path, os.O_RDWR)
    except OSError:  # gone, or its file is, or that is not a file of ours
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the observer of another session may be at it
        os.ftruncate(file, 0)
        os.kill(pid, number)
        return _settled(file, timeout)
    except BlockingIOError:
        return _settled(file, timeout)
    except OSError:
        return ""
    finally:
        os.close(file)


def _settled(file: int, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    text, since = b"", time.monotonic()
    while (now := time.monotonic()) < deadline:
        time.sleep(_LOOK_SECONDS)
        fresh = os.pread(file, _MOST_BYTES, 0)
        if fresh != text:
            text, since = fresh, now
        elif text and now - since > _SETTLED_SECONDS:
            break
    return text.decode(errors="replace")


def _catches(pid: int, number: int) -> bool:
    """Whether the process runs and has a handler: the signal's default would end it."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    stopped = status["State"].split()[0] in {"T", "t", "Z", "X"}
    return not stopped and bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def trim(stack: str, limit: int) -> str:
    """At most ``limit`` characters: whole threads, the main one before all others, in the order they have."""
    kept: list[str] = []
    for thread in reversed(_threads(stack)):  # newest thread first is how faulthandler lists them
        if sum(map(len, kept)) + len(thread) > limit:
            break
        kept.append(thread)
    return "".join(reversed(kept)) or stack[:limit]  # the main thread stays the last, as it is known by


class _Frame(NamedTuple):
    file: str
    function: str


class _Rule(NamedTuple):
    """What the topmost frame says about its thread."""

    file: str
    """Ends with this, or, with a slash at its end, contains it."""
    functions: frozenset[str] | None
    """None is any."""
    waiting: bool | None
    """True: in a communication wait. False: certainly not. None: cannot be known."""


def _rule(file: str, functions: str, waiting: bool | None) -> _Rule:
    return _Rule(file, frozenset(functions.split()) or None, waiting)


# Seen on PyTorch 2.13 with Gloo; the first rule that fits decides. Whoever calls `Work.wait()`
# is the topmost frame itself, since that is a C++ method: which is why a user's own frame on top,
# a sleep as well as a wait, says nothing.
_RULES = (
    # Pickling before an object is sent, unpickling after it was received.
    _rule("torch/distributed/distributed_c10d.py", "_object_to_tensor _tensor_to_object", False),
    # Blocking collectives, barriers, sends and receives: all wait in this file.
    _rule("torch/distributed/distributed_c10d.py", "", True),
    # DTensor, functional collectives: an asynchronous tensor is waited for on first use.
    _rule("torch/distributed/_functional_collectives.py", "wait_tensor", True),
    # Pipeline schedules: batched point-to-point.
    _rule("torch/distributed/pipelining/schedules.py", "_wait_batch_p2p", True),
    # DDP and others broadcasting parameters and buffers in C++.
    _rule("torch/nn/parallel/distributed.py", "_distributed_broadcast_coalesced _sync_module_states", True),
    _rule("torch/distributed/utils.py", "_sync_params_and_buffers", True),
    # C++ runs the graph: DDP's reducer waits here, and here kernels compute.
    _rule("torch/autograd/graph.py", "_engine_run_backward", None),
    # Files, worker processes.
    _rule("torch/serialization.py", "", False),
    _rule("torch/utils/data/", "", False),
    _rule("torch/distributed/checkpoint/", "", False),
)
# Between a wait and whoever asked for it: the dispatcher, the logger around each collective, and
# the one place of ours that every collective passes.
_TRANSPARENT = ("torch/_ops.py", "torch/distributed/c10d_logger.py", "torchscout/collectives/interceptor.py")
_BACKWARD = _Frame("torch/autograd/graph.py", "_engine_run_backward")
_FRAME = re.compile(r'^  File "(.*)", line \S+ in (.*)$', re.MULTILINE)
_STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen ")


def is_waiting(stack: str) -> bool | None:
    """Whether the trainer waits in a communication; None where its stacks cannot tell.

    The main thread counts. Other threads may communicate in the background, and count only where
    the main thread hands over to them: backward runs in threads of its own, and a main thread in the
    standard library may be waiting for one of its own.
    """
    threads = [_frames(thread) for thread in _threads(stack)]
    if not any(threads):
        return None
    *others, main = threads
    waiting = _classify(main)
    if waiting is True or not any(_classify(other) is True for other in others):
        return waiting
    return True if main and _matches(main[0], _BACKWARD) else None


def _threads(stack: str) -> list[str]:
    return [part for part in re.split(r"^(?=Thread |Current thread )", stack, flags=re.MULTILINE) if part]


def _frames(thread: str) -> list[_Frame]:
    """Most recent call first, without what is transparent."""
    frames = [_Frame(*found) for found in _FRAME.findall(thread)]
    while frames and frames[0].file.endswith(_TRANSPARENT):
        del frames[0]
    return frames


def _classify(frames: list[_Frame]) -> bool | None:
    if not frames:
        return None
    top = frames[0]
    for rule in _RULES:
        fits = rule.file in top.file if rule.file.endswith("/") else top.file.endswith(rule.file)
        if fits and (rule.functions is None or top.function in rule.functions):
            return rule.waiting
    # The standard library calls no collective, but in C++ anybody else may.
    return False if _STANDARD_LIBRARY.search(top.file) else None


def _matches(frame: _Frame, other: _Frame) -> bool:
    return frame.file.endswith(other.file) and frame.function == other.function
