"""The specification that an observer gets, and which ranks host the hubs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.test_policy import HANG, decided
from torchscout.config import ObserverConfig, StragglerConfig
from torchscout.mesh import Mesh
from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks, mesh_from
from torchscout.run.folder import Identity
from torchscout.run.restart import RestartPlan

PLAIN = ObserverSpec(
    rank=1, size=2, record="/r", run=Identity("/runs"), token="t" * 16, config=ObserverConfig()
)


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        (["a"], (0,)),
        (["a", "a", "a"], (0, 2, 1)),
        ([None, None], (0, 1)),
        (["a", "a", "b", "b", "a"], (0, 3, 1, 2, 4)),  # the standby is not on the machine of the hub
        ([*"aaabbbccc"], (0, 8, 1, 3, 6, 2, 4, 7)),  # then one of each machine, and no more than eight
    ],
)
def test_the_hub_its_standby_and_those_elected_after_them_are_spread_over_machines(
    hosts: list[str | None], ranks: tuple[int, ...]
):
    assert hub_ranks(hosts) == ranks


def test_a_spec_survives_serialization():
    strict = replace(PLAIN, straggler=StragglerConfig(kappa=9.0, confirmations=4))
    acting = replace(PLAIN, plan=RestartPlan().after(decided(HANG)), plan_folders=("/plans",))
    for spec in (PLAIN, strict, acting):
        assert ObserverSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank 2 is not in a job of 2 ranks"),
        ({"run": {"run_dir": "runs"}}, "run_dir must be an absolute path, got 'runs'"),
        ({"hub": 0}, "rank 1 hosts a hub, which needs the mesh"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, object], message: str):
    document = {**PLAIN.to_json(), **changes}
    with pytest.raises(ValueError, match=message):
        ObserverSpec.from_json(document)


@pytest.mark.parametrize(
    "mesh", [Mesh.grid(replica=4, tensor=2, hosts=list("aabbccdd")), Mesh.grid(replica=4).carve_experts(2)]
)
def test_a_mesh_survives_serialization(mesh: Mesh):
    again = mesh_from(json.loads(json.dumps(describe_mesh(mesh))))
    assert len(again) == len(mesh)
    for rank in range(len(mesh)):
        for role in ("dense", "expert"):
            assert again.address_of(rank, role) == mesh.address_of(rank, role)
        assert again.host_of(rank) == mesh.host_of(rank)
