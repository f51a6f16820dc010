"""The one place that sees collectives; fingerprints, timing and faults hang off it (paper, 6.1.2 and 7.1).

Every collective of a process, whoever issues it (DDP's C++ reducer, FSDP2, DTensor, compiled
code, a user's own line, any thread), is an operator of the ``c10d`` dispatcher. A kernel of ours
stands at the dispatch key ``BackendSelect`` of each of them: it tells the listeners, then lets
the operation go on below. No function is replaced.

Not seen, because no operator is called: replays of a CUDA graph, symmetric memory and fused
transports (NVSHMEM, DeepEP), calls made directly on a ``Backend`` object. Not known here: when
an operation is done. ``issued`` means that the backend has it; ``Pending`` can be asked.

[Note: leaving the dispatcher] The kernels come with the first listener. With the last one they
stay and pass every call on, which costs some 10 microseconds a collective: PyTorch cannot take a
kernel out while another thread is on its way to it. A thread that waits for the interpreter lock
at the kernel's entrance then finds it freed, and one that looks it up at the wrong moment gets
"fallthrough_kernel was executed". Both were seen, raised into the training thread. Whoever
knows that no other thread communicates may call ``uninstall``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchscout.collectives.call import Call, Operator, operators
from torchscout.log import log
from torchscout.utils._torch import DispatchKey, frame_evaluation

__all__ = ["Handle", "Listener", "Pending", "examine", "listen", "uninstall"]


class Pending:
    """An issued operation that can be asked whether it is done.

    The backend's own object behind it holds the operation's tensors. An open operation needs
    them anyway; a finished one lets go of them the first time it is asked, so whoever keeps a
    ``Pending`` must keep asking.
    """

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def is_completed(self) -> bool:
        work = self._work
        if work is None or work.is_completed():
            self._work = None
            return True
        return False

    def wait(self) -> None:
        """Until it is done, as the caller of a synchronous collective does. It may do so again."""
        if self._work is not None:
            self._work.wait()


class Listener(Protocol):
    """What hears of every collective, on the thread that issues it.

    It may sleep in ``before`` and in ``issued``. A collective that a listener itself issues is heard by
    nobody. An exception does not reach training, but it removes the listener that raised it: what that
    one knows is no longer whole.
    """

    def before(self, call: Call) -> Any:
        """Called before the operation is issued; what it returns comes back in ``issued``."""
        ...

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Called once the backend has the operation; not called when issuing it failed.

        ``pending`` is None where the backend returns nothing to ask: NCCL does so when the
        caller waits at once, and inside a coalesced block.
        """
        ...


def _log(error: Exception) -> None:
    log.error("a listener to collectives failed and was removed", exc_info=error)


def listen(
    listener: Listener, *, on_error: Callable[[Exception], None] = _log, outermost: bool = False
) -> Handle:
    """Tell ``listener`` of every collective of this process, until its handle is removed.

    ``on_error`` is given what the listener raised, after its removal, and must not raise itself. Listeners
    nest: who hears ``before`` first hears ``issued`` last, and an ``outermost`` one is around all others.
    A forked child starts without listeners.
    """
    handle = Handle(listener, on_error)
    _interceptor.add(handle, first=outermost)
    return handle


@contextmanager
def examine(check: Callable[[Call], None]) -> Iterator[None]:
    """Call ``check`` before every collective of this process, on the thread that issues it, in this block.

    What it raises reaches the code that issues the collective, and nothing is sent.
    """
    _interceptor.examine(check)
    try:
        yield
    finally:
        _interceptor.stop_examining(check)


class Handle:
    """One listener's attachment; it lasts until ``remove`` or the end of the ``with`` block."""

    __slots__ = ("_attached", "_listener", "_on_error")

    def __init__(self, listener: Listener, on_error: Callable[[Exception], None]) -> None:
        self._listener, self._on_error = listener, on_error
        self._attached = True

    def remove(self) -> None:
        """Stop listening: in any order, from any thread, also from inside the listener.

        A thread that is inside the listener already finishes there; no other call begins.
        """
        self._attached = False
        _interceptor.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def before(self, call: Call) -> Any:
        return self._tell(self._listener.before, call)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        self._tell(self._listener.issued, call, token, pending)

    def _tell(self, hear: Callable[..., Any], *what: Any) -> Any:
        if not self._attached:
            return None
        try:
            return hear(*what)
        except Exception as error:  # noqa: BLE001  the boundary: training must not see it
            self.remove()
            self._on_error(error)
            return None


