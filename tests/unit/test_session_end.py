"""How a session says that it has ended: a line in the log, and a marker for `scout status`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_dirs import read_ends
from tests.unit.test_incidents import job
from tests.unit.test_record import INCIDENT
from torchscout.run.folder import End, RankEntry, Unwatched
from torchscout.session.boundary import Boundary
from torchscout.session.ending import closing_line
from torchscout.session.incidents import Incidents
from torchscout.session.session import Parts, Session


def session_of(run_dir: Path, rank: int = 0) -> Session:
    boundary = Boundary(rank)
    session = Session(
        Parts(
            run_dir=run_dir,
            boundary=boundary,
            incidents=Incidents(job(run_dir, rank), [], boundary.failed),
            entry=RankEntry(rank, "host", 1, "record"),
        )
    )
    session.start_from(3)
    return session


def report(session: Session) -> None:
    assert session._incidents is not None
    session._incidents.publish(0, [INCIDENT])


def test_a_session_that_is_closed_has_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "torchscout")
    session = session_of(tmp_path)
    session.close()
    session.close()
    assert read_ends(tmp_path) == {0: End(0, "finished", 3, "record")}
    (line,) = caplog.messages
    assert "finished after step 3" in line


def test_incidents_are_counted_in_the_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    session = session_of(tmp_path)
    report(session)
    session.close()
    assert "1 sdc" in caplog.messages[-1]


def test_the_last_line_of_a_rank_that_was_not_watched_to_the_end_says_so():
    quiet = closing_line("finished", 40, [], None, unwatched=[1])
    assert "no incidents" not in quiet
    assert "not watched for hangs to the end" in quiet
    assert "1 sdc" in closing_line("finished", 40, [INCIDENT], None, unwatched=[1])
    assert "not watched" not in closing_line("finished", 40, [], None)


def test_the_last_line_of_a_rank_that_ends_before_a_diagnosis_says_so():
    line = closing_line("failed", 40, [], None, is_verdict_due=True)
    assert "no incidents" not in line
    assert "a diagnosis is under way" in line


def test_rank_0_does_not_speak_for_ranks_that_were_not_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "torchscout")
    for record, said in (("earlier", False), ("record", True)):
        Unwatched(1, record).write(tmp_path)
        RankEntry(1, "host", 1, "record").write(tmp_path)
        session_of(tmp_path).close()
        assert ("rank 1 was not watched" in caplog.messages[-1]) is said
        assert ("no incidents" in caplog.messages[-1]) is not said


ENDS = [
    (RuntimeError("two\nlines"), "failed", "RuntimeError: two"),
    (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    (SystemExit(143), "interrupted", "143"),
    (SystemExit(1), "failed", "1"),
    (SystemExit(0), "finished", ""),
]


@pytest.mark.parametrize("manner", ["with", "finally"])
def test_what_ends_the_block_is_on_record(tmp_path: Path, manner: str):
    for number, (error, how, why) in enumerate(ENDS):
        session = session_of(tmp_path / str(number))
        with pytest.raises(type(error)):  # noqa: PT012  the block is what is tested
            if manner == "with":
                with session:
                    raise error
            try:
                raise error
            finally:
                session.close()
        end = read_ends(tmp_path / str(number))[0]
        assert end.how == how
        assert why in end.why
        assert bool(end.why) == bool(why)


def test_a_failure_is_logged_by_the_rank_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with pytest.raises(RuntimeError), session_of(tmp_path, rank=2):
        raise RuntimeError("two\nlines")
    (line,) = caplog.messages
    assert "failed after step 3 by RuntimeError: two lines" in line


def test_an_exception_that_was_handled_all_along_is_not_what_ends_the_session(tmp_path: Path):
    try:
        raise ImportError("an optional package")
    except ImportError:
        session_of(tmp_path).close()
    assert read_ends(tmp_path)[0].how == "finished"


def test_a_marker_that_cannot_be_written_is_a_failure_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "ends").write_text("a file is in the way")
    session = session_of(tmp_path)
    session.close()
    assert len(session.failures) == 1
    assert "torchscout itself failed at step 3" in caplog.messages[-1]


def test_a_program_that_ends_by_an_exception_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """What the interpreter does at its end; see below for whole programs."""
    session = session_of(tmp_path)
    report(session)  # or rank 0 would wait for one
    monkeypatch.setattr(sys, "last_value", RuntimeError("the user's own mistake"), raising=False)
    session._at_exit()
    end = read_ends(tmp_path)[0]
    assert (end.how, end.why) == ("failed", "RuntimeError: the user's own mistake")
    assert "the user's own mistake" in caplog.text
    assert "1 sdc" in caplog.text


SCRIPT = """
import sys, time
from pathlib import Path
from tests.unit.test_session_end import session_of
from torchscout.log import show_by_default
show_by_default()
session = session_of(Path(sys.argv[1]))
if sys.argv[2] == "raise":
    raise RuntimeError("the user's own mistake")
if sys.argv[2] == "sleep":
    print(flush=True)
    time.sleep(600)
def slow_exit():
    print(flush=True)
    time.sleep(600)
try:
    if sys.argv[2] == "caught":
        raise RuntimeError("an attempt")
    if sys.argv[2] == "looked up":
        raise KeyError("not in the cache")
except (RuntimeError, KeyError):
    if sys.argv[2] == "caught":
        session.step_finished()
    slow_exit()
if sys.argv[2] == "exits slowly":
    show = sys.excepthook
    sys.excepthook = lambda *error: (show(*error), slow_exit())
    raise RuntimeError("Connection closed by peer")
try:
    raise RuntimeError("Connection closed by peer")
finally:
    slow_exit()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("manner", "how"), [("return", "finished"), ("raise", "failed")])
def test_a_script_that_never_closes_its_session(tmp_path: Path, manner: str, how: str):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), manner]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert read_ends(tmp_path)[0].how == how, done.stderr
    assert "torchscout: " in done.stderr.splitlines()[-1]
    assert "after step 3" in done.stderr.splitlines()[-1]


def test_a_session_that_sigterm_ends_says_so_though_only_its_parent_sees_the_exit_status(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert read_ends(tmp_path) == {0: End(0, "interrupted", 3, "record", "SIGTERM")}
    assert "interrupted after step 3 by SIGTERM" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("manner", "how", "why"),
    [
        ("exits slowly", "failed", "RuntimeError: Connection closed by peer"),
        ("cleans up", "failed", "RuntimeError: Connection closed by peer"),
        ("caught", "interrupted", "SIGTERM"),  # and it has trained since
        ("looked up", "interrupted", "SIGTERM"),
    ],
)
def test_a_session_that_an_exception_ends_says_so_though_sigterm_comes_meanwhile(
    tmp_path: Path, manner: str, how: str, why: str
):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), manner]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    end = read_ends(tmp_path)[0]
    assert (end.how, end.why) == (how, why), errors
    assert f"{how} after step" in errors.splitlines()[-1]
