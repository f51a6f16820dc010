"""What a session does about incidents: it reports a decision once, writes the plan, and leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_dirs import read_ends
from tests.support.small_job import until
from tests.unit.test_policy import ALL, HANG, SDC, decided
from torchscout.communicators import Job
from torchscout.config import RecoveryConfig
from torchscout.decision.types import Action, Decision, Failure, Incident, from_json
from torchscout.mesh import Mesh
from torchscout.run import restart
from torchscout.run.folder import End, Identity, RankEntry
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan
from torchscout.session import recovery
from torchscout.session.recovery import EXIT_STATUS, Recovery


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "_SECONDS_TO_REPORT", 0.0)


def worker(place: Path, config: RecoveryConfig = ALL, rank: int = 0, **settings: Any) -> Recovery:
    job = Job(
        rank, Mesh.grid(replica=4), ["node-1"] * 4, "token", Identity(str(place / "run")), devices=[*"ABCD"]
    )
    settings = {"plan": RestartPlan(), "folder": place / "plans", "checkpoints": None} | settings
    return Recovery(job, config, **settings)


def left(session: Recovery, found: Incident) -> list[int]:
    """Return the exit statuses with which the worker left."""
    statuses: list[int] = []
    session.exit = statuses.append
    session.handle(found)
    return statuses


def recorded(folder: Path) -> Decision:
    (decision,) = IncidentLog.read(folder / "run").decisions
    return decision


def test_one_rank_reports_and_all_leave_after_the_plan_is_written(tmp_path: Path):
    for rank in range(4):
        assert left(worker(tmp_path, rank=rank), SDC) == [EXIT_STATUS]
    decision = recorded(tmp_path)
    assert (decision.is_carried_out, decision.devices) == (True, ("rank 2: C",))
    (planned,) = RestartPlan.read(tmp_path / "plans").restarts
    assert restart.is_same(planned, decision)
    assert planned.seconds > 0


@pytest.mark.parametrize(
    ("found", "settings", "carried_out"),
    [
        (HANG, {"folder": None}, False),
        (SDC, {"config": RecoveryConfig()}, False),
        (SDC, {"config": RecoveryConfig(act=["restart"])}, True),
    ],
    ids=["nowhere to write a plan", "a dry run", "with less than it calls for"],
)
def test_whether_a_decision_is_carried_out(
    tmp_path: Path, found: Incident, settings: dict[str, Any], carried_out: bool
):
    assert bool(left(worker(tmp_path, **settings), found)) == carried_out
    assert recorded(tmp_path).is_carried_out == carried_out


def test_a_worker_records_that_it_leaves_on_purpose(tmp_path: Path):
    """Its launcher may take its exit status before its observer, which would then report that it failed."""
    session = worker(tmp_path, rank=2)
    session.entry = RankEntry.own(2, tmp_path / "record")
    ended: list[End | None] = []
    session.exit = lambda _: ended.append(read_ends(tmp_path / "run").get(2))
    session.handle(SDC)
    assert ended == [End(2, "interrupted", SDC.step, str(tmp_path / "record"), decided(SDC).sentence)]


def test_a_run_directory_that_cannot_be_written_does_not_keep_a_worker(tmp_path: Path):
    (tmp_path / "run").touch()
    assert left(worker(tmp_path), HANG) == [EXIT_STATUS]
    assert RestartPlan.read(tmp_path / "plans").failure is Failure.HANG


def test_a_stop_that_cannot_be_written_does_not_end_the_worker(tmp_path: Path):
    """Without the plan the launcher would restart the job again and again."""
    (tmp_path / "file").touch()
    stopping = RecoveryConfig(act=ALL.act, max_restarts=1)
    plan = RestartPlan().after(decided(HANG))
    assert left(worker(tmp_path, stopping, plan=plan, folder=tmp_path / "file" / "plans"), HANG) == []
    assert recorded(tmp_path).action is Action.STOP


READ = "import json, sys; json.dump([json.load(sys.stdin), sys.argv[1:]], open('got', 'w'))"


@pytest.mark.parametrize("act", [(), ALL.act])
def test_a_command_reads_the_decision(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    act: tuple[str, ...],
):
    monkeypatch.chdir(tmp_path)
    left(worker(tmp_path, RecoveryConfig(act, on_decision=[sys.executable, "-c", READ, "$(touch x)"])), SDC)
    got = tmp_path / "got"
    until(lambda: got.exists() and got.read_text().endswith("]"), "the command has written", 20.0)
    document, arguments = json.loads(got.read_text())
    assert from_json(document) == recorded(tmp_path)
    run_dir = str(tmp_path / "run")
    assert (document["run_dir"], document["command"]) == (run_dir, f"scout status {run_dir}")
    assert document["launcher"] == worker(tmp_path).job.run.launcher
    assert any(f"more: scout status {run_dir}" in line for line in caplog.messages)
    assert recorded(tmp_path).is_carried_out is bool(act)
    assert arguments == ["$(touch x)"]


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
    config = RecoveryConfig(act=ALL.act, on_decision=command, on_decision_seconds=seconds)
    assert left(worker(tmp_path, config), SDC) == [EXIT_STATUS]
    for each in restart._started:
        each.wait(30)
    assert f"torchscout: on_decision: {command[0]} {problem}" in capfd.readouterr().err
