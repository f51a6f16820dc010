"""A call that was not captured has a reason, and no exception reaches training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.support.replay_by_hand import armed, calling, doubling, reason, x


def test_an_evaluation_alone_is_the_reason_for_refusal():
    module = doubling()
    with armed(module) as capture, torch.no_grad():
        module(torch.ones(2))
        assert "called only without gradients: in an evaluation" in reason(capture)


def test_a_failure_is_not_hidden_by_a_later_evaluation():
    module = calling(lambda self, x: x.to_dense() * self.weight)
    with armed(module) as capture:
        module(torch.ones(2).to_sparse())
        with torch.no_grad():
            module(torch.ones(2).to_sparse())
        assert "sparse_coo" in reason(capture)


def test_reentrant_checkpointing_is_reported():
    module = doubling()
    with armed(module) as capture:
        checkpoint(module, x(1, 2), use_reentrant=True).sum().backward()
        assert "use_reentrant=True, which replay does not support" in reason(capture)


def test_a_call_inside_compiled_code_is_not_captured_and_reported():
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner, nn.ReLU())
    outer.compile(backend="eager")
    with armed(inner) as capture:
        outer(x(1, 2)).sum().backward()
        assert "only inside compiled code" in reason(capture)


class Strange:
    """Something that cannot be taken apart."""


@pytest.fixture
def strange():
    def fail(_: Any) -> Any:
        raise RuntimeError("cannot be taken apart")

    pytree.register_pytree_node(Strange, fail, lambda *_: Strange())
    yield Strange()
    pytree._deregister_pytree_node(Strange)


def test_a_failing_capture_of_arguments_is_reported_and_never_raised(strange: Strange):
    module = calling(lambda self, x, _: x * self.weight)
    with armed(module) as capture:
        assert module(x(1, 2), strange).tolist() == [1, 2]
        assert reason(capture) == "RuntimeError: cannot be taken apart"


def test_a_failing_capture_of_outputs_is_reported_and_never_raised(strange: Strange):
    module = calling(lambda self, x: (x * self.weight, strange))
    with armed(module) as capture:
        assert module(x(1, 2))[1] is strange
        assert reason(capture) == "RuntimeError: cannot be taken apart"


def test_a_forward_that_raises_leaves_a_call_without_gradients():
    module = calling(lambda *_: 1 / 0)
    with armed(module) as capture:
        with pytest.raises(ZeroDivisionError):
            module(x(1, 2))
        assert capture.invocation().gradients == {}


class Wrapped(torch.Tensor):
    pass


UNSENDABLE = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "subclass": lambda: torch.ones(2).as_subclass(Wrapped),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("kind", "message"), [("sparse", "sparse_coo"), ("subclass", "a Wrapped"), ("meta", "torch.strided")]
)
def test_an_input_that_cannot_be_sent_as_bytes_is_reported(kind: str, message: str, keep: bool):
    module = calling(lambda self, _: self.weight * 2)
    with armed(module, keep=keep) as capture:
        module(UNSENDABLE[kind]()).sum().backward()
        assert "is among the inputs" in reason(capture)
        assert message in reason(capture)


class Cache:
    """As a model's layers are given: it holds things that hold tensors, and has itself somewhere inside."""

    def __init__(self, *entries: torch.Tensor) -> None:
        self.slots = [SimpleNamespace(entry=each, cache=self) for each in entries]

    def add(self, entry: torch.Tensor) -> torch.Tensor:
        self.slots.append(SimpleNamespace(entry=entry, cache=self))
        return entry


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("entries", [0, 1], ids=["filled by the call", "filled before"])
def test_an_object_that_holds_tensors_is_reported(entries: int, keep: bool):
    module = calling(lambda self, x, cache: x * cache.add(self.weight * 2))
    with armed(module, keep=keep) as capture:
        module(x(1, 2), Cache(*[torch.ones(2)] * entries)).sum().backward()
        assert reason(capture).startswith("argument 1 is a Cache that contains tensors, which cannot be sent")


def test_an_object_without_tensors_is_passed_on():
    module = calling(lambda self, x, cache: x * self.weight * len(cache.slots))
    with armed(module) as capture:
        module(x(1, 2), cache := Cache()).sum().backward()
        assert capture.invocation().leaves[1] is cache


def test_a_gradient_that_cannot_be_sent_as_bytes_is_reported():
    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.to_sparse()

    module = doubling()
    with armed(module) as capture:
        Sparse.apply(module(x(1, 2))).sum().backward()
        assert reason(capture) == "the gradient of its output is a torch.sparse_coo tensor of torch.float32"


def test_a_module_that_writes_to_its_parameters_is_reported_before_it_is_called_again():
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight

    module = calling(forward)
    for keep in (True, False):
        with armed(module, keep=keep) as capture:
            module(x(1, 2)).sum().backward()
            assert reason(capture) == "its forward pass writes to its own parameters"


def test_an_update_between_two_calls_does_not_count_as_a_write_of_the_module():
    module = doubling()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with armed(module) as capture:
        for _ in range(2):
            module(x(1, 2)).sum().backward()
            optimizer.step()
        assert capture.invocation().leaves[0].tolist() == [1, 2]
