"""NaN and infinity in trained state, as a check has signed it or, if it has not, as it is now."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.replay_by_hand import align, observations
from torchscout.c3.signature import Algorithm
from torchscout.replay.finite import FiniteState, not_finite
from torchscout.replay.recipe import Observation, finish_signatures
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.state.table import Kind, StateTable, row_of


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(3)) for name in names}


def replicated(held: dict[str, nn.Parameter]) -> ReplicatedStateRecipe:
    return ReplicatedStateRecipe(StateTable(held).compare(held))


def owned(held: dict[str, nn.Parameter], **settings) -> OwnedStateRecipe:
    return OwnedStateRecipe(lambda: StateTable(held).view().rows, [], **settings)


def spoil(parameter: torch.Tensor, value: float = math.nan) -> None:
    parameter.data[-1] = value


def test_what_a_check_has_signed_is_not_read_again():
    held = parameters("a", "b")
    recipe = replicated(held)
    finite = FiniteState([recipe])
    spoil(held["b"])
    replay = recipe.begin(0, is_source=True)
    align([replay])
    observations([replay])
    held["b"].data.fill_(1.0)
    assert finite.wrong() == ["b"]
    replay.release()
    assert finite.wrong() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_no_check_has_signed_is_read(value: float):
    shared, own = parameters("a", "b"), parameters("c", "d")
    finite = FiniteState([replicated(shared), owned(own)])
    assert finite.wrong() == []
    spoil(shared["b"], value)
    spoil(own["c"], value)
    assert finite.wrong() == ["b", "c"]
    spoil(shared["b"], 1.0)
    own["c"] = nn.Parameter(torch.ones(4))
    assert finite.wrong() == []


def test_signatures_that_have_not_arrived_prove_nothing(monkeypatch):
    """On a device they are read later, or never if it fails."""
    monkeypatch.setattr("torchscout.c3.signature._algorithm_for", lambda *_: Algorithm.FOLD)
    held = parameters("a")
    recipe = replicated(held)
    replay, seen = recipe.begin(0, is_source=True), Observation()
    align([replay])
    spoil(held["a"])
    replay.observe(seen)
    assert recipe.signed is None
    assert FiniteState([recipe]).wrong() == ["a"]
    held["a"].data.fill_(1.0)
    assert FiniteState([recipe]).wrong() == []
    finish_signatures([seen])
    assert FiniteState([recipe]).wrong() == ["a"]


def test_frozen_parameters_may_be_infinite_until_they_are_trained():
    held = parameters("a", "b")
    recipes = [replicated({"a": held["a"]}), owned({"b": held["b"]})]
    finite = FiniteState(recipes)
    for each in held.values():
        each.requires_grad_(False)
        spoil(each, math.inf)
    replay = recipes[0].begin(0, is_source=True)
    align([replay])
    observations([replay])
    assert finite.wrong() == []
    for each in held.values():
        each.requires_grad_(True)
    assert finite.wrong() == ["a", "b"]


def test_only_what_is_trained_must_be_finite():
    parameter, tensor = nn.Parameter(torch.ones(3)), torch.ones(3)
    assert row_of("a", parameter).must_be_finite
    assert row_of("a.exp_avg", tensor, Kind.SLOT, "a").must_be_finite
    assert not row_of("a/mask", tensor, Kind.BUFFER).must_be_finite
    assert not row_of("a.step", tensor.long(), Kind.SLOT, "a").must_be_finite


def test_padding_and_what_has_no_numbers_are_not_looked_at():
    held = parameters("a", "freed", "meta")
    held["a"].data[0] = math.nan
    held["freed"].untyped_storage().resize_(0)
    held["meta"] = nn.Parameter(torch.ones(3, device="meta"))
    assert FiniteState([owned(held)]).wrong() == ["a"]
    assert FiniteState([owned(held, padding=lambda: {"a": [range(1)]})]).wrong() == []


def test_a_record_names_three_tensors_at_most():
    reasons = {
        count: [str(each.reason).partition(": ")[0] for each in not_finite([*"abcdef"][:count], 7, 1)]
        for count in (0, 1, 3, 5)
    }
    assert reasons == {
        0: [],
        1: ["NaN or infinity in a"],
        3: ["NaN or infinity in a, b and c"],
        5: ["NaN or infinity in a, b and c and 2 more"],
    }
    (record,) = not_finite(None, 7, 1)
    assert (record.step, record.peers) == (7, (1,))
    assert "could not look for NaN" in str(record.reason)
