"""Slices of parameters: where they are, which optimizers permit them, and what is done for the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.update_job import CPU, Job, Rank, flip_lowest_bit, observed, outliers
from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import is_dense
from torchscout.replay.recipes.optimizer import REPRODUCED, WHOLE_BUDGET, OptimizerRecipe
from torchscout.replay.recipes.optimizer_slice import Separability, nth_slice


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Many short updates: threads would cost more than they help on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Lamb(torch.optim.Optimizer):
    """Its step is as long as the parameter's norm over the update's."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / parameter.grad.norm()
                parameter.sub_(parameter.grad * ratio, alpha=group["lr"])


class OnlyMatrices(torch.optim.SGD):
    """Decays what has two dimensions."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                decay = 0.9 if parameter.dim() > 1 else 1.0
                parameter.mul_(decay).sub_(parameter.grad, alpha=group["lr"])


class Weird(torch.optim.Optimizer):
    """Constructed unlike any other, with things beside its tensors that no copy may touch."""

    def __init__(self, *, model, factor_per_step, log):
        super().__init__([{"params": list(model.values()), "factors": {"fast": [1.0, factor_per_step]}}], {})
        self.momentum = torch.full((1,), 0.5)
        self.counts = [0, {"steps": 0}]
        self.generator = torch.Generator().manual_seed(3)
        self.mask = torch.eye(3).to_sparse()
        self.log = log
        self.state["everywhere"] = {"seen": 0}

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        self.counts[1]["steps"] += 1
        self.state["everywhere"]["seen"] += 1
        self.momentum.mul_(0.99)
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                speed = slots.setdefault("speed", torch.zeros_like(parameter))
                slots["age"] = slots.get("age", 0) + 1
                speed.mul_(self.momentum).add_(parameter.grad)
                parameter.sub_(speed, alpha=group["factors"]["fast"][1] ** slots["age"])


class Wrapper(torch.optim.Optimizer):
    """Leaves the work to an optimizer inside it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self):
        self.inner.step()


def single(kind, shape=(40, 30), **settings):
    parameter = torch.nn.Parameter(torch.ones(shape))
    return kind([parameter], **settings), parameter


def obstacle(kind, shape=(40, 30), **settings):
    return Separability().obstacle(*single(kind, shape, **settings))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
@pytest.mark.parametrize("shape", [(7,), (40, 30), (4, 3, 2, 2)])
def test_updates_of_single_elements_are_separable(kind, settings, shape):
    assert obstacle(kind, shape, **settings) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Adafactor, "Adafactor (updates|keeps)"),
        (Lamb, "Lamb updates the parameter of a slice differently"),
        (OnlyMatrices, "OnlyMatrices updates the parameter"),
        (getattr(torch.optim, "Muon", Lamb), "(Muon cannot step a slice|Lamb)"),
    ],
)
def test_updates_that_look_beyond_an_element_are_not(kind, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(obstacle(kind))


def test_a_rule_for_matrices_does_not_concern_vectors():
    separability = Separability()
    assert separability.obstacle(*single(OnlyMatrices, (7,))) is None
    assert separability.obstacle(*single(OnlyMatrices, (7, 7))) is not None


def test_measuring_happens_once_and_changes_nothing():
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self):
            Counting.steps += 1
            return super().step()

    optimizer, parameter = single(Counting, lr=0.1, momentum=0.9)
    stream = torch.get_rng_state()
    separability = Separability()
    assert separability.obstacle(optimizer, parameter) is None
    steps = Counting.steps
    assert steps > 0
    assert separability.obstacle(optimizer, parameter) is None
    assert Counting.steps == steps
    optimizer.param_groups[0]["foreach"] = True
    assert separability.obstacle(optimizer, parameter) is None
    assert Counting.steps == 2 * steps
    assert torch.equal(stream, torch.get_rng_state())
    assert torch.equal(parameter, torch.ones(40, 30))
    assert not optimizer.state
    assert parameter.grad is None


