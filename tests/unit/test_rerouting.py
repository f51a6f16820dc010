"""Captured calls of experts, resized to other numbers of rows."""

from __future__ import annotations

import pytest
import torch

from torchscout.errors import ReplayError
from torchscout.replay.capture.invocation import Invocation, RowResize

CPU = torch.device("cpu")
X = torch.arange(12.0).view(6, 2)


def call(*args: object, gradient: torch.Tensor | None = None) -> Invocation:
    found = Invocation.of(args, {}, CPU, keep=True)
    found.gradients = {} if gradient is None else {0: gradient}
    return found


def arguments(made: Invocation) -> tuple:
    tensors = {place: each for place, each in enumerate(made.leaves) if isinstance(each, torch.Tensor)}
    return made.arguments(tensors)[0]


def test_rows_are_taken_in_turn_and_counts_say_whose_they_are():
    made = RowResize((5, 3)).applied(call(X, torch.tensor([4, 2]), gradient=-X))
    x, counts = arguments(made)
    assert counts.tolist() == [5, 3]
    assert torch.equal(x, torch.cat([X, X[:2]]))
    assert torch.equal(made.gradients[0], -x)


def test_fewer_rows_are_the_first_ones_and_none_at_all_is_a_shape_too():
    assert torch.equal(arguments(RowResize((1, 2)).applied(call(X, torch.tensor([4, 2]))))[0], X[:3])
    x, counts = arguments(RowResize((0, 0)).applied(call(X, torch.tensor([4, 2]))))
    assert (x.shape, counts.tolist()) == ((0, 2), [0, 0])


def test_what_goes_along_with_each_row_is_made_over_and_what_does_not_is_left():
    weights, table = torch.arange(6.0), torch.arange(8.0).view(4, 2)
    x, counts, scores, other = arguments(RowResize((4, 4)).applied(call(X, [4, 2], weights, table)))
    assert counts == [4, 4]
    assert scores.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert other is not None
    assert torch.equal(other, table)
    assert len(x) == 8


def test_padding_belongs_to_no_expert():
    padded = torch.cat([X, torch.full((4, 2), 99.0)])
    x, _ = arguments(RowResize((9,)).applied(call(padded, torch.tensor([6]))))
    assert len(x) == 9
    assert x.max() < 99


def test_a_single_expert_needs_no_counts():
    (x,) = arguments(RowResize((7,)).applied(call(X)))
    assert torch.equal(x, torch.cat([X, X[:1]]))


def test_an_expert_that_nobody_asked_gets_the_same_random_rows_everywhere():
    empty = torch.zeros(0, 2, dtype=torch.bfloat16)
    first, second = (arguments(RowResize((3, 1)).applied(call(empty, torch.tensor([0, 0]))))[0] for _ in "ab")
    assert (first.shape, first.dtype) == ((4, 2), torch.bfloat16)
    assert torch.equal(first, second)
    assert first.unique().numel() > 2


def test_a_shape_for_another_number_of_experts_is_refused():
    with pytest.raises(ReplayError, match="its call has 2 experts, the shape 3"):
        RowResize((1, 1, 1)).require(call(X, torch.tensor([4, 2])))
    with pytest.raises(ReplayError, match="none of its arguments has rows"):
        RowResize((1,)).require(call(torch.tensor([4, 2])))


def test_the_captured_call_stays_as_it_was():
    before = call(X, torch.tensor([4, 2]), gradient=-X)
    RowResize((5, 3)).applied(before)
    assert torch.equal(before.leaves[0], X)
    assert before.leaves[1].tolist() == [4, 2]
    assert torch.equal(before.gradients[0], -X)
