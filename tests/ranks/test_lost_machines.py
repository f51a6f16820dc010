"""Jobs on machines without a shared disk, except one: machines are replaced by blank ones, and jobs end with
the same bits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evaluation.jobs.contracts import FAULTY
from evaluation.jobs.script import OTHER
from tests.ranks.test_standby import own_address
from tests.support.restarts import SCRIPT, answers, run
from tests.support.torchrun_agents import Agents, installed, running_agents
from torchscout.decision.types import Action, Decision, Scope
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan

pytestmark = pytest.mark.slow
SECONDS = 200.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a job in which nothing happens."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(folder).returncode == 0
    return str(answers(folder)[0]["bits"])


@contextmanager
def job(
    tmp_path: Path, fault: str, standbys: int, machines: int = 3, *, apart: bool = True
) -> Iterator[tuple[Agents, Path]]:
    """Machines of one rank each, the first of which has the store, and standbys."""
    folder = tmp_path / "job"
    folder.mkdir(parents=True)
    script = [*SCRIPT, str(folder), "--fault", fault, "--act", "restart,replace", *["--apart"] * apart]
    options = [
        f"--nnodes={machines}",
        "--nproc-per-node=1",
        "--max-restarts=5",
        f"--local-addr={own_address()}",
    ]
    with running_agents(folder, installed(tmp_path / "site"), script, *options) as agents:
        for number, name in enumerate("abcd"[:machines]):
            agents.start(name, hosts_store=number == 0)
            time.sleep(1)  # ranks are in the order of process ids
        agents.until_said("a", f"attached to {machines} ranks on {machines} machines")
        for name in "abcdefg"[machines : machines + standbys]:
            agents.start(name)
        yield agents, folder


def decisions(folder: Path) -> list[Decision]:
    return [each for run_dir in sorted(folder.glob("run-*")) for each in IncidentLog.read(run_dir).decisions]


def ended(folder: Path, hosts: str, alone: str) -> list[dict[str, Any]]:
    """Check the final bits and where the job ended; return what each rank says of its resumption."""
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(len(hosts))]
    assert {each["bits"] for each in found} == {alone}
    assert sorted(each["host"] for each in found) == sorted(hosts)
    return found


def test_a_blank_standby_gets_its_shards_from_a_peer(tmp_path: Path, alone: str):
    with job(tmp_path, "corrupt", 1) as (agents, folder):
        assert agents.wait(*"abcd", seconds=SECONDS) == [0] * 4, agents.everything()
        (decision,) = decisions(folder)
        assert (decision.action, decision.ranks, decision.hosts) == (Action.REPLACE, (FAULTY,), ("b",))
        (blank,) = (each for each in ended(folder, "acd", alone) if each["host"] == "d")
        assert blank["resumed"] > 0
        assert blank["source"].startswith("rank "), blank


def test_agents_find_a_shared_directory_without_a_setting(tmp_path: Path, alone: str):
    with job(tmp_path, "corrupt", 1, apart=False) as (agents, folder):
        assert agents.wait(*"abcd", seconds=SECONDS) == [0] * 4, agents.everything()
        (decision,) = decisions(folder)
        assert (decision.action, decision.ranks, decision.hosts) == (Action.REPLACE, (FAULTY,), ("b",))
        assert "this machine, b, is quarantined" in agents.said("b")
        assert "excluded machines" not in agents.everything()
        assert min(each["resumed"] for each in ended(folder, "acd", alone)) > 0
        assert RestartPlan.read(folder / "kept" / "files").excluded == ("b",)


def test_a_lost_machine_is_named_replaced_and_excluded(tmp_path: Path, alone: str):
    """Connections break at once, so that workers usually fail, and are restarted, before anything is decided.
    Their observers decide then."""
    with job(tmp_path, "lost", 1) as (agents, folder):
        assert agents.wait(*"acd", seconds=SECONDS) == [0] * 3, agents.everything()
        assert agents.wait("b") == [-9]
        (incident,) = IncidentLog.read(folder / "run-0").incidents
        assert (incident.scope, incident.ranks, incident.hosts) == (Scope.MACHINE, (FAULTY,), ("b",))
        assert incident.action is Action.REPLACE
        (decision,) = decisions(folder)
        assert (decision.action, decision.hosts, decision.is_carried_out) == (Action.REPLACE, ("b",), True)
        assert decision.sentence in agents.everything()
        assert min(each["resumed"] for each in ended(folder, "acd", alone)) > 0
        plan = RestartPlan.read(folder / "kept-a" / "files")
        assert (plan.excluded, len(plan.restarts)) == (("b",), 1)


def test_two_failures_at_once_are_recovered_from(tmp_path: Path, alone: str):
    with job(tmp_path, "two", 0) as (agents, folder):
        assert agents.wait(*"abc", seconds=SECONDS) == [0] * 3, agents.everything()
        found = decisions(folder)
        assert {each.action for each in found} <= {Action.RESTART, Action.REPLACE}
        assert {rank for each in found for rank in each.ranks} <= {0, FAULTY}
        assert min(each["resumed"] for each in ended(folder, "abc", alone)) > 0


def test_a_rank_that_is_killed_while_the_job_resumes_is_recovered_from_too(tmp_path: Path, alone: str):
    with job(tmp_path, "resuming", 1) as (agents, folder):
        assert agents.wait(*"abcd", seconds=SECONDS) == [0] * 4, agents.everything()
        assert (folder / f"suffered-{OTHER}").exists()
        assert decisions(folder)[0].hosts == ("b",)
        assert all("verified checkpoint" in each["reason"] for each in ended(folder, "acd", alone))


def test_a_second_machine_may_be_lost_as_soon_as_the_job_has_resumed(tmp_path: Path, alone: str):
    with job(tmp_path, "lost_again", 2) as (agents, folder):
        survivors = [name for name in "acde" if agents.started[name].wait(SECONDS) == 0]
        assert len(survivors) == 3, agents.everything()
        assert (folder / f"suffered-{OTHER}").exists()
        (lost,) = {*"acde"} - {*survivors}
        found = decisions(folder)
        assert [(each.action, each.hosts) for each in found] == [
            (Action.REPLACE, ("b",)),
            (Action.REPLACE, (lost,)),
        ]
        ended(folder, "".join(survivors), alone)


def test_two_machines_that_hold_no_copies_for_each_other_may_be_lost_at_once(tmp_path: Path):
    """Four machines keep copies in two pairs, (a, b) and (c, d)."""
    with job(tmp_path / "alone", "none", 0, machines=4) as (agents, folder):
        assert agents.wait(*"abcd", seconds=SECONDS) == [0] * 4, agents.everything()
        alone = str(json.loads((folder / "rank-0.json").read_text())["bits"])
    with job(tmp_path, "two_lost", 2, machines=4) as (agents, folder):
        assert agents.wait(*"adef", seconds=SECONDS) == [0] * 4, agents.everything()
        (decision,) = decisions(folder)
        assert (decision.action, sorted(decision.hosts)) == (Action.REPLACE, ["b", "c"])
        assert min(each["resumed"] for each in ended(folder, "adef", alone)) > 0


def test_a_job_whose_state_is_lost_stops_and_says_so(tmp_path: Path):
    """Of three machines, the second holds the first one's copies, and the third the second one's."""
    with job(tmp_path, "two_lost", 2) as (agents, folder):
        assert agents.wait("a", seconds=SECONDS)[0] != 0
        found = decisions(folder)
        # The only rank that is left cannot tell whether it is cut off, so that nobody is named.
        assert found[-1].action is Action.STOP
        assert Action.REPLACE not in {each.action for each in found}
        assert "shard of rank 1" in found[-1].sentence
        assert RestartPlan.read(folder / "kept-a" / "files").is_stopped
        assert found[-1].sentence in agents.everything()
        assert not [*folder.glob("rank-*.json")], "nothing trains on without the lost state"
