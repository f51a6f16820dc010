"""``torchrun --rdzv-backend=scout``: quarantined machines stay out, and standbys take their places."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_job import until
from tests.support.torchrun_agents import ROOT, Agents, installed, running_agents
from torchscout.decision.types import Action, Decision, Failure
from torchscout.run.restart import RestartPlan

slow = pytest.mark.slow


class Job:
    """A job of workers that say where they run, and fail or end when they are asked to."""

    def __init__(self, folder: Path, agents: Agents) -> None:
        self.folder, self.agents = folder, agents
        self._seen: set[Path] = set()

    def started(self, count: int) -> list[str]:
        """Wait until so many workers have started since the last call, and return their machines."""
        until(lambda: len(self._new()) >= count, f"{count} workers start", 90.0)
        new = self._new()
        self._seen |= new
        assert {json.loads(each.read_text())[1] for each in new} == {str(count)}, "the size of the job"
        return sorted(each.name.split("-")[1] for each in new)

    def _new(self) -> set[Path]:
        return {each for each in self.folder.glob("started-*") if each.read_text()} - self._seen

    def fail(self, action: Action = Action.RESTART, *hosts: str) -> None:
        for each in self._seen:
            (self.folder / f"fail-{each.name.split('-')[2]}").write_text(" ".join([action.name, *hosts]))

    def stays(self, seconds: float = 5.0) -> None:
        """Check that no worker is restarted."""
        time.sleep(seconds)
        assert not self._new()

    def end(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    nodes = getattr(request, "param", "2")
    script = ["-m", "tests.support.agent_job", str(tmp_path)]
    options = [f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=5"]
    with running_agents(tmp_path, installed(tmp_path / "site"), script, *options) as agents:
        yield Job(tmp_path, agents)


@slow
def test_one_agent_too_many_waits_and_a_restart_keeps_the_machines(job: Job):
    """A standby neither restarts a job that is complete nor displaces a machine that has its state."""
    job.agents.start("a", hosts_store=True)
    job.agents.start("b")
    assert job.started(2) == ["a", "b"]
    job.agents.start("c", join_timeout="6")  # which does not count while it waits
    job.agents.until_said("c", "this machine, c, is a standby")
    job.fail()
    assert job.started(2) == ["a", "b"]
    job.stays(10)
    job.end()
    assert job.agents.wait("a", "b", "c") == [0, 0, 0], job.agents.everything()


@slow
def test_a_standby_replaces_a_quarantined_machine_and_its_relaunched_agent_stays_out(job: Job):
    """Also if that machine hosts the store: its agent does not exit."""
    job.agents.start("a", hosts_store=True)
    job.agents.start("b")
    assert job.started(2) == ["a", "b"]
    job.agents.start("c")
    job.agents.until_said("c", "is a standby")
    job.fail(Action.REPLACE, "a")
    assert job.started(2) == ["b", "c"]
    job.agents.until_said("a", "this machine, a, is quarantined")
    job.agents.start("relaunched", host="a")
    job.agents.until_said("relaunched", "this machine, a, is quarantined")
    job.stays()
    job.fail()
    assert job.started(2) == ["b", "c"]
    job.end()
    assert job.agents.wait("a", "b", "c", "relaunched") == [0, 0, 0, 0], job.agents.everything()


@slow
def test_a_machine_runs_a_preflight_before_it_joins_again(job: Job):
    """Without a standby the job waits for it; otherwise the standby takes its place."""
    job.agents.start("a", hosts_store=True, preflight="3")
    job.agents.start("b", preflight="3")
    assert job.started(2) == ["a", "b"]
    job.fail(Action.PREFLIGHT, "b")
    assert job.started(2) == ["a", "b"]
    assert "the preflight of this machine, b, found nothing" in job.agents.said("b")
    assert "preflight" not in job.agents.said("a")
    job.agents.start("c")
    job.agents.until_said("c", "is a standby")
    job.fail(Action.PREFLIGHT, "a")
    assert job.started(2) == ["b", "c"]
    job.agents.until_said("a", "this machine, a, is a standby")
    job.end()
    assert job.agents.wait("a", "b", "c") == [0, 0, 0], job.agents.everything()


@slow
def test_with_an_empty_pool_the_job_says_so_and_continues_with_a_late_standby(job: Job):
    job.agents.start("a", hosts_store=True)
    job.agents.start("b")
    assert job.started(2) == ["a", "b"]
    job.fail(Action.REPLACE, "b")
    job.agents.until_said("a", "1 of 2 machines have joined the job, and b must not")
    job.agents.start("c")
    assert job.started(2) == ["a", "c"]
    job.end()
    assert job.agents.wait("a", "b", "c") == [0, 0, 0], job.agents.everything()


@slow
def test_with_an_empty_pool_the_job_ends_after_the_time_to_join(job: Job):
    job.agents.start("a", hosts_store=True, join_timeout="15")
    job.agents.start("b", join_timeout="15")
    assert job.started(2) == ["a", "b"]
    job.fail(Action.REPLACE, "b")
    status, quarantined = job.agents.wait("a", "b")
    assert (status != 0, quarantined) == (True, 0), job.agents.everything()
    assert "too few machines" in job.agents.said("a")
    assert "without this machine, b" in job.agents.said("b")


@slow
@pytest.mark.parametrize("job", ["1:2"], indirect=True)
def test_a_job_that_may_be_smaller_goes_on_without_the_quarantined_machine(job: Job):
    job.agents.start("a", hosts_store=True)
    job.agents.start("b")
    assert job.started(2) == ["a", "b"]
    job.fail(Action.REPLACE, "b")
    assert job.started(1) == ["a"]
    job.stays()
    job.end()
    assert job.agents.wait("a", "b") == [0, 0], job.agents.everything()


@slow
def test_without_the_machine_of_the_store_the_job_ends_with_a_reason(job: Job):
    job.agents.start("a", hosts_store=True)
    job.agents.start("b")
    assert job.started(2) == ["a", "b"]
    job.agents.start("c")
    job.agents.until_said("c", "is a standby")
    os.killpg(job.agents.started["a"].pid, signal.SIGKILL)
    status, standby = job.agents.wait("b", "c")
    job.end()  # for the worker of the agent that was killed
    assert (status != 0, standby) == (True, 0), job.agents.everything()
    assert f"localhost:{job.agents.port}" in job.agents.said("b")
    assert "--rdzv-endpoint" in job.agents.said("b")


def plan(action: Action, *hosts: str) -> RestartPlan:
    sentence = f"{action.value}: something is wrong."
    return RestartPlan().after(
        Decision(step=1, action=action, failure=Failure.SDC, ranks=(), hosts=hosts, sentence=sentence)
    )


@slow
def test_a_plan_on_one_machine_keeps_another_out_when_the_job_is_started_again(job: Job):
    plan(Action.REPLACE, "b").write(job.folder / "plan")
    job.agents.start("b", hosts_store=True)  # joins, and leaves when it learns of the plan
    time.sleep(8)
    job.agents.start("a", plan=str(job.folder / "plan"))
    job.agents.until_said("b", "this machine, b, is quarantined")
    job.agents.start("c")
    assert job.started(2) == ["a", "c"]
    job.end()
    assert job.agents.wait("a", "b", "c") == [0, 0, 0], job.agents.everything()


@slow
def test_a_job_that_was_stopped_does_not_start(job: Job):
    plan(Action.STOP).write(job.folder / "plan")
    job.agents.start("a", hosts_store=True, plan=str(job.folder / "plan"))
    assert job.agents.wait("a")[0] != 0
    assert plan(Action.STOP).sentence in job.agents.said("a")
    assert not [*job.folder.glob("started-*")]


def own_address() -> str:
    """An address of this machine that is not loopback: ranks of different machines need one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


