"""One call of a module, caught while training makes it; nothing else is, and training never notices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.replay_by_hand import CPU, armed, calling, doubling, reason, x
from torchscout.replay.capture.hooks import CallCapture
from torchscout.replay.capture.invocation import Invocation
from torchscout.utils.reentrancy import own_work


def argument(invocation: Invocation, place: int = 0) -> list:
    return invocation.leaves[place].tolist()


def test_arguments_gradients_and_mask_of_a_call():
    module = doubling()
    with armed(module) as capture:
        (module(x(1, 2)) * torch.tensor([3.0, 4.0])).sum().backward()
        found = capture.invocation()
    assert argument(found) == [1, 2]
    assert found.requires_grad == [True]
    assert {place: each.tolist() for place, each in found.gradients.items()} == {0: [3, 4]}


def test_of_several_pending_calls_the_last_to_get_gradients_is_captured():
    module = doubling()
    with armed(module) as capture:
        first, second = module(x(1, 1)), module(x(2, 2))
        second.sum().backward()
        first.sum().mul(5).backward()
        found = capture.invocation()
    assert argument(found) == [1, 1]
    assert found.gradients[0].tolist() == [5, 5]


def test_an_evaluation_after_training_is_ignored():
    module = doubling()
    with armed(module) as capture:
        module(x(1, 2)).sum().backward()
        with torch.no_grad():
            module(torch.tensor([5.0, 5.0]))
        with torch.inference_mode():
            module(torch.tensor([6.0, 6.0]))
        module(x(7, 7))  # somebody forgot no_grad; nothing came back to it
        assert argument(capture.invocation()) == [1, 2]


@pytest.mark.parametrize("keep", [True, False])
def test_recomputation_in_backward_is_not_captured(keep: bool):
    calls: list[int] = []

    def forward(self: Any, x: torch.Tensor, call: int) -> torch.Tensor:
        calls.append(call)
        return torch.sin(x * self.weight)

    module = calling(forward)
    with armed(module, keep=keep) as capture:
        output = checkpoint(lambda given: module(given, len(calls)), x(1, 2), use_reentrant=False)
        output.sum().mul(2).backward()
        found = capture.invocation()
    assert calls == [0, 1]
    assert found.leaves[1] == 0
    assert [each.tolist() for each in found.gradients.values()] == ([[2, 2]] if keep else [])


def test_a_call_of_scouts_own_is_not_captured():
    module = doubling()
    with armed(module) as capture:
        with own_work():
            module(x(1, 2)).sum().backward()
        assert reason(capture).startswith("it was not called")


def test_a_frozen_module_has_no_gradients_and_no_mask():
    module = doubling().requires_grad_(False)
    with armed(module) as capture:
        module(torch.ones(2))
        found = capture.invocation()
    assert (found.requires_grad, found.gradients) == ([False], {})


def test_gradients_are_indexed_by_the_position_of_the_output_tensor():
    def forward(self: Any, x: torch.Tensor) -> Any:
        shown = {"logits": x * self.weight, "cache": None, "scores": [x.detach(), x * 3]}
        return shown, None, 5, x * 7

    module = calling(forward)
    with armed(module) as capture:
        shown, _, _, last = module(x(1, 2))
        (shown["scores"][1].sum() * 2 + last.sum() * 4).backward()
        found = capture.invocation()
    assert {place: each.tolist() for place, each in found.gradients.items()} == {2: [2, 2], 3: [4, 4]}


def test_arguments_by_name_and_in_containers_are_captured():
    module = calling(lambda self, x, *, mask, scale: x * self.weight * mask["keep"][0] * scale)
    with armed(module) as capture:
        module(x(1, 2), mask={"keep": (torch.tensor([True, False]), None)}, scale=2.0).sum().backward()
        found = capture.invocation()
    args, kwargs = found.arguments({})
    assert args[0].tolist() == [1, 2]
    assert kwargs["scale"] == 2.0
    assert kwargs["mask"]["keep"][0].tolist() == [True, False]
    assert found.requires_grad == [True, False, False, False]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_compiled_in_place_is_captured_and_restored(backend: str):
    module = nn.Linear(2, 2)
    module.compile(backend=backend)
    compiled = module._compiled_call_impl
    module(x(0, 0)).sum().backward()
    with armed(module) as capture:
        module(x(1, 2)).sum().mul(3).backward()
        found = capture.invocation()
        assert argument(found) == [1, 2]
        assert found.gradients[0].tolist() == [3, 3]
    assert module._compiled_call_impl is compiled
    assert module(x(1, 2)).shape == (2,)


def test_a_compiled_wrapper_is_captured_too():
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    with armed(module) as capture:
        module(x(1, 2)).sum().backward()
        assert argument(capture.invocation()) == [1, 2]


def test_only_the_source_keeps_values():
    module = doubling()
    with armed(module, keep=False) as capture:
        module(x(1, 2)).sum().backward()
        found = capture.invocation()
        assert [leaf for leaf in found.leaves if isinstance(leaf, torch.Tensor)] == []
        assert found.gradients == {}
        assert found.requires_grad == [True]


def test_disarming_releases_tensors_and_hooks():
    module = doubling()
    capture = CallCapture(module, CPU, keep=True)
    module(x(1, 2)).sum().backward()
    held = weakref.ref(capture.invocation().leaves[0])
    capture.disarm()
    assert held() is None
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    module(x(1, 2)).sum().backward()
    assert reason(capture).startswith("it was not called")


def test_a_gradient_that_comes_after_disarming_is_not_kept():
    module = doubling()
    capture = CallCapture(module, CPU, keep=True)
    output = module(x(1, 2))
    capture.disarm()
    output.sum().backward()
    assert reason(capture).startswith("it was not called")


def test_an_output_that_outlives_the_step_keeps_no_hook():
    module = calling(lambda self: self.weight)
    with armed(module) as capture:
        (module() * 3).sum().backward()
        assert capture.invocation().gradients[0].tolist() == [3, 3]
    assert not module.weight._backward_hooks


GRADIENTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "expanded": (torch.sum, (3, 1)),
    "transposed": (lambda y: (y.t().contiguous() * torch.ones(3, 2)).sum(), (1, 2)),
    "partly expanded": (lambda y: (y.sum(0) * torch.tensor([1.0, 2.0, 3.0])).sum(), (3, 1)),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_any_strides_become_one_block_of_the_same_values(kind: str):
    loss, strides = GRADIENTS[kind]
    module = calling(lambda self, x: x * self.weight[:, None])
    with armed(module) as capture:
        output = module(torch.ones(2, 3))
        seen: list[torch.Tensor] = []
        output.register_hook(lambda gradient: seen.append(gradient.clone()))
        loss(output).backward()
        dense = capture.invocation().densified().gradients[0]
    assert torch.equal(dense, seen[0])
    assert dense.stride() == strides


def test_a_lazily_conjugated_gradient_becomes_plain_bytes():
    module = calling(lambda self, x: x * self.weight)
    values = torch.tensor([1 + 2j, 3 - 1j])
    with armed(module) as capture:
        output = module(values)
        (output.conj() * values).abs().sum().backward()
        raw = capture.invocation().gradients[0]
        dense = capture.invocation().densified().gradients[0]
    assert raw.is_conj(), "otherwise this test shows nothing"
    assert not dense.is_conj()
    assert torch.equal(dense, raw)


def test_a_view_given_as_input_is_captured_alone():
    module = calling(lambda self, x: x * self.weight)
    with armed(module) as capture:
        module(torch.arange(8.0).view(2, 4)[:, 1:3]).sum().backward()
        (leaf,) = capture.invocation().leaves
    assert leaf.tolist() == [[1, 2], [5, 6]]
    assert leaf.untyped_storage().nbytes() == 16


@pytest.mark.parametrize("inside", [True, False])
def test_an_input_changed_afterwards_was_captured_before(inside: bool):
    module = calling(lambda self, x: (x.add_(1) if inside else x) * self.weight)
    given = torch.ones(2)
    with armed(module) as capture:
        output = module(given).sum()
        given.data.mul_(100)
        output.backward()
        assert argument(capture.invocation()) == [1, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_model_can_be_deleted_afterwards(compiled: bool):
    module = nn.Linear(2, 2)
    if compiled:
        module.compile(backend="eager")
    capture = CallCapture(module, CPU, keep=True)
    given = x(1, 2)
    module(given).sum().backward()
    capture.disarm()
    held, weight = weakref.ref(module), weakref.ref(module.weight)
    if compiled:  # the compiler keeps cycles of its own
        torch._dynamo.reset()
    gc.disable()
    try:
        del module
        if compiled:
            gc.collect()
        assert (held(), weight()) == (None, None)
    finally:
        gc.enable()
