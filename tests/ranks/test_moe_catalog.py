"""Experts replayed at the shapes of a catalog: one in each check, and all before a checkpoint is trusted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mixture_jobs import Outcome, Trial, train
from tests.support.ranks import RankError, run_ranks
from torchscout.checkpoint.gate import SweepResult, TrustLevel
from torchscout.config import ReplayConfig
from torchscout.decision.types import Scope
from torchscout.faults.plan import FaultPlan
from torchscout.testing.moe_model import EXPERTS, catalog_for

LAYERS = ("layer.0.mixture.experts", "layer.1.mixture.experts")
CYCLE = 2
"""Checks in a cycle over two shapes: both layers run the same kernels, so one of them represents both."""


def turns(rows: tuple[int, int], checks: range) -> list[tuple[int, int]]:
    """Rows and layer of these checks, counted from 0: after each cycle the layers change places."""
    first, second = rows
    order = [(first, 0), (second, 1), (first, 1), (second, 0)]
    return [order[check % len(order)] for check in checks]


def trial_at(tmp_path: Path, *counts: int, ranks: int = 6, spread: int = 2, **settings: object) -> Trial:
    path = tmp_path / "catalog.json"
    trial = Trial(ranks, spread, replay=ReplayConfig(interval=1, recipes=("experts",), expert_catalog=path))
    catalog_for(trial.spread, counts, path)
    return replace(trial, **settings)


def visited(seen: Outcome) -> list[tuple[int, int]]:
    """Rows and layer of what was replayed, check by check."""
    checks = {each.step: str(each.layer) for each in seen.records if each.surface.endswith("/output")}
    names = [name.split(" x") for name in checks.values()]
    return [(int(rows), LAYERS.index(layer)) for layer, rows in names]


@pytest.mark.parametrize(("rows", "step"), [(512, 4), pytest.param(128, 5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_wrong_expert_weight_is_its_ranks_after_a_clean_cycle(
    ranks: int, rows: int, step: int, tmp_path: Path
):
    sick, steps = ranks - 1, 6
    faults = FaultPlan().flip_bit(rank=sick, at=f"{LAYERS[0]}/up", step=step, bit=20)
    trial = trial_at(tmp_path, 128, 512, ranks=ranks, steps=steps, faults=faults)
    everybody = run_ranks(train, ranks, trial, tmp_path / "run", timeout=300)
    assert [seen.fired for seen in everybody] == [int(rank == sick) for rank in range(ranks)]
    (incident,) = everybody[0].incidents
    assert (incident.scope, incident.ranks) == (Scope.RANK, (sick,))
    assert incident.step == step
    assert incident.records[0].layer == f"{LAYERS[0]} x{rows}"
    # What is not accepted comes again.
    due = turns((128, 512), range(step))
    assert visited(everybody[0]) == [*due, *[due[-1]] * (steps - step)]


def test_every_shape_has_its_turn_however_uneven_the_routing_is(tmp_path: Path):
    trial = trial_at(tmp_path, 3, 40, 200, steps=6, uneven=2.0)
    everybody = run_ranks(train, 6, trial, tmp_path / "run", timeout=120)
    expected = {(rows,) * (EXPERTS // 2) for rows in (3, 40, 200)}
    for seen in everybody:
        assert ([each.sentence for each in seen.incidents], seen.failures) == ([], [])
        assert seen.unchecked == {}
        assert expected <= {tuple(counts) for counts in seen.routed}
        assert seen.status["replay"]["lacking"] is None
        covered = seen.status["replay"]["coverage"]["experts"]
        assert (covered["targets"], covered["cycles"]) == (3, 2), "paths of the device"
        assert (covered["modules"], covered["modules_visited"]) == (2, 2), "layers that represented them"
    assert [0, 0] in everybody[1].routed, "some experts are asked by nobody"


@pytest.mark.slow
def test_what_is_wrong_at_one_number_of_rows_is_found_within_a_cycle_and_by_a_sweep(tmp_path: Path):
    """512 rows are more than training ever has."""
    trial = trial_at(
        tmp_path, 128, 512, steps=20, sick=(3, 2 * 512, 100), directory=tmp_path / "kept", killed=13
    )
    with pytest.raises(RankError):
        run_ranks(train, 6, trial, tmp_path / "killed", timeout=120)

    # New workers, one of which is on a sick machine.
    sick = replace(trial, sick=(3, 2 * 512, 0), killed=None, steps=0)
    swept = run_ranks(train, 6, sick, tmp_path / "swept", timeout=120)
    for rank, seen in enumerate(swept):
        assert (seen.fired > 0) == (rank == 3)
        assert seen.resumed is not None
        assert (seen.resumed.swept, seen.resumed.role) == (SweepResult.SDC, TrustLevel.VERIFIED), seen.resumed
    (incident,) = swept[0].incidents
    assert incident.ranks == (3,)
    assert {each.layer for each in incident.records} == {f"{LAYERS[1]} x512"}, "one layer represents both"

    # While the job runs: of two cycles the first is clean.
    running = replace(trial, directory=None, killed=None, steps=4, sick=(3, 2 * 512, 3))
    everybody = run_ranks(train, 6, running, tmp_path / "running", timeout=120)
    assert everybody[3].fired
    (incident,) = everybody[0].incidents
    assert (incident.ranks, incident.step) == ((3,), 4)
    assert incident.records[0].layer == f"{LAYERS[0]} x512"


@pytest.mark.long
def test_a_checkpoint_is_verified_after_two_cycles_and_the_next_run_goes_on_within_one(tmp_path: Path):
    trial = trial_at(tmp_path, 8, 16, 24, 32, steps=10, directory=tmp_path / "kept")
    cycle = 4
    for seen in run_ranks(train, 6, trial, tmp_path / "run", timeout=120):
        roles = [(each["latest"], each["candidate"], each["verified"]) for each in seen.kept]
        assert roles[cycle] == (cycle, cycle, None), "known to be sealed at the next check"
        assert roles[2 * cycle] == (2 * cycle, 2 * cycle, cycle)
        assert seen.kept[-1]["lacking"] is None
        promotion = seen.kept[-1]["promotion"]
        assert (promotion["step"], promotion["coverage"], promotion["paths"]) == (cycle, "full", cycle)
        assert (promotion["before"], promotion["after"]) == (cycle, cycle)
    further = run_ranks(train, 6, replace(trial, steps=13), tmp_path / "further", timeout=120)
    for seen in further:
        assert seen.resumed is not None
        assert seen.resumed.step == 10
        order = [(8, 0), (16, 1), (24, 0), (32, 1), (8, 1), (16, 0), (24, 1), (32, 0)]
        assert visited(seen)[-3:] == [order[step % 8] for step in (10, 11, 12)]


SHAPES = (16, 32, 48, 64)
"""The largest is more than training ever has."""


def with_room(trial: Trial) -> Trial:
    """With time for all shapes in one check. The first check measures what one takes, and with the votes of
    the second all ranks learn it."""
    return replace(trial, replay=replace(trial.replay, max_overhead=0.99))


def test_with_time_for_several_shapes_one_check_has_all_of_them(tmp_path: Path):
    """A kernel that is wrong at the last of four shapes is found by the third check, not by the fourth."""
    trial = with_room(
        trial_at(tmp_path, *SHAPES, ranks=3, spread=1, steps=4, sick=(1, EXPERTS * SHAPES[-1], 0))
    )
    everybody = run_ranks(train, 3, trial, tmp_path / "sick", timeout=120)
    assert [seen.fired > 0 for seen in everybody] == [rank == 1 for rank in range(3)]
    (incident,) = everybody[0].incidents
    assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (1,), 3)
    assert incident.records[0].layer == f"{LAYERS[0]} x{SHAPES[-1]}"
    for seen in everybody:
        assert seen.failures == []
        assert seen.status["replay"]["certified"] is None

    healthy = replace(trial, sick=None, steps=5, directory=tmp_path / "kept")
    for seen in run_ranks(train, 3, healthy, tmp_path / "healthy", timeout=120):
        assert ([each.sentence for each in seen.incidents], seen.failures, seen.unchecked) == ([], [], {})
        replayed = [each for each in seen.records if each.surface.endswith("/output")]
        layers = [[str(each.layer) for each in replayed if each.step == step] for step in (1, 2, 3, 4)]
        assert layers[:2] == [[f"{LAYERS[0]} x16"], [f"{LAYERS[1]} x32"]]
        assert layers[2] == [f"{LAYERS[0]} x{rows}" for rows in (48, 64, 16, 32)], "on one layer"
        assert layers[3] == [f"{LAYERS[1]} x{rows}" for rows in (48, 64, 16, 32)]
        assert seen.status["replay"]["coverage"]["experts"]["together"] == len(SHAPES)
        verified = [each["verified"] for each in seen.kept]
        assert verified[:3] == [None, None, None], "four paths before and after"
        assert verified[-1] in {3, 4}, "on a busy machine, a copy may not be complete at the next check"


def test_of_two_replicas_none_is_named_for_one_of_several_shapes(tmp_path: Path):
    trial = trial_at(tmp_path, *SHAPES, ranks=2, spread=1, steps=3, sick=(1, EXPERTS * SHAPES[-1], 0))
    everybody = run_ranks(train, 2, with_room(trial), tmp_path / "run", timeout=120)
    assert [seen.fired > 0 for seen in everybody] == [False, True]
    (incident,) = everybody[0].incidents
    assert (incident.scope, incident.ranks, incident.step) == (Scope.PEER_GROUP, (0, 1), 3)


def test_state_coverage_verifies_with_every_check_and_says_which_paths_it_had(tmp_path: Path):
    trial = trial_at(
        tmp_path, *SHAPES, ranks=3, spread=1, steps=4, directory=tmp_path / "kept", coverage="state"
    )
    state = ("experts", "replicated_state")
    trial = replace(trial, replay=replace(trial.replay, recipes=state))
    for seen in run_ranks(train, 3, trial, tmp_path / "run", timeout=120):
        assert (seen.incidents, seen.failures) == ([], [])
        assert [each["verified"] for each in seen.kept] == [None, 1, 2, 3]
        assert [each["candidate"] for each in seen.kept] == [None] * 4
        had = [each["promotion"] and each["promotion"]["before"] for each in seen.kept]
        assert (had, seen.kept[-1]["promotion"]["paths"]) == ([None, 1, 2, 3], 4)
    without = replace(
        trial, directory=tmp_path / "without", replay=replace(trial.replay, recipes=("experts",))
    )
    for seen in run_ranks(train, 3, without, tmp_path / "compares nothing", timeout=120):
        assert [each["verified"] for each in seen.kept] == [None] * 4, "no check has compared the state"


def test_a_job_that_loses_its_memory_within_a_cycle_goes_on_from_files_in_between(tmp_path: Path):
    trial = trial_at(tmp_path, 8, 16, 24, 32, 40, 48, ranks=3, spread=1, steps=8, directory=tmp_path / "kept")
    trial = replace(trial, persist_every=2, killed=6, written=4)
    with pytest.raises(RankError):
        run_ranks(train, 3, trial, tmp_path / "killed", timeout=120)
    shutil.rmtree(tmp_path / "kept" / "memory")
    again = replace(trial, killed=None, written=None)
    for seen in run_ranks(train, 3, again, tmp_path / "again", timeout=120):
        assert seen.resumed is not None
        assert (seen.resumed.step, seen.resumed.role) == (4, TrustLevel.LATEST), seen.resumed
        assert seen.resumed.swept is SweepResult.CLEAN
        assert (seen.incidents, seen.failures) == ([], [])


def spoiled(tmp_path: Path, how: str) -> Path:
    path = tmp_path / "catalog.json"
    text = path.read_text()
    path.write_text(
        {
            "damaged": text.replace('"rows"', '"rowz"', 1),
            "foreign": '{"kind": "shopping list"}',
            "missing": text,
        }[how]
    )
    if how == "missing":
        path.unlink()
    return path


@pytest.mark.slow_cases("damaged", "missing")
@pytest.mark.parametrize("how", ["damaged", "foreign", "missing", "stale"])
def test_a_catalog_that_does_not_hold_is_refused_and_training_goes_on_without_it(how: str, tmp_path: Path):
    trial = trial_at(tmp_path, 8, steps=3, ranks=4, directory=tmp_path / "kept")
    if how == "stale":  # made for another number of experts
        catalog_for(4, [8], tmp_path / "catalog.json")
    else:
        spoiled(tmp_path, how)
    for seen in run_ranks(train, 4, trial, tmp_path / "run", timeout=120):
        assert (seen.incidents, seen.failures) == ([], [])
        lacking = seen.status["replay"]["lacking"]
        assert lacking.startswith("the catalog of expert shapes was refused: rank 0: ")
        assert seen.status["checkpoint"]["lacking"] == lacking
        last = seen.kept[-1]
        assert (last["verified"], last["capturing"]) == (2, 3), "by what is replayed as training called it"
        if how == "stale":
            assert "parameters was 'up 1x16x32" in lacking
            assert "and is 'up 2x16x32" in lacking
