"""`scout hosts`, and the recipes of docs/recovery.md for Kubernetes, with a stand-in for kubectl.

Which machines are to be left out, and the script for Slurm, are in ``scenarios/test_reports``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.test_policy import SDC, decided
from torchscout.cli.main import app
from torchscout.decision.types import Action, Decision, Failure
from torchscout.run.folder import End, RankEntry
from torchscout.run.restart import RestartPlan
from torchscout.run.writer import RunWriter, record_one
from torchscout.session.ending import add_run

ROOT = Path(__file__).parents[2]


def replacing(*hosts: str) -> Decision:
    return Decision(
        step=3,
        action=Action.REPLACE,
        failure=Failure.SDC,
        ranks=(1,),
        hosts=hosts,
        sentence=f"Replace {hosts[0]}: wrong numbers.",
    )


STOP = Decision(step=3, action=Action.STOP, failure=Failure.SDC, ranks=(), hosts=(), sentence="Stop the job.")


def ask(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["hosts", *map(str, arguments)])
    assert isinstance(done.exception, SystemExit | None), done.exc_info
    return done.exit_code, done.stdout


def test_a_plan_lists_the_excluded_machines_with_reasons(tmp_path: Path):
    plan = RestartPlan().after(replacing("node-3", "node-5")).after(replacing("node-7"))
    plan.write(tmp_path)
    assert ask(tmp_path) == (3, "node-3\nnode-5\nnode-7\n")
    assert ask(tmp_path, "--format", "slurm", "--exclude-file", tmp_path / "out") == (
        3,
        "node-3,node-5,node-7\n",
    )
    assert (tmp_path / "out").read_text() == "node-3,node-5,node-7\n"
    report = json.loads(ask(tmp_path, "--json")[1])
    assert report["excluded"]["node-7"] == "Replace node-7: wrong numbers."


def test_a_run_directory_lists_what_a_dry_run_would_replace(tmp_path: Path):
    replace(RankEntry.own(1, tmp_path / "record", 2), device="GPU-1").write(tmp_path)
    entry = json.loads((tmp_path / "ranks" / "rank-1.json").read_text())
    recorder = RunWriter(tmp_path, 0)
    recorder.record(replacing(entry["host"]))
    recorder.record(decided(SDC))
    recorder.close()
    status, output = ask(tmp_path, "--json")
    report = json.loads(output)
    assert (status, [*report["excluded"]]) == (3, [entry["host"], "node-1"])
    assert (report["used"], report["devices"]) == ([entry["host"]], {"1": "GPU-1"})


def test_machines_that_need_a_preflight_are_not_excluded(tmp_path: Path):
    """Those of the newest decision: the job has run on since the others."""
    check = replace(replacing("node-3", "--all"), action=Action.PREFLIGHT)
    RestartPlan().after(replace(check, hosts=("node-9",))).after(check).write(tmp_path)
    status, output = ask(tmp_path, "--json")
    assert (status, json.loads(output)["excluded"]) == (0, {})
    assert json.loads(output)["preflight"] == {"node-3": check.sentence}


def ran(
    run_dir: Path,
    decision: Decision | None,
    *,
    ends: tuple[str, ...] = ("finished", "finished"),
    hosts: tuple[str, ...] = ("node-3", "node-4"),
    began: float = 60.0,
) -> Path:
    """A run of two ranks with a decision, whose newest session began so many seconds after it."""
    run_dir.mkdir(exist_ok=True)
    if decision is not None:
        record_one(run_dir, 0, decision)
    for rank, (how, host) in enumerate(zip(ends, hosts, strict=False)):
        entry = replace(RankEntry.own(rank, run_dir / "record", 2), host=host)
        entry.write(run_dir)
        if how != "running":
            End(rank, how, 9, entry.record).write(run_dir)  # type: ignore[arg-type]
    at = time.time() + began
    os.utime(run_dir / "ranks", (at, at))
    return run_dir


WRONG, GONE = replacing("node-3"), replace(replacing("node-3"), failure=Failure.MACHINES_GONE)


@pytest.mark.parametrize(
    ("decision", "run", "status"),
    [
        (WRONG, {}, 0),
        (WRONG, {"began": -60.0}, 3),  # it went on with wrong numbers, and finished
        (GONE, {"began": -60.0}, 0),  # the machine came back
        (GONE, {"hosts": ("node-4", "node-5")}, 3),
        (GONE, {"ends": ("finished", "failed")}, 3),
        (GONE, {"ends": ("finished", "running")}, 3),
        (GONE, {"ends": ("finished",)}, 3),  # of the other rank nothing is known
        (STOP, {}, 0),
        (STOP, {"began": -60.0}, 4),
        (STOP, {"ends": ("finished", "interrupted")}, 4),
    ],
)
def test_a_later_success_disproves_a_decision(
    tmp_path: Path, decision: Decision, run: dict[str, Any], status: int
):
    assert ask(ran(tmp_path, decision, **run))[0] == status


def test_runs_of_the_same_checkpoints_count(tmp_path: Path):
    """What one of them would have replaced, and that a later one has finished."""
    first, plan = tmp_path / "first", replacing("node-5", "node-7")
    ran(first, replacing("node-3"), ends=("failed", "failed"), began=-60.0)
    record_one(first, 0, replace(plan, is_carried_out=True))
    add_run(tmp_path, first)
    RestartPlan().after(plan).write(tmp_path)
    status, output = ask(tmp_path, "--json")
    by_plan = dict.fromkeys(plan.hosts, str(RestartPlan.path(tmp_path)))
    assert (status, json.loads(output)["excluded_by"]) == (3, {**by_plan, "node-3": str(first)})
    add_run(tmp_path, ran(tmp_path / "second", None, hosts=("node-3", "node-5")))
    assert ask(tmp_path) == (3, "node-7\n")


def test_a_machine_that_a_plan_excludes_without_a_decision_stays_excluded(tmp_path: Path):
    """A person or an agent has added it; that it was restarted on before says nothing."""
    restart = replace(replacing("node-3"), action=Action.RESTART)
    replace(RestartPlan().after(restart), excluded=("node-3",)).write(tmp_path)
    add_run(tmp_path, ran(tmp_path / "run", restart))
    assert ask(tmp_path) == (3, "node-3\n")


def test_a_run_that_cannot_be_read_is_no_reason_to_use_all_machines(tmp_path: Path):
    (tmp_path / "incidents" / "rank-0.jsonl").mkdir(parents=True)
    assert ask(tmp_path)[0] == 2


def test_without_excluded_machines_the_file_is_empty(tmp_path: Path):
    ran(tmp_path, None)
    assert ask(tmp_path, "--exclude-file", tmp_path / "out") == (0, "\n")
    assert (tmp_path / "out").read_text() == ""


def test_a_folder_of_neither_kind_is_refused(tmp_path: Path):
    """A list without machines would mean that all may be used."""
    ran(tmp_path / "run", replacing("node-3"))
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path, tmp_path / "empty"):
        done = CliRunner().invoke(app, ["hosts", str(folder)], terminal_width=1000)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{folder} is neither" in "".join(done.stderr)


def test_why_a_job_was_stopped_is_said_beside_the_list(tmp_path: Path):
    done = CliRunner().invoke(app, ["hosts", str(ran(tmp_path, STOP, began=-60.0))])
    assert (done.exit_code, done.stdout) == (4, "\n")
    assert STOP.sentence in done.stderr


def test_what_is_no_name_of_a_machine_reaches_no_command(tmp_path: Path):
    plan = RestartPlan().after(replacing("node-3", "--all", "a b", "x;reboot", "y\nz"))
    plan.write(tmp_path)
    assert ask(tmp_path) == (3, "node-3\n")


def recipe(name: str) -> str:
    """The code that docs/recovery.md gives under this name."""
    text = (ROOT / "docs" / "recovery.md").read_text()
    found = re.search(rf"<!-- recipe: {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None, name
    return found[1]


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment whose kubectl writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "kubectl": f'printf "%s\\n" "kubectl $*" >> "{tmp_path}/calls"',
        "scout": f'exec {sys.executable} -m torchscout "$@"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


CORDONED = ["kubectl cordon node-3", "kubectl cordon node-5"]


def test_the_recipe_for_kubernetes_cordons_excluded_machines_only(tmp_path: Path, stand_ins: dict[str, str]):
    (tmp_path / "checkpoints").mkdir()
    add_run(tmp_path / "checkpoints", ran(tmp_path / "run", None))
    command = ["sh", "-c", recipe("kubernetes")]
    subprocess.run(command, cwd=tmp_path, env=stand_ins, check=False, timeout=60)
    assert calls(tmp_path) == [], "nothing was decided"
    RestartPlan().after(replacing("node-3", "node-5")).write(tmp_path / "checkpoints")
    subprocess.run(command, cwd=tmp_path, env=stand_ins, check=False, timeout=60)
    assert calls(tmp_path) == CORDONED


def test_the_recipe_for_a_command_cordons_at_once(tmp_path: Path, stand_ins: dict[str, str]):
    command = [sys.executable, "-c", recipe("cordon.py")]
    for decision in (STOP, replacing("node-3", "node-5")):
        document = json.dumps(decision.to_json())
        subprocess.run(command, input=document, text=True, env=stand_ins, check=True, timeout=60)
    assert calls(tmp_path) == CORDONED
