"""Real observers beside real, torch-free trainers: what they find, and that nothing stops the trainers."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torchscout
from tests.support.http_server import http_server
from tests.support.small_job import QUICK, SmallJob, small_job, until
from torchscout.decision.progress import Phase
from torchscout.decision.types import Incident, Resolved
from torchscout.errors import ObserverError
from torchscout.mesh import Mesh
from torchscout.observer import handle as observers
from torchscout.observer.handle import ObserverHandle, launch
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.spec import ObserverSpec, describe_mesh
from torchscout.report.document import examined
from torchscout.run.folder import Identity, RankEntry, read_heartbeat
from torchscout.run.notify import Webhook
from torchscout.utils.network import new_token
from torchscout.utils.procfs import is_running

LONG = 600.0


def incident_of(job: SmallJob) -> Incident:
    return until(job.lines, "an incident is written")[0]


def goes_on(job: SmallJob) -> None:
    before = min(job.steps)
    until(lambda: min(job.steps) > before + 20, "training goes on")


@pytest.mark.long
def test_a_healthy_job_is_silent_and_a_late_rank_is_named_until_it_moves(tmp_path: Path):
    with small_job(3, tmp_path, min_silence_seconds=30.0, grace_seconds=120.0) as job:
        goes_on(job)
        statuses = [job.ask(rank, do="status") for rank in range(3)]
        assert [status["messages"] for status in statuses] == [0, 0, 0]
        assert [status["connected"] for status in statuses] == [[True, True]] * 3
        assert statuses[0]["threshold_seconds"] == 30.0
        for rank in range(3):
            job.order(rank, do="change", min_silence_seconds=0.6)
        until(lambda: job.ask(0, do="status")["threshold_seconds"] == 0.6, "the new threshold holds")
        job.order(1, do="sleep", seconds=3.0)
        incident = incident_of(job)
        assert incident.ranks == (1,)
        stacks = {
            record.progress["rank"]: record.progress["stack"]
            for record in incident.records
            if record.progress
        }
        assert sorted(stacks) == [0, 1, 2]
        assert "in _do_sleep" in stacks[1]
        assert "in _hear" in stacks[2]
        resolved = until(lambda: job.lines()[1:], "it is resolved")[0]
        assert isinstance(resolved, Resolved)
        assert (resolved.ranks, resolved.sentence) == ((1,), incident.sentence)
        assert resolved.stalled_seconds >= 3.0
        for rank in range(3):
            job.order(rank, do="finish")
        until(lambda: not any(map(is_running, job.observers)), "the observers leave")
        assert [trainer.wait() for trainer in job.trainers] == [0, 0, 0]
        assert len(job.lines()) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "ends",
            "heartbeat.json",
            "incidents",
            "observers",
        ]
        assert list((tmp_path / "observers").iterdir()) == []


@pytest.mark.long
def test_a_hang_is_posted_and_once_more_when_it_is_resolved(tmp_path: Path):
    with (
        http_server(lambda number: 503 if number < 3 else 200) as received,
        small_job(3, tmp_path, webhook=Webhook(received.url)) as job,
    ):
        job.order(1, do="sleep", seconds=4.0)
        until(lambda: len(job.lines()) == 2, "it is resolved")
        until(lambda: len(received.bodies) == 4, "both are posted")
        incident, end = job.lines()
    *_, posted, resolved = map(json.loads, received.bodies)
    assert (posted["id"], posted["state"], posted["ranks"]) == (incident.id, "open", [1])
    assert (resolved["id"], resolved["state"], end.incident) == (incident.id, "resolved", incident.id)


@pytest.mark.long
def test_observers_outlive_whoever_ends_the_whole_job(tmp_path: Path):
    """A launcher sends a signal to all processes of the job when one has died."""
    with small_job(3, tmp_path, min_silence_seconds=60.0) as job:
        job.trainers[1].kill()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for observer in job.observers:
                os.kill(observer, number)
        assert incident_of(job).ranks == (1,)
        for other in (0, 2):
            job.trainers[other].kill()
        until(lambda: not any(map(is_running, job.observers)), "the observers leave by themselves")


@pytest.mark.long
def test_a_killed_trainer_is_named_though_nobody_is_silent(tmp_path: Path):
    with small_job(3, tmp_path, min_silence_seconds=60.0) as job:
        job.trainers[1].kill()
        assert incident_of(job).ranks == (1,)
        for other in (0, 2):
            job.trainers[other].kill()
        until(lambda: not any(map(is_running, job.observers)), "the observers leave")
        assert len(job.lines()) == 1, "whoever ended later was taken along"


@pytest.mark.long
def test_with_the_hub_stopped_training_goes_on_and_the_standby_concludes(tmp_path: Path):
    with small_job(3, tmp_path) as job:
        os.kill(job.observers[0], signal.SIGSTOP)
        goes_on(job)
        job.order(1, do="sleep", seconds=15.0)  # a busy machine takes a while to find that the hub is stopped
        assert incident_of(job).ranks == (1,)
        os.kill(job.observers[0], signal.SIGCONT)
        until(lambda: len(job.lines()) > 1, "it is resolved")
        goes_on(job)
        assert {line.ranks for line in job.lines()} == {(1,)}
        assert [type(line) for line in job.lines()].count(Incident) == 1


@pytest.mark.slow
def test_a_trainer_that_holds_the_interpreter_lock_is_named_with_its_stack(tmp_path: Path):
    with small_job(3, tmp_path) as job:
        job.order(1, do="hold the lock", seconds=20.0)
        incident = incident_of(job)
        assert incident.ranks == (1,)
        assert "in _do_hold_the_lock" in incident.records[0].progress["stack"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pause", "checkpoint"])
def test_a_paused_rank_is_not_blamed(tmp_path: Path, what: str):
    with small_job(3, tmp_path) as job:
        job.order(1, do=what, seconds=4.0)
        until(lambda: job.steps[0] == job.steps[1] + 1, "the others wait")
        goes_on(job)
        assert job.ask(0, do="status")["rounds"] > 0
        assert job.lines() == []


@pytest.mark.slow
def test_a_job_that_is_asked_to_end_is_no_incident(tmp_path: Path):
    with small_job(3, tmp_path) as job:
        for trainer in job.trainers:
            trainer.terminate()
        until(lambda: not any(map(is_running, job.observers)), "the observers leave")
        assert job.lines() == []


@pytest.mark.slow
def test_two_jobs_on_one_machine_do_not_interfere(tmp_path: Path):
    with small_job(2, tmp_path / "one") as one, small_job(2, tmp_path / "two") as two:
        one.order(1, do="sleep", seconds=LONG)
        assert incident_of(one).ranks == (1,)
        goes_on(two)
        assert two.lines() == []
        assert two.ask(0, do="status")["messages"] == 0


def test_an_observer_needs_neither_torch_nor_numpy():
    code = "import torchscout.observer.process, sys; print({'torch', 'numpy'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "set()"


@pytest.mark.parametrize("configured", [True, False])
def test_observers_that_are_released_right_after_their_start_end_at_once(tmp_path: Path, configured: bool):
    writers = [ProgressWriter.create(tmp_path / "progress", rank) for rank in range(3)]
    duties = ObserverSpec(
        rank=0,
        size=3,
        record="",
        run=Identity(str(tmp_path / "run")),
        token=new_token(),
        config=replace(QUICK, grace_seconds=LONG),
        mesh=describe_mesh(Mesh.grid(replica=3)),
    )
    observers = [
        launch(replace(duties, rank=rank, record=str(writer.path), hub={0: 0, 2: 1}.get(rank)))
        for rank, writer in enumerate(writers)
    ]
    try:
        for observer in observers:
            if configured:
                observer.configure([("127.0.0.1", observers[rank].port) for rank in (0, 2)])
        for observer in observers:
            observer.close(timeout=0.01)  # nobody gets the time to connect
        until(lambda: not any(observer.is_running for observer in observers), "the hubs leave, too")
    finally:
        for observer, writer in zip(observers, writers, strict=True):
            if observer.is_running:
                os.kill(observer.pid, signal.SIGKILL)
            writer.close()


@pytest.fixture
def assignment(tmp_path: Path) -> Iterator[ObserverSpec]:
    """For an observer of this very process."""
    writer = ProgressWriter.create(tmp_path / "progress", 0)
    writer.advance(Phase.FORWARD)
    yield ObserverSpec(
        rank=0,
        size=1,
        record=str(writer.path),
        run=Identity(str(tmp_path / "run")),
        token=new_token(),
        config=QUICK,
        hub=0,
        mesh=describe_mesh(Mesh.grid()),
    )
    writer.close()


@pytest.fixture
def observer(assignment: ObserverSpec) -> Iterator[ObserverHandle]:
    observer = launch(assignment)
    yield observer
    if observer.is_running:
        os.kill(observer.pid, signal.SIGKILL)
    observer.close()


def test_settings_are_changed_where_they_are_valid(observer: ObserverHandle):
    observer.configure([("127.0.0.1", observer.port)])
    observer.change(startup_seconds=42.0)
    assert observer.config.startup_seconds == 42.0
    status = observer.status(timeout=20)
    assert (status["threshold_seconds"], status["config"]["startup_seconds"]) == (42.0, 42.0)
    with pytest.raises(ValueError, match="silence_multiple must be at least 1, got 0"):
        observer.change(silence_multiple=0)
    assert observer.status(timeout=20)["config"]["silence_multiple"] == QUICK.silence_multiple


def test_a_rank_elsewhere_runs_as_long_as_rank_0_is_heard_of(
    observer: ObserverHandle, assignment: ObserverSpec
):
    run_dir = assignment.run_dir
    own = RankEntry.own(0, Path(assignment.record), 2)
    for entry in (own, replace(own, rank=1, host="another", hostname="another")):
        entry.write(run_dir)
    until(lambda: read_heartbeat(run_dir), "the observer has written one")
    assert [each["state"] for each in examined(run_dir)["ranks"]] == ["running", "running"]
    assert examined(run_dir)["exit_status"] == 0
    os.kill(observer.pid, signal.SIGKILL)
    until(lambda: not observer.is_running, "it writes no more")
    os.utime(run_dir / "heartbeat.json", (1e9, 1e9))
    report = examined(run_dir)
    assert [each["state"] for each in report["ranks"]] == ["running", "unknown"]
    assert report["exit_status"] == 2
    assert "rank 1 since 2001-09-09" in report["sentence"]


def test_an_observer_is_in_a_session_of_its_own(observer: ObserverHandle):
    assert os.getsid(observer.pid) == observer.pid != os.getsid(0)


def test_an_observer_ends_on_request(observer: ObserverHandle):
    observer.configure([("127.0.0.1", observer.port)])
    observer.close(timeout=20)
    assert not observer.is_running
    observer.close()


def test_a_stopped_observer_does_not_hold_its_trainer_up(observer: ObserverHandle):
    os.kill(observer.pid, signal.SIGSTOP)
    with pytest.raises(ObserverError, match="the observer of rank 0 does not answer"):
        observer.status(timeout=0.1)
    with pytest.raises(ObserverError, match="does not read its input"):
        fill_its_pipe(observer)


def fill_its_pipe(observer: ObserverHandle) -> None:
    while True:
        observer.change(timeout=0.01, min_silence_seconds=5.0)


def test_a_killed_observer_is_an_error_to_whoever_asks(observer: ObserverHandle):
    os.kill(observer.pid, signal.SIGKILL)
    until(lambda: not observer.is_running, "it is gone")
    with pytest.raises(ObserverError, match="the observer of rank 0 is gone"):
        observer.status()


def test_a_failure_to_start_says_why(assignment: ObserverSpec):
    with pytest.raises(ObserverError, match=r"(?s)is gone; its log ends: .*No such file or directory"):
        launch(replace(assignment, record="/nowhere/progress"))


def test_a_rank_with_thousands_of_open_files_has_an_observer_too(assignment: ObserverSpec):
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        observer = launch(assignment)
        assert observer.status()["messages"] == 0
        observer.close()
    finally:
        for each in files:
            os.close(each)


def test_a_start_is_limited_in_time(assignment: ObserverSpec):
    began = time.monotonic()
    with pytest.raises(ObserverError, match="does not answer"):
        launch(assignment, timeout=0.0)
    assert time.monotonic() - began < 20, "it did not wait for the observer"


def test_a_module_beside_ours_that_has_a_name_of_the_standard_library_is_not_imported(
    assignment: ObserverSpec, tmp_path: Path
):
    """As old backports leave them in site-packages."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "torchscout").symlink_to(Path(torchscout.__file__).parent)
    for name in ("enum", "json", "selectors", "dataclasses"):
        (site / f"{name}.py").write_text("raise ImportError('this is no module of the standard library')")
    observer = launch(assignment, home=site)
    assert observer.status(timeout=20)["messages"] == 0
    observer.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(observer: ObserverHandle):
    os.kill(observer.pid, signal.SIGSTOP)
    with pytest.raises(ObserverError, match="does not answer"):
        observer.status(timeout=0.1)
    observer.change(startup_seconds=42.0)
    os.kill(observer.pid, signal.SIGCONT)
    assert observer.status(timeout=20)["config"]["startup_seconds"] == 42.0


