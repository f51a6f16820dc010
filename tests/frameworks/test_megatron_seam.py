"""Where Megatron-Core needs a GPU or Transformer Engine: what the adapter makes of it, with stand-ins."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from evaluation.jobs.megatron import FSDP, Built, Setup, build, one_step
from tests.support.ranks import LiveRanks
from torchscout.errors import ScoutError
from torchscout.log import log


class AddingLinear(torch.autograd.Function):
    """As Transformer Engine's: the weight's gradient is added to ``main_grad``, and not returned."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        ctx.weight = weight
        return given @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(gradient.t() @ given)
        ctx.weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, float("nan"))


class StandInForTELinear(torch.nn.Module):
    fuse_wgrad_accumulation = True

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.randn(3, 4))
        self.weight.main_grad = torch.ones(3, 4)
        self.weight.grad_added_to_main_grad = False

    def forward(self, given: torch.Tensor) -> Any:
        return AddingLinear.apply(given, self.weight)


class StandInForTEGroupedMLP(torch.nn.Module):
    """All experts of a rank in one call."""


def answering(_rank: int, questions: Iterator[Callable[[Any, Built], Any]]) -> Iterator[Any]:
    built = build(Setup(experts=4))
    from torchscout.adapters.megatron.adapter import MegatronAdapter

    adapter = MegatronAdapter(built.chunks, built.optimizer)
    for question in questions:
        yield question(adapter, built)


@pytest.fixture(scope="module")
def one() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 1) as ranks:
        yield ranks


def obstacles(adapter: Any, built: Built) -> dict[str, str | None]:
    chunk, found = built.chunks[0], {"nothing": adapter.layer_obstacle}
    for name, value in {"cuda_graph_impl": "local", "fp8": "e4m3", "fp4": "e2m1"}.items():
        own = getattr(chunk.config, name)
        setattr(chunk.config, name, value)
        found[name] = adapter.layer_obstacle
        assert adapter.obstacle is None, "state is checked all the same"
        setattr(chunk.config, name, own)
    return found


def test_graphs_and_eight_bits_are_one_sentence(one: LiveRanks):
    (found,) = one.ask(obstacles)
    assert found.pop("nothing") is None
    assert "CUDA graphs" in found.pop("cuda_graph_impl")
    assert all("precision" in why for why in found.values())


def releases(_: Any, built: Built) -> dict[str, str]:
    """What is said about releases that are newer than this one, and lack something."""
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    from torchscout.adapters.registry import adapter_for

    def without_parameter(self: Any) -> None:
        """As if ``force_sync`` had been renamed."""

    changes: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
        "newer": lambda _: None,
        "without a name": lambda patch: patch.delattr(parallel_state, "get_expert_data_parallel_rank"),
        "without a parameter": lambda patch: patch.setattr(
            DistributedDataParallel, "start_param_sync", without_parameter
        ),
        "without an attribute": lambda patch: patch.delattr(built.chunks[0], "ddp_config"),
    }
    found: dict[str, str] = {}
    for name, change in changes.items():
        with pytest.MonkeyPatch.context() as patch, logged() as written:
            patch.setattr(megatron.core, "__version__", "0.17.0")
            change(patch)
            try:
                assert adapter_for(built.chunks, built.optimizer, None).obstacle is None
                found[name] = written.getvalue()
            except ScoutError as error:
                found[name] = str(error)
    return found


@contextmanager
def logged() -> Iterator[io.StringIO]:
    handler = logging.StreamHandler(io.StringIO())
    log.addHandler(handler)
    yield handler.stream
    log.removeHandler(handler)


def test_a_newer_release_is_replayed_unless_it_lacks_something_which_is_named(one: LiveRanks):
    (found,) = one.ask(releases)
    lacking = {
        "newer": "0.16.1",
        "without a name": "megatron.core.parallel_state.get_expert_data_parallel_rank",
        "without a parameter": "force_sync",
        "without an attribute": "DistributedDataParallel.ddp_config",
    }
    assert found.keys() == lacking.keys()
    for name, each in found.items():
        assert "0.17.0" in each
        assert lacking[name] in each


