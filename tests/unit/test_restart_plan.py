"""The restart plan: what the next workers learn from it, and what is refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_policy import HANG, SDC, decided
from torchscout.decision.types import Action, Failure
from torchscout.errors import RestartPlanError
from torchscout.run.restart import RestartPlan, write_plans

PLAN = RestartPlan().after(decided(HANG)).after(decided(SDC))


def test_a_plan_collects_restarts_and_excluded_machines(tmp_path: Path):
    assert PLAN.failure is Failure.SDC
    assert PLAN.excluded == ("node-1",), "a restart in place excludes nothing"
    assert [each.action for each in PLAN.restarts] == [Action.RESTART, Action.REPLACE]
    PLAN.write(tmp_path / "new" / "folder")
    assert RestartPlan.read(tmp_path / "new" / "folder") == PLAN
    assert RestartPlan.path(tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o600
    assert RestartPlan.read(tmp_path) == RestartPlan(), "without a file the job was not restarted"


def test_a_used_plan_keeps_its_history_and_excluded_machines_only():
    used = PLAN.used()
    assert (used.failure, used.sentence) == (Failure.OTHER, "")
    assert (used.restarts, used.excluded) == (PLAN.restarts, PLAN.excluded)


def test_only_a_stop_keeps_the_job_from_running():
    actions = (Action.RESTART, Action.PREFLIGHT, Action.REPLACE, Action.STOP)
    plans = [PLAN.after(replace(decided(HANG), action=action)) for action in actions]
    assert [each.is_stopped for each in plans] == [False, False, False, True]
    assert [each.excluded for each in plans] == [("node-1",)] * 4, "a preflight excludes nobody yet"


def test_the_history_is_bounded():
    plan = PLAN
    for step in range(200):
        plan = plan.after(decided(replace(HANG, step=step)))
    assert [each.step for each in plan.restarts] == [*range(136, 200)]


def test_what_another_rank_has_written_is_kept(tmp_path: Path):
    """Ranks of one machine write the same plan, and the last run may have decided after this one began."""
    own, other = decided(HANG, seconds=7.0), decided(replace(SDC, step=20))
    plan = RestartPlan().after(own)
    RestartPlan().after(other).after(replace(own, seconds=7.5, devices=("rank 2: GPU",))).write(tmp_path)
    assert write_plans(plan, [tmp_path]) == []
    found = RestartPlan.read(tmp_path)
    assert (found.restarts, found.excluded, found.failure) == ((other, own), ("node-1",), Failure.HANG)


GOOD = PLAN.to_json()
RESTART = GOOD["restarts"][0]


WRONG = {
    "no object": [],
    "no version": {},
    "another version": {**GOOD, "schema": 2},
    "an unknown failure": {**GOOD, "failure": "tired"},
    "machines in no list": {**GOOD, "excluded": "node-1"},
    "a machine without a name": {**GOOD, "excluded": [7]},
    "a restart that is none": {**GOOD, "restarts": [[]]},
    "a restart that continues": {**GOOD, "restarts": [{**RESTART, "action": "continue"}]},
    "an unknown scope": {**GOOD, "restarts": [{**RESTART, "scope": "galaxy"}]},
    "a time that is no number": {**GOOD, "restarts": [{**RESTART, "seconds": math.nan}]},
    "half a step": {**GOOD, "restarts": [{**RESTART, "step": 1.5}]},
    "a rank that is no number": {**GOOD, "restarts": [{**RESTART, "ranks": ["x"]}]},
    "a machine of a restart without a name": {**GOOD, "restarts": [{**RESTART, "hosts": [{}]}]},
    "a missing field": {key: value for key, value in GOOD.items() if key != "excluded"},
}
RAW = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": NaN}', b" " * (1 << 21)]


def test_what_is_no_whole_plan_is_refused_with_its_path(tmp_path: Path):
    PLAN.write(tmp_path)
    path = RestartPlan.path(tmp_path)
    for content in [*(json.dumps(each).encode() for each in WRONG.values()), *RAW]:
        path.write_bytes(content)
        with pytest.raises(RestartPlanError, match=str(path)):
            RestartPlan.read(tmp_path)


def test_only_an_owner_only_file_is_read(tmp_path: Path):
    PLAN.write(tmp_path)
    path = RestartPlan.path(tmp_path)
    path.chmod(0o644)
    with pytest.raises(RestartPlanError, match="belongs to this user alone"):
        RestartPlan.read(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RestartPlanError):
        RestartPlan.read(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RestartPlanError, match="not a regular file"):
        RestartPlan.read(tmp_path)


def test_a_plan_that_was_not_used_yet_still_decides_what_can_be_trusted():
    """The job failed again before it had loaded a checkpoint."""
    corrupt = RestartPlan().after(decided(SDC))
    assert corrupt.after(decided(HANG)).failure is Failure.SDC
    assert corrupt.used().after(decided(HANG)).failure is Failure.HANG
    assert RestartPlan().after(decided(HANG)).after(decided(SDC)).failure is Failure.SDC
