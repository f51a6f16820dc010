"""Takes the Python stacks of a trainer on request (paper, section 7; DESIGN.md, "Silence").

The trainer registers ``faulthandler`` for a real-time signal. Its handler is C code that takes no lock and no
GIL, so it works inside a collective, inside a loop that never releases the GIL, and without permission to
trace the process. It shows Python frames only: what a C++ call inside the topmost frame does is unknown, and
``is_waiting`` returns None then.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchscout.utils.private_files import open_private
from torchscout.utils.procfs import catches_signal
from torchscout.utils.text import counted

__all__ = ["Registration", "is_waiting", "register", "take", "trim"]

_SETTLED_SECONDS = 0.03  # a dump has no end mark: it is complete once it stops growing
_POLL_SECONDS = 0.005
_MAX_BYTES = 4 << 20
_PACKAGE = f"{Path(__file__).parents[1]}/"
_STDLIB = re.compile(rf"{re.escape(str(Path(threading.__file__).parent))}/(?!(site|dist)-packages/)")


@dataclass(slots=True)
class Registration:
    """Until ``unregister``, the trainer writes its stacks to ``path`` whenever it receives the signal."""

    path: Path
    number: int
    is_registered: bool = True

    def unregister(self) -> None:
        """Idempotent."""
        if not self.is_registered:
            return
        self.is_registered = False
        self.path.unlink(missing_ok=True)
        handler = _handlers[self.number]
        handler.names.remove(self.path)
        if not handler.names:
            del _handlers[self.number]
            faulthandler.unregister(self.number)
            os.close(handler.descriptor)


@dataclass(slots=True)
class _Handler:
    """The handler of one signal in this process, which all sessions share."""

    descriptor: int
    """The file that dumps are written to."""
    names: list[Path]
    """One name of that file for each session."""


_handlers: dict[int, _Handler] = {}
"""By signal number."""


def register(directory: Path, number: int) -> Registration:
    """Register the signal; called by the trainer's main thread with an owner-only ``directory``.

    Raises ``ValueError`` if the signal is in use.
    """
    if (handler := _handlers.get(number)) is not None:
        path = directory / f"stack-{secrets.token_hex(8)}"
        os.link(handler.names[0], path)
        handler.names.append(path)
        return Registration(path, number)
    if signal.getsignal(number) not in {signal.SIG_DFL, signal.SIG_IGN}:
        raise ValueError(f"signal {number} is in use here; set ObserverConfig.stack_signal to another one")
    # ``faulthandler.unregister`` restores this. By default a late request would end the trainer.
    signal.signal(number, signal.SIG_IGN)
    descriptor, name = tempfile.mkstemp(prefix="stack-", dir=directory)  # owner-only
    # In append mode, so that the observer may truncate the file between two dumps.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    _handlers[number] = _Handler(descriptor, [Path(name)])
    return Registration(Path(name), number)


def take(pid: int, path: Path, number: int, timeout: float) -> str:
    """Return the trainer's stacks, or an empty string if there are none in time; called by the observer.

    The signal is not sent to a process that is stopped or does not catch it.
    """
    try:
        if not catches_signal(pid, number):
            return ""
        file = open_private(path, os.O_RDWR)
    except OSError:  # the process or its file is gone, or the file is not ours
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another session's observer may be doing the same
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
        time.sleep(_POLL_SECONDS)
        fresh = os.pread(file, _MAX_BYTES, 0)
        if fresh != text:
            text, since = fresh, now
        elif text and now - since > _SETTLED_SECONDS:
            break
    return _arranged(text.decode(errors="replace")) if text else ""


def _arranged(dump: str) -> str:
    """Return the main thread, then the other threads of the program, equal ones once, and the number of
    torchscout's own. Without addresses, ranks that wait in the same place have the same stacks.

    ``faulthandler`` begins with the newest thread and ends with the main one, or with dots after 100 threads.
    """
    main, *others = reversed([thread.partition("\n")[2] for thread in dump.rstrip("\n").split("\n\n")])
    counts = Counter(frames for frames in others if not _is_own(frames))
    shown = [
        f"Main thread (most recent call first):\n{main or '  unknown: only the newest 100 threads are shown'}"
    ]
    for frames, count in counts.items():
        shown.append(f"{'Thread' if count == 1 else f'{count} threads'} (most recent call first):\n{frames}")
    if own := len(others) - counts.total():
        shown.append(f"{counted(own, 'thread')} of torchscout {'is' if own == 1 else 'are'} not shown")
    return "\n\n".join(shown) + "\n"


def _is_own(thread: str) -> bool:
    """Whether torchscout started the thread. Threads that C++ started call it too, and are the program's."""
    files = [frame.file for frame in _frames(thread)]
    first = next((file for file in reversed(files) if not _STDLIB.match(file)), "")
    return first.startswith(_PACKAGE) and files[-1] == threading.__file__


