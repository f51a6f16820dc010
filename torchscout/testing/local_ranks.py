"""Runs functions on N real ranks of this machine, for the demo, the campaign and tests.

Importing torch takes seconds, so ranks are forked from a server that has imported it once. A rank never
takes the interpreter's exit path: Gloo threads of a live DDP object race with it.

Ranks communicate over Gloo, or over NCCL on the CUDA devices of this machine. More NCCL ranks than devices
need NCCL 2.30 and ``NCCL_MULTI_RANK_GPU_ENABLE=1``.
"""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["LiveRanks", "RankError", "die_with_parent", "preload", "run_ranks", "start_process"]

_AFTER_FAILURE_SECONDS = 5.0
_STACK_SECONDS = 3.0
_EXIT_SECONDS = 1.0
_EXIT = b"exit"
_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch.distributed", "torchscout.testing.local_ranks"]


class RankError(AssertionError):
    """One or more ranks raised, died or hung; the message has the traceback or stack of each."""

    def __init__(self, failures: Mapping[int, str], size: int) -> None:
        text = "\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
        super().__init__(f"{len(failures)} of {size} ranks failed\n{text}")
        self.failures = dict(failures)
        """Descriptions by rank."""

    @property
    def in_short(self) -> str:
        """The last line of each traceback; ranks that died without one come first."""
        last = {rank: text.strip().splitlines()[-1] for rank, text in self.failures.items()}
        order = sorted(last, key=lambda rank: "\n" in self.failures[rank].strip())
        return "; ".join(f"rank {rank}: {last[rank]}" for rank in order)


@dataclass(frozen=True, slots=True)
class _Answer:
    ok: bool
    value: Any
    """What the body returned, or a description of what went wrong."""


@dataclass(frozen=True, slots=True)
class _Work:
    body: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...]
    backend: str = "gloo"
    environment: Mapping[str, str] = field(default_factory=dict)
    is_live: bool = False
    """Whether the body is a generator that answers requests."""