@pytest.mark.long
def test_a_trainer_that_exits_silently_is_named_and_its_victims_are_not(tmp_path: Path):
    """``os._exit(0)`` on one rank; the others fail soon after, as they do when a connection is lost."""
    with small_job(3, tmp_path, min_silence_seconds=60.0) as job:
        job.order(1, do="exit", status=0, suddenly=True)
        until(lambda: not is_running(job.trainers[1].pid), "it has left")
        time.sleep(0.5)
        job.trainers[0].kill()
        incident = incident_of(job)
        assert incident.ranks == (1,), incident.sentence


@pytest.mark.long
def test_trainers_that_all_exit_silently_are_no_incident(tmp_path: Path):
    with small_job(3, tmp_path, min_silence_seconds=60.0) as job:
        for rank in range(3):
            job.order(rank, do="exit", status=0, suddenly=True)
        until(lambda: not any(map(is_running, job.observers)), "the observers leave")
        assert job.lines() == []


@pytest.mark.slow_cases("0")
@pytest.mark.long_cases("1")
@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_shows_how_an_interpreter_ended(tmp_path: Path, status: int):
    with small_job(3, tmp_path, min_silence_seconds=60.0) as job:
        job.order(1, do="exit", status=status)
        if status:
            assert incident_of(job).ranks == (1,)
            return
        until(lambda: not is_running(job.trainers[1].pid), "it has ended")
        time.sleep(1.0)
        assert job.lines() == []


