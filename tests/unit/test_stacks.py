"""A trainer's stacks: requested by a signal, and whether they show a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchscout.observer import stacks

SIGNAL = 46
TORCH = "/env/lib/python3.11/site-packages/torch"

WAITING = [
    ("distributed/distributed_c10d.py", "all_reduce"),
    ("distributed/distributed_c10d.py", "barrier"),
    ("distributed/distributed_c10d.py", "monitored_barrier"),
    ("distributed/distributed_c10d.py", "recv"),
    ("distributed/pipelining/schedules.py", "_wait_batch_p2p"),
    ("nn/parallel/distributed.py", "_distributed_broadcast_coalesced"),
    ("distributed/utils.py", "_sync_params_and_buffers"),
]
WORKING = [
    ("distributed/distributed_c10d.py", "_object_to_tensor"),
    ("serialization.py", "_save"),
    ("utils/data/_utils/fetch.py", "fetch"),
    ("distributed/checkpoint/filesystem.py", "_write_item"),
]
UNKNOWN = [
    ("autograd/graph.py", "_engine_run_backward"),
    ("nn/modules/linear.py", "forward"),
    ("distributed/pipelining/schedules.py", "_step_microbatches"),
]


def thread(*frames: tuple[str, str]) -> str:
    lines = "".join(f'  File "{file}", line 12 in {function}\n' for file, function in frames)
    return f"Thread (most recent call first):\n{lines}"


MINE = ("/home/me/train.py", "main")
BACKWARD = thread((f"{TORCH}/autograd/graph.py", "_engine_run_backward"), MINE)
COMMUNICATING = thread((f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"), MINE)
JOINING = thread(("/usr/lib/python3.11/threading.py", "join"), MINE)


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [(*frame, True) for frame in WAITING]
    + [(*frame, False) for frame in WORKING]
    + [(*frame, None) for frame in UNKNOWN],
)
def test_the_topmost_frame_decides(file: str, function: str, expected: bool | None):
    assert stacks.is_waiting(thread((f"{TORCH}/{file}", function), MINE)) is expected


def test_frames_between_a_wait_and_its_caller_are_ignored():
    dispatcher = (f"{TORCH}/_ops.py", "__call__")
    wait = (f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor")
    ours = ("/env/lib/python3.11/site-packages/torchscout/collectives/interceptor.py", "kernel")
    barrier = (f"{TORCH}/distributed/distributed_c10d.py", "monitored_barrier")
    assert stacks.is_waiting(thread(dispatcher, wait, MINE)) is True
    assert stacks.is_waiting(thread(dispatcher, ours, barrier, MINE)) is True
    assert stacks.is_waiting(thread(dispatcher, MINE)) is None


@pytest.mark.parametrize(
    "frame",
    [
        MINE,
        ("/usr/lib/python3.11/queue.py", "get"),
        ("/usr/lib/python3.11/threading.py", "wait"),
        ("<frozen importlib._bootstrap>", "_load"),
        ("/env/lib/python3.11/site-packages/a.py", "b"),
    ],
)
def test_any_other_code_may_wait_for_a_thread_that_communicates(frame: tuple[str, str]):
    assert stacks.is_waiting(thread(frame, MINE)) is None


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (BACKWARD, True),  # backward hooks run in threads of their own
        (JOINING, None),  # perhaps for that thread
        (thread(MINE), None),
        (thread((f"{TORCH}/serialization.py", "_save"), MINE), None),
    ],
)
def test_other_threads_count_if_the_main_one_may_wait_for_them(main: str, expected: bool | None):
    assert stacks.is_waiting(main + "\n" + COMMUNICATING) is expected


def test_the_main_thread_is_the_first():
    assert stacks.is_waiting(COMMUNICATING + "\n" + JOINING) is True


@pytest.mark.parametrize("text", ["", "\n", "garbage", thread()])
def test_no_stack_says_nothing(text: str):
    assert stacks.is_waiting(text) is None


def test_trimming_keeps_whole_threads_and_the_main_one_first():
    text = "\n".join([BACKWARD, *[COMMUNICATING] * 9])
    trimmed = stacks.trim(text, len(BACKWARD) + 2 * len(COMMUNICATING) + 5)
    assert trimmed.splitlines() == "\n".join([BACKWARD, *[COMMUNICATING] * 2]).splitlines()
    assert stacks.is_waiting(trimmed) == stacks.is_waiting(text)  # the main thread is still known as such
    assert stacks.trim(BACKWARD, 10) == BACKWARD[:10]
    assert stacks.trim("", 10) == ""


TRAINER = """
import ctypes, sys, time
from pathlib import Path
from torchscout.observer import stacks
registration = stacks.register(Path(sys.argv[1]), {signal})
def business():
    print(registration.path, flush=True)
    {business}
business()
"""


@contextmanager
def trainer(folder: Path, business: str, before: str = "") -> Iterator[tuple[int, Path]]:
    """A process that does its business; its pid and its file."""
    code = before + TRAINER.format(signal=SIGNAL, business=business)
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        yield process.pid, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("business", ["time.sleep(60)", "while True: ctypes.PyDLL(None).pause()"])
def test_a_blocked_trainer_gives_its_stack(tmp_path: Path, business: str):
    """Also one that holds the interpreter lock for good."""
    with trainer(tmp_path, business) as (pid, path):
        assert path.stat().st_mode & 0o777 == 0o600
        for _ in range(2):  # only what is new
            stack = stacks.take(pid, path, SIGNAL, 10.0)
            assert stack.startswith("Main thread (most recent call first)"), "no address: stacks are compared"
            assert stack.count(" in business") == 1


THREADS = """
import _thread, threading
from concurrent.futures import ThreadPoolExecutor
from torchscout.utils.listener import Listener
pool = ThreadPoolExecutor(9)
def load():
    threading.Event().wait()