MODULES = "import sys, torch.distributed.run; print(*sorted(each for each in sys.modules if {}))"


def modules(path: str, which: str) -> list[str]:
    """Import what torchrun imports, and list the modules."""
    command = [sys.executable, "-c", MODULES.format(which)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@slow
def test_a_torchrun_of_another_job_imports_nothing_but_the_entry_point(tmp_path: Path):
    path = installed(tmp_path / "site")
    entry_point = ["torchscout", "torchscout.plugins", "torchscout.plugins.torchrun"]
    assert modules(path, "each.startswith('torchscout')") == entry_point
    without = tmp_path / "without" / "torchscout-0.0.0.dist-info"  # hides the installed one
    without.mkdir(parents=True)
    (without / "METADATA").write_text("Metadata-Version: 2.1\nName: torchscout\nVersion: 0.0.0\n")
    (without / "entry_points.txt").touch()
    before = modules(os.pathsep.join([str(ROOT), str(without.parent)]), "True")
    assert sorted({*modules(path, "True")} - {*before}) == entry_point


@slow
def test_a_torchrun_of_another_job_prints_nothing_new(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "--nproc-per-node=1", "--no-python", "true"]
    environment = os.environ | {"PYTHONPATH": installed(tmp_path / "site")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "scout" not in done.stderr + done.stdout
