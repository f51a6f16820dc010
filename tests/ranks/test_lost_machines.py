"""Jobs on machines without a shared disk: machines are replaced by blank ones, and jobs end with the same
bits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_recovery import answers, run
from tests.ranks.test_standby import own_address
from tests.support.recovery_job import CULPRIT
from tests.support.torchrun_agents import Agents, installed, running_agents
from torchscout.decision.record import Action, Decision, Scope
from torchscout.decision.recorder import IncidentLog

pytestmark = pytest.mark.slow
SECONDS = 200.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a job in which nothing happens."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(folder, "none", "").returncode == 0
    return str(answers(folder)[0]["bits"])


@contextmanager
def job(tmp_path: Path, fault: str, standbys: int) -> Iterator[tuple[Agents, Path]]:
    """Three machines of one rank, with the store on another one, and standbys."""
    folder = tmp_path / "job"
    folder.mkdir()
    script = ["-m", "tests.support.recovery_job", str(folder), fault, "restart,replace", "apart"]
    options = ["--nnodes=3", "--nproc-per-node=1", "--max-restarts=5", f"--local-addr={own_address()}"]
    with running_agents(folder, installed(tmp_path / "site"), script, *options) as agents:
        for number, name in enumerate("abc"):
            agents.start(name, hosts_store=number == 0)
            time.sleep(1)  # ranks are in the order of process ids
        agents.until_said("a", "attached to 3 ranks on 3 machines")
        for name in "defg"[:standbys]:
            agents.start(name)
        yield agents, folder


def decisions(folder: Path) -> list[Decision]:
    return [each for run_dir in sorted(folder.glob("run-*")) for each in IncidentLog.read(run_dir).decisions]


def ended(folder: Path, hosts: str, alone: str) -> list[dict[str, Any]]:
    """Check the final bits and where the job ended; return what each rank says of its resumption."""
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]
    assert {each["bits"] for each in found} == {alone}
    assert sorted(each["host"] for each in found) == sorted(hosts)
    return found


def test_a_blank_standby_gets_its_shards_from_a_peer(tmp_path: Path, alone: str):
    with job(tmp_path, "corrupt", 1) as (agents, folder):
        assert agents.wait(*"abcd", seconds=SECONDS) == [0] * 4, agents.everything()
        (decision,) = decisions(folder)
        assert (decision.action, decision.ranks, decision.hosts) == (Action.REPLACE, (CULPRIT,), ("b",))
        (blank,) = (each for each in ended(folder, "acd", alone) if each["host"] == "d")
        assert blank["resumed"] > 0
        assert blank["source"].startswith("rank "), blank


def test_a_lost_machine_is_named_and_replaced(tmp_path: Path, alone: str):
    """Connections break at once, so that workers usually fail before anything is decided."""
    with job(tmp_path, "lost", 1) as (agents, folder):
        assert agents.wait(*"acd", seconds=SECONDS) == [0] * 3, agents.everything()
        assert agents.wait("b") == [-9]
        (incident,) = IncidentLog.read(folder / "run-0").incidents
        assert (incident.scope, incident.ranks, incident.hosts) == (Scope.MACHINE, (CULPRIT,), ("b",))
        assert incident.action is Action.REPLACE
        assert {each.action for each in decisions(folder)} <= {Action.REPLACE}
        assert min(each["resumed"] for each in ended(folder, "acd", alone)) > 0


def test_two_failures_at_once_are_recovered_from(tmp_path: Path, alone: str):
    with job(tmp_path, "two", 0) as (agents, folder):
        assert agents.wait(*"abc", seconds=SECONDS) == [0] * 3, agents.everything()
        found = decisions(folder)
        assert {each.action for each in found} <= {Action.RESTART, Action.REPLACE}
        assert {rank for each in found for rank in each.ranks} <= {0, CULPRIT}
        assert min(each["resumed"] for each in ended(folder, "abc", alone)) > 0


def test_a_rank_that_fails_as_soon_as_the_job_has_resumed_is_recovered_from_too(tmp_path: Path, alone: str):
    """A second machine must not be lost then: until the next copy, each shard is held once."""
    with job(tmp_path, "again", 1) as (agents, folder):
        assert agents.wait(*"abcd", seconds=SECONDS) == [0] * 4, agents.everything()
        assert (folder / f"suffered-{CULPRIT + 1}").exists()
        assert decisions(folder)[0].action is Action.REPLACE
        ended(folder, "acd", alone)
