"""SIGTERM in real processes: the handler's work is done, and the process ends as it would have."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.small_job import until

ROOT = Path(__file__).parents[2]
BEGIN = """
import ctypes, os, pathlib, signal, sys, threading, time
from torchscout.session.termination import before_termination
here = pathlib.Path(sys.argv[1])
def act():
    time.sleep(float(sys.argv[2]))
    (here / "done").touch()
"""
BLOCKED = """
mutex = ctypes.create_string_buffer(128)
(here / "ready").touch()
for _ in range(2):  # the second time it waits for itself, and no signal interrupts that
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def started(tmp_path: Path, script: str, seconds: float = 0.3) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + script, str(tmp_path), str(seconds)], env={"PYTHONPATH": str(ROOT)}
    )
    until((tmp_path / "ready").exists, "it has begun", 60)
    return process


def ended(tmp_path: Path, script: str) -> tuple[int, bool]:
    """Start it and send SIGTERM; return how the process has ended, and whether it has acted before."""
    process = started(tmp_path, script)
    process.terminate()
    return process.wait(60), (tmp_path / "done").exists()


def test_files_are_written_though_the_main_thread_is_blocked_in_c(tmp_path: Path):
    assert ended(tmp_path, "before_termination(act)" + BLOCKED) == (-signal.SIGTERM, True)


def test_a_second_sigterm_ends_the_process_at_once(tmp_path: Path):
    process = started(tmp_path, "before_termination(act)" + BLOCKED, seconds=600)
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits"
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert not (tmp_path / "done").exists()


def test_after_undo_sigterm_is_what_it_was(tmp_path: Path):
    assert ended(tmp_path, "before_termination(act)()" + BLOCKED) == (-signal.SIGTERM, False)


def test_a_job_with_a_handler_of_its_own_is_left_alone(tmp_path: Path):
    own = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nbefore_termination(act)\n"
    assert ended(tmp_path, f"{own}(here / 'ready').touch()\ntime.sleep(600)") == (7, False)


def test_a_job_with_a_wakeup_descriptor_of_its_own_is_left_alone(tmp_path: Path):
    own = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
before_termination(act)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == writer, "it is still the job's"
"""
    assert ended(tmp_path, own + BLOCKED) == (-signal.SIGTERM, False)


def test_outside_of_the_main_thread_nothing_is_changed(tmp_path: Path):
    elsewhere = """
undo = []
thread = threading.Thread(target=lambda: undo.append(before_termination(act)))
thread.start()
thread.join()
undo[0]()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    assert ended(tmp_path, elsewhere + BLOCKED) == (-signal.SIGTERM, False)


def test_undo_leaves_a_wakeup_descriptor_that_the_job_has_set_since(tmp_path: Path):
    taken = """
undo = before_termination(act)
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
undo()
undo()
assert signal.set_wakeup_fd(-1) == writer
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
before_termination(act)
"""
    assert ended(tmp_path, taken + BLOCKED) == (-signal.SIGTERM, True), "and it can be set up again"


def test_undo_leaves_a_handler_that_the_job_has_set_since(tmp_path: Path):
    own = "undo = before_termination(act)\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nundo()\n"
    assert ended(tmp_path, f"{own}(here / 'ready').touch()\ntime.sleep(600)") == (7, False)


def test_a_job_that_takes_the_wakeup_descriptor_later_can_still_be_ended(tmp_path: Path):
    taken = """
undo = before_termination(act)
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
(here / "ready").touch()
time.sleep(600)
"""
    assert ended(tmp_path, taken) == (-signal.SIGTERM, True)


@pytest.mark.parametrize("whose", ["child", "parent"])
def test_a_forked_childs_sigterm_is_its_own(tmp_path: Path, whose: str):
    forked = """
before_termination(act)
child = os.fork()
if not child:
    time.sleep(600)
(here / "child").write_text(str(child))
(here / "ready").touch()
if sys.argv[-1] == "child":
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    time.sleep(1)
    sys.exit(os.WTERMSIG(status))
time.sleep(600)
"""
    process = started(tmp_path, forked.replace("sys.argv[-1]", repr(whose)))
    if whose == "parent":
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        subprocess.run(["kill", "-9", (tmp_path / "child").read_text()], check=True)
    else:
        assert process.wait(60) == signal.SIGTERM, "how the child ended"
    assert (tmp_path / "done").exists() == (whose == "parent")
