"""Changes that a call makes in a module are undone: buffers, counters, caches, streams, extra state."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchscout.replay.capture.context import buffers_of, preserved, refusal


class Doing(nn.Module):
    """A module whose call does to itself whatever the test wants."""

    def __init__(self, act: Callable[[Any], None], **attributes: Any) -> None:
        super().__init__()
        self.act = act
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self) -> None:
        self.act(self)


def call(module: nn.Module, buffers: Mapping[str, torch.Tensor] | None = None, times: int = 1) -> None:
    with preserved(module, buffers_of(module) if buffers is None else buffers, seed=1):
        for _ in range(times):
            module()


def bits(tensor: torch.Tensor) -> tuple[int, int, list]:
    return id(tensor), tensor._version, tensor.tolist()


def with_buffer(act: Callable[[Any], None], **options: Any) -> Doing:
    module = Doing(act)
    module.register_buffer("mean", torch.zeros(3), **options)
    module.register_buffer("none", None)
    return module


CHANGES: dict[str, Callable[[Any], object]] = {
    "a buffer in place": lambda self: self.mean.add_(1),
    "a buffer replaced": lambda self: setattr(self, "mean", self.mean + 1),
    "a buffer that was None": lambda self: setattr(self, "none", torch.ones(2)),
    "a new buffer": lambda self: self.register_buffer("late", torch.ones(2), persistent=False),
    "a new attribute": lambda self: setattr(self, "last", torch.ones(2)),
    "the training mode": lambda self: self.eval(),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_module_has_its_buffers_and_attributes_again(what: str, persistent: bool):
    module = with_buffer(CHANGES[what], persistent=persistent)
    attributes, names, before = {*vars(module)}, {*module._non_persistent_buffers_set}, bits(module.mean)
    call(module, times=3)
    assert ({*vars(module)}, module._non_persistent_buffers_set) == (attributes, names)
    assert (bits(module.mean), [*module._buffers], module.none) == (before, ["mean", "none"], None)
    assert module.training


def test_the_call_sees_the_given_buffers_and_leaves_them_as_they_are():
    given, seen = {"mean": torch.full((3,), 7.0)}, []
    module = with_buffer(lambda self: seen.append(self.mean.add_(1).tolist()))
    call(module, given)
    assert seen == [[8.0] * 3]
    assert (given["mean"].tolist(), given["mean"]._version) == ([7.0] * 3, 0)


def test_a_buffer_under_two_names_is_exchanged_under_both():
    shared = torch.zeros(2)
    first, second = Doing(lambda self: self.mean.add_(1)), Doing(lambda self: self.mean.add_(1))
    for module in (first, second):
        module.register_buffer("mean", shared)
    seen = []
    parent = Doing(lambda _: (first(), second(), seen.append(second.mean.tolist())))
    parent.first, parent.second = first, second
    before = bits(shared)
    call(parent)
    assert seen == [[2.0, 2.0]], "still one buffer in the call"
    assert bits(shared) == before
    assert first.mean is second.mean is shared


def test_buffers_of_nested_modules_are_exchanged_by_their_dotted_names():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    before = {name: bits(each) for name, each in module.named_buffers()}
    assert list(before) == ["1.0.running_mean", "1.0.running_var", "1.0.num_batches_tracked"]
    with preserved(module, buffers_of(module), seed=1):
        module(torch.rand(4, 2))
        assert module[1][0].num_batches_tracked == 1
    assert {name: bits(each) for name, each in module.named_buffers()} == before


ACTS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "counter": (0, lambda self: setattr(self, "it", self.it + 1)),
    "list": ([1, 2], lambda self: self.it.append(3)),
    "list element": ([1, 2], lambda self: self.it.__setitem__(0, 3)),
    "dict": ({"a": 1}, lambda self: self.it.update(a=2, b=3)),
    "dict order": (OrderedDict(a=1, b=2), lambda self: self.it.move_to_end("a")),
    "defaultdict": (defaultdict(int, a=1), lambda self: self.it["b"]),
    "counts": (Counter(a=2), lambda self: self.it.update("ab")),
    "set": ({1, 2}, lambda self: (self.it.add(3), self.it.discard(1))),
    "deque": (deque([1, 2], maxlen=2), lambda self: self.it.append(3)),
    "replaced": ([1, 2], lambda self: setattr(self, "it", [3])),
    "deleted": ([1, 2], lambda self: delattr(self, "it")),
    "list in dict": ({"a": [1]}, lambda self: self.it["a"].append(2)),
    "dict in tuple": (({"a": 1},), lambda self: self.it[0].clear()),
    "list taken out of a list": ([[1], [2]], lambda self: self.it.pop().append(3)),
}


@pytest.mark.parametrize("what", ACTS)
def test_a_plain_attribute_is_put_back(what: str):
    value, act = ACTS[what]
    module = Doing(act, it=value)
    before = repr(value)
    with preserved(module, {}, seed=1):
        module()
        assert "it" not in vars(module) or repr(module.it) != before
    assert module.it is value
    assert repr(value) == before


def test_a_container_that_contains_itself_is_handled():
    ring: list[Any] = [1]
    ring.append(ring)
    module = Doing(lambda self: self.ring.clear(), ring=ring)
    call(module)
    assert module.ring[0] == 1
    assert module.ring[1] is ring


@pytest.mark.parametrize("where", [lambda t: t, lambda t: [t], lambda t: {"k": t}, lambda t: {"k": (t,)}])
def test_a_tensor_changed_in_place_gets_its_bits_back(where: Callable[[torch.Tensor], Any]):
    tensor = torch.tensor([1.0, -0.0, float("nan")])
    expected = tensor.view(torch.int32).tolist()
    module = Doing(lambda _: tensor.mul_(3), kept=where(tensor))
    call(module)
    assert tensor.view(torch.int32).tolist() == expected


def test_a_tensor_that_was_not_changed_is_not_written():
    tensor = torch.ones(2)
    module = Doing(lambda _: None, kept=tensor)
    call(module)
    assert tensor._version == 0


def test_tensors_that_cannot_change_or_have_no_values_are_skipped():
    with torch.inference_mode():
        frozen = torch.ones(2)
    module = Doing(lambda _: None, frozen=frozen, planned=torch.empty(2, device="meta"))
    call(module)
    assert module.frozen is frozen


STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand((), generator=g).item()),
    "python": (lambda: random.Random(3), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random()),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_modules_own_generator_draws_alike_on_peers_and_is_restored(kind: str):
    make, draw = STREAMS[kind]
    drawn = []
    modules = [Doing(lambda self: drawn.append(draw(self.stream)), stream=make()) for _ in range(2)]
    draw(modules[1].stream)  # a peer that stands elsewhere
    for module in modules:
        call(module)
    assert drawn[0] == drawn[1]
    assert draw(modules[0].stream) == draw(make())


class Extra(nn.Module):
    """Keeps its state where only it knows, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = SimpleNamespace(amax=torch.zeros(2))
        self.register_buffer("copy", torch.zeros(2))

    def get_extra_state(self) -> dict:
        return {"amax": self.meter.amax}

    def set_extra_state(self, state: dict) -> None:
        self.meter.amax = state["amax"]
        self.copy.copy_(state["amax"])

    def forward(self) -> None:
        self.meter.amax.add_(1)