def loaded():
    threading.Thread(target=load, daemon=True).start()
def mine(listener):
    listener.serve()
def started(start):
    ready, listener = threading.Event(), Listener(("127.0.0.1", 0), "")
    listener._turn = lambda turn=listener._turn: (ready.set(), turn())
    start(listener)
    ready.wait()
"""
"""Threads that rest in code of the user, and others that serve in torchscout's."""


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ("", []),
        ("loaded()", [("Thread", "in load")]),
        ("loaded(); loaded(); loaded()", [("3 threads", "in load")]),
        ("started(Listener.start)", [("1 ", "of torchscout")]),
        (
            "started(Listener.start); loaded(); started(Listener.start)",
            [("Thread", "in load"), ("2 ", "of torchscout")],
        ),
        ("started(lambda each: pool.submit(each.serve))", [("1 ", "of torchscout")]),
        # Threads of the program may pass through torchscout, and threads of C++ code may begin in it.
        (
            "started(lambda each: threading.Thread(target=mine, args=(each,)).start())",
            [("Thread", "in mine")],
        ),
        ("started(lambda each: pool.submit(mine, each))", [("Thread", "in mine")]),
        ("started(lambda each: _thread.start_new_thread(each.serve, ()))", [("Thread", "in serve")]),
        (
            "loaded(); started(lambda each: pool.submit(mine, each)); loaded()",
            [("2 threads", "in load"), ("Thread", "in mine")],
        ),
    ],
)
def test_threads_of_the_program_follow_the_main_one_and_others_are_counted(
    tmp_path: Path, starts: str, expected: list[tuple[str, str]]
):
    with trainer(tmp_path, "time.sleep(60)", THREADS + starts) as (pid, path):
        main, *others = until_quiet(pid, path).split("\n\n")
    assert main.startswith("Main thread (most recent call first)")
    assert " in business" in main
    assert len(others) == len(expected), others
    for thread, (start, part) in zip(others, expected, strict=True):
        assert thread.startswith(start)
        assert part in thread


def until_quiet(pid: int, path: Path) -> str:
    """The stacks, once all threads have come to rest."""
    before = ""
    while (stack := stacks.take(pid, path, SIGNAL, 10.0)) != before:
        before = stack
    return stack


def test_among_more_threads_than_a_dump_has_none_is_taken_for_the_main_one(tmp_path: Path):
    with trainer(tmp_path, "time.sleep(60)", THREADS + "for _ in range(120): loaded()") as (pid, path):
        main, others = until_quiet(pid, path).split("\n\n")
    assert " in " not in main
    assert others.startswith("100 threads ")


def test_a_stopped_trainer_gives_none(tmp_path: Path):
    with trainer(tmp_path, "time.sleep(60)") as (pid, path):
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            pass
        assert stacks.take(pid, path, SIGNAL, 10.0) == ""


def test_a_trainer_that_unregistered_is_not_signalled(tmp_path: Path):
    with trainer(tmp_path, "registration.unregister(); time.sleep(60)") as (pid, path):
        while path.exists():
            pass
        assert stacks.take(pid, path, SIGNAL, 10.0) == ""
        os.kill(pid, SIGNAL)  # even a request that was under way does not end it
        time.sleep(0.1)
        assert Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_process_that_never_registered_is_not_sent_the_signal(tmp_path: Path):
    process = subprocess.Popen(["sleep", "60"])
    (tmp_path / "file").touch()
    assert stacks.take(process.pid, tmp_path / "file", SIGNAL, 0.1) == ""
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert stacks.take(process.pid, tmp_path / "file", SIGNAL, 10.0) == ""


def test_a_signal_in_use_is_refused(tmp_path: Path):
    previous = signal.signal(SIGNAL, lambda *_: None)
    try:
        with pytest.raises(ValueError, match="signal 46 is in use here"):
            stacks.register(tmp_path, SIGNAL)
    finally:
        signal.signal(SIGNAL, previous)


def test_two_sessions_of_one_process_both_get_stacks(tmp_path: Path):
    """There is one handler of a signal in a process; it serves both, until the last one takes it back."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (stacks.register(tmp_path / name, SIGNAL) for name in ("one", "two"))
    try:
        for each in (one, two):
            assert "test_two_sessions" in stacks.take(os.getpid(), each.path, SIGNAL, 2.0)
        one.unregister()
        assert [*(tmp_path / "one").iterdir()] == []
        assert "test_two_sessions" in stacks.take(os.getpid(), two.path, SIGNAL, 2.0)
        three = stacks.register(tmp_path / "one", SIGNAL)
        two.unregister()
        assert "test_two_sessions" in stacks.take(os.getpid(), three.path, SIGNAL, 2.0)
        three.unregister()
        three.unregister()
        assert stacks.take(os.getpid(), two.path, SIGNAL, 0.2) == ""
    finally:
        signal.signal(SIGNAL, signal.SIG_DFL)
