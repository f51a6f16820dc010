"""State with one owner that cannot be watched is not taken for watched."""

from __future__ import annotations

import pytest
import torch

from torchscout.errors import ReplayError
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.state.table import StateTable


def stepped(state: dict[str, torch.Tensor]) -> OwnedStateRecipe:
    """A recipe over two steps of an optimizer."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    recipe = OwnedStateRecipe(lambda: StateTable(state).view().rows, [optimizer])
    recipe.start()
    for step in range(2):
        recipe.watch_after(step)
        weight.grad = torch.ones(4)
        optimizer.step()
    return recipe


def test_state_that_cannot_be_signed_counts_as_unwatched():
    recipe = stepped({"a/weight": torch.ones(3, device="meta")})
    with pytest.raises(ReplayError, match="a meta tensor has no bytes"):
        recipe.begin(0, is_source=True).describe()
    assert recipe.share == 0.0


def test_close_removes_the_optimizer_hooks():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    recipe = OwnedStateRecipe(dict, [optimizer])
    recipe.start()
    assert optimizer._optimizer_step_pre_hooks
    recipe.close()
    assert not optimizer._optimizer_step_pre_hooks
