"""When recipes are due, what they go through, and how the cadence follows a budget."""

from __future__ import annotations

import itertools

import pytest

from torchscout.config import ReplayConfig
from torchscout.replay.schedule import Due, OverheadBudget, Rotation


def run(rotation: Rotation, steps: range) -> dict[int, list[Due]]:
    found = {}
    for step in steps:
        if due := rotation.due(step):
            found[step] = due
            rotation.finished(step)
    return found


def test_each_recipe_has_its_own_interval_and_goes_through_its_own_targets():
    rotation = Rotation({"layer": 3, "replicated_state": 1}, {"layer": 2, "replicated_state": 5})
    found = run(rotation, range(1, 11))
    assert [(step, due.target) for step in found for due in found[step] if due.kind == "layer"] == [
        (2, 0),
        (4, 1),
        (6, 2),
        (8, 0),
        (10, 1),
    ]
    assert [step for step in found if Due("replicated_state", 0) in found[step]] == [5, 10]
    assert rotation.rounds == 6  # steps 2, 4, 5, 6, 8 and 10, where both are one check


def test_coverage_says_how_far_a_cycle_is():
    rotation = Rotation({"layer": 3}, {"layer": 20})
    run(rotation, range(1, 41))
    assert rotation.coverage() == {
        "layer": {"targets": 3, "visited": 2, "cycles": 0, "interval": 20, "next_step": 60}
    }
    run(rotation, range(41, 81))
    assert (rotation.coverage()["layer"]["visited"], rotation.coverage()["layer"]["cycles"]) == (3, 1)


def test_a_recipe_that_was_not_asked_for_is_never_due():
    rotation = Rotation({"layer": 2, "output": 1}, {"embedding": 1, "layer": 1})
    assert {due.kind for dues in run(rotation, range(1, 9)).values() for due in dues} == {"layer"}


def test_a_recipe_without_targets_here_is_due_all_the_same():
    """Ranks that have some vote on it job-wide, and this one must not be missing."""
    rotation = Rotation({"embedding": 0, "layer": 2}, {"embedding": 4, "layer": 2})
    assert run(rotation, range(1, 5))[4] == [Due("embedding", None), Due("layer", 1)]
    assert rotation.coverage().keys() == {"layer"}


def test_stretched_intervals_hold_from_each_recipes_last_turn():
    rotation = Rotation({"layer": 2, "replicated_state": 1}, {"layer": 3, "replicated_state": 5})
    run(rotation, range(1, 11))
    rotation.change(2, 10)
    found = run(rotation, range(11, 30))
    assert [step for step in found if Due("replicated_state", 0) in found[step]] == [20]
    assert [step for step in found for due in found[step] if due.kind == "layer"] == [15, 21, 27]
    rotation.change(1, 29)
    assert list(run(rotation, range(30, 34))) == [30, 33], "at once where the turn is overdue"


def test_a_cadence_that_changes_often_puts_nobody_off():
    rotation = Rotation({"layer": 2, "replicated_state": 1}, {"layer": 4, "replicated_state": 1})
    found = []
    for step in range(1, 40):
        due = [each.kind for each in rotation.due(step)]
        if due:
            found += [step] if "layer" in due else []
            rotation.finished(step)
            rotation.change(1 + step % 2, step)
    assert len(found) >= 4
    assert all(after - before <= 9 for before, after in itertools.pairwise(found))


def test_the_same_intervals_again_change_nothing():
    rotation = Rotation({"layer": 2}, {"layer": 10})
    rotation.change(1, 7)
    assert list(run(rotation, range(1, 21))) == [10, 20]


def test_intervals_grow_until_checks_fit_the_budget():
    cadence = OverheadBudget()
    for _ in range(5):
        cadence.step_took(0.1)
        cadence.check_took(0.5)
    assert cadence.share(20) == pytest.approx(0.2)
    stretch = cadence.stretch(20, 0.005)
    assert cadence.share(20 * stretch) <= 0.005 < cadence.share(20 * (stretch - 1))


def test_without_a_budget_or_without_measurements_intervals_stay():
    cadence = OverheadBudget()
    assert (cadence.stretch(20, 0.005), cadence.share(20)) == (1, None)
    cadence.step_took(0.1)
    cadence.check_took(100.0)
    assert cadence.stretch(20, None) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "at least 1 step"),
        ({"recipes": ("layer", "nothing")}, "unknown recipes"),
        ({"recipes": ()}, "nothing would be checked"),
        ({"recipes": {"layer": 0}}, "at least 1 step"),
        ({"variants": ()}, "finite factors"),
        ({"variants": (1.0, float("nan"))}, "finite factors"),
        ({"variants": (1.0, 1.0)}, "differ from each other"),
        ({"max_overhead": 1.5}, "between 0 and 1, got 1.5"),
        ({"timeout_seconds": 0}, "positive and finite"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ReplayConfig(**settings)


def test_recipes_may_have_their_own_intervals():
    assert ReplayConfig(interval=7, recipes=("layer", "replicated_state")).intervals == {
        "layer": 7,
        "replicated_state": 7,
    }
    assert ReplayConfig(recipes={"layer": 5}).intervals == {"layer": 5}
