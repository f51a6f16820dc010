"""Which modules are inside compiled code, and what one eager pass saves for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from tests.support.replay_by_hand import CPU, align, observe
from torchscout.errors import ReplayError
from torchscout.replay.compiled import CompiledCode, compiled_around, is_compiled
from torchscout.replay.recipe import SavedInput
from torchscout.replay.recipes.layer import LayerRecipe, LayerReplay


class Block(nn.Module):
    """Has everything that a pass must leave as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():
            self.calls += 1
        x = self.drop(self.norm(self.mix(x))) * scale
        return x, x.detach().sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(4, 4)
        self.act: Callable[[], Any] = lambda: None
        """What an eager pass does besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not torch.compiler.is_compiling():
            self.act()
        for block in self.blocks:
            x, _ = block(x, scale=torch.ones(4))
        return x


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def replays_of(net: Net, model: nn.Module) -> tuple[LayerRecipe, CompiledCode]:
    modules = {"first": net.first, **{f"blocks.{i}": each for i, each in enumerate(net.blocks)}}
    modules["unused"] = net.unused
    code = CompiledCode(model, CPU)
    surfaces = {each: name for name, each in net.named_parameters()}
    return LayerRecipe("layer", modules, surfaces, CPU, compiled=code), code


def train(model: nn.Module) -> None:
    model(torch.randn(3, 4)).square().sum().backward()


def made(seed: int = 0) -> tuple[Net, nn.Module]:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.compile(net, backend="eager")


def checked(recipe: LayerRecipe, target: int, model: nn.Module, *, is_source: bool = True) -> LayerReplay:
    replay = recipe.begin(target, is_source=is_source)
    train(model)
    return replay


def everything(net: Net) -> list[Any]:
    tensors = [*net.state_dict().values(), torch.get_rng_state()]
    tensors += [each.grad for each in net.parameters() if each.grad is not None]
    return [each.tolist() for each in tensors] + [block.calls for block in net.blocks]


def test_the_compiled_module_around_a_module_is_found():
    net, model = made()
    assert compiled_around(model, net.blocks[1]) is model
    assert compiled_around(model, model) is None, "the compiled module itself is captured as it is"
    assert compiled_around(net, net.blocks[1]) is None
    net.compile(backend="eager")
    assert compiled_around(nn.Sequential(net), net.blocks[1].mix) is net


def test_a_compiled_block_is_inside_nothing_but_its_parts_are():
    net = Net()
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    assert compiled_around(net, net.blocks[0]) is None
    assert compiled_around(net, net.blocks[1]) is None
    assert compiled_around(net, net.blocks[0]._orig_mod.mix) is net.blocks[0]


def test_a_module_whose_forward_alone_is_compiled_counts_as_compiled():
    class Decorated(Block):
        forward = torch.compile(Block.forward, backend="eager")

    assert is_compiled(Decorated())
    net = Net()
    assert not is_compiled(net)
    net.forward = torch.compile(net.forward, backend="eager")
    assert is_compiled(net)
    assert compiled_around(net, net.first) is net


def test_blocks_of_one_kind_share_one_saved_input_and_one_pass():
    net, model = made()
    passes: list[None] = []
    net.act = lambda: passes.append(None)
    recipe, _ = replays_of(net, model)
    calls = []
    for target in (1, 2, 3, 0):
        replay = checked(recipe, target, model)
        replay.describe()
        calls.append(replay.invocation())
        replay.release()
    assert len(passes) == 1
    shared = [[leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)] for call in calls[:3]]
    assert all(each is same for each, same in zip(shared[0], shared[1], strict=True))
    assert all(each is same for each, same in zip(shared[0], shared[2], strict=True))
    assert calls[3].leaves[0] is not calls[0].leaves[0]


def test_gradients_are_asked_for_where_training_has_them_and_nowhere_else():
    net, model = made()
    recipe, _ = replays_of(net, model)
    replay = checked(recipe, 2, model)
    replay.describe()
    call = replay.invocation()
    assert call.requires_grad == [True, False], "the input has a history, the scale has none"
    assert list(call.gradients) == [0], "the second output is detached"
    assert call.gradients[0].norm() == pytest.approx(1, rel=0.5)
    again = checked(recipe, 2, model)
    again.describe()
    assert torch.equal(again.invocation().gradients[0], call.gradients[0])


def test_a_peer_that_is_not_the_source_makes_no_gradients():
    net, model = made()
    recipe, _ = replays_of(net, model)
    assert checked(recipe, 2, model, is_source=False).describe()["gradients"] == {}


def test_a_pass_leaves_training_unchanged():
    net, model = made()
    recipe, _ = replays_of(net, model)
    replay = checked(recipe, 1, model)
    before, hooks = everything(net), [len(each._forward_pre_hooks) for each in net.modules()]
    align([replay])
    observe(replay)
    replay.release()
    assert everything(net) == before
    assert [len(each._forward_pre_hooks) for each in net.modules()] == hooks == [0] * len(hooks)
    assert not model._forward_pre_hooks


def test_peers_that_saved_other_inputs_compute_the_same_on_the_sources():
    jobs = []
    for rank in range(3):
        net, model = made()
        recipe, _ = replays_of(net, model)
        replay = recipe.begin(1, is_source=rank == 1)
        torch.manual_seed(rank)
        train(model)
        jobs.append(replay)
    align(jobs, source=1)
    seen = [observe(each) for each in jobs]
    assert seen[0] == seen[1] == seen[2]
    assert "blocks.0/grad_input" in seen[0]


def test_a_module_that_no_pass_calls_is_not_checked_and_three_passes_are_made():
    net, model = made()
    passes: list[None] = []
    net.act = lambda: passes.append(None)
    recipe, _ = replays_of(net, model)
    for _ in range(5):
        replay = checked(recipe, 4, model)
        with pytest.raises(ReplayError, match="did not call it with gradients"):
            replay.describe()
        replay.release()
    assert len(passes) == 3


def test_a_failing_pass_is_reported_tried_three_times_and_leaves_training_unchanged():
    net, model = made()
    recipe, _ = replays_of(net, model)
    failures: list[None] = []

    def fail() -> None:
        failures.append(None)
        torch.rand(1)
        raise MemoryError("no room")

    net.act = fail
    for turn in range(5):
        replay = checked(recipe, 1, model)
        before = everything(net)
        with pytest.raises(MemoryError if turn < 3 else ReplayError, match="no room"):
            replay.describe()
        replay.release()
        assert everything(net) == before
    assert len(failures) == 3


def test_targets_that_are_due_together_share_a_failed_pass():
    net, model = made()
    recipe, _ = replays_of(net, model)
    failures: list[None] = []

    def fail() -> None:
        failures.append(None)
        raise MemoryError("no room")

    net.act = fail
    replays = [recipe.begin(target, is_source=True) for target in (0, 1)]
    train(model)
    for replay, error in zip(replays, (MemoryError, ReplayError), strict=True):
        with pytest.raises(error, match="no room"):
            replay.describe()
    assert len(failures) == 1


def test_a_compiled_module_that_was_not_called_is_reported_and_tried_again():
    net, model = made()
    recipe, _ = replays_of(net, model)
    replay = recipe.begin(1, is_source=True)
    with pytest.raises(
        ReplayError, match="the compiled module around it cannot be run eagerly: it was not called"
    ):
        replay.describe()
    replay.release()
    assert "leaves" in checked(recipe, 1, model).describe()


def test_a_table_that_renormalizes_itself_keeps_the_pass_from_running():
    net, _ = made()
    net.table = nn.Embedding(3, 4, max_norm=1.0)
    model = torch.compile(net, backend="eager")
    recipe, _ = replays_of(net, model)
    replay = checked(recipe, 1, model)
    with pytest.raises(ReplayError, match="max_norm"):
        replay.describe()


def test_a_part_that_synchronizes_gradients_keeps_the_pass_from_running():
    """DDP would wait for a backward pass, and fail in training's next step."""
    net, model = made()
    net.first.set_requires_gradient_sync = lambda _: None  # as `replicate` and FSDP2 give a module
    recipe, _ = replays_of(net, model)
    replay = checked(recipe, 1, model)
    with pytest.raises(ReplayError, match="first synchronizes gradients"):
        replay.describe()


def test_a_saved_call_is_replayed_eagerly_without_a_pass():
    """After a restart: what the compiled model would be called with is not known yet."""
    from torchscout.replay.capture.saved_calls import SavedCall

    net, model = made()
    recipe, _ = replays_of(net, model)
    first = checked(recipe, 1, model)
    align([first])
    kept = SavedCall.of(first.invocation())
    seen = observe(first)

    again_net, again_model = made()
    again_net.load_state_dict(net.state_dict())
    later, _ = replays_of(again_net, again_model)
    replay = later.replay_saved(1, SavedInput(is_source=True, call=kept.call, tensors=kept.tensors))
    assert replay.is_eager
    assert not again_model._forward_pre_hooks
    align([replay])
    assert observe(replay)["blocks.0/output"] == seen["blocks.0/output"]
