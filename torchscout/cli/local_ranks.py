"""Run one function on N real Gloo ranks of this machine: for the demo, campaigns and our own tests.

Importing torch costs seconds, so ranks are forked from a server that has done it once. A rank
never takes the interpreter's exit path: Gloo threads of a live DDP object race with it.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["RankError", "preload", "run_ranks"]

_AFTER_FAILURE_SECONDS = 5.0
_STACK_SECONDS = 3.0
_LEAVE_SECONDS = 1.0
_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch.distributed", "torchscout.cli.local_ranks"]


class RankError(AssertionError):
    """One or more ranks raised, died or hung; the message holds each one's traceback or stack."""


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


def preload(*modules: str) -> None:
    """Import more modules in the server; only before the first ``run_ranks`` of a process."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``body(rank, *args)`` on ``world_size`` ranks and return their results in order.

    ``body`` must be importable (defined at module level). A rank that has not answered after
    ``timeout`` seconds, or a few seconds after another one failed, is killed, and where it
    stood is part of the ``RankError``.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    _context.set_forkserver_preload(_preloaded)
    with tempfile.TemporaryDirectory(prefix="scout-ranks-") as name:
        folder = Path(name)
        work = _Work(body, world_size, args)
        ranks = [_Rank.start(rank, folder, work) for rank in range(world_size)]
        try:
            answers = _collect(ranks, timeout)
        finally:
            _end(ranks)
    if failures := [f"rank {rank}: {answer.value}" for rank, answer in enumerate(answers) if not answer.ok]:
        raise RankError(f"{len(failures)} of {world_size} ranks failed\n" + "\n".join(failures))
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

    def leave(self) -> None:
        with suppress(OSError):
            self.pipe.send_bytes(b"leave")

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


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.leave()
    deadline = time.monotonic() + _LEAVE_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.end()


def _rank_main(rank: int, folder: Path, pipe: Connection, work: _Work) -> None:
    """The child's whole life. It answers, waits until every rank has answered, and leaves."""
    os.setpgid(0, 0)  # so that the parent can end whatever this rank started
    _die_with_parent()
    with (folder / f"stack-{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        answer = _run(rank, folder, work)
        try:
            # By value: torch would send a tensor as a shared-memory handle, which dies with us.
            message = pickle.dumps(answer)
        except Exception:  # noqa: BLE001  whatever a result's own pickling raises is the answer
            answer = _Answer(False, f"its result cannot be pickled\n{traceback.format_exc()}")
            message = pickle.dumps(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError, EOFError):
            pipe.send_bytes(message)
            pipe.recv_bytes()  # a rank that leaves early looks like a failure to the others
    os._exit(0 if answer.ok else 1)


def _run(rank: int, folder: Path, work: _Work) -> _Answer:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(work.world_size)}
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name need not resolve
    try:
        store = dist.FileStore(str(folder / "store"), work.world_size)  # type: ignore[attr-defined]  # no port
        dist.init_process_group("gloo", rank=rank, world_size=work.world_size, store=store)
        return _Answer(True, work.body(rank, *work.args))
    except BaseException:  # noqa: BLE001  the boundary: whatever ended the body is the answer
        return _Answer(False, traceback.format_exc())


def _die_with_parent() -> None:
    """Let the kernel end this rank, even a blocked one, once the caller of ``run_ranks`` is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
