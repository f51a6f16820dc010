"""FSDP's way with gradients, on scratch tensors: what each rank ends up with, and who is to be compared."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.ranks import run_ranks
from torchscout.c3.signature import PendingSignatures, signature
from torchscout.mesh import Mesh
from torchscout.replay.sharded_parameters import Reduction, route_of

ELEMENTS = 5 * 3 + 5


def read_values(pending: list[PendingSignatures]) -> list[int]:
    return [each.read()[0] for each in pending]


def reduced(rank: int, shape: tuple[int, ...], wrong: int | None) -> tuple[bool, list[int]] | None:
    """Two signatures of this rank's shard, its gradients being those of all others but for one element."""
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    module = nn.Linear(3, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    replica, shard = shape if len(shape) == 2 else (1, *shape)
    parameters = [*module.parameters()]
    route = route_of(parameters, Mesh.grid(replica=replica, shard=shard), rank)
    if route is None:
        return None
    reduction = Reduction(route, parameters)
    values = torch.arange(float(ELEMENTS))
    if wrong == rank:
        values[0] = 100.0
    reduction.take([values[:15].view(5, 3), values[15:]])
    return reduction.has_copies, read_values(reduction.run())


def test_replicas_end_up_with_the_same_shards():
    found = run_ranks(reduced, 4, (2, 2), None)
    assert [copies for copies, _ in found] == [True] * 4
    scattered = [each for _, (each, _) in found]
    assert scattered[:2] == scattered[2:]
    assert scattered[0] != scattered[1]
    assert [each for _, (_, each) in found] == scattered  # the mean of equals


def test_a_wrong_contribution_is_detected_before_replicas_are_reduced():
    """Element 0 lies in the first shard: that of rank 2, whoever of its replica got it wrong."""
    healthy, found = run_ranks(reduced, 4, (2, 2), None), run_ranks(reduced, 4, (2, 2), 3)
    differing = [rank for rank in range(4) if found[rank][1][0] != healthy[rank][1][0]]
    assert differing == [2]
    after = [rank for rank in range(4) if found[rank][1][1] != healthy[rank][1][1]]
    assert after == [0, 2]
    assert found[0][1][1] == found[2][1][1]


def test_shards_with_one_owner_have_nothing_to_be_compared_with():
    for has_copies, signatures in run_ranks(reduced, 3, (3,), None):
        assert not has_copies
        assert len(signatures) == 1


def twice(rank: int) -> tuple[list[int], list[int], int]:
    """The second time rank 0 has nothing to give: its pass has failed."""
    module = nn.Linear(3, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    parameters = [*module.parameters()]
    route = route_of(parameters, Mesh.grid(shard=2), rank)
    assert route is not None
    reduction, gradients = Reduction(route, parameters), [torch.ones(5, 3), torch.ones(5)]
    reduction.take(gradients)
    first = read_values(reduction.run())
    if rank == 1:
        reduction.take(gradients)
    return first, read_values(reduction.run()), signature(torch.full((10,), 0.5))


def test_a_rank_without_gradients_gives_zeros_and_takes_part():
    for first, second, halves in run_ranks(twice, 2):
        assert first != second
        assert second == [halves]


def test_nothing_is_reduced_where_the_mesh_disagrees():
    assert run_ranks(elsewhere, 2) == [True, True]


def elsewhere(rank: int) -> bool:
    module = nn.Linear(3, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    replicas = route_of([*module.parameters()], Mesh.grid(replica=2), rank)
    plain = route_of([*nn.Linear(3, 5).parameters()], Mesh.grid(shard=2), rank)
    return replicas is None and plain is None