def test_an_observer_that_dies_is_started_again_where_it_was_and_not_for_ever(
    assignment: ObserverSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(observers, "_RESTART_SECONDS", 0.05)
    observer = launch(assignment)
    port = observer.port
    observer.configure([("127.0.0.1", port)])
    lost: list[ObserverError] = []
    observer.keep_alive(lost.append)
    try:
        for times in (1, 2, 3):
            os.kill(observer.pid, signal.SIGKILL)
            until(lambda times=times: observer.restarts == times and observer.is_running, "it is back")
            assert observer.status(timeout=20)["config"]["min_silence_seconds"] == QUICK.min_silence_seconds
            assert observer.port == port
            until(lambda: observer.status(timeout=20)["connected"] == [True], "it reaches its hub")
        assert (lost, observer.is_lost) == ([], False)
        os.kill(observer.pid, signal.SIGKILL)
        until(lambda: observer.is_lost, "it is not started again")
        assert not observer.is_running
        assert str(lost[0]).endswith("not watched for hangs any more"), (
            "and nothing of its log, which is empty"
        )
        with pytest.raises(ObserverError, match="is gone"):
            observer.status()
    finally:
        observer.close()


def test_nobody_waits_for_an_observer_that_is_being_started_again(
    observer: ObserverHandle, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on, start = threading.Event(), threading.Event(), observers._start_process

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return start(*arguments)

    monkeypatch.setattr(observers, "_RESTART_SECONDS", 0.0)
    monkeypatch.setattr(observers, "_start_process", slowly)
    observer.keep_alive()
    observer._process.kill()
    assert begun.wait(60)
    try:
        for ask in (lambda: observer.change(timeout=0.1, min_silence_seconds=9.0), observer.status):
            with pytest.raises(ObserverError, match="is being restarted"):
                ask()
        assert observer.config.min_silence_seconds != 9.0
    finally:
        go_on.set()
    assert observer.status(timeout=60)["config"]["min_silence_seconds"] == QUICK.min_silence_seconds


def test_a_released_observer_is_not_started_again(assignment: ObserverSpec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observers, "_RESTART_SECONDS", 0.05)
    observer = launch(assignment)
    observer.configure([("127.0.0.1", observer.port)])
    observer.keep_alive()
    observer.close(timeout=20)
    time.sleep(0.5)
    assert (observer.is_running, observer.restarts) == (False, 0)


@pytest.mark.slow
def test_with_hub_and_standby_killed_both_come_back_and_a_hang_is_found(tmp_path: Path):
    with small_job(3, tmp_path, min_silence_seconds=2.0) as job:
        for rank in range(3):
            job.order(rank, do="keep")
        goes_on(job)
        for rank in (0, 2):
            os.kill(job.observers[rank], signal.SIGKILL)
        until(
            lambda: all(job.ask(rank, do="status")["connected"] == [True, True] for rank in range(3)),
            "all reach both hubs again",
        )
        job.order(1, do="sleep", seconds=LONG)
        assert incident_of(job).ranks == (1,)


def test_an_observer_that_cannot_be_started_again_for_want_of_descriptors_is_gone(
    assignment: ObserverSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(observers, "_RESTART_SECONDS", 0.05)
    observer = launch(assignment)
    observer.configure([("127.0.0.1", observer.port)])
    observer.keep_alive()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(observer.pid, signal.SIGKILL)
        until(lambda: observer.restarts == 3, "it was tried")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(ObserverError, match="is gone"):
        observer.status()
    with pytest.raises(ObserverError, match="is gone"):
        observer.change(min_silence_seconds=5.0)
    observer.close()


def test_an_observer_ends_well_without_its_run_folder(assignment: ObserverSpec):
    observer = launch(assignment)
    observer.configure([("127.0.0.1", observer.port)])
    shutil.rmtree(assignment.run_dir)
    observer.close(timeout=20)
    assert observer._process.returncode == 0
