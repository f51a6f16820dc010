"""`scout hosts`, and the recipes of docs/recovery.md for Kubernetes, with a stand-in for kubectl.

Which machines are to be left out, and the script for Slurm, are in ``scenarios/test_reports``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.test_policy import SDC, decided
from torchscout.cli.main import app
from torchscout.decision.types import Action, Decision, Failure
from torchscout.run.folder import RankEntry
from torchscout.run.restart import RestartPlan
from torchscout.run.writer import RunWriter

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
    RankEntry.own(1, tmp_path / "record", 2, device="GPU-1").write(tmp_path)
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


def test_without_excluded_machines_the_file_is_empty(tmp_path: Path):
    assert ask(tmp_path, "--exclude-file", tmp_path / "out") == (0, "\n")
    assert (tmp_path / "out").read_text() == ""


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