def test_slices_begin_at_multiples_of_64k_and_rotate():
    found = [(nth_slice(200_017, count).start, nth_slice(200_017, count).end) for count in range(5)]
    assert found == [(0, 65536), (65536, 131072), (131072, 196608), (196608, 200_017), (0, 65536)]
    assert nth_slice(65536, 7).end == 65536
    assert nth_slice(3, 1).end == 3


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_large_parameter_is_replayed_slice_by_slice(settings):
    job = Job(lambda p: torch.optim.AdamW(p.values(), **settings), shapes=[(211, 953)])
    job.train(1)
    starts = []
    for turn in range(5):
        round_ = job.replay(source=turn % 3)
        flip_lowest_bit(job.ranks[1].parameters["layer.0/weight"], element=70_000)
        found = round_.observe()
        round_.release()
        flip_lowest_bit(job.ranks[1].parameters["layer.0/weight"], element=70_000)
        start, end, whole = round_.descriptions[0]["slice"]["layer.0/weight"]
        starts.append(start)
        assert not whole
        assert end == min(start + 65536, 211 * 953)
        assert found[0]["optimizer/reproduced"] == REPRODUCED
        assert outliers(found, "optimizer/update") == ([1] if start == 65536 else [])
    assert starts == [0, 65536, 131072, 196608, 0]


def in_memory_order(rank: Rank, contiguous_gradient: bool) -> None:
    rank.backward()
    if not contiguous_gradient:
        for parameter in rank.parameters.values():
            strided = torch.empty_like(parameter, memory_format=torch.preserve_format)
            parameter.grad = strided.copy_(parameter.grad)
    rank.optimizer.step()


@pytest.mark.parametrize("contiguous_gradient", [False, True])
def test_a_dense_parameter_is_cut_in_the_order_of_its_memory(contiguous_gradient):
    def make(parameters):
        for parameter in parameters.values():
            parameter.data = parameter.data.t().contiguous().t()
        return torch.optim.AdamW(parameters.values(), lr=0.1)

    job = Job(make, shapes=[(300, 401)])
    for _ in range(3):
        round_ = job.replay(step=lambda rank: in_memory_order(rank, contiguous_gradient))
        assert {signatures["optimizer/reproduced"] for signatures in round_.observe()} == {REPRODUCED}
        assert round_.descriptions[0]["slice"]["layer.0/weight"][2] is contiguous_gradient


def test_a_parameter_with_gaps_is_replayed_whole():
    def make(parameters):
        for parameter in parameters.values():
            parameter.data = torch.cat([parameter.data, parameter.data], 1)[:, : parameter.shape[1]]
        return torch.optim.AdamW(parameters.values(), lr=0.1)

    job = Job(make, shapes=[(30, 41)])
    assert not is_dense(job.ranks[0].parameters["layer.0/weight"])
    round_ = job.replay()
    assert {signatures["optimizer/reproduced"] for signatures in round_.observe()} == {REPRODUCED}
    assert round_.descriptions[1]["slice"]["layer.0/weight"] == [0, 1230, True]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_single_number_keeps_its_shape(kind, shape):
    job = Job(lambda parameters: kind(parameters.values(), lr=0.1), shapes=[shape])
    for _ in range(2):
        round_ = job.replay()
        assert round_.descriptions[1]["slice"]["layer.0/weight"] == [0, 1, True]
        assert {signatures["optimizer/reproduced"] for signatures in round_.observe()} == {REPRODUCED}


@pytest.mark.parametrize("kind", [Lamb, OnlyMatrices, torch.optim.Adafactor])
def test_what_is_not_separable_is_replayed_whole(kind):
    job = Job(lambda parameters: kind(parameters.values(), lr=0.1), shapes=[(300, 401)])
    for _ in range(2):
        round_ = job.replay()
        assert round_.descriptions[0]["slice"]["layer.0/weight"] == [0, 120_300, True]
        assert {signatures["optimizer/reproduced"] for signatures in round_.observe()} == {REPRODUCED}


