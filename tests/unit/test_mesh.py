"""Peer groups: the paper's cases, its table of published jobs, and refusals."""

from __future__ import annotations

import hashlib

import pytest

from torchscout.mesh import Axis, Mesh, MeshAddress, PeerGroup


@pytest.mark.parametrize(
    ("degrees", "rank", "peers", "axis"),
    [
        ({"replica": 4, "tensor": 2}, 6, (0, 2, 4, 6), Axis.REPLICA),
        ({"shard": 4, "tensor": 2}, 5, (1, 3, 5, 7), Axis.SHARD),
        ({"replica": 2, "shard": 4}, 1, (1, 5), Axis.REPLICA),
        ({"tensor": 4}, 2, (2,), Axis.SHARD),
    ],
)
def test_replicas_are_peers_and_shards_where_there_are_none(
    degrees: dict[str, int], rank: int, peers: tuple[int, ...], axis: Axis
):
    mesh = Mesh.grid(**degrees)
    assert mesh.peers_of(rank) == PeerGroup(peers, axis)
    assert mesh.peers_of(rank, role="dense") == mesh.peers_of(rank, role="expert")


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "expert"])
def test_model_parallel_ranks_are_never_peers(axis: str):
    mesh = Mesh.grid(replica=3, **{axis: 4})
    for rank in range(len(mesh)):
        coordinates = {getattr(mesh.address_of(peer), axis) for peer in mesh.peers_of(rank).ranks}
        assert coordinates == {getattr(mesh.address_of(rank), axis)}


@pytest.mark.parametrize(
    ("size", "compare", "attribute"), [(1, False, False), (2, True, False), (3, True, True)]
)
def test_size_rules(size: int, compare: bool, attribute: bool):
    peers = Mesh.grid(replica=size).peers_of(0)
    assert (peers.can_compare, peers.can_attribute, len(peers)) == (compare, attribute, size)


@pytest.mark.parametrize(
    ("job", "ranks", "degrees", "peers"),
    [
        ("Megatron 1T", 3_072, {"tensor": 8, "pipeline": 64, "replica": 6}, 6),
        ("MegaScale 175B", 12_288, {"tensor": 8, "pipeline": 8, "replica": 192}, 192),
        ("GLM-130B", 768, {"tensor": 4, "pipeline": 8, "replica": 24}, 24),
        ("Llama 3 405B", 16_384, {"tensor": 8, "pipeline": 16, "replica": 128}, 128),
        ("Skywork-MoE", 1_536, {"pipeline": 12, "expert": 4, "replica": 32}, 32),
        ("MegaScale-MoE", 1_440, {"pipeline": 15, "expert": 8, "replica": 12}, 12),
    ],
)
def test_the_papers_table_of_published_jobs(job: str, ranks: int, degrees: dict[str, int], peers: int):
    mesh = Mesh.grid(**degrees)
    assert len(mesh) == ranks, job
    groups = mesh.peer_groups()
    assert {len(group) for group in groups} == {peers}
    assert sorted(rank for group in groups for rank in group.ranks) == list(range(ranks))


def test_experts_carved_out_of_replicas_leave_dense_layers_their_peers():
    mesh = Mesh.grid(replica=4, tensor=2).carve_experts(2)
    assert mesh.peers_of(0, role="dense").ranks == (0, 2, 4, 6)
    assert mesh.peers_of(0, role="expert").ranks == (0, 4)
    assert mesh.peers_of(0) == mesh.peers_of(0, role="expert")  # the paper's formula matches e
    assert mesh.groups_along("expert") == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_experts_carved_out_of_shards():
    mesh = Mesh.grid(replica=2, shard=4).carve_experts(2, out_of=Axis.SHARD)
    assert mesh.peers_of(0, role="expert") == PeerGroup((0, 4), Axis.REPLICA)
    assert mesh.groups_along("shard", role="expert") == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_hosts():
    mesh = Mesh.grid(replica=2, tensor=2, hosts=["a", "a", "b", "b"])
    assert (mesh.host_of(2), mesh.ranks_on("a"), mesh.hosts_of((3, 0, 1))) == ("b", (0, 1), ("b", "a"))
    unknown = Mesh.grid(replica=2)
    assert (unknown.host_of(0), unknown.hosts_of((0, 1)), unknown.ranks_on("a")) == (None, (), ())


def test_addresses_in_any_order_and_numbering():
    addresses = {
        0: MeshAddress(replica=7, tensor=1),
        1: MeshAddress(replica=2),
        2: MeshAddress(replica=2, tensor=1),
    }
    mesh = Mesh(addresses, {0: "a", 1: "b", 2: "c"})
    assert mesh.peers_of(0).ranks == (0, 2)
    assert mesh.address_of(0) == MeshAddress(replica=7, tensor=1)
    assert mesh.host_of(2) == "c"


def test_all_peer_groups_of_131072_ranks():
    mesh = Mesh.grid(replica=2, shard=512, tensor=8, pipeline=16)
    groups = mesh.peer_groups()
    assert (len(mesh), len(groups)) == (131_072, 65_536)
    assert groups[5].ranks == (5, 5 + 65_536)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mesh.grid(replica=-1), "replica must be at least 1, got -1"),
        (lambda: Mesh.grid(tensor=0), "tensor must be at least 1, got 0"),
        (lambda: Mesh([MeshAddress(shard=-3)]), r"negative, got MeshAddress\(replica=0, shard=-3"),
        (lambda: Mesh([MeshAddress(2), MeshAddress(), MeshAddress(2)]), r"ranks \[0, 2\] share .*replica=2"),
        (lambda: Mesh([MeshAddress()], ["a", "b"]), "1 addresses but 2 hosts"),
        (lambda: Mesh([MeshAddress()], [], expert_addresses=[]), "1 dense addresses but 0 expert addresses"),
        (lambda: Mesh({0: MeshAddress(), 2: MeshAddress(1)}), r"0 to 1, got \[0, 2\]"),
        (lambda: Mesh.grid(replica=4).peers_of(4), "rank 4 is not in a mesh of 4 ranks"),
        (lambda: Mesh.grid(replica=4).peers_of(-1), "rank -1 is not"),
        (lambda: Mesh.grid().groups_along("batch"), "unknown mesh axis 'batch'; the axes are replica, shard"),
        (lambda: Mesh.grid(replica=4).peers_of(0, role="sparse"), "'sparse' is not a valid LayerKind"),
        (
            lambda: Mesh.grid(replica=4).carve_experts(3),
            "cannot carve 3 expert partitions out of 4 along replica",
        ),
        (lambda: PeerGroup((3, 1), Axis.REPLICA), r"ascending, got \(3, 1\)"),
    ],
)
def test_bad_input_is_refused_with_the_value(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_summary_is_the_digest_of_addresses_as_they_are_printed():
    """Checkpoints of earlier versions have such digests."""
    mesh = Mesh.grid(replica=3, shard=2, tensor=2).carve_experts(3)
    printed = "\n".join(str(mesh.address_of(rank)) for rank in range(len(mesh)))
    digest = hashlib.blake2b(printed.encode(), digest_size=6).hexdigest()
    assert mesh.summary().endswith(f"({digest})")
