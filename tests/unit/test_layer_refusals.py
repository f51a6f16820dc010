"""Parts of a module that cannot be replayed or compared are reported, and nothing is kept afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.replay_by_hand import (
    CPU,
    NAME,
    Block,
    Calling,
    Job,
    align,
    batch,
    differing,
    observations,
    observe,
    prepare,
    recipe_of,
    sized,
)
from torchscout.errors import ReplayError
from torchscout.replay.recipe import ABSENT, Mode, Observation
from torchscout.replay.recipes.layer import LayerRecipe, LayerReplay
from torchscout.utils.reentrancy import own_work


def writing(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.writes:
        with torch.no_grad():
            self.weight.mul_(0.5)
    return x * self.weight


def test_a_module_that_writes_to_its_parameters_only_in_replay_is_reported():
    job = Job(lambda: Calling(writing), prepared=lambda module: setattr(module, "writes", False), ranks=1)
    (replay,) = job.aligned()
    job.modules[0].writes = True
    seen = Observation()
    with pytest.raises(ReplayError, match="writes to its own parameters"), own_work():
        replay.observe(seen)
    assert f"{NAME}/output" not in seen.signatures, "its record is what carries the reason"


def test_a_parameter_without_gradient_is_absent_and_a_frozen_one_not_compared():
    def make() -> nn.Module:
        module = Calling(lambda self, x: x * self.weight)
        module.unused = nn.Parameter(torch.ones(2))
        module.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        return module

    found = observations(Job(make).aligned())
    assert {each[f"{NAME}.unused.grad"] for each in found} == {ABSENT}
    assert found[0][f"{NAME}.weight.grad"] != ABSENT
    assert f"{NAME}.frozen.grad" not in found[0]


def test_without_captured_gradients_the_forward_pass_alone_is_compared():
    replays = Job(Block, train=lambda module, rank: module(batch(rank))).aligned()
    found = observations(replays)
    assert differing(found) == set()
    absent = {surface for surface, value in found[0].items() if value == ABSENT}
    assert absent == {each.surface for each in replays[0].comparisons() if each.mode == Mode.BACKWARD}
    (reason,) = {each.absent for each in replays[0].comparisons() if each.mode == Mode.BACKWARD}
    assert reason == "no gradient reached the output of the module"


def test_a_module_without_parameters_or_tensors_has_nothing_to_compare_there():
    job = Job(
        nn.Identity,
        train=lambda module, _: module("text"),
    )
    found = observations(job.aligned())
    assert differing(found) == set()
    assert found[0][f"{NAME}/parameters"] == found[0][f"{NAME}/output"] == ABSENT


def test_peers_with_other_buffers_or_other_gradients_are_refused():
    job = Job(Block, ranks=2)
    job.modules[1].register_buffer("more", torch.ones(1))
    with pytest.raises(ReplayError, match=r"its buffers are \['more', .*\] here and \["):
        prepare(job.replays)
    frozen = iter((False, True))
    job = Job(Block, ranks=2, prepared=lambda module: module.up.bias.requires_grad_(not next(frozen)))
    with pytest.raises(ReplayError, match=rf"differ from the source: \['{NAME}.up.bias.grad'\]"):
        prepare(job.replays)


def test_a_parameter_that_was_added_later_is_reported():
    module = Block()
    recipe = recipe_of(module)
    module.late = nn.Parameter(torch.ones(1))
    with pytest.raises(ReplayError, match="a parameter that was not there when replay was attached"):
        recipe.begin(0, is_source=True)


def test_a_released_replay_holds_nothing_and_hooks_nothing():
    job = Job(Block)
    replays = job.aligned()
    for replay in replays:
        replay.release()
        assert isinstance(replay, LayerReplay)
        assert replay._call is replay._own is None
        assert replay._buffers == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in job.modules)


def test_each_target_is_its_own_module():
    modules = {"first": nn.Linear(4, 4), "second": Block()}
    surfaces = {each: name for m in modules.values() for name, each in m.named_parameters(prefix=str(id(m)))}
    recipe = LayerRecipe("layer", modules, surfaces, CPU)
    assert recipe.targets == ("first", "second")
    replay = recipe.begin(1, is_source=True)
    sized(modules["second"](batch(0))).backward()
    align([replay])
    assert "second/output" in observe(replay)
    replay.release()
