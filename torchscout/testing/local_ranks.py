"""Run functions on N real ranks of this machine: for the demo, campaigns and our own tests.

Importing torch costs seconds, so ranks are forked from a server that has done it once. A rank
never takes the interpreter's exit path: Gloo threads of a live DDP object race with it.

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

__all__ = ["LiveRanks", "RankError", "preload", "run_ranks"]

_AFTER_FAILURE_SECONDS = 5.0
_STACK_SECONDS = 3.0
_LEAVE_SECONDS = 1.0
_LEAVE = b"leave"
_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch.distributed", "torchscout.testing.local_ranks"]


class RankError(AssertionError):
    """One or more ranks raised, died or hung; the message holds each one's traceback or stack."""

    def __init__(self, failures: Mapping[int, str], size: int) -> None:
        told = "\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
        super().__init__(f"{len(failures)} of {size} ranks failed\n{told}")
        self.failures = dict(failures)
        """By rank, in words."""

    @property
    def in_short(self) -> str:
        """The end of each one's traceback; whoever died without one comes first."""
        last = {rank: told.strip().splitlines()[-1] for rank, told in self.failures.items()}
        order = sorted(last, key=lambda rank: "\n" in self.failures[rank].strip())
        return "; ".join(f"rank {rank}: {last[rank]}" for rank in order)


@dataclass(frozen=True, slots=True)
class _Answer:
    ok: bool
    value: Any
    """What the body returned, or what went wrong in words."""


@dataclass(frozen=True, slots=True)
class _Work:
    body: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...]
    backend: str = "gloo"
    environment: Mapping[str, str] = field(default_factory=dict)
    is_asked: bool = False
    """Whether the body answers questions, one after another."""


def preload(*modules: str) -> None:
    """Import more modules in the server; only before the first ``run_ranks`` of a process."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``body(rank, *args)`` on ``world_size`` ranks and return their results in order.

    ``body`` must be importable (defined at module level). A rank that has not answered after ``timeout``
    seconds, or a few seconds after another one failed, is killed, and where it stood is part of the
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
    """Ranks that stay and are asked one thing after another, until ``close`` or the end of a ``with`` block.

    ``body(rank, questions, *args)`` is a generator: it takes one question after another and yields an
    answer to each. When there are no more questions it comes to its end. After a ``RankError`` the ranks
    are of no more use.
    """

    def __init__(
        self, body: Callable[..., Iterator[Any]], world_size: int, *args: Any, backend: str = "gloo"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scout-ranks-")
        work = _Work(body, world_size, args, backend, is_asked=True)
        self._ranks = _start(Path(self._folder.name), work)

    def __enter__(self) -> LiveRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Any, timeout: float = 60.0) -> list[Any]:
        """Every rank's answer, in order."""
        self.tell(question)
        return self.answers(timeout)

    def tell(self, question: Any) -> None:
        """Ask, and do something else until there are answers."""
        message = pickle.dumps(question)
        for rank in self._ranks:
            rank.tell(message)

    def have_answered(self, timeout: float) -> bool:
        """Whether all have, or have failed, within that time."""
        waiting: set[Any] = {rank.pipe for rank in self._ranks}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            waiting -= set(wait(list(waiting), left))
        return not waiting

    def answers(self, timeout: float = 60.0) -> list[Any]:
        """What was told, by every rank in order."""
        return _values(_collect(self._ranks, timeout))

    def close(self, timeout_seconds: float = _LEAVE_SECONDS) -> None:
        """End all ranks; those that have not come to their end by then are killed. Idempotent."""
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
            ranks.append(_Rank.start(rank, folder, work))  # noqa: PERF401  those begun so far must end
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
            return _Answer(False, f"left without an answer, exit code {self.process.exitcode}")
        return answer

    def where_it_stands(self) -> str:
        """Ask the rank for its Python stacks; a stopped process has none to give."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline, before = time.monotonic() + _STACK_SECONDS, ""
        while time.monotonic() < deadline:
            text = self.stack.read_text() if self.stack.exists() else ""
            if text.endswith("\n") and text == before:  # it is written line by line
                return f"did not answer in time; its stack:\n{text}"
            before = text
            time.sleep(0.05)
        return "did not answer in time and gave no stack (stopped, or blocked in the kernel)"

    def tell(self, message: bytes) -> None:
        with suppress(OSError):  # whoever is gone has no answer, which is found when it is collected
            self.pipe.send_bytes(message)

    def end(self) -> None:
        """Make sure that neither the rank nor a child of it stays."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _collect(ranks: Sequence[_Rank], timeout: float) -> list[_Answer]:
    """Every rank's answer; where one is missing, its stack."""
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
        answers[index] = _Answer(False, ranks[index].where_it_stands())
    return [answers[index] for index in range(len(ranks))]


def _end(ranks: Sequence[_Rank], timeout_seconds: float = _LEAVE_SECONDS) -> None:
    for rank in ranks:
        rank.tell(_LEAVE)
    deadline = time.monotonic() + timeout_seconds
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.end()


def _rank_main(rank: int, folder: Path, pipe: Connection, work: _Work) -> None:
    """The child's whole life. It answers, waits until every rank has answered, and leaves."""
    os.setpgid(0, 0)  # so that the parent can end whatever this rank started
    _die_with_parent()
    ok = True
    with (folder / f"stack-{rank}").open("w") as stack, suppress(OSError, EOFError):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        questions = _Questions(pipe)
        answers = _answers(
            rank, folder, work, questions
        )  # never closed: it is a body in the middle of its work
        for answer in answers:
            ok = _tell(pipe, answer)
            if not ok:
                break
        questions.wait_to_leave()  # a rank that leaves early looks like a failure to the others
    os._exit(0 if ok else 1)


class _Questions:
    """What the parent asks, until it says that the rank may leave."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._may_leave = pipe, False

    def __iter__(self) -> Iterator[Any]:
        while (message := self._pipe.recv_bytes()) != _LEAVE:
            yield pickle.loads(message)
        self._may_leave = True

    def wait_to_leave(self) -> None:
        if not self._may_leave:
            self._pipe.recv_bytes()


def _tell(pipe: Connection, answer: _Answer) -> bool:
    """Whether it was a good answer, and could be told."""
    try:
        # By value: torch would send a tensor as a shared-memory handle, which dies with us.
        message = pickle.dumps(answer)
    except Exception:  # noqa: BLE001  whatever a result's own pickling raises is the answer
        answer = _Answer(False, f"its result cannot be pickled\n{traceback.format_exc()}")
        message = pickle.dumps(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    return answer.ok


def _answers(rank: int, folder: Path, work: _Work, questions: Iterable[Any]) -> Iterator[_Answer]:
    try:
        _join(rank, folder, work)
        if work.is_asked:
            for value in work.body(rank, iter(questions), *work.args):
                yield _Answer(True, value)
        else:
            yield _Answer(True, work.body(rank, *work.args))
    except BaseException:  # noqa: BLE001  the boundary: whatever ended the body is the answer
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
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name need not resolve
    store = dist.FileStore(str(folder / "store"), work.world_size)  # type: ignore[attr-defined]  # no port
    dist.init_process_group(work.backend, rank=rank, world_size=work.world_size, store=store)


def _die_with_parent() -> None:
    """Let the kernel end this rank, even a blocked one, once the caller of ``run_ranks`` is gone.

    A caller that is gone already sends no signal, so that this is looked up once the kernel is asked.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([parent.sentinel], 0):
        os._exit(1)
