"""From an incident to a job that trains again: it ends with the bits of a job that was never faulty.

A job of the catalog is started by torchrun, which starts all ranks again when one of them fails or when a
decision ends them, and resumes from its checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from evaluation.jobs.contracts import FAULTY
from evaluation.jobs.script import FAULTY_STEP, LATER_STEP, OTHER
from tests.support.restarts import answers, decisions, run
from tests.support.run_dirs import read_ends
from torchscout.decision.types import Action
from torchscout.run.restart import RestartPlan

BOTH = ["--act", "restart,replace"]


def plan_of(folder: Path) -> RestartPlan:
    return RestartPlan.read(folder / "kept" / "files")


def reached(folder: Path) -> list[tuple[int, Action]]:
    """The step of each failure after which the job was restarted or stopped; 0 in ``resume()``."""
    return [(each.step, each.action) for each in plan_of(folder).restarts]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is left of a job to which nothing happens, and about which nothing is decided."""
    folder = tmp_path_factory.mktemp("alone")
    ended = run(folder, *BOTH)
    assert ended.returncode == 0, ended.stderr
    assert decisions(folder) == []
    assert not RestartPlan.path(folder / "kept" / "files").exists()
    (bits,) = {each["bits"] for each in answers(folder)}
    return str(bits)


class Fault(NamedTuple):
    name: str
    act: str
    action: Action | None
    """What is decided; torchrun needs no decision to start a job again when a rank has failed."""
    verified: bool = False
    """Whether a checkpoint must be taken that is verified."""
    launcher: tuple[str, ...] = ()


SCOUT_RUN = (sys.executable, "-m", "torchscout", "run", "--")
FAULTS = [
    Fault("stopped", "restart", Action.RESTART),
    Fault("asleep", "restart", Action.RESTART),
    Fault("asleep", "restart", Action.RESTART, launcher=SCOUT_RUN),
    Fault("killed", "restart", None),
    Fault("raises", "restart", None),
    Fault("corrupt", "restart", Action.RESTART, verified=True),
    Fault("corrupt", "restart,replace", Action.REPLACE, verified=True),
    # One rank is busy with the incident when the others leave, and loses its connections to them.
    Fault("unheard", "restart,replace", Action.REPLACE, verified=True),
]


@pytest.mark.slow_except("corrupt-restart,replace")
@pytest.mark.long_cases("corrupt-restart,replace")
@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda each: f"{each.name}-{each.act}{'-scout-run' * bool(each.launcher)}"
)
def test_a_restarted_job_ends_as_if_nothing_had_happened(fault: Fault, tmp_path: Path, alone: str):
    ended = run(tmp_path, "--fault", fault.name, "--act", fault.act, prefix=fault.launcher)
    assert (tmp_path / f"suffered-{FAULTY}").exists()
    assert ended.returncode == 0, ended.stderr
    found = answers(tmp_path)
    assert {(each["bits"], each["life"]) for each in found} == {(alone, 1)}
    assert all(0 < each["resumed"] < FAULTY_STEP for each in found)
    assert all("verified checkpoint" in each["reason"] for each in found) or not fault.verified
    if fault.action is not None:
        (decision,) = decisions(tmp_path)
        assert (decision.action, decision.ranks, decision.is_carried_out) == (fault.action, (FAULTY,), True)
        assert ended.stderr.count(decision.sentence) >= 2, "when it is made, and after the restart"
        plan = plan_of(tmp_path)
        assert (len(plan.restarts), plan.sentence) == (1, ""), "the plan was used"
        assert plan.excluded == (decision.hosts if fault.action is Action.REPLACE else ())
    if fault.name == "unheard":
        end = read_ends(tmp_path / "run-0").get(OTHER)
        assert end is not None
        assert end.how == "failed", "it did not know"


@pytest.mark.slow
def test_a_machine_that_corrupts_every_run_stops_the_job(tmp_path: Path):
    """There is no other machine, so that the same one is used again until the policy gives up."""
    ended = run(tmp_path, "--fault", "always_corrupt", *BOTH, restarts=6)
    assert ended.returncode != 0
    actions = [decision.action for life in range(4) for decision in decisions(tmp_path, life)]
    assert actions == [Action.REPLACE, Action.REPLACE, Action.STOP]
    assert plan_of(tmp_path).is_stopped
    assert not (tmp_path / "rank-0.json").exists(), "the job never ends on corrupt state"


@pytest.mark.slow
def test_a_job_in_which_a_rank_is_killed_whenever_it_resumes_is_stopped(tmp_path: Path):
    ended = run(tmp_path, "--fault", "never_resumes", "--act", "restart", restarts=5)
    assert ended.returncode != 0
    assert reached(tmp_path) == [(FAULTY_STEP, Action.RESTART), (0, Action.RESTART), (0, Action.STOP)]
    assert f"2 restarts did not help at step {FAULTY_STEP}" in ended.stderr
    assert not (tmp_path / "rank-0.json").exists()


@pytest.mark.slow
def test_restarts_of_the_past_do_not_stop_a_job_that_got_on_since(tmp_path: Path, alone: str):
    """Both times that it resumes after a fault, a rank is killed in ``resume()``."""
    ended = run(tmp_path, "--fault", "gets_on", "--act", "restart", restarts=5)
    assert ended.returncode == 0, ended.stderr
    assert {(each["bits"], each["life"]) for each in answers(tmp_path)} == {(alone, 4)}
    assert reached(tmp_path) == [(each, Action.RESTART) for each in (FAULTY_STEP, 0, LATER_STEP - 1, 0)]


@pytest.mark.slow
def test_by_default_a_decision_is_only_logged(tmp_path: Path):
    ended = run(tmp_path, "--fault", "corrupt")
    assert ended.returncode == 0, ended.stderr
    assert {each["life"] for each in answers(tmp_path)} == {0}
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.is_carried_out) == (Action.REPLACE, False)
    assert "dry run" in ended.stderr
    assert not RestartPlan.path(tmp_path / "kept" / "files").exists()