def trim(stack: str, limit: int) -> str:
    """Return at most ``limit`` characters of the stacks: whole threads, and the main one in any case."""
    while len(stack) > limit and "\n\n" in stack:
        stack = stack.rpartition("\n\n")[0]
    return stack[:limit]


class _Frame(NamedTuple):
    file: str
    function: str


class _Rule(NamedTuple):
    """What the topmost frame says about its thread."""

    file: str
    """The end of the file's path or, if this ends with a slash, a part of it."""
    functions: str
    """Names of functions, separated by spaces; empty matches any."""
    waiting: bool | None
    """True: waits in a communication. False: certainly not. None: unknown."""


# As seen on PyTorch 2.13 with Gloo; the first rule that matches decides. ``Work.wait()`` is a C++ method, so
# its caller is the topmost frame: a user's own frame on top, in a sleep or in a wait, says nothing.
_RULES = (
    # Pickling before an object is sent, unpickling after it was received.
    _Rule("torch/distributed/distributed_c10d.py", "_object_to_tensor _tensor_to_object", False),
    # Blocking collectives, barriers, sends and receives: all wait in this file.
    _Rule("torch/distributed/distributed_c10d.py", "", True),
    # DTensor, functional collectives: an asynchronous tensor is waited for on first use.
    _Rule("torch/distributed/_functional_collectives.py", "wait_tensor", True),
    # Pipeline schedules: batched point-to-point.
    _Rule("torch/distributed/pipelining/schedules.py", "_wait_batch_p2p", True),
    # DDP and others broadcasting parameters and buffers in C++.
    _Rule("torch/nn/parallel/distributed.py", "_distributed_broadcast_coalesced _sync_module_states", True),
    _Rule("torch/distributed/utils.py", "_sync_params_and_buffers", True),
    # C++ runs the graph: DDP's reducer waits here, and here kernels compute.
    _Rule("torch/autograd/graph.py", "_engine_run_backward", None),
    # Files, worker processes.
    _Rule("torch/serialization.py", "", False),
    _Rule("torch/utils/data/", "", False),
    _Rule("torch/distributed/checkpoint/", "", False),
)
# Frames between a wait and its caller: the dispatcher, the logger around each collective, and SCOUT's
# interceptor.
_TRANSPARENT = ("torch/_ops.py", "torch/distributed/c10d_logger.py", "torchscout/collectives/interceptor.py")
_BACKWARD = _Frame("torch/autograd/graph.py", "_engine_run_backward")
_FRAME = re.compile(r'^  File "(.*)", line \S+ in (.*)$', re.MULTILINE)


def is_waiting(stack: str) -> bool | None:
    """Return whether the trainer waits in a communication; None if its stacks cannot tell.

    The main thread decides. Other threads may communicate in the background, and count only if the main
    thread waits for them: the backward pass runs in threads of its own.
    """
    main, *others = map(_frames, stack.split("\n\n"))
    waiting = _classify(main)
    if waiting is True or not any(_classify(other) is True for other in others):
        return waiting
    return True if main and _matches(main[0], _BACKWARD) else None


def _frames(thread: str) -> list[_Frame]:
    """Return the frames, most recent call first, without transparent ones on top."""
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
        if fits and (not rule.functions or top.function in rule.functions.split()):
            return rule.waiting
    return None  # any code may call a collective in C++, or wait for a thread that does


def _matches(frame: _Frame, other: _Frame) -> bool:
    return frame.file.endswith(other.file) and frame.function == other.function
