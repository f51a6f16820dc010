"""DTensors that a peer receives: the local part bit for bit, on the peer's own mesh, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.replay_by_hand import CPU, armed, calling, reason, receiver
from torchscout.c3.signature import signature
from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import (
    DTensorLayout,
    as_dense,
    captured,
    described,
    local_part,
    receive,
    room_for,
)
from torchscout.replay.capture.invocation import Invocation
from torchscout.replay.recipes.optimizer_slice import gradient_of, is_unreduced


@pytest.fixture(autouse=True)
def eight_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def mesh(*ranks: int, name: str = "tp") -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks), mesh_dim_names=(name,))


def source_mesh() -> DeviceMesh:
    return mesh(0, 1)


def peer_mesh() -> DeviceMesh:
    """Of another replica; rank 0 plays both, which only their meshes tell apart."""
    return mesh(0, 5)


def laid(placement: Placement, on: DeviceMesh, local: torch.Tensor | None = None, **settings: Any) -> DTensor:
    values = torch.arange(6.0).view(2, 3) if local is None else local
    return DTensor.from_local(values, on, [placement], run_check=False, **settings)


def call(*args: Any, keep: bool = True) -> Invocation:
    return Invocation.of(args, {}, CPU, keep=keep)


def arrived(source: Invocation, peer: Invocation) -> Invocation:
    room = peer.like(json.loads(json.dumps(source.describe())), CPU)
    sent: list[torch.Tensor] = []
    receive(source.tensors(), lambda tensor: sent.append(tensor.clone()))
    receive(room.tensors(), receiver(sent))
    return room


PLACEMENTS = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max")]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_the_local_part_arrives_on_the_peers_own_mesh(placement: Placement, keep: bool):
    given, own = laid(placement, source_mesh()), laid(placement, peer_mesh(), torch.zeros(2, 3))
    (found,) = arrived(call(given), call(own, keep=keep)).leaves
    assert isinstance(found, DTensor)
    assert found.device_mesh == peer_mesh()
    assert (found.placements, found.shape, found.stride()) == (given.placements, given.shape, given.stride())
    assert local_part(found).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert signature(found) == signature(torch.arange(6.0).view(2, 3))


def test_a_whole_that_does_not_divide_evenly_keeps_its_shape():
    uneven = {"shape": torch.Size((3, 3)), "stride": (3, 1)}
    given = laid(Shard(0), source_mesh(), **uneven)
    (found,) = arrived(call(given), call(laid(Shard(0), peer_mesh(), **uneven), keep=False)).leaves
    assert found.shape == (3, 3)
    assert local_part(found).shape == (2, 3)


def test_what_was_captured_is_not_changed_by_training():
    given = laid(Shard(0), source_mesh())
    copy = captured(given)
    local_part(given).zero_()
    assert local_part(copy).sum() == 15


def test_gaps_in_a_local_part_are_closed():
    sliced = torch.arange(12.0).view(2, 6)[:, ::2]
    dense = as_dense(laid(Shard(0), source_mesh(), sliced))
    assert isinstance(dense, DTensor)
    assert local_part(dense).is_contiguous()
    assert torch.equal(local_part(dense), sliced)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            lambda: laid(Shard(0), mesh(0, 1, 2, 3)),
            r"mesh of shape \(4,\) of axes tp here and on a cpu mesh of shape \(2,\) of axes tp",
        ),
        (
            lambda: laid(Shard(0), mesh(0, 5, name="cp")),
            r"of axes cp here and on .* of axes tp on the source",
        ),
        (
            lambda: laid(Shard(1), peer_mesh()),
            r"placed as \(Shard\(dim=1\),\) here and as \(Shard\(dim=0\),\)",
        ),
        (lambda: torch.ones(2, 3), "there is no DTensor here and one on the source"),
        (lambda: None, "there is no DTensor here and one on the source"),
    ],
)
@pytest.mark.parametrize("keep", [True, False])
def test_a_peer_that_does_not_match_is_refused(own: Any, message: str, keep: bool):
    source = json.loads(json.dumps(call(laid(Shard(0), source_mesh())).describe()))
    with pytest.raises(ReplayError, match=f"^argument 0.*{message}"):
        call(own(), keep=keep).like(source, CPU)


def test_a_plain_tensor_is_refused_where_the_peer_has_a_dtensor():
    source = json.loads(json.dumps(call(torch.ones(2)).describe()))
    with pytest.raises(ReplayError, match="argument 0: there is a DTensor here and none on the source"):
        call(laid(Shard(0), peer_mesh()), keep=False).like(source, CPU)


def test_a_placement_that_cannot_be_described_is_reported():
    strided = DTensor.from_local(torch.ones(2, 3), source_mesh(), [_StridedShard(0, split_factor=2)])
    module = calling(lambda self, _: self.weight * 2)
    with armed(module) as capture:
        module(strided).sum().backward()
        assert reason(capture) == "a DTensor placed as _S(0, 2) is among the inputs"


class Doubling(nn.Module):
    def __init__(self, on: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(laid(Replicate(), on, torch.ones(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_gradients_of_dtensors_are_captured_and_arrive():
    source, peer = Doubling(source_mesh()), Doubling(peer_mesh())
    with armed(source) as here, armed(peer, keep=False) as there:
        source(laid(Shard(0), source_mesh())).to_local().square().sum().backward()
        peer(laid(Shard(0), peer_mesh())).to_local().sum().backward()
        sent, own = here.invocation().densified(), there.invocation()
        found = arrived(sent, own).gradients[0]
    assert isinstance(found, DTensor)
    assert (found.device_mesh, found.placements, found.shape) == (peer_mesh(), (Shard(0),), (4, 3))
    assert local_part(found).tolist() == [[0, 2, 4], [6, 8, 10]]


def test_a_buffer_that_is_a_dtensor_gets_room_on_the_peers_mesh():
    sent = json.loads(json.dumps(described(laid(Replicate(), source_mesh()))))
    room = room_for(sent, CPU, DTensorLayout.of(laid(Replicate(), peer_mesh())))
    assert isinstance(room, DTensor)
    assert room.device_mesh == peer_mesh()


class TestGradientsOfParameters:
    def test_a_whole_gradient_of_a_shard_is_cut(self):
        parameter = laid(Shard(0), source_mesh(), torch.ones(2, 3))
        whole = laid(Replicate(), source_mesh(), torch.arange(12.0).view(4, 3))
        assert gradient_of(whole, parameter).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert not is_unreduced(whole, parameter)

    def test_partial_gradients_are_left_unreduced(self):
        parameter = laid(Replicate(), source_mesh(), torch.ones(3))
        summand = laid(Partial(), source_mesh(), torch.arange(3.0))
        assert is_unreduced(summand, parameter)
        assert gradient_of(summand, parameter).tolist() == [0, 1, 2]

    @pytest.mark.parametrize(("of_gradient", "of_parameter"), [(Partial(), Shard(0)), (Shard(1), Shard(0))])
    def test_a_gradient_that_would_need_communication_is_refused(
        self, of_gradient: Placement, of_parameter: Placement
    ):
        parameter = laid(of_parameter, source_mesh())
        with pytest.raises(ReplayError, match="not placed as its parameter is"):
            gradient_of(laid(of_gradient, source_mesh()), parameter)

    def test_a_gradient_on_another_mesh_is_refused(self):
        parameter = laid(Replicate(), source_mesh())
        with pytest.raises(ReplayError, match="not placed as its parameter is"):
            gradient_of(laid(Partial(), peer_mesh()), parameter)
