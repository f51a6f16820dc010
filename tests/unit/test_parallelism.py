"""Which ranks do the same work, from the axes of a DeviceMesh and from the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchscout.adapters.base import mesh_from
from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.config import Parallelism
from torchscout.mesh import AXES, Axis, Mesh

WORLD = 8
HOSTS = ["a"] * 4 + ["b"] * 4


@pytest.fixture(autouse=True)
def eight_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def device_mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def degrees(mesh: Mesh) -> dict[str, int]:
    return {axis: mesh.degree(axis) for axis in AXES if mesh.degree(axis) > 1}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"dp": 4, "tp": 2}, {"replica": 4, "tensor": 2}),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"replica": 2, "shard": 2, "tensor": 2}),
        ({"dp": 4, "cp": 2}, {"replica": 4, "context": 2}),
        ({"fsdp": 4, "tp": 2}, {"shard": 4, "tensor": 2}),
        ({"pp": 2, "ddp": 2, "tp": 2}, {"pipeline": 2, "replica": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_axes_are_known_by_their_names(axes: dict[str, int], expected: dict[str, int]):
    mesh = mesh_from(device_mesh(**axes), WORLD, HOSTS)
    assert degrees(mesh) == expected
    assert mesh.host_of(7) == "b"


def test_peers_are_those_the_device_mesh_has_along_its_axis():
    mesh = mesh_from(device_mesh(dp=4, tp=2), WORLD, HOSTS)
    assert mesh.peers_of(3).ranks == (1, 3, 5, 7)
    turned = DeviceMesh("cpu", torch.arange(WORLD).view(2, 4).t(), mesh_dim_names=("dp", "tp"))
    assert mesh_from(turned, WORLD, HOSTS).peers_of(3).ranks == (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)


def guessed(shard_over: Callable[[DeviceMesh], DeviceMesh], axes: DeviceMesh, *, tensor: bool) -> Mesh:
    net = Net()
    if tensor:
        parallelize_module(net, axes["tp"], {"up": ColwiseParallel()})
    fully_shard(net, mesh=shard_over(axes))
    return PyTorchAdapter(net, [], None).mesh(HOSTS)


@pytest.mark.parametrize(
    ("axes", "over", "expected"),
    [
        ({"dp": 4, "tp": 2}, "dp", {"shard": 4, "tensor": 2}),
        ({"fsdp": 4, "tp": 2}, "fsdp", {"shard": 4, "tensor": 2}),
        (
            {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
            ("dp_replicate", "dp_shard"),
            {"replica": 2, "shard": 2, "tensor": 2},
        ),
        ({"replicate": 2, "dp": 2, "tp": 2}, ("replicate", "dp"), {"replica": 2, "shard": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_fsdp_with_tensor_parallelism_is_read_off_its_parameters(
    axes: dict[str, int], over: str | tuple[str, ...], expected: dict[str, int]
):
    mesh = guessed(lambda each: each[over], device_mesh(**axes), tensor=True)
    assert degrees(mesh) == expected
    axis = Axis.REPLICA if "replica" in expected else Axis.SHARD
    assert mesh.peer_axis() is axis


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"dp_shard": 4, "cp": 2}, {"shard": 4, "context": 2}),
        ({"dp": 4, "cp": 2}, {"shard": 4, "context": 2}),
    ],
    ids=str,
)
def test_axes_that_fsdp_sees_as_one_are_told_apart(axes: dict[str, int], expected: dict[str, int]):
    """Context-parallel ranks attend to other tokens each: they are not one another's peers."""
    mesh = guessed(lambda each: each[tuple(axes)]._flatten("dp_shard_cp"), device_mesh(**axes), tensor=False)
    assert degrees(mesh) == expected


def test_fsdp_alone_needs_no_names_that_we_know():
    assert degrees(guessed(lambda each: each, init_device_mesh("cpu", (WORLD,)), tensor=False)) == {
        "shard": 8
    }
    turned = DeviceMesh("cpu", torch.arange(WORLD).view(4, 2).t(), mesh_dim_names=("some", "names"))
    mesh = guessed(lambda each: each, turned, tensor=False)
    assert degrees(mesh) == {"replica": 2, "shard": 4}
    assert mesh.peers_of(0).ranks == (0, 1), "the mesh says which, not the order of ranks"


def test_a_named_axis_along_which_fsdp_shards_has_no_replicas():
    """What a user calls dp may be either; shards must never be compared as copies."""
    axes = device_mesh(dp=4, tp=2)
    net = Net()
    parallelize_module(net, axes["tp"], {"up": ColwiseParallel()})
    fully_shard(net, mesh=axes["dp"])
    assert degrees(PyTorchAdapter(net, [], axes).mesh(HOSTS)) == {"shard": 4, "tensor": 2}
    assert degrees(PyTorchAdapter(Net(), [], axes).mesh(HOSTS)) == {"replica": 4, "tensor": 2}


def test_an_unknown_axis_is_refused_with_what_to_pass():
    with pytest.raises(
        ValueError, match=r"unknown mesh axes \['galaxy'\].*tensor: tensor, tp.*Parallelism\("
    ):
        guessed(lambda each: each["galaxy"], device_mesh(galaxy=4, tp=2), tensor=True)


def test_axes_without_names_are_refused_with_what_to_pass():
    with pytest.raises(ValueError, match=r"every axis of a DeviceMesh needs a different name.*Parallelism\("):
        mesh_from(init_device_mesh("cpu", (4, 2)), WORLD, HOSTS)


def test_what_no_parameter_shows_is_refused_with_what_to_pass():
    net = Net()
    parallelize_module(net, device_mesh(dp=4, tp=2)["tp"], {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"pass parallelism=, such as Parallelism\(replica=4, tensor=2\)"):
        PyTorchAdapter(net, [], None).mesh(HOSTS)


def test_a_description_of_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="parallelism describes 4 ranks, the job has 8"):
        mesh_from(Parallelism(replica=2, tensor=2), WORLD, HOSTS)


def test_experts_are_carved_out_of_replicas_or_of_the_shards_of_the_only_one():
    mesh = mesh_from(Parallelism(replica=4, tensor=2, expert_within_data=2), WORLD, HOSTS)
    assert mesh.peers_of(0, "dense").ranks == (0, 2, 4, 6)
    assert mesh.peers_of(0, "expert").ranks == (0, 4)
    sharded = mesh_from(Parallelism(shard=8, expert_within_data=4), WORLD, HOSTS)
    assert sharded.peers_of(1, "expert").ranks == (1, 5)
    assert sharded.ranks_along("expert", 0, "expert") == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="cannot carve 3 expert partitions out of 8 along replica"):
        mesh_from(Parallelism(replica=8, expert_within_data=3), WORLD, HOSTS)
