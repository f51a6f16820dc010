"""Recovery with all permissions leaves a healthy job alone, and one about which nothing is certain."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.ranks.test_standby import own_address
from tests.support.restarts import answers, decisions, run
from tests.support.torchrun_agents import ROOT, installed, running_agents
from torchscout.decision.types import Action, Manifestation
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan

pytestmark = pytest.mark.slow
STEPS = int(os.environ.get("SCOUT_SOAK", "2000"))
SETTINGS = """
[replay]
interval = 10
[recovery]
act = ["restart", "replace"]
"""


def test_nothing_is_done_in_thousands_of_healthy_steps(tmp_path: Path):
    """`scout run` on two machines of two ranks, with a standby, and the script that it does not change."""
    settings, run_dir = tmp_path / "scout.toml", tmp_path / "run"
    settings.write_text(SETTINGS)
    script = [str(ROOT / "tests" / "launch_scripts" / "healthy.py"), str(tmp_path), str(STEPS)]
    scout = [sys.executable, "-m", "torchscout", "run", "--config", str(settings), "--run-dir", str(run_dir)]
    options = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", f"--local-addr={own_address()}"]
    path = installed(tmp_path / "site")
    with running_agents(tmp_path, path, script, *options, prefix=[*scout, "--"]) as agents:
        agents.start("a", hosts_store=True)
        agents.start("b")
        agents.until_said("a", "attached to DistributedDataParallel")
        agents.start("c")
        assert agents.wait(*"abc", seconds=120 + 0.3 * STEPS) == [0] * 3, agents.everything()
        everything = agents.everything()
    assert len([*tmp_path.glob("rank-*")]) == 4, "all ranks trained to the end"
    assert "decision" not in everything
    assert "itself failed" not in everything
    log = IncidentLog.read(run_dir)
    assert (log.incidents, log.decisions) == ([], [])
    assert not RestartPlan.path(run_dir).exists()


def test_a_job_of_which_half_disagrees_goes_back_to_its_verified_state_and_replaces_nobody(tmp_path: Path):
    ended = run(tmp_path, "--fault", "split", "--act", "restart,replace", ranks=4)
    assert ended.returncode == 0, ended.stderr
    found = answers(tmp_path, ranks=4)
    assert {each["life"] for each in found} == {1}
    assert all("verified checkpoint" in each["reason"] for each in found)
    assert len({each["bits"] for each in found}) == 1
    (incident,) = IncidentLog.read(tmp_path / "run-0").incidents
    assert (incident.manifestation, len(incident.ranks)) == (Manifestation.SDC, 4)
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.is_carried_out) == (Action.PREFLIGHT, True)
    assert RestartPlan.read(tmp_path / "kept" / "files").excluded == ()
