"""Attention that a block has exchanged is in place again for the length of a replay, and no longer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional

from tests.support.replay_by_hand import armed, calling, reason, x
from torchscout.errors import ReplayError
from torchscout.replay.capture.context import Attention


def state() -> tuple[Any, ...]:
    """All that may be exchanged."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return functional.scaled_dot_product_attention, handlers, dict(vars(ring._cp_options))


@contextmanager
def block(**options: Any) -> Iterator[None]:
    """As ``context_parallel`` leaves things in its block."""

    def attend(*_: Any) -> str:
        return "around the ranks"

    before, own = functional.scaled_dot_product_attention, dict(vars(ring._cp_options))
    functional.scaled_dot_product_attention = attend
    vars(ring._cp_options).update(options)
    ring._enable_cp_dtensor_dispatcher()
    yield
    ring._disable_cp_dtensor_dispatcher()
    vars(ring._cp_options).update(own)
    functional.scaled_dot_product_attention = before


def test_applied_reinstalls_ring_attention_and_removes_it_afterwards():
    outside = state()
    with block(enable_load_balance=False):
        inside, attention = state(), Attention.now()
    assert attention.is_ring
    with attention.applied():
        function, handlers, options = state()
        assert function is inside[0]
        assert handlers.keys() == inside[1].keys() > outside[1].keys()
        assert options == inside[2] != outside[2]
    assert state() == outside


def test_applied_removes_ring_attention_even_if_the_replay_fails():
    outside = state()
    with block(enable_load_balance=False):
        attention = Attention.now()
    with pytest.raises(ZeroDivisionError), attention.applied():
        1 / 0  # noqa: B018
    assert state() == outside


def test_plain_attention_can_be_applied_inside_a_ring_attention_block():
    plain = Attention.now()
    assert not plain.is_ring
    with block():
        inside = state()
        with plain.applied():
            assert functional.scaled_dot_product_attention is plain.function
            assert not state()[1].keys() & ring.custom_ops.keys()
        assert (state()[0], state()[2]) == (inside[0], inside[2])
        assert Attention.now().is_ring


def test_peers_must_have_the_same_attention():
    plain = Attention.now()
    with block():
        one = Attention.now()
    with block(enable_load_balance=False):
        other = Attention.now()
    with block():
        one.require(Attention.now().describe())  # another function, made in the same way
    for here, there in [(plain, one), (one, plain), (one, other)]:
        with pytest.raises(ReplayError, match=r"attention is .* here and .* on the source"):
            here.require(there.describe())


def test_a_job_without_context_parallelism_does_not_import_it():
    code = (
        "import sys, torchscout.replay.capture.context as ours\n"
        "assert not ours.Attention.now().is_ring\n"
        "assert ours._MODULE not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def sharded_for_the_call(tensor: torch.Tensor, module: torch.nn.Module) -> None:
    """One step in a block that shards a tensor and makes it whole again."""
    whole = tensor.clone()
    with block():
        tensor.resize_(2).copy_(whole[:2])
        module(x(1, 2)).sum().backward()
        tensor.resize_(4).copy_(whole)


def test_a_buffer_is_captured_as_the_call_found_it():
    module = calling(lambda self, x: x * self.weight * self.table)
    module.register_buffer("table", torch.arange(4.0))
    with armed(module) as capture:
        sharded_for_the_call(module.table, module)
        assert capture.invocation().buffers["table"].tolist() == [0, 1]
    with armed(module, keep=False) as capture:
        sharded_for_the_call(module.table, module)
        assert capture.invocation().buffers == {}


@pytest.mark.parametrize("keep", [True, False])
def test_an_attribute_that_had_another_shape_in_the_call_is_the_reason_for_refusal(keep: bool):
    module = calling(lambda self, x: x * self.weight * self.table)
    module.table = torch.arange(4.0)
    with armed(module, keep=keep) as capture:
        sharded_for_the_call(module.table, module)
        assert reason(capture).startswith("a tensor among its attributes had another shape")
