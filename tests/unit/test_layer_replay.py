"""One module replayed by a source and its peers: healthy ones agree, a wrong bit is found where it is."""

from __future__ import annotations

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
    prepare,
    receiver,
    sized,
)
from tests.support.update_job import outliers
from torchscout.replay.recipe import ABSENT, Mode


def test_healthy_peers_agree_on_every_surface_whatever_they_trained_on():
    job = Job(Block, source=1)
    found = observations(job.aligned())
    assert differing(found) == set()
    assert ABSENT not in found[0].values()
    assert list(found[0]) == [
        f"{NAME}/{each}" for each in ("input", "parameters", "output", "grad_input")
    ] + [f"{NAME}.{name}.grad" for name, _ in Block().named_parameters()]


def test_what_is_compared_and_upon_which_premises():
    comparisons = {each.surface: each for each in Job(Block).aligned()[0].comparisons()}
    premises = (f"{NAME}/input", f"{NAME}/parameters")
    assert {each.mode for each in comparisons.values() if not each.premises} == {Mode.INPUT, Mode.STATE}
    assert comparisons[f"{NAME}/output"].mode == Mode.FORWARD
    assert comparisons[f"{NAME}.up.weight.grad"].mode == Mode.BACKWARD
    assert {each.premises for each in comparisons.values()} == {(), premises}


def test_a_wrong_backward_shows_only_in_the_gradients_behind_it():
    job = Job(Block)
    job.modules[1].norm.register_full_backward_hook(lambda _, given, __: (given[0] * 1.0001,))
    found = observations(job.aligned())
    assert differing(found) == {f"{NAME}/grad_input", f"{NAME}.up.weight.grad", f"{NAME}.up.bias.grad"}
    assert outliers(found, f"{NAME}/grad_input") == [1]


def test_a_bit_lost_on_the_way_shows_in_the_input():
    job = Job(Block)
    prepare(job.replays)
    sent: list[torch.Tensor] = []
    job.replays[0].align(lambda tensor: sent.append(tensor.clone()))
    job.replays[1].align(receiver(sent))
    sent[-1][0] ^= 1  # the last is a buffer
    job.replays[2].align(receiver(sent))
    assert outliers(observations(job.replays), f"{NAME}/input") == [2]


def test_replays_use_the_buffers_of_the_source():
    seen = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(self.scale.tolist())
        return x * self.weight * self.scale

    def make() -> nn.Module:
        module = Calling(forward)
        # Expanded: a peer that made room for such strides would have too little of it.
        module.register_buffer("scale", torch.tensor([[float(len(seen))]]).expand(1, 4))
        module.register_buffer("none", None)
        return module

    job = Job(make, source=2)
    replays = job.aligned()
    seen.clear()
    assert differing(observations(replays)) == set()
    assert seen == [[[2.0] * 4]] * 3
    assert [module.scale[0, 0].item() for module in job.modules] == [0, 1, 2]


def test_a_second_observation_is_like_the_first():
    replays = Job(Block).aligned()
    first = observations(replays)
    observations(replays, 3.0)
    assert observations(replays) == first


def test_a_module_that_writes_into_its_arguments_repeats_itself():
    job = Job(
        lambda: Calling(lambda self, x: x.mul_(2) * self.weight),
        train=lambda module, rank: sized(module(batch(rank) * 1)).backward(),
    )
    replays = job.aligned()
    assert observations(replays) == observations(replays)


