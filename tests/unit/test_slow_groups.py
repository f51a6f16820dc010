"""What slow process groups have in common, and when it is reported."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from torchscout.config import StragglerConfig
from torchscout.decision.groups import Diagnosis, Group, GroupStragglers, localize
from torchscout.decision.timings import GroupTimes
from torchscout.decision.types import Incident, Scope
from torchscout.mesh import Mesh, MeshAddress

SURFACES = {"shard": "time/all_gather", "tensor": "time/all_reduce", "replica": "time/reduce_scatter"}
DEFAULTS = StragglerConfig()


def figure(hosts: bool = True) -> Mesh:
    """The paper's 16 ranks: 4 replicas x 2 shards x 2 tensor slices, each tensor pair on one machine."""
    coordinates = [(rank // 2 % 4, rank % 2, rank // 8) for rank in range(16)]
    return Mesh(
        [MeshAddress(replica=d, shard=s, tensor=t) for d, s, t in coordinates],
        [f"machine-{2 * d + s}" for d, s, _ in coordinates] if hosts else None,
    )


def shard(*ranks: int) -> Group:
    return Group("shard", ranks)


def tensor(*ranks: int) -> Group:
    return Group("tensor", ranks)


def groups_of(mesh: Mesh, *axes: str) -> list[Group]:
    return [Group(axis, ranks) for axis in axes for ranks in mesh.groups_along(axis)]


def numbers(hosts: Iterable[str]) -> list[int]:
    return [int(host.removeprefix("machine-")) for host in hosts]


FAULT = [shard(4, 5), tensor(4, 12)]
"""Machine 4, in the figure."""


@pytest.mark.parametrize(
    ("slow", "cause", "machines"),
    [
        pytest.param(FAULT, "machine", [4], id="they meet on a machine"),
        pytest.param([*FAULT, shard(10, 11), tensor(2, 10)], "machine", [2, 4], id="two machines"),
        pytest.param([*FAULT, tensor(5, 13)], "machine", [4, 5], id="two machines of one group"),
        pytest.param([tensor(4, 12)], "intra_machine", [4], id="within a machine only"),
        pytest.param([shard(4, 5)], "network", [4, 5], id="between machines only"),
        pytest.param([shard(0, 1), shard(4, 5), tensor(2, 10), tensor(7, 15)], "job", [], id="many machines"),
    ],
)
def test_a_cause_explains_slow_groups(slow: list[Group], cause: str, machines: list[int]):
    (found,) = localize(figure(), slow, groups_of(figure(), "shard", "tensor"))
    assert (found.diagnosis.value, numbers(found.hosts), found.ambiguous) == (cause, machines, False)
    assert set(found.groups) == set(slow)
    assert found.names_machines == (cause in ("machine", "intra_machine"))


def test_separate_causes_are_separate_findings():
    machine, network = localize(figure(), [*FAULT, shard(0, 1)], groups_of(figure(), "shard", "tensor"))
    assert (machine.diagnosis, machine.ranks, machine.endpoints) == (Diagnosis.MACHINE, (4, 12), (4,))
    assert (network.diagnosis, network.groups) == (Diagnosis.NETWORK, (shard(0, 1),))


def test_axis_names_do_not_matter_only_what_groups_span():
    """The shard groups stay within machines here, and the tensor groups leave them."""
    mesh = Mesh.grid(shard=4, tensor=4, hosts=[f"machine-{rank % 4}" for rank in range(16)])
    inside, leaving = shard(1, 5, 9, 13), tensor(4, 5, 6, 7)
    measured = groups_of(mesh, "shard", "tensor")
    assert localize(mesh, [inside], measured)[0].diagnosis is Diagnosis.INTRA_MACHINE
    assert localize(mesh, [leaving], measured)[0].diagnosis is Diagnosis.NETWORK
    (found,) = localize(mesh, [inside, leaving], measured)
    assert (found.diagnosis, numbers(found.hosts)) == (Diagnosis.MACHINE, [1])


@pytest.mark.parametrize(("machines", "few"), [(8, 2), (16, 2), (32, 4)])
def test_more_than_a_few_slow_machines_are_the_job(machines: int, few: int):
    hosts = [f"machine-{rank // 2}" for rank in range(2 * machines)]
    mesh = Mesh.grid(replica=machines, tensor=2, hosts=hosts)
    measured = groups_of(mesh, "tensor")
    found = [localize(mesh, measured[:count], measured)[0].diagnosis for count in (few, few + 1)]
    assert found == [Diagnosis.INTRA_MACHINE, Diagnosis.JOB]


def test_any_machine_or_two_of_a_larger_mesh_explain_all_their_groups():
    hosts = [f"machine-{index}" for index in range(16)]
    mesh = Mesh.grid(replica=4, shard=4, tensor=4, hosts=[hosts[rank // 4] for rank in range(64)])
    measured = groups_of(mesh, "replica", "shard", "tensor")
    for one, other in itertools.combinations_with_replacement(hosts, 2):
        bad = {*mesh.ranks_on(one), *mesh.ranks_on(other)}
        (found,) = localize(mesh, [group for group in measured if bad & {*group.ranks}], measured)
        assert (found.diagnosis, set(found.hosts)) == (Diagnosis.MACHINE, {one, other})


PAIR, OTHER = (0, 1), (0, 2)


@pytest.mark.parametrize(
    ("slow", "normal", "cause", "machines", "ambiguous"),
    [
        pytest.param([PAIR, OTHER], [(3, 4), (1, 7)], "machine", [0], False, id="the one they share"),
        pytest.param([PAIR, OTHER, (4, 5), (4, 6)], [], "machine", [0, 4], False, id="two of them"),
        pytest.param([PAIR, (0, 1, 2)], [], "machine", [0, 1], True, id="they share two"),
        pytest.param([PAIR, (0, 1, 2)], [(1, 3)], "machine", [0], False, id="one of two is normal elsewhere"),
        pytest.param([PAIR], [(1, 2)], "machine", [0, 1], True, id="one group does not name an end"),
        pytest.param([PAIR, PAIR], [(1, 2)], "machine", [0, 1], True, id="on two axes: one direction"),
        pytest.param(
            [PAIR, (2, 3), (0, 1, 2, 3)], [], "machine", [0, 1, 2, 3], True, id="equally small sets"
        ),
        pytest.param(
            [PAIR, OTHER, (4, 5), (4, 6), (8, 9), (8, 10)],
            [],
            "process_group",
            [0, 1, 2, 4, 5, 6, 8, 9, 10],
            True,
            id="three are not guessed",
        ),
    ],
)
def test_where_nothing_within_machines_is_measured(
    slow: list[tuple], normal: list[tuple], cause: str, machines: list[int], ambiguous: bool
):
    """Every rank has a machine of its own, with its number."""
    mesh = Mesh.grid(replica=32, hosts=[f"machine-{rank}" for rank in range(32)])
    groups = [Group(f"axis {place}", ranks) for place, ranks in enumerate(slow)]
    (found,) = localize(mesh, groups, [*groups, *(Group("normal", ranks) for ranks in normal)])
    assert (found.ambiguous, sorted(numbers(found.hosts))) == (ambiguous, machines)
    assert found.diagnosis.value == cause or ambiguous


def test_a_shared_machine_that_is_normal_inside_is_the_network():
    slow = [shard(4, 5), Group("replica", (4, 6))]
    inside = [tensor(4, 12), tensor(5, 13), tensor(6, 14)]
    found = [localize(figure(), slow, slow + each) for each in (inside, inside[:1], inside[1:])]
    assert [each[0].diagnosis.value for each in found] == ["network", "network", "machine"]


def test_an_undecided_group_does_not_hide_the_network():
    inside = [tensor(*ranks) for ranks in [(0, 8), (1, 9), (2, 10), (3, 11)]]
    slow = [shard(0, 1), shard(4, 5)]
    undecided, network = localize(figure(), slow, slow + inside)
    assert (undecided.groups, undecided.ambiguous) == ((shard(4, 5),), True)
    assert (network.diagnosis, network.groups) == (Diagnosis.NETWORK, (shard(0, 1),))


def test_unknown_hosts_leave_the_process_groups():
    mesh = figure(hosts=False)
    (found,) = localize(mesh, FAULT, groups_of(mesh, "shard", "tensor"))
    assert (found.diagnosis, found.hosts, found.ranks) == (Diagnosis.PROCESS_GROUP, (), (4, 5, 12))


# Over several checks.


def times(
    mesh: Mesh, slow: Iterable[Group] = (), axes: Iterable[str] = ("shard", "tensor"), ms: float = 10.0
) -> list[GroupTimes]:
    """Ten milliseconds per collective, and five times that on the slow groups."""
    slow = {*slow}
    return [
        GroupTimes(
            SURFACES[axis],
            axis,
            "layer.0",
            4096,
            {each.ranks: 5 * ms if each in slow else ms for each in groups_of(mesh, axis)},
        )
        for axis in axes
    ]


def watch(
    mesh: Mesh, rounds: Sequence[Sequence[GroupTimes]], config: StragglerConfig = DEFAULTS
) -> list[Incident]:
    diagnosis = GroupStragglers(mesh, config)
    return [found for step, each in enumerate(rounds) for found in diagnosis.observe(step, each)[0]]


def test_each_finding_has_its_own_evidence_and_says_which_groups_are_slow():
    slow = times(figure(), [shard(0, 1), tensor(4, 12)])
    machine, network = sorted(watch(figure(), [slow] * 3), key=lambda found: found.scope.value)
    assert (machine.scope, network.scope) == (Scope.MACHINE, Scope.PROCESS_GROUP)
    assert [(each.surface, each.ranks) for each in machine.records] == [("time/all_reduce", (4,))]
    assert [(each.surface, each.ranks) for each in network.records] == [("time/all_gather", (0,))]
    assert all(fact in machine.sentence for fact in ("{4, 12}", "machine-4"))
    assert all(fact in network.sentence for fact in ("{0, 1}", "machine-0", "machine-1"))


def test_settings_are_followed():
    slow = [times(figure(), FAULT)] * 4
    assert len(watch(figure(), slow[:3])) == 1
    assert watch(figure(), slow, StragglerConfig(min_slowdown_ms=100.0)) == []
    assert watch(figure(), slow[:3], StragglerConfig(confirmations=4)) == []
    assert len(watch(figure(), slow, StragglerConfig(confirmations=4))) == 1


def test_a_fast_small_collective_does_not_exonerate():
    small = [
        each._replace(elements=8, milliseconds=dict.fromkeys(each.milliseconds, 0.1))
        for each in times(figure(), axes=["tensor"])
    ]
    (found,) = watch(figure(), [times(figure(), FAULT) + small] * 8)
    assert (found.scope, found.ranks) == (Scope.MACHINE, (4, 12))


def test_a_group_that_hovers_at_the_edge_delays_but_does_not_silence():
    """Slow inside the machine once, then neither slow enough to count nor back to normal."""
    between = times(figure(), [shard(4, 5)], axes=["shard"])

    def inside(milliseconds: float) -> list[GroupTimes]:
        (found,) = times(figure(), axes=["tensor"])
        usual = {ranks: 10 + ranks[0] % 4 / 2 for ranks in found.milliseconds}
        return [found._replace(milliseconds=usual | {(4, 12): milliseconds})]

    found = watch(figure(), [between + inside(50.0)] + [between + inside(12.5)] * 8)
    assert [(incident.scope, incident.step) for incident in found] == [(Scope.PROCESS_GROUP, 5)]


def test_two_groups_that_agree_are_not_known_to_be_normal():
    """Neither machine was compared inside, so a slow group between them does not accuse the network."""
    mesh = Mesh.grid(replica=2, tensor=4, hosts=[f"machine-{rank // 4}" for rank in range(8)])
    (found,) = watch(mesh, [times(mesh, [Group("replica", (1, 5))], axes=["replica", "tensor"])] * 8)
    assert found.scope is Scope.PROCESS_GROUP
    assert "or the network" in found.sentence


def test_too_few_groups_are_no_majority():
    (slow,) = times(figure(), FAULT, axes=["tensor"])
    few = slow._replace(milliseconds={ranks: slow.milliseconds[ranks] for ranks in [(4, 12), (0, 8)]})
    assert watch(figure(), [times(figure())] * 2 + [[few]] * 8) == []


def test_one_machine_among_16384_ranks():
    mesh = Mesh.grid(replica=128, shard=16, tensor=8, hosts=[f"machine-{rank // 8}" for rank in range(16384)])
    axes, bad = ("replica", "shard", "tensor"), {*mesh.ranks_on("machine-777")}
    slow = {group for group in groups_of(mesh, *axes) if bad & {*group.ranks}}
    (found,) = watch(mesh, [times(mesh, slow, axes)] * 4)
    assert (found.scope, found.hosts, {*found.ranks}) == (Scope.MACHINE, ("machine-777",), bad)
    assert len(found.sentence) < 300
