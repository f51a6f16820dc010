"""A replayed call that is saved for a sweep: written to a checkpoint and loaded in another process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.replay_by_hand import CPU
from torchscout.replay.capture.context import Attention
from torchscout.replay.capture.invocation import Invocation
from torchscout.replay.capture.saved_calls import SavedCalls, restored
from torchscout.state import encoding
from torchscout.state.collect import is_loader

KEY = ("layer", "layer.3")


def call(*args: Any, **kwargs: Any) -> Invocation:
    made = Invocation.of(args, kwargs, CPU, keep=True)
    made.gradients[0] = torch.arange(4.0)
    return made


def kept(made: Invocation, limit: int = 1 << 20) -> SavedCalls:
    saved_calls = SavedCalls()
    saved_calls.limit = limit
    saved_calls.keep(KEY, made)
    return saved_calls


def saved(saved_calls: SavedCalls, limit: int = 1 << 20) -> SavedCalls:
    """As another process loads them."""
    document, tensors = encoding.encode(saved_calls.state_dict())
    loaded = SavedCalls()
    loaded.limit = limit
    loaded.load_state_dict(encoding.decode(json.loads(json.dumps(document)), tensors))
    return loaded


def test_a_call_comes_back_bit_for_bit_with_its_arguments_as_they_were():
    torch.manual_seed(3)
    x = torch.randn(4, 3).t().requires_grad_()  # not contiguous
    made = call(x, [2, None, (torch.tensor([1, 2]), "mask")], scale=0.5, flags={"a": True})
    state = torch.get_rng_state()
    found = saved(kept(made)).of(KEY)
    assert found is not None
    again = restored(found.call, nn.Linear(2, 2), CPU, found.tensors)
    args, kwargs = again.arguments({})
    assert torch.equal(args[0], x)
    assert args[0].stride() == x.stride()
    assert args[1][:2] == [2, None]
    assert torch.equal(args[1][2][0], torch.tensor([1, 2]))
    assert (args[1][2][1], kwargs) == ("mask", {"scale": 0.5, "flags": {"a": True}})
    assert again.requires_grad == made.requires_grad
    assert torch.equal(again.gradients[0], torch.arange(4.0))
    assert torch.equal(again.randomness.states["cpu"], state)


def test_a_rank_without_saved_calls_allocates_from_the_description_alone():
    made = call(torch.randn(4, 3), 7)
    found = kept(made).of(KEY)
    assert found is not None
    room = restored(found.call, nn.Linear(2, 2), CPU).like(found.call, CPU)
    assert [(each.shape, each.dtype) for each in room.tensors()] == [
        (each.shape, each.dtype) for each in made.tensors()
    ]
    assert room.leaves[1] == 7


def test_later_training_does_not_change_saved_calls():
    gradient = torch.zeros(4)
    made = call(torch.ones(2))
    made.gradients[0] = gradient
    found = kept(made).of(KEY)
    assert found is not None
    gradient.add_(1)
    made.leaves[0].add_(1)
    again = restored(found.call, nn.Linear(2, 2), CPU, found.tensors)
    assert torch.equal(again.gradients[0], torch.zeros(4))
    assert torch.equal(again.leaves[0], torch.ones(2))


class Mask:
    """An object that cannot be saved."""


def in_a_ring() -> Invocation:
    made = call(torch.ones(2))
    made.attention = Attention(made.attention.function, is_ring=True)
    return made


@pytest.mark.parametrize(
    ("made", "limit", "reason"),
    [
        (lambda: call(torch.ones(2), Mask()), 1 << 20, "argument 1 is .*Mask, which cannot be saved"),
        (in_a_ring, 1 << 20, "context_parallel block"),
        (lambda: call(torch.ones(2)), 40, "saved calls would need .* bytes, and 40 are allowed"),
    ],
)
def test_a_call_that_cannot_be_saved_replaces_the_previous_one_with_the_reason(
    made: Any, limit: int, reason: str
):
    saved_calls = kept(call(torch.ones(2)))
    saved_calls.limit = limit
    saved_calls.keep(KEY, made())
    assert saved_calls.of(KEY) is None
    assert re.search(reason, saved_calls.problems[KEY])
    saved_calls.drop(KEY)
    assert not saved_calls.problems


def test_without_memory_nothing_is_saved_or_loaded():
    saved_calls = kept(call(torch.ones(2)))
    assert saved(saved_calls).of(KEY) is not None
    assert saved(saved_calls, limit=0).of(KEY) is None
    assert kept(call(torch.ones(2)), limit=0).of(KEY) is None


def test_checkpoints_hold_them_by_reference():
    # They are no loader, whose state is copied in every capture.
    saved_calls = kept(call(torch.ones(2)))
    assert not is_loader(saved_calls)
    first, second = (encoding.encode(saved_calls.state_dict())[1] for _ in range(2))
    assert first
    assert all(second[name] is each for name, each in first.items())