def test_a_variant_scales_floating_inputs_and_nothing_else():
    seen = []

    def forward(self: Any, x: torch.Tensor, index: torch.Tensor, *, z: torch.Tensor, factor: float) -> Any:
        seen.append((x.tolist(), index.tolist(), z.tolist(), factor))
        return x * self.weight

    def train(module: nn.Module, rank: int) -> None:
        z = torch.tensor([1j])
        sized(module(torch.ones(4), torch.tensor([3]), z=z, factor=0.5)).backward()

    job = Job(lambda: Calling(forward), train=train)
    replays = job.aligned()
    seen.clear()
    one, other = observations(replays), observations(replays, 0.25)
    assert seen[0] == ([1.0] * 4, [3], [1j], 0.5)
    assert seen[3] == ([0.25] * 4, [3], [0.25j], 0.5)
    assert differing(one) == differing(other) == set()
    assert one[0][f"{NAME}/parameters"] == other[0][f"{NAME}/parameters"]
    assert all(one[0][f"{NAME}/{each}"] != other[0][f"{NAME}/{each}"] for each in ("input", "output"))


def test_sparse_gradients_of_an_embedding_are_compared():
    job = Job(
        lambda: nn.Embedding(8, 4, sparse=True),
        train=lambda module, rank: sized(module(torch.tensor([rank, 5, 5]))).backward(),
    )
    found = observations(job.aligned())
    assert differing(found) == set()
    assert list(found[0]) == [
        f"{NAME}/input",
        f"{NAME}/parameters",
        f"{NAME}/output",
        f"{NAME}.weight.grad",
    ], "indices have no gradient"
    assert ABSENT not in found[0].values()


def scaling() -> nn.Module:
    return Calling(lambda self, x, **_: x * self.weight)


def nested(self: Any, x: torch.Tensor) -> Any:
    return {"a": x * self.weight, "none": None}, (x.detach(), x * 2)


def uses_some(module: nn.Module, rank: int) -> None:
    named, pair = module(batch(rank))
    (sized(named["a"]) + sized(pair[1])).backward()


def unused_argument(module: nn.Module, rank: int) -> None:
    unused = torch.full((rank + 1,), float(rank), requires_grad=True)
    sized(module(batch(rank), unused=unused, mode="fast")).backward()


def in_larger_memory(module: nn.Module, rank: int) -> None:
    output = torch.cat([torch.ones(2, 4), module(batch(rank))])
    (output * torch.arange(20.0).view(5, 4)).sum().backward()


def conjugated(module: nn.Module, rank: int) -> None:
    (module(torch.tensor([1 + 2j])).conj() * 2j).abs().sum().backward()


@pytest.mark.parametrize(
    ("make", "train"),
    [
        pytest.param(scaling, unused_argument, id="unused arguments"),
        pytest.param(lambda: Calling(nested), uses_some, id="tuples and dicts of outputs"),
        pytest.param(Block, lambda module, rank: module(batch(rank)).sum().backward(), id="expanded"),
        pytest.param(Block, in_larger_memory, id="gradient that is a view of larger memory"),
        pytest.param(scaling, conjugated, id="lazily conjugated gradient"),
    ],
)
def test_calls_of_any_form_are_sent_with_their_gradients(make: Any, train: Any):
    assert differing(observations(Job(make, train=train).aligned())) == set()


def vocabulary() -> nn.Module:
    return nn.Linear(4, 200_000, bias=False)


def read_many(module: nn.Module, rank: int) -> None:
    sized(module(batch(rank).repeat(30, 1))).backward()


def test_a_gradient_much_larger_than_the_inputs_is_not_sent_and_what_follows_is_compared():
    job = Job(vocabulary, train=read_many)
    replays = job.aligned()
    assert job.replays[0].describe()["gradients"] == {}
    found = observations(replays)
    assert differing(found) == set()
    assert ABSENT not in found[0].values()
    comparisons = {each.surface: each for each in replays[0].comparisons()}
    assert f"{NAME}/output" in comparisons[f"{NAME}.weight.grad"].premises


def test_a_wrong_backward_shows_where_the_output_stands_in_for_its_gradient():
    job = Job(vocabulary, train=read_many)
    job.modules[1].register_full_backward_hook(lambda _, given, __: (given[0] * 1.0001,))
    assert differing(observations(job.aligned())) == {f"{NAME}/grad_input"}
