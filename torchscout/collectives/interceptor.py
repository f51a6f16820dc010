"""Intercepts collectives for fingerprints, timing and faults (paper, sections 6.1.2 and 7.1).

Every collective of a process, whether DDP's C++ reducer, FSDP2, DTensor, compiled code or the user issues it,
on any thread, is an operator of the ``c10d`` dispatcher. This module registers a kernel for each of them at
the dispatch key ``BackendSelect``, which calls the listeners and redispatches. No function is replaced.

Replays of CUDA graphs, symmetric memory, fused transports (NVSHMEM, DeepEP) and calls on a ``Backend`` object
call no operator and are not seen. ``issued`` means that the backend has the operation; ``Pending`` knows
whether it is done.

[Note: leaving the dispatcher] The first listener installs the kernels. They stay after the last listener is
gone, and cost about 10 microseconds a collective: PyTorch cannot remove a kernel safely while another thread
is about to call it. A thread that waits for the interpreter lock at the start of the kernel then calls freed
memory, and one that looks the kernel up at the wrong moment raises "fallthrough_kernel was executed". Both
have been seen in training threads. Callers that know that no other thread communicates may call
``uninstall``.
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
    """An issued operation, which may be done.

    It keeps the tensors of the operation alive until ``is_completed`` first returns True, so a caller that
    keeps a ``Pending`` must poll it.
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
        """Wait until it is done, as a synchronous collective does. Idempotent."""
        if self._work is not None:
            self._work.wait()


class Listener(Protocol):
    """Is called for every collective, on the thread that issues it.

    If the backend raises, so that there is no operation, ``refused(token)`` is called instead of ``issued``
    where a listener has that method. Methods may block. Collectives that a listener issues itself are not
    reported. An exception does not reach training, but removes the listener that raised it, because its
    knowledge is then incomplete.
    """

    def before(self, call: Call) -> Any:
        """Called before the operation is issued; the return value is passed to ``issued``."""
        ...

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Called once the backend has the operation.

        ``pending`` is None if the backend returns no work: NCCL does so if the caller waits at once, and
        inside a coalesced block.
        """
        ...


def _log(error: Exception) -> None:
    log.error("a listener to collectives failed and was removed", exc_info=error)


def listen(
    listener: Listener, *, on_error: Callable[[Exception], None] = _log, outermost: bool = False
) -> Handle:
    """Call ``listener`` for every collective of this process until its handle is removed.

    ``on_error`` receives what the listener raised, after its removal, and must not raise. Listeners nest: the
    first one called ``before`` is the last one called with ``issued``, and an ``outermost`` one comes first.
    A forked child starts without listeners.
    """
    handle = Handle(listener, on_error)
    _interceptor.add(handle, first=outermost)
    return handle


@contextmanager
def examine(check: Callable[[Call], None]) -> Iterator[None]:
    """In this block call ``check`` before every collective of this process, on the thread that issues it.

    If it raises, the collective is not issued, and the exception reaches the code that would have issued it.
    """
    _interceptor.examine(check)
    try:
        yield
    finally:
        _interceptor.stop_examining(check)


class Handle:
    """The registration of one listener, until ``remove`` or the end of the ``with`` block."""

    __slots__ = ("_attached", "_listener", "_on_error")

    def __init__(self, listener: Listener, on_error: Callable[[Exception], None]) -> None:
        self._listener, self._on_error = listener, on_error
        self._attached = True

    def remove(self) -> None:
        """Stop listening, in any order, from any thread or from the listener itself.

        A call of the listener that has begun on another thread finishes; no other call begins.
        """
        self._attached = False
        _interceptor.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def before(self, call: Call) -> Any:
        return self._notify(self._listener.before, call)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        self._notify(self._listener.issued, call, token, pending)

    def refused(self, token: Any) -> None:
        if (method := getattr(self._listener, "refused", None)) is not None:
            self._notify(method, token)

    def _notify(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if not self._attached:
            return None
        try:
            return method(*arguments)
        except Exception as error:  # noqa: BLE001  the boundary: training must not see it
            self.remove()
            self._on_error(error)
            return None


def uninstall() -> None:
    """Remove the kernels from the dispatcher if there are no listeners.

    Call it only if no other thread issues a collective meanwhile: see [Note: leaving the dispatcher].
    """
    _interceptor.uninstall()


class _Interceptor:
    """The kernels of this process and their listeners."""

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
                self._library = None  # the only reference, which ends its registrations

    def forget(self) -> None:
        """Remove all listeners in a forked child: they belong to its parent."""
        self.handles, self.checks = (), ()
        self._lock = threading.Lock()


class _Thread(threading.local):
    in_listener = False


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
        # Tracing calls this with fake tensors; their collectives are never issued.
        if not (handles or checks) or _thread.in_listener or keys.has(DispatchKey.Meta):
            return redispatch(below, *arguments)
        call = Call(operator, arguments)
        try:
            for check in checks:
                check(call)
            tokens = _notify_before(handles, call)
            result, is_issued = None, False
            try:
                result = redispatch(below, *arguments)
                is_issued = True
            finally:
                _notify_after(handles, call, tokens, result, is_issued=is_issued)
        finally:
            call.release()
        return result

    _hide_from_compiler(kernel.__code__)
    return kernel


def _hide_from_compiler(code: CodeType) -> None:
    """Keep Dynamo from compiling this code and what it calls.

    DDP issues collectives while ``torch.compile(ddp)`` runs, and Dynamo would trace the kernels for them.
    """
    # Not torch.compiler.disable: it imports the compiler, which takes seconds.
    compiler = frame_evaluation
    # PyTorch 2.13 has these names; without them, tracing only costs time.
    if hasattr(compiler, "set_code_exec_strategy") and hasattr(compiler, "_FrameExecStrategy"):
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))


def _notify_before(handles: tuple[Handle, ...], call: Call) -> list[Any]:
    _thread.in_listener = True
    try:
        return [handle.before(call) for handle in handles]
    finally:
        _thread.in_listener = False


def _notify_after(
    handles: tuple[Handle, ...], call: Call, tokens: list[Any], result: Any, *, is_issued: bool
) -> None:
    boxed = result[-1] if isinstance(result, tuple) else result
    work = None if boxed is None else dist.Work.unbox(boxed)
    pending = None if work is None else Pending(work)
    _thread.in_listener = True
    try:
        for handle, token in zip(reversed(handles), reversed(tokens), strict=True):
            if is_issued:
                handle.issued(call, token, pending)
            else:
                handle.refused(token)
    finally:
        _thread.in_listener = False