def test_what_is_neither_separable_nor_small_is_not_replayed():
    job = Job(lambda p: Lamb(p.values()), shapes=[(2049, WHOLE_BUDGET // 2048)], ranks=1)
    with pytest.raises(ReplayError, match=r"Lamb updates the parameter .* 4196352 elements are too many"):
        job.replay()


def test_an_optimizer_of_any_construction_is_cloned():
    log = []
    momentum = torch.full((1,), 0.5)
    job = Job(lambda parameters: Weird(model=parameters, factor_per_step=0.5, log=log.append))
    for steps in range(1, 4):
        round_ = job.replay(source=steps % 3)
        momentum.mul_(0.99)
        for _ in range(2):
            assert {signatures["optimizer/reproduced"] for signatures in round_.observe()} == {REPRODUCED}
        for rank in job.ranks:
            assert rank.optimizer.counts == [0, {"steps": steps}]
            assert rank.optimizer.state["everywhere"] == {"seen": steps}
            assert rank.optimizer.state[rank.parameters["layer.0/weight"]]["age"] == steps
            assert rank.optimizer.momentum == momentum
    assert log == []


def test_an_optimizer_inside_the_optimizer_is_never_stepped():
    job = Job(lambda parameters: Wrapper(parameters.values()))
    weights = [rank.parameters["layer.0/weight"] for rank in job.ranks]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before = weights[0].detach().clone()
    replays = [rank.recipe.begin(0, is_source=i == 0) for i, rank in enumerate(job.ranks)]
    assert torch.equal(before, weights[0])
    with pytest.raises(ReplayError, match=r"a clone of Wrapper cannot step: AttributeError: .*inner"):
        replays[0].describe()


def test_a_clone_does_not_call_callbacks_of_the_optimizer():
    class Logging(torch.optim.SGD):
        def step(self):
            self.log(0)
            super().step()

    log = []
    optimizer, parameter = single(Logging)
    optimizer.log = log.append
    with pytest.raises(ReplayError, match="a clone of Logging cannot step: AttributeError"):
        Separability().obstacle(optimizer, parameter)
    assert log == []


class TestTensorParallel:
    @pytest.fixture(autouse=True)
    def two_ranks(self):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        yield
        dist.destroy_process_group()

    def half(self, values: torch.Tensor, dimension: int = 0):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(values, init_device_mesh("cpu", (2,)), [Shard(dimension)])

    def replay(self, kind, gradient_dimension=0, **settings):
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(self.half(torch.randn(200, 400, generator=generator)))
        optimizer = kind([parameter], **settings)
        recipe = OptimizerRecipe({"w": parameter}, [optimizer], CPU)
        for _ in range(2):
            replay = recipe.begin(0, is_source=True)
            values = torch.randn(400, 200, generator=generator)
            values = values if gradient_dimension else values.view(200, 400)
            parameter.grad = self.half(values, gradient_dimension)
            optimizer.step()
        description = replay.describe()
        replay.prepare([description], 0)
        return description, observed(replay)

    @pytest.mark.parametrize("foreach", [False, True])
    def test_a_slice_of_the_local_part_is_replayed(self, foreach):
        description, found = self.replay(torch.optim.AdamW, foreach=foreach)
        assert description["slice"] == {"w": [65536, 80_000, False]}
        assert description["tensor"]["state exp_avg"]["size"] == [80_000 - 65536]
        assert found["optimizer/reproduced"] == REPRODUCED

    def test_an_update_that_needs_the_whole_parameter_is_not(self):
        with pytest.raises(ReplayError, match=r"Lamb updates .* has only a part of w"):
            self.replay(Lamb)

    def test_a_gradient_with_another_placement_is_refused(self):
        with pytest.raises(ReplayError, match="not placed as its parameter"):
            self.replay(torch.optim.SGD, gradient_dimension=1)