def test_extra_state_is_set_back_to_what_it_was():
    module = nn.Sequential(Extra())
    with preserved(module, buffers_of(module), seed=1):
        module[0]()
    assert module[0].meter.amax.tolist() == [0, 0]


def test_setting_extra_state_writes_to_no_buffer_of_the_users():
    module = Extra()
    before = bits(module.copy)
    call(module)
    assert bits(module.copy) == before


def test_an_exception_in_the_block_puts_everything_back():
    def act(self: Any) -> None:
        self.mean.add_(1)
        self.count += 1
        self.late = 3
        raise RuntimeError("in the layer")

    module = with_buffer(act)
    module.count = 0
    before = bits(module.mean)
    with pytest.raises(RuntimeError, match="in the layer"):
        call(module)
    assert bits(module.mean) == before
    assert module.count == 0
    assert not hasattr(module, "late")


def test_an_exception_on_the_way_in_puts_everything_back():
    module = with_buffer(lambda _: None)
    module.extra = Extra()
    module.extra.meter = None  # get_extra_state fails
    before = bits(module.mean)
    with pytest.raises(AttributeError), preserved(module, buffers_of(module), seed=1):
        pytest.fail("never entered")
    assert bits(module.mean) == before


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_are_renormalized_when_called_are_refused(kind: type[nn.Module]):
    assert refusal(nn.Sequential(kind(3, 2, max_norm=1.0))) == (
        "0 renormalizes its weights in place (max_norm) in every call"
    )
    assert refusal(kind(3, 2, max_norm=1.0)).startswith("it renormalizes")
    assert refusal(nn.Sequential(kind(3, 2), nn.Linear(2, 2))) is None
