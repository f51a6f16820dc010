"""What a session does about incidents: it reports a decision once, writes the plan, and leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.small_job import until
from tests.unit.test_policy import HANG, SDC, decided
from torchscout.communicators import Job
from torchscout.config import RecoveryConfig
from torchscout.decision.records.recorder import IncidentLog
from torchscout.decision.recovery import command as decision_command
from torchscout.decision.recovery.restart_plan import RestartPlan
from torchscout.decision.types import Action, Failure, Incident, from_json
from torchscout.mesh import Mesh
from torchscout.observer.record.directory import End, RankEntry, read_end
from torchscout.session import recovery
from torchscout.session.recovery import EXIT_STATUS, Recovery

ACT = RecoveryConfig(act=("restart", "replace"))


def handled(
    folder: Path, found: Incident, config: RecoveryConfig, rank: int = 0, plan_folder: Path | None = None
) -> list[int]:
    """Return the exit statuses with which the worker left."""
    left: list[int] = []
    job = Job(rank, Mesh.grid(replica=4), ["node-1"] * 4, "token", folder / "run")
    session = Recovery(job, config, RestartPlan.first(), plan_folder, None, exit=left.append)
    session.handle(found)
    return left


def test_a_worker_leaves_after_the_plan_is_written(tmp_path: Path):
    assert handled(tmp_path, SDC, ACT, plan_folder=tmp_path / "plans") == [EXIT_STATUS]
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert decision.is_carried_out
    assert RestartPlan.read(tmp_path / "plans").restarts == (decision,)


def test_without_a_folder_for_the_plan_the_decision_is_only_recorded(tmp_path: Path):
    assert handled(tmp_path, HANG, ACT) == []
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert not decision.is_carried_out


def test_one_rank_reports_and_all_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "_SECONDS_TO_REPORT", 0.0)
    for rank in range(4):
        assert handled(tmp_path, HANG, ACT, rank, tmp_path / "plans") == [EXIT_STATUS]
    assert len(IncidentLog.read(tmp_path / "run").decisions) == 1


def test_a_worker_records_that_it_leaves_on_purpose(tmp_path: Path):
    """Its launcher may take its exit status before its observer, which would then report that it failed."""
    ended: list[End | None] = []
    job = Job(2, Mesh.grid(replica=4), ["node-1"] * 4, "token", tmp_path / "run")
    session = Recovery(job, ACT, RestartPlan.first(), tmp_path / "plans", None)
    session.entry = RankEntry.own(2, tmp_path / "record")
    session.exit = lambda _: ended.append(read_end(job.run_dir, 2))
    session.handle(SDC)
    sentence = decided(SDC).sentence
    assert ended == [End(2, "interrupted", SDC.step, str(tmp_path / "record"), sentence)]


def test_a_run_directory_that_cannot_be_written_does_not_keep_a_worker(tmp_path: Path):
    (tmp_path / "run").touch()
    assert handled(tmp_path, HANG, ACT, plan_folder=tmp_path / "plans") == [EXIT_STATUS]
    assert RestartPlan.read(tmp_path / "plans").failure is Failure.HANG


def test_a_stop_that_cannot_be_written_does_not_end_the_worker(tmp_path: Path):
    """Without the plan the launcher would restart the job again and again."""
    (tmp_path / "file").touch()
    stopping = RecoveryConfig(act=("restart", "replace"), max_restarts=1)
    left: list[int] = []
    job = Job(0, Mesh.grid(replica=4), ["node-1"] * 4, "token", tmp_path / "run")
    plan = RestartPlan.first().after(decided(HANG))
    session = Recovery(job, stopping, plan, tmp_path / "file" / "plans", None, exit=left.append)
    session.handle(HANG)
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert decision.action is Action.STOP
    assert left == []


READ = "import json, sys; json.dump([json.load(sys.stdin), sys.argv[1:]], open('got', 'w'))"


def wait_for(path: Path) -> str:
    until(lambda: path.exists() and path.read_text().endswith("]"), f"{path} is written", 20.0)
    return path.read_text()


@pytest.mark.parametrize("act", [(), ("restart", "replace")])
def test_a_command_reads_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: tuple[str, ...]):
    monkeypatch.chdir(tmp_path)
    config = RecoveryConfig(act=act, on_decision=[sys.executable, "-c", READ, "$(touch shell)", ";"])
    handled(tmp_path, SDC, config, plan_folder=tmp_path / "plans")
    document, arguments = json.loads(wait_for(tmp_path / "got"))
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert from_json(document) == decision
    assert decision.is_carried_out is bool(act)
    assert arguments == ["$(touch shell)", ";"]
    assert not (tmp_path / "shell").exists()


@pytest.mark.parametrize(
    ("command", "seconds", "problem"),
    [
        (["/nonexistent/command"], 30.0, "could not be started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], 30.0, "ended with status 3"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], 0.5, "was ended after 0.5 s"),
    ],
)
def test_a_command_that_fails_or_hangs_changes_nothing(
    tmp_path: Path, command: list[str], seconds: float, problem: str, capfd: pytest.CaptureFixture[str]
):
    config = RecoveryConfig(act=("restart", "replace"), on_decision=command, on_decision_seconds=seconds)
    assert handled(tmp_path, SDC, config, plan_folder=tmp_path / "plans") == [EXIT_STATUS]
    for each in decision_command._started:
        each.wait(30)
    assert f"torchscout: on_decision: {command[0]} {problem}" in capfd.readouterr().err


def test_the_named_devices_are_recorded(tmp_path: Path):
    job = Job(0, Mesh.grid(replica=4), ["node-1"] * 4, "token", tmp_path, devices=["A", "B", "C", "D"])
    Recovery(job, RecoveryConfig(), RestartPlan.first(), None, None).handle(SDC)
    (decision,) = IncidentLog.read(tmp_path).decisions
    assert decision.devices == ("rank 2: C",)