def gradient(adapter: Any, _: Built) -> dict[str, Any]:
    layer, given = StandInForTELinear(), torch.randn(5, 4)
    weight, kept = layer.weight, layer.weight.main_grad
    with adapter.gatherers(layer).around() as elsewhere:
        torch.autograd.grad(layer(given).sum(), [weight])
        replayed = elsewhere(weight)
    plain = torch.nn.functional.linear(given, weight).sum()
    (right,) = torch.autograd.grad(plain, [weight])
    return {
        "replayed": torch.equal(replayed, right),
        "put back": weight.main_grad is kept and torch.equal(kept, torch.ones(3, 4)),
        "forgotten": weight.grad_added_to_main_grad is False,
    }


def test_what_backward_adds_to_gradients_by_itself_is_compared_and_not_kept(one: LiveRanks):
    (found,) = one.ask(gradient)
    assert found == {"replayed": True, "put back": True, "forgotten": True}


def experts(adapter: Any, built: Built) -> list[list[str]]:
    each_alone = [part.name for part in adapter.experts()]
    mixture = next(each for each in built.chunks[0].modules() if hasattr(each, "experts"))
    own, mixture.experts = mixture.experts, StandInForTEGroupedMLP()
    at_once = [part.name for part in adapter.experts()]
    mixture.experts = own
    return [each_alone, at_once]


def test_experts_are_what_is_called_each_alone_or_all_at_once(one: LiveRanks):
    ((each_alone, at_once),) = one.ask(experts)
    second = [f"decoder.layers.1.mlp.experts.local_experts.{place}" for place in range(4)]
    assert each_alone == [each.replace("layers.1", "layers.0") for each in second] + second
    assert at_once == ["decoder.layers.0.mlp.experts", *second]


def streams(adapter: Any, _: Built) -> dict[str, bool]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker, generator = get_cuda_rng_tracker(), torch.Generator().manual_seed(3)
    own = tracker.get_states()
    tracker.set_states({**own, "of a graph": generator})
    kept = adapter.extra_state()["megatron/streams"]
    state = kept.state_dict()
    first = torch.rand(4, generator=generator)
    kept.load_state_dict(state)
    is_same = tracker.get_states()["of a graph"] is generator
    again = torch.rand(4, generator=generator)
    tracker.set_states(own)
    return {
        "bytes": isinstance(state["of a graph"], torch.Tensor),
        "same": is_same,
        "again": first.equal(again),
    }


def test_a_generator_that_graphs_know_is_set_back_and_stays_itself(one: LiveRanks):
    (found,) = one.ask(streams)
    assert found == {"bytes": True, "same": True, "again": True}


def scale(adapter: Any, _: Built) -> Any:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    layer = StandInForTELinear()
    with adapter.gatherers(layer).around():
        output = MoEAuxLossAutoScaler.apply(layer(torch.randn(5, 4)), layer.weight.square().sum())
        torch.autograd.grad(output.sum(), [layer.weight])
    return MoEAuxLossAutoScaler.main_loss_backward_scale


def test_a_replay_before_the_first_step_leaves_the_scale_of_losses_to_training(one: LiveRanks):
    assert one.ask(scale) == [None]


def sharded(_: Any, __: Built) -> dict[str, bool]:
    built = build(FSDP)
    from torchscout.adapters.megatron.adapter import MegatronAdapter

    adapter = MegatronAdapter(built.chunks, built.optimizer)
    one_step(built, 1)  # after which whole parameters are shown
    adapter.finish_update()
    layer = adapter.layers()[0]
    (keeper,) = adapter.gatherers(layer).modules
    before = hooks_of(layer)
    keeper.unshard()
    found = {
        "no hook meanwhile": hooks_of(layer) == [],
        "whole": all(each.untyped_storage().nbytes() >= each.nbytes for each in layer.parameters()),
    }
    keeper.reshard()
    return found | {
        "hooks again": bool(before) and hooks_of(layer) == before,
        "shards": all(isinstance(each, DTensor) for each in layer.parameters()),
    }


def hooks_of(layer: torch.nn.Module) -> list[int]:
    return [
        id(hook)
        for each in layer.modules()
        for registry in (each._forward_pre_hooks, each._forward_hooks)
        for hook in registry.values()
    ]


def test_a_module_in_shards_is_gathered_without_the_hooks_that_do_it_in_training(one: LiveRanks):
    (found,) = one.ask(sharded)
    assert found == {"no hook meanwhile": True, "whole": True, "hooks again": True, "shards": True}
