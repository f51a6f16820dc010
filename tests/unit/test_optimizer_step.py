"""An optimizer's update, replayed on copies: healthy ranks reproduce it, and training is unchanged."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support.update_job import CPU, Job, Rank, flip_lowest_bit, observed, outliers
from torchscout.replay.recipe import ABSENT, Mode
from torchscout.replay.recipes.optimizer import REPRODUCED, OptimizerRecipe
from torchscout.replay.recipes.optimizer_clone import Parts, blueprint_of, build

SETTINGS = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
}


def implementations(name: str) -> list[dict]:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        return []
    accepted = inspect.signature(kind).parameters
    wanted = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    flags = [flag for flag in wanted if set(flag) <= set(accepted)]
    return [{"lr": 0.01, **SETTINGS[name], **flag} for flag in flags or [{}]]


QUICK = ("*AdamW*", "*Adafactor*", "*Muon", "*SGD-foreach", "*NAdam-foreach", "*Adadelta")
"""The others are as they are, and are tried with ``make test-slow``."""
EVERY = pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            name, settings, id="-".join([name, *(k for k in ("foreach", "fused") if settings.get(k))])
        )
        for name in SETTINGS
        for settings in implementations(name)
    ],
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small updates: threads would cost more than they help on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(name: str, settings: dict):
    return lambda parameters: getattr(torch.optim, name)(parameters.values(), **settings)


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters.values(), lr=0.01, **settings)


def assert_reproduced(found):
    assert [signatures["optimizer/reproduced"] for signatures in found] == [REPRODUCED] * len(found)
    assert all(signatures == found[0] for signatures in found)
    assert ABSENT not in found[0].values()


@pytest.mark.slow_except(*QUICK)
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_healthy_ranks_reproduce_their_update(name, settings, dtype, steps_before):
    if name == "SGD" and settings.get("fused") and dtype is torch.bfloat16:
        pytest.skip("on the CPU it reads beyond its momentum buffer (pytorch/pytorch#191763)")
    job = Job(made(name, settings), dtype=dtype, ranks=2)
    job.train(steps_before)
    before = next(iter(job.ranks[0].parameters.values())).detach().clone()
    round_ = job.replay(source=1)
    assert_reproduced(round_.observe())
    assert_reproduced(round_.observe())  # the aligned values are as they were
    assert not torch.equal(before, job.ranks[0].parameters["layer.0/weight"])


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adafactor"])
def test_a_wrong_real_result_is_seen_on_its_rank(name):
    job = Job(made(name, {"lr": 0.01, **SETTINGS[name]}))
    job.train(1)
    round_ = job.replay()
    flip_lowest_bit(job.ranks[2].parameters["layer.0/weight"], element=100)
    found = round_.observe()
    differing = {surface: outliers(found, surface) for surface in found[0] if outliers(found, surface)}
    assert differing == {"optimizer/update": [2], "optimizer/reproduced": [2]}
    assert found[2]["optimizer/reproduced"] == ABSENT


@pytest.mark.parametrize("tensor", [0, 1, 2, 3])
def test_a_wrong_aligned_value_is_seen_on_its_rank(tensor):
    job = Job(adamw)
    job.train(1)
    found = job.replay(damaged=1, damaged_tensor=tensor).observe()
    assert outliers(found, "optimizer/input") == [1]
    assert outliers(found, "optimizer/update") == []


def test_wrong_arithmetic_is_seen_on_its_rank():
    """Here a rank's class has another constant in its step; settings cannot tell them apart."""

    class Faulty(torch.optim.SGD):
        factor = 1.0

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad * type(self).factor, alpha=group["lr"])

    job = Job(lambda parameters: Faulty(parameters.values(), lr=0.1))
    round_ = job.replay()
    found = [observed(round_.replays[i]) for i in (0, 1)]
    Faulty.factor = 1.0001
    found.append(observed(round_.replays[2]))
    differing = [surface for surface in found[0] if outliers(found, surface)]
    assert differing == ["optimizer/param", "optimizer/reproduced"]
    assert outliers(found, "optimizer/param") == [2]


def test_what_is_computed_counts_only_where_inputs_agree():
    job = Job(adamw)
    job.train(1)
    for each in job.replay().replays[0].comparisons():
        assert each.premises == (("optimizer/input",) if each.mode == Mode.OPTIMIZER else ())


