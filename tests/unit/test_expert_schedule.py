"""How soon a catalog of expert shapes is covered, by the code that decides it in a job."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torchscout.checkpoint.gate import Outcome
from torchscout.config import ReplayConfig
from torchscout.replay.recipes.experts import ExpertsRecipe
from torchscout.replay.schedule import MOST_TOGETHER, Alike, OverheadBudget, PathOrder, Rotation
from torchscout.session.checkpoints.certifier import CertifiedSteps, CheckCoverage
from torchscout.session.replay.coverage import RecipeCycle
from torchscout.session.replay.pace import EXPERTS, Pace, PaceVote

LAYERS, TEMPLATES = 58, 42
CPU = torch.device("cpu")
STEP, CHECK, SHAPE = 1.0, 0.04, 0.01
"""Seconds of a step, of a check without experts, and of one shape."""


def recipe_for(modules: Sequence[nn.Module], shapes: int) -> ExpertsRecipe:
    named = {f"layers.{place}.experts": module for place, module in enumerate(modules)}
    surfaces = {
        each: f"{name}/{path}" for name, module in named.items() for path, each in module.named_parameters()
    }
    rows = [(1 + number, 128) for number in range(shapes)]
    return ExpertsRecipe(named, dict.fromkeys(named, rows), surfaces, CPU)


def verified_after(config: ReplayConfig, layers: int, shapes: int, most: int) -> tuple[int, int]:
    """The step at which the first state is certified, and the number of checks until then."""
    recipe = recipe_for([nn.Linear(1, 1) for _ in range(layers)], shapes)
    rotation = Rotation({EXPERTS: recipe.order}, config.intervals)
    pace = Pace(config, CPU, recipe.order.cycle)
    certifier = CertifiedSteps()
    certifier.set_coverage(RecipeCycle(recipe.order.cycle))
    for step in range(1, most + 1):
        pace.step_took(STEP)
        if (due := rotation.due(step)) == []:
            continue
        check = CheckCoverage(paths=rotation.turns_at(EXPERTS, step))
        assert check.paths == len(due)
        rotation.finished(step)
        pace.check_took(CHECK + SHAPE * check.paths, check.paths, SHAPE * check.paths)
        certifier.decide(step, certifier.votes(Outcome.HEALTHY, differs=False), check)
        pace.adopt(pace.vote(), rotation, step)
        if certifier.certified_step is not None:
            return step, rotation.rounds
    raise AssertionError(f"nothing is certified after {most} steps")


def test_58_layers_and_42_templates_are_verified_within_2000_steps():
    assert verified_after(ReplayConfig(), LAYERS, TEMPLATES, most=2000) == (1680, 84)


def test_a_budget_with_room_for_several_shapes_verifies_sooner():
    """(0.005 / 0.995 * 20 * 1.0 - 0.04) / 0.01 = 6 shapes after the first check, which has one."""
    config = ReplayConfig(max_overhead=0.005)
    assert verified_after(config, LAYERS, TEMPLATES, most=2000) == (300, 15)


def checks(order: PathOrder, number: int, together: int = 1) -> list[list[tuple[int, int]]]:
    """The shapes and modules of each check, for one set of modules."""
    rotation = Rotation({EXPERTS: order}, {EXPERTS: 1})
    rotation.change(1, 0, {EXPERTS: together})
    found = []
    for step in range(1, number + 1):
        found.append([divmod(due.target, order.modules) for due in rotation.due(step)])
        rotation.finished(step)
    return found


@pytest.mark.parametrize(
    ("modules", "shapes"), [(58, 42), (1, 5), (5, 1), (2, 2), (4, 6), (6, 4), (7, 7), (3, 9)]
)
def test_every_path_comes_once_in_a_cycle_and_every_module_at_every_path_in_the_end(
    modules: int, shapes: int
):
    order = PathOrder([Alike(modules, shapes)])
    assert order.cycle == shapes
    pairs = [pair for check in checks(order, modules * shapes) for pair in check]
    for first in range(len(pairs) - shapes + 1):
        assert {shape for shape, _ in pairs[first : first + shapes]} == set(range(shapes))
    assert {module for _, module in pairs[:modules]} == set(range(modules)), "in as many checks"
    assert set(pairs) == {(shape, module) for shape in range(shapes) for module in range(modules)}


@pytest.mark.parametrize("together", [1, 2, 5, 8])
def test_all_shapes_of_a_check_are_replayed_on_one_module(together: int):
    found = checks(PathOrder([Alike(6, 8)]), 40, together)
    assert all(len({module for _, module in check}) == 1 for check in found)
    shapes = [shape for check in found for shape, _ in check]
    assert shapes == [turn % 8 for turn in range(len(shapes))]
    assert {module for check in found for _, module in check} == set(range(6))


def test_a_check_that_is_not_accepted_repeats_all_its_shapes():
    rotation = Rotation({EXPERTS: PathOrder([Alike(3, 5)])}, {EXPERTS: 1})
    rotation.change(1, 0, {EXPERTS: 2})
    for step in (1, 2):
        rotation.finished(step)
    due = rotation.due(3)
    rotation.finished(3)
    assert rotation.due(4) != due
    rotation.take_back(EXPERTS, 3)
    assert rotation.due(4) == due


def test_the_next_run_goes_on_with_the_same_shape_and_module():
    rotation, other = (Rotation({EXPERTS: PathOrder([Alike(3, 5)])}, {EXPERTS: 1}) for _ in range(2))
    rotation.change(1, 0, {EXPERTS: 2})
    for step in (1, 2, 3):
        rotation.finished(step)
    rotation.change(1, 3)
    other.load_state_dict(rotation.state_dict())
    assert other.due(1) == rotation.due(4)
    other.load_state_dict({"turns": {EXPERTS: 4}})  # of an earlier version
    assert [due.target % 3 for due in other.due(1)] == [4 % 3]


def test_sets_of_modules_have_paths_of_their_own():
    order = PathOrder([Alike(2, 3), Alike(4, 1)])
    assert (order.cycle, order.modules) == (4, 6)
    targets = [target for turn in range(40) for target in order.targets(turn, turn, 1)]
    assert set(targets) == set(range(2 * 3 + 4))
    assert (order.modules_in(targets), order.modules_in([0, 2, 6, 7])) == (6, 3)


def test_modules_are_alike_if_classes_shapes_and_dtypes_are():
    def cycle(*modules: nn.Module) -> int:
        return recipe_for(modules, 3).order.cycle

    assert cycle(nn.Linear(2, 4), nn.Linear(2, 4)) == 3
    assert cycle(nn.Linear(2, 4), nn.Linear(2, 5)) == 6
    assert cycle(nn.Linear(2, 4), nn.Linear(2, 4, dtype=torch.bfloat16)) == 6
    assert cycle(nn.Linear(2, 4), nn.Bilinear(2, 1, 4)) == 6
    one, other = (nn.Sequential(nn.Linear(2, 2), each) for each in (nn.ReLU(), nn.GELU()))
    assert cycle(one, other) == 6


def test_a_sweep_visits_every_path_and_every_module_once():
    recipe = recipe_for([nn.Linear(1, 1) for _ in range(5)], 3)
    swept = [recipe.targets[target].split(" x") for target in recipe.swept()]
    assert len(swept) == 5
    assert {name for name, _ in swept} == {f"layers.{place}.experts" for place in range(5)}
    assert {rows for _, rows in swept} == {f"{1 + shape},128" for shape in range(3)}
    assert {recipe.saved_name(target) for target in recipe.swept()} == {"layers.0.experts"}


def measured(shapes: int, shape: float = SHAPE) -> OverheadBudget:
    budget = OverheadBudget()
    for _ in range(5):
        budget.step_took(STEP)
        budget.check_took(CHECK + shape * shapes, shapes, shape * shapes)
    return budget


@pytest.mark.parametrize("now", [1, 2, 8])
def test_as_many_shapes_fit_as_the_budget_allows_whatever_a_check_has_now(now: int):
    budget = measured(now)
    fitting = budget.together(20, 0.004)
    assert fitting == 4
    assert CHECK + SHAPE * fitting <= 0.004 / 0.996 * 20 < CHECK + SHAPE * (fitting + 1)
    assert budget.stretch(20, 0.004) == 1, "intervals do not grow for shapes that a check can do without"


def test_one_shape_at_least_and_eight_at_most():
    assert measured(1).together(20, 0.5) == MOST_TOGETHER
    assert measured(1).together(20, 0.0001) == 1
    assert measured(1).stretch(20, 0.0001) > 1, "then intervals grow"
    assert measured(1).together(20, None) == 1
    assert OverheadBudget().together(20, 0.5) == 1, "before anything was measured"


def test_ranks_agree_on_what_fits_on_every_one_of_them():
    config = ReplayConfig(max_overhead=0.005)
    votes = []
    for shape, paths in ((0.01, 42), (0.03, 42), (0.01, 5), (0.01, 0)):
        pace = Pace(config, CPU, paths)
        pace.step_took(STEP)
        pace.check_took(CHECK + shape, 1, shape)
        votes.append(pace.vote())
    assert [-each.fewest for each in votes] == [6, 2, 5, MOST_TOGETHER]
    agreed = PaceVote(*map(max, zip(*votes, strict=True)))
    for each, together in ((config, 2), (ReplayConfig(), 1)):  # one shape without a budget
        rotation = Rotation({EXPERTS: PathOrder([Alike(3, 42)])}, {EXPERTS: 20})
        Pace(each, CPU, 42).adopt(agreed, rotation, 0)
        assert len(rotation.due(20)) == together
