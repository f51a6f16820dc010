"""A captured call as it travels: described in JSON, its tensors bit for bit, the rest alike or refused."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest
import torch

from tests.support.replay_by_hand import CPU, receiver
from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import captured, receive
from torchscout.replay.capture.context import register_tracker
from torchscout.replay.capture.invocation import Invocation


def call(*args: Any, keep: bool = True, **kwargs: Any) -> Invocation:
    return Invocation.of(args, kwargs, CPU, keep=keep)


def description_of(invocation: Invocation) -> Any:
    return json.loads(json.dumps(invocation.describe()))


def arrived(source: Invocation, peer: Invocation) -> Invocation:
    """The source's call on a peer."""
    room = peer.like(description_of(source), CPU)
    receive(room.tensors(), receiver(sent(source)))
    return room


def sent(source: Invocation) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    receive(source.tensors(), lambda tensor: out.append(tensor.clone()))
    return out


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "int64": torch.tensor([[-(1 << 63), (1 << 63) - 1]]),
    "bfloat16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "float32": torch.tensor([0x7FC00001, 1, -0x80000000], dtype=torch.int32).view(torch.float32),
    "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, float("nan") - 0j]),
    "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "zero dimensions": torch.tensor(3.25),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "sliced": torch.arange(12.0).view(3, 4)[:, 1::2],
    "later in its storage": torch.arange(12.0)[5:],
    "one row of any stride": torch.arange(4.0).as_strided((1, 4), (77, 1)),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_any_tensor_arrives_bit_for_bit_with_its_strides(kind: str):
    tensor = TENSORS[kind]
    found = arrived(call(tensor), call(torch.zeros(1), keep=False)).leaves[0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bytes_of(found) == bytes_of(tensor.resolve_conj().resolve_neg())
    assert found.stride() == captured(tensor).stride()
    if kind not in {"expanded", "sliced", "negated"}:  # those have gaps
        assert found.stride() == tensor.stride()


def test_a_peer_has_the_sources_call_whatever_its_own_was():
    source = call(torch.tensor([1.0, 2.0], requires_grad=True), 3, mask=None, names=["a", True, 0.1])
    source.gradients = {0: torch.tensor([5.0]), 2: torch.tensor([6.0])}
    torch.rand(1)
    peer = call(torch.zeros(7), 4, mask=torch.ones(2), names=["b", False, 0.2], keep=False)
    found = arrived(source, peer)
    args, kwargs = found.arguments({})
    assert args[0].tolist() == [1, 2]
    assert args[1:] == (3,)
    assert kwargs == {"mask": None, "names": ["a", True, 0.1]}
    assert found.requires_grad == [True, False, False, False, False, False]
    assert {place: each.tolist() for place, each in found.gradients.items()} == {0: [5], 2: [6]}
    assert torch.equal(found.randomness.states["cpu"], source.randomness.states["cpu"])
    assert not torch.equal(peer.randomness.states["cpu"], source.randomness.states["cpu"])


def test_autocast_is_the_sources():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        source = call(torch.ones(1))
    assert description_of(source)["autocast"] == {"cpu": "bfloat16"}
    assert arrived(source, call(torch.ones(1), keep=False)).autocast == {"cpu": "bfloat16"}
    assert call(torch.ones(1)).autocast == {"cpu": None}


class Flag(enum.IntEnum):
    LEFT = 1
    RIGHT = 2


class Config:
    def __init__(self, width: int) -> None:
        self.width = width

    def __repr__(self) -> str:
        return f"Config({self.width})"


class Handle:
    """Looks different everywhere: its text is its address."""


def test_an_object_stays_the_peers_own_if_it_looks_alike():
    own, handle = Config(3), Handle()
    args, _ = arrived(call(Config(3), Handle(), Flag.LEFT), call(own, handle, Flag.LEFT)).arguments({})
    assert args[0] is own
    assert args[1] is handle
    assert args[2] is Flag.LEFT, "not the number alone"


@pytest.mark.parametrize(
    ("here", "there"),
    [(Config(3), Config(4)), (Handle(), Config(4)), (Flag.LEFT, Flag.RIGHT), (1, Flag.LEFT)],
)
def test_an_object_that_differs_is_refused_with_its_place(here: Any, there: Any):
    with pytest.raises(ReplayError, match=r"^argument 1 is .* here and .* on the source$") as caught:
        call(torch.ones(1), here).like(description_of(call(torch.ones(1), there)), CPU)
    assert type(there).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((torch.ones(1), 1), {}), ((), {"x": torch.ones(1)}), (([torch.ones(1)],), {})],
)
def test_another_form_of_arguments_is_refused(args: tuple, kwargs: dict):
    with pytest.raises(ReplayError, match="arguments have a different structure than the source's"):
        call(*args, **kwargs).like(description_of(call(torch.ones(1))), CPU)


def test_other_random_streams_are_refused():
    class Streams:
        def get_states(self) -> dict[str, torch.Tensor]:
            return {"model": torch.get_rng_state()}

        def set_states(self, states: Any) -> None: ...

    peer = call(1)
    forget = register_tracker("framework", Streams())
    try:
        source = description_of(call(1))
    finally:
        forget()
    with pytest.raises(ReplayError, match=r"random streams are \['cpu'\], not \['cpu', 'framework/model'\]"):
        peer.like(source, CPU)