def test_a_scaled_gradient_has_no_real_result_to_compare_with():
    job = Job(adamw)
    job.train(1)
    round_ = job.replay()
    real, scaled = round_.observe(1.0)[0], round_.observe(10.0)
    assert scaled[0] == scaled[1] == scaled[2]
    assert [surface for surface in real if scaled[0][surface] == ABSENT] == [
        "optimizer/update",
        "optimizer/reproduced",
    ]
    assert scaled[0]["optimizer/param"] != real["optimizer/param"]
    assert scaled[0]["optimizer/input"] == real["optimizer/input"]
    assert round_.observe(1.0)[0] == real


def test_an_update_that_no_peer_reproduces_is_absent_everywhere():
    job = Job(lambda parameters: Rounding(parameters.values(), lr=0.01))
    state = torch.get_rng_state()
    found = job.replay(step=lambda rank: (torch.set_rng_state(state), rank.step())).observe()
    assert {signatures["optimizer/reproduced"] for signatures in found} == {ABSENT}
    assert outliers(found, "optimizer/param") == []


class Rounding(torch.optim.SGD):
    """Draws from the global stream in its step."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.rand_like(parameter)
                parameter.data.sub_(parameter.grad * noise, alpha=group["lr"])


@pytest.mark.slow_except(*QUICK)
@EVERY
def test_training_is_bitwise_what_it_is_without_replay(name, settings):
    with_replay, without = (Job(made(name, settings), shapes=[(33, 67), (5, 3)], ranks=2) for _ in range(2))
    for job in (with_replay, without):
        torch.manual_seed(7)
        for step in range(3):
            if job is without:
                job.train(1)
            else:
                round_ = job.replay(step % 2, source=step % 2)
                round_.observe()
                round_.observe(0.1)
                round_.release()
        job.stream = torch.get_rng_state()
    assert torch.equal(with_replay.stream, without.stream)
    for rank, twin in zip(with_replay.ranks, without.ranks, strict=True):
        assert_same(state_of(rank), state_of(twin))


def state_of(rank: Rank) -> dict:
    optimizer = rank.optimizer
    place = {id(parameter): name for name, parameter in rank.parameters.items()}
    return {
        "parameters": {name: parameter.detach() for name, parameter in rank.parameters.items()},
        "gradients": {name: parameter.grad for name, parameter in rank.parameters.items()},
        "state": {place[id(parameter)]: slots for parameter, slots in optimizer.state.items()},
        "groups": [
            {**group, "params": [place[id(p)] for p in group["params"]]} for group in optimizer.param_groups
        ],
        "attributes": {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")},
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for item, counterpart in zip(one, other, strict=True):
            assert_same(item, counterpart)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    else:
        assert one == other


def test_rng_states_are_restored_even_if_the_optimizer_draws():
    job = Job(lambda parameters: Rounding(parameters.values(), lr=0.01))
    before = torch.get_rng_state()
    replays = [rank.recipe.begin(0, is_source=i == 0) for i, rank in enumerate(job.ranks)]
    assert torch.equal(before, torch.get_rng_state())  # measuring has stepped clones
    for replay in replays:
        replay.release()
    round_ = job.replay()
    before = torch.get_rng_state()
    round_.observe()
    assert torch.equal(before, torch.get_rng_state())


def test_a_tensor_learning_rate_is_the_sources():
    job = Job(lambda parameters: torch.optim.AdamW(parameters.values(), lr=torch.tensor(0.01)))
    job.train(1)
    own = job.ranks[0].optimizer.param_groups[0]["lr"]
    round_ = job.replay()
    own.mul_(2)  # a schedule, after the update
    assert_reproduced(round_.observe())
    assert own == torch.tensor(0.02)


def test_every_parameter_is_updated_with_its_own_group():
    def make(parameters):
        first, second = parameters.values()
        groups = [
            {"params": [first], "weight_decay": 0.5},
            {"params": [second], "weight_decay": 0.0, "lr": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    job = Job(make, shapes=[(40, 3), (11,)])
    for target in (0, 1, 0, 1):
        assert_reproduced(job.replay(target).observe())


def test_named_parameters_are_no_difference():
    job = Job(lambda parameters: torch.optim.SGD(parameters.items(), lr=0.1), shapes=[(4, 3), (11,)])
    round_ = job.replay(1)
    assert_reproduced(round_.observe())
    assert "group param_names" not in round_.descriptions[0]["setting"]  # of every parameter in the group


def test_a_scheduler_does_not_step_the_real_optimizer():
    job = Job(adamw)
    schedulers = [LambdaLR(rank.optimizer, lambda step: 0.9**step) for rank in job.ranks]
    for _ in range(3):
        round_ = job.replay()
        for scheduler in schedulers:
            scheduler.step()
        assert_reproduced(round_.observe())
        round_.release()
    for rank in job.ranks:
        assert rank.optimizer.state[rank.parameters["layer.0/weight"]]["step"] == 3


def test_a_step_put_on_the_optimizer_stays_there():
    (rank,) = Job(adamw, ranks=1).ranks
    rank.optimizer.step = print
    (weight,) = rank.parameters.values()
    parts = Parts(weight.detach(), torch.ones_like(weight), {})
    clone, leaf = build(*blueprint_of(rank.optimizer, weight, parts))
    assert "step" not in vars(clone)
    assert leaf is not weight


def test_no_hook_sees_the_replay():
    job = Job(adamw)
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("global before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("global after")),
    ]
    for rank in job.ranks:
        rank.optimizer.register_step_post_hook(lambda *_: seen.append("own"))
    round_ = job.replay()
    expected = list(seen)
    round_.observe()
    for handle in handles:
        handle.remove()
    assert len(expected) == 9
    assert seen == expected


@pytest.mark.parametrize("overflow", [False, True])
def test_a_fused_update_under_a_gradient_scaler_is_skipped_alike(overflow):
    job = Job(lambda parameters: adamw(parameters, fused=True))
    job.train(2)
    scalers = {id(rank): torch.amp.GradScaler("cpu", init_scale=1024.0) for rank in job.ranks}

    def scaled_step(rank: Rank) -> None:
        rank.backward()
        gradient = rank.parameters["layer.0/weight"].grad
        scalers[id(rank)].scale(gradient.new_ones(()))
        gradient.mul_(1024.0)
        if overflow:
            gradient[3, 3] = torch.inf
        scalers[id(rank)].step(rank.optimizer)

    before = job.ranks[0].parameters["layer.0/weight"].detach().clone()
    round_ = job.replay(step=scaled_step)
    assert "attribute found_inf" in round_.descriptions[1]["tensor"]
    assert_reproduced(round_.observe())
    assert torch.equal(before, job.ranks[0].parameters["layer.0/weight"]) is overflow


def test_only_what_somebody_optimizes_is_a_target():
    kept, frozen, foreign = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizers = [torch.optim.SGD([kept]), torch.optim.SGD([frozen])]
    recipe = OptimizerRecipe({"a": frozen, "b": kept, "c": foreign}, optimizers, CPU)
    assert list(recipe.targets) == ["b"]
    assert recipe.kind == "optimizer"


def test_the_last_of_several_steps_counts():
    job = Job(adamw)
    assert_reproduced(job.replay(step=lambda rank: (rank.step(), rank.step())).observe())


def test_release_is_safe_at_any_time():
    job = Job(adamw, ranks=1)
    (rank,) = job.ranks
    registered = OrderedDict(rank.optimizer._optimizer_step_pre_hooks)
    early = rank.recipe.begin(0, is_source=True)
    assert len(rank.optimizer._optimizer_step_pre_hooks) == len(registered) + 1
    early.release()
    assert rank.optimizer._optimizer_step_pre_hooks == registered
    round_ = job.replay()
    assert rank.optimizer._optimizer_step_pre_hooks == registered  # the hook is for one step
    round_.observe()
    for _ in range(2):
        round_.release()
        early.release()


def test_peers_keep_no_copies_before_they_are_asked_to():
    job = Job(adamw)
    job.train(1)
    replays = [rank.recipe.begin(0, is_source=i == 0) for i, rank in enumerate(job.ranks)]
    job.train(1)
    assert [len(replay._tensors) for replay in replays] == [5, 0, 0]
    copies = copy.copy(replays[0]._tensors)
    live = {t.data_ptr() for rank in job.ranks for t in rank.parameters.values()}
    assert live.isdisjoint(copied.data_ptr() for copied in copies)