def preload(*modules: str) -> None:
    """Import more modules in the server. Call it before the first ``run_ranks`` of a process."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def start_process(body: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Start a process in which the preloaded modules are imported; ``body`` must be importable."""
    _context.set_forkserver_preload(_preloaded)
    process = _context.Process(target=body, args=args)
    process.start()
    return process


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``body(rank, *args)`` on ``world_size`` ranks and return their results in order.

    ``body`` must be importable (defined at module level). A rank that has not returned after ``timeout``
    seconds, or a few seconds after another one failed, is killed, and its stack is part of the
    ``RankError``. With ``backend="nccl"`` each rank has a current CUDA device. Variables of ``environment``
    are set before a rank uses any device.
    """
    with tempfile.TemporaryDirectory(prefix="scout-ranks-") as name:
        ranks = _start(Path(name), _Work(body, world_size, args, backend, environment or {}))
        try:
            answers = _collect(ranks, timeout)
        finally:
            _end(ranks)
    return _values(answers)


class LiveRanks:
    """Ranks that answer requests until ``close`` or the end of a ``with`` block.

    ``body(rank, requests, *args)`` is a generator that yields an answer to each request, and returns when
    there are no more. After a ``RankError`` the ranks cannot be used any more.
    """

    def __init__(
        self, body: Callable[..., Iterator[Any]], world_size: int, *args: Any, backend: str = "gloo"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scout-ranks-")
        work = _Work(body, world_size, args, backend, is_live=True)
        self._ranks = _start(Path(self._folder.name), work)

    def __enter__(self) -> LiveRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Any, timeout: float = 60.0) -> list[Any]:
        """Send a request, and return the answers of all ranks in order."""
        self.send(request)
        return self.answers(timeout)

    def send(self, request: Any) -> None:
        """Send a request without waiting; ``answers`` returns the answers."""
        message = pickle.dumps(request)
        for rank in self._ranks:
            rank.send(message)

    def have_answered(self, timeout: float) -> bool:
        """Whether all ranks answer or fail within ``timeout`` seconds."""
        waiting: set[Any] = {rank.pipe for rank in self._ranks}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            waiting -= set(wait(list(waiting), left))
        return not waiting

    def answers(self, timeout: float = 60.0) -> list[Any]:
        """The answers of all ranks to the last request, in order."""
        return _values(_collect(self._ranks, timeout))

    def close(self, timeout_seconds: float = _EXIT_SECONDS) -> None:
        """End all ranks; those that have not ended by then are killed. Idempotent."""
        _end(self._ranks, timeout_seconds)
        self._ranks = []
        self._folder.cleanup()


def _start(folder: Path, work: _Work) -> list[_Rank]:
    if work.world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {work.world_size}")
    _context.set_forkserver_preload(_preloaded)
    ranks: list[_Rank] = []
    with ExitStack() as undo:
        undo.callback(_end, ranks)
        for rank in range(work.world_size):
            ranks.append(_Rank.start(rank, folder, work))  # noqa: PERF401  undo must see each one
        undo.pop_all()
    return ranks


def _values(answers: Sequence[_Answer]) -> list[Any]:
    if failures := {rank: answer.value for rank, answer in enumerate(answers) if not answer.ok}:
        raise RankError(failures, len(answers))
    return [answer.value for answer in answers]


@dataclass(frozen=True, slots=True)
class _Rank:
    """The parent's end of one rank."""

    process: ForkServerProcess
    pipe: Connection
    stack: Path

    @classmethod
    def start(cls, rank: int, folder: Path, work: _Work) -> _Rank:
        here, there = _context.Pipe()
        process = _context.Process(target=_rank_main, args=(rank, folder, there, work), daemon=True)
        process.start()
        there.close()
        return cls(process, here, folder / f"stack-{rank}")

    def answer(self) -> _Answer:
        try:
            answer: _Answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_AFTER_FAILURE_SECONDS)
            return _Answer(False, f"exited without an answer, exit code {self.process.exitcode}")
        return answer

    def stack_report(self) -> str:
        """The rank's Python stacks. A stopped process cannot return them."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline, before = time.monotonic() + _STACK_SECONDS, ""
        while time.monotonic() < deadline:
            text = self.stack.read_text() if self.stack.exists() else ""
            if text.endswith("\n") and text == before:  # stacks are written line by line
                return f"did not answer in time; its stack:\n{text}"
            before = text
            time.sleep(0.05)
        return "did not answer in time, and its stack is unknown (stopped, or blocked in the kernel)"

    def send(self, message: bytes) -> None:
        with suppress(OSError):  # a rank that is gone is found when answers are collected
            self.pipe.send_bytes(message)

    def end(self) -> None:
        """Kill the rank and all its children."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _collect(ranks: Sequence[_Rank], timeout: float) -> list[_Answer]:
    """The answer of every rank, or the stack of one that has not answered."""
    answers: dict[int, _Answer] = {}
    waiting: dict[object, int] = {rank.pipe: index for index, rank in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait([ranks[index].pipe for index in waiting.values()], left):
            index = waiting.pop(pipe)
            answers[index] = ranks[index].answer()
            if not answers[index].ok:
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
    for index in waiting.values():
        answers[index] = _Answer(False, ranks[index].stack_report())
    return [answers[index] for index in range(len(ranks))]


def _end(ranks: Sequence[_Rank], timeout_seconds: float = _EXIT_SECONDS) -> None:
    for rank in ranks:
        rank.send(_EXIT)
    deadline = time.monotonic() + timeout_seconds
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.end()


def _rank_main(rank: int, folder: Path, pipe: Connection, work: _Work) -> None:
    """The child process: answers, waits until every rank has answered, and exits."""
    os.setpgid(0, 0)  # so that the parent can kill this rank's children too
    die_with_parent()
    ok = True
    with (folder / f"stack-{rank}").open("w") as stack, suppress(OSError, EOFError):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        requests = _Requests(pipe)
        answers = _answers(rank, folder, work, requests)  # never closed: the body may be in the middle
        for answer in answers:
            ok = _send_answer(pipe, answer)
            if not ok:
                break
        requests.wait_for_exit()  # a rank that exits early looks like a failure to other ranks
    os._exit(0 if ok else 1)


class _Requests:
    """The parent's requests, until it lets the rank exit."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._may_exit = pipe, False

    def __iter__(self) -> Iterator[Any]:
        while (message := self._pipe.recv_bytes()) != _EXIT:
            yield pickle.loads(message)
        self._may_exit = True

    def wait_for_exit(self) -> None:
        if not self._may_exit:
            self._pipe.recv_bytes()


def _send_answer(pipe: Connection, answer: _Answer) -> bool:
    """Send an answer; return whether it is a result and could be pickled."""
    try:
        # By value: torch would send a tensor as a shared-memory handle, which is gone when we exit.
        message = pickle.dumps(answer)
    except Exception:  # noqa: BLE001  pickling a result may raise anything
        answer = _Answer(False, f"its result cannot be pickled\n{traceback.format_exc()}")
        message = pickle.dumps(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    return answer.ok


def _answers(rank: int, folder: Path, work: _Work, requests: Iterable[Any]) -> Iterator[_Answer]:
    try:
        _join(rank, folder, work)
        if work.is_live:
            for value in work.body(rank, iter(requests), *work.args):
                yield _Answer(True, value)
        else:
            yield _Answer(True, work.body(rank, *work.args))
    except BaseException:  # noqa: BLE001  the boundary: whatever ends the body is its answer
        yield _Answer(False, traceback.format_exc())


def _join(rank: int, folder: Path, work: _Work) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= work.environment
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(work.world_size)}
    if work.backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host name may not resolve
    store = dist.FileStore(str(folder / "store"), work.world_size)  # type: ignore[attr-defined]  # no port
    dist.init_process_group(work.backend, rank=rank, world_size=work.world_size, store=store)


def die_with_parent() -> None:
    """Let the kernel kill this process, even if it is blocked, once the one that asked for it is gone.

    A parent that is already gone causes no signal, so this is checked afterwards.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([parent.sentinel], 0):
        os._exit(1)