def uninstall() -> None:
    """Take the kernels out of the dispatcher, if nobody listens any more.

    Only where no other thread issues a collective meanwhile: see [Note: leaving the dispatcher].
    """
    _interceptor.uninstall()


class _Interceptor:
    """The kernels of this process, and whom they tell."""

    def __init__(self) -> None:
        self.handles: tuple[Handle, ...] = ()
        self.checks: tuple[Callable[[Call], None], ...] = ()
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None

    def add(self, handle: Handle, *, first: bool) -> None:
        with self._lock:
            self._install()
            self.handles = (handle, *self.handles) if first else (*self.handles, handle)

    def examine(self, check: Callable[[Call], None]) -> None:
        with self._lock:
            self._install()
            self.checks = (*self.checks, check)

    def stop_examining(self, check: Callable[[Call], None]) -> None:
        with self._lock:
            self.checks = tuple(other for other in self.checks if other is not check)

    def _install(self) -> None:
        if self._library is None:
            self._library = _register()

    def remove(self, handle: Handle) -> None:
        with self._lock:
            self.handles = tuple(other for other in self.handles if other is not handle)

    def uninstall(self) -> None:
        with self._lock:
            if not self.handles and not self.checks:
                self._library = None  # the only reference: its registrations end with it

    def forget(self) -> None:
        """Start a forked child without listeners: those it inherits speak for its parent."""
        self.handles, self.checks = (), ()
        self._lock = threading.Lock()


class _Thread(threading.local):
    telling = False
    """Whether this thread is inside a listener."""


_interceptor = _Interceptor()
_thread = _Thread()
os.register_at_fork(after_in_child=_interceptor.forget)


def _register() -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    register: Callable[..., None] = library.impl
    for operator in operators():
        register(operator.overload, _kernel(operator), "BackendSelect", with_keyset=True)
    return library


def _kernel(operator: Operator) -> Callable[..., Any]:
    redispatch = operator.overload.redispatch

    def kernel(keys: Any, *arguments: Any) -> Any:
        below, handles = keys.remove(DispatchKey.BackendSelect), _interceptor.handles
        checks = _interceptor.checks
        # While code is traced, fake tensors come by; their collectives are never issued.
        if not (handles or checks) or _thread.telling or keys.has(DispatchKey.Meta):
            return redispatch(below, *arguments)
        call = Call(operator, arguments)
        try:
            for check in checks:
                check(call)
            tokens = _tell_before(handles, call)
            result = redispatch(below, *arguments)
            _tell_issued(handles, call, tokens, result)
        finally:
            call.release()
        return result

    _hide_from_compiler(kernel.__code__)
    return kernel


def _hide_from_compiler(code: CodeType) -> None:
    """Let Dynamo compile neither this code nor what it calls.

    DDP issues collectives while ``torch.compile(ddp)`` runs, and Dynamo would trace the kernels for them.
    """
    # Not torch.compiler.disable: it imports the compiler, which takes seconds.
    compiler: Any = frame_evaluation
    # Private, and seen in PyTorch 2.13 only: without it, tracing costs time and nothing else.
    if hasattr(compiler, "set_code_exec_strategy") and hasattr(compiler, "_FrameExecStrategy"):
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))


def _tell_before(handles: tuple[Handle, ...], call: Call) -> list[Any]:
    _thread.telling = True
    try:
        return [handle.before(call) for handle in handles]
    finally:
        _thread.telling = False


def _tell_issued(handles: tuple[Handle, ...], call: Call, tokens: list[Any], result: Any) -> None:
    boxed = result[-1] if isinstance(result, tuple) else result
    work = None if boxed is None else dist.Work.unbox(boxed)
    pending = None if work is None else Pending(work)
    _thread.telling = True
    try:
        for handle, token in zip(reversed(handles), reversed(tokens), strict=True):
            handle.issued(call, token, pending)
    finally:
        _thread.telling = False
