"""A replayed call runs under training's conditions, alike on all peers, and restores every switch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.replay_by_hand import (
    NAME,
    Block,
    Calling,
    Job,
    batch,
    differing,
    observations,
    sized,
)
from torchscout.replay.recipe import Mode, Observation
from torchscout.utils.reentrancy import own_work


def test_autocast_is_the_sources_in_forward_and_off_in_backward():
    dtypes, in_backward = [], []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            dtypes.append(x.dtype)
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            in_backward.append(torch.is_autocast_enabled("cpu"))
            return gradient

    class Spied(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Spy.apply(super().forward(x))

    def train(module: nn.Module, rank: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 0):
            loss = sized(module(batch(rank)).float())
        loss.backward()

    replays = Job(lambda: Spied(4, 4), train=train).aligned()
    dtypes.clear()
    assert differing(observations(replays)) == set()
    assert dtypes == [torch.bfloat16] * 3
    assert set(in_backward) == {False}
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_around_the_check_is_ignored():
    replays = Job(Block).aligned()
    plain = observations(replays)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert observations(replays) == plain


def test_a_module_in_evaluation_mode_is_replayed_so():
    job = Job(Block, prepared=lambda module: module.eval())
    kept = []
    job.modules[0].dropout.register_forward_hook(
        lambda _, given, out: kept.append(torch.equal(given[0], out))
    )
    assert differing(observations(job.aligned())) == set()
    assert kept == [True]
    assert not job.modules[0].training


def test_an_exception_in_a_module_propagates_and_leaves_everything_unchanged():
    is_broken = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        torch.rand(3)
        if is_broken:
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("a broken kernel")
        return x * self.weight

    replays = Job(lambda: Calling(forward), prepared=lambda module: setattr(module, "count", 0)).aligned()
    is_broken.append(True)
    stream, flags, filters = torch.get_rng_state(), switches(), list(warnings.filters)
    seen = Observation()
    with pytest.raises(RuntimeError, match="a broken kernel"), own_work():
        replays[1].observe(seen)
    assert list(seen.signatures) == [f"{NAME}/input", f"{NAME}/parameters"], "what was seen before counts"
    assert torch.equal(stream, torch.get_rng_state())
    assert switches() == flags
    assert list(warnings.filters) == filters
    assert replays[1]._module.count == 1


def switches() -> tuple:
    inductor: Any = sys.modules.get("torch._inductor.config")
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        inductor and inductor.deterministic,
    )


@pytest.fixture
def unusual_switches():
    """Each set otherwise than in replay, and not all by default."""
    import torch._inductor.config as inductor

    before = switches()
    torch.use_deterministic_algorithms(False, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = True
    inductor.deterministic = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]
    torch.backends.cudnn.benchmark = before[3]
    inductor.deterministic = bool(before[4])


def modes_seen(prepared: Callable[[nn.Module], None] = lambda _: None) -> list[tuple]:
    """The switches in the replayed calls of one module."""
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            looked()
            return super().forward(x)

    @torch.compiler.disable
    def looked() -> None:
        seen.append(switches())

    job = Job(lambda: Seeing(4, 4), ranks=1, prepared=prepared)
    replays = job.aligned()
    seen.clear()
    observations(replays)
    return seen


def test_kernels_are_deterministic_in_replay_and_every_switch_is_put_back(unusual_switches):
    before = switches()
    assert modes_seen() == [(True, False, False, False, True)]
    assert switches() == before


def test_compiled_code_keeps_trainings_own_mode(unusual_switches):
    before = switches()
    (seen,) = modes_seen(lambda module: module.compile(backend="eager"))
    assert seen[:-1] == before[:-1]  # the last is the compiler's own, which it sets itself


def test_a_compiled_module_is_replayed_by_its_peers():
    torch._dynamo.reset()
    compiled = []

    def prepared(module: nn.Module) -> None:
        module.compile(backend="aot_eager")
        compiled.append(module._compiled_call_impl)

    job = Job(Block, prepared=prepared)
    assert differing(observations(job.aligned())) == set()
    for replay in job.replays:
        replay.release()
    assert [module._compiled_call_impl for module in job.modules] == compiled


def test_a_stream_of_the_modules_own_does_not_make_peers_differ():
    def make() -> nn.Module:
        module = Calling(lambda self, x: x * self.weight * torch.rand((), generator=self.stream))
        module.stream = torch.Generator().manual_seed(next(seeds))
        return module

    seeds = iter(range(9))
    job = Job(make)
    before = [module.stream.get_state() for module in job.modules]
    assert differing(observations(job.aligned())) == set()
    after = [module.stream.get_state() for module in job.modules]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def refused(replay: Any) -> Observation:
    """What is seen of a replay that strict mode ends."""
    seen, flags = Observation(), switches()
    with pytest.raises(RuntimeError), own_work():
        replay.observe(seen)
    assert switches() == flags
    return seen


PUT = "put_ does not have a deterministic implementation"


def test_a_forward_pass_that_strict_mode_refuses_is_replayed_without_and_marked():
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).put_(torch.arange(x.numel()), x) * self.weight

    replay = Job(lambda: Calling(forward), ranks=1).aligned()[0]
    (message,) = refused(replay).refused
    assert message.startswith(PUT)
    seen = Observation()
    with own_work():
        replay.observe(seen)
    assert seen.refused == []
    computed = {f"{NAME}/output", f"{NAME}/grad_input", f"{NAME}.weight.grad"}
    assert seen.unrepeatable == dict.fromkeys(computed, PUT)
    assert seen.signatures.keys() == computed | {f"{NAME}/input", f"{NAME}/parameters"}


def refusing(message: str) -> nn.Module:
    """Strict mode ends its backward with this message."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            strict = not torch.is_deterministic_algorithms_warn_only_enabled()
            if torch.are_deterministic_algorithms_enabled() and strict:
                raise RuntimeError(message)
            return gradient

    return Calling(lambda self, x: Refusing.apply(x * self.weight))


def test_a_backward_pass_that_strict_mode_refuses_leaves_the_forward_pass_strict():
    message = f"{PUT}, but you set 'torch.use_deterministic_algorithms(True)'."
    replay = Job(lambda: refusing(message), ranks=1).aligned()[0]
    assert refused(replay).refused == [message]
    seen = Observation()
    with own_work():
        replay.observe(seen)
    assert seen.unrepeatable == {f"{NAME}/grad_input": PUT, f"{NAME}.weight.grad": PUT}
    assert replay.determinism.relaxed == {Mode.BACKWARD}


def test_matrix_products_without_a_workspace_setting_are_replayed_without_and_still_compared():
    message = "torch.use_deterministic_algorithms(True) ... CUBLAS_WORKSPACE_CONFIG=:4096:8"
    replay = Job(lambda: refusing(message), ranks=1).aligned()[0]
    assert refused(replay).refused == [message]
    seen = Observation()
    with own_work():
        replay.observe(seen)
    assert seen.unrepeatable == {}
    assert f"{NAME}/grad_input" in seen.signatures


def test_other_errors_are_not_taken_for_missing_determinism():
    replay = Job(lambda: refusing("out of memory"), ranks=1).aligned()[0]
    assert refused(replay).refused == []
    assert refused(replay).refused == []
