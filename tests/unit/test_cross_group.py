import itertools
import random

import pytest

from torchscout.config import StragglerConfig
from torchscout.decision.consensus.rules import statistical
from torchscout.decision.records.record import Action, EvidenceRecord, Manifestation, Scope
from torchscout.decision.straggler.groups import CollectiveTime, GroupDiagnosis, incident
from torchscout.decision.straggler.localization import Diagnosis, Group, localize
from torchscout.mesh import Mesh, MeshAddress

SURFACES = {"shard": "time/all_gather", "tensor": "time/all_reduce", "replica": "time/reduce_scatter"}
DEFAULTS = StragglerConfig()
ROUNDS = 8  # enough to confirm a few simultaneous faults in a small mesh


def figure(hosts=True):
    """The paper's 16 ranks: 4 replicas x 2 shards x 2 tensor slices, each tensor pair on one machine."""
    coordinates = [(rank // 2 % 4, rank % 2, rank // 8) for rank in range(16)]
    return Mesh(
        [MeshAddress(replica=d, shard=s, tensor=t) for d, s, t in coordinates],
        [f"machine-{2 * d + s}" for d, s, _ in coordinates] if hosts else None,
    )


def shard(*ranks):
    return Group("shard", ranks)


def tensor(*ranks):
    return Group("tensor", ranks)


def groups_of(mesh, *axes):
    return [Group(axis, ranks) for axis in axes for ranks in mesh.groups_along(axis)]


def localize_figure(*slow, axes=("shard", "tensor")):
    mesh = figure()
    return localize(mesh, slow, groups_of(mesh, *axes))


def pairs(*members, axis="shard"):
    """Groups of two ranks on a mesh of one rank per machine: ranks and machines are the same."""
    return [Group(axis, tuple(sorted(ranks))) for ranks in members]


def one_rank_per_machine(count):
    return Mesh.grid(replica=count, hosts=[f"machine-{rank}" for rank in range(count)])


# Localization: sets in, findings out.


def test_paper_figure_names_the_machine_where_shard_and_tensor_groups_meet():
    (found,) = localize_figure(shard(4, 5), tensor(4, 12))
    assert (found.diagnosis, found.hosts, found.ranks) == (Diagnosis.MACHINE, ("machine-4",), (4, 12))
    assert found.endpoints == (4,)
    assert set(found.groups) == {shard(4, 5), tensor(4, 12)}
    assert not found.ambiguous


def test_slow_between_machines_and_normal_within_is_the_network():
    (found,) = localize_figure(shard(4, 5))
    assert (found.diagnosis, found.groups) == (Diagnosis.NETWORK, (shard(4, 5),))
    assert found.hosts == ("machine-4", "machine-5")
    assert not found.names_machines


def test_slow_within_a_machine_only_is_its_inner_links():
    (found,) = localize_figure(tensor(4, 12))
    assert (found.diagnosis, found.hosts, found.ranks) == (Diagnosis.INTRA_MACHINE, ("machine-4",), (4, 12))


def test_axis_names_do_not_matter_only_what_groups_span():
    """The shard groups stay within machines here, and the tensor groups leave them."""
    mesh = Mesh.grid(shard=4, tensor=4, hosts=[f"machine-{rank % 4}" for rank in range(16)])
    measured = groups_of(mesh, "shard", "tensor")
    assert localize(mesh, [shard(1, 5, 9, 13)], measured)[0].diagnosis is Diagnosis.INTRA_MACHINE
    assert localize(mesh, [tensor(4, 5, 6, 7)], measured)[0].diagnosis is Diagnosis.NETWORK
    (found,) = localize(mesh, [shard(1, 5, 9, 13), tensor(4, 5, 6, 7)], measured)
    assert (found.diagnosis, found.hosts, found.endpoints) == (Diagnosis.MACHINE, ("machine-1",), (5,))


def test_slow_groups_over_many_machines_have_job_scope():
    slow = [shard(0, 1), shard(4, 5), tensor(2, 10), tensor(7, 15)]
    (found,) = localize_figure(*slow)
    assert (found.diagnosis, found.hosts, found.ranks) == (Diagnosis.JOB, (), ())
    assert set(found.groups) == set(slow)


@pytest.mark.parametrize(("machines", "few"), [(8, 2), (16, 2), (32, 4)])
def test_more_than_a_few_slow_machines_have_job_scope(machines, few):
    mesh = Mesh.grid(
        replica=machines, tensor=2, hosts=[f"machine-{rank // 2}" for rank in range(2 * machines)]
    )
    measured = groups_of(mesh, "tensor")
    assert [found.diagnosis for found in localize(mesh, measured[:few], measured)] == [
        Diagnosis.INTRA_MACHINE
    ]
    assert [found.diagnosis for found in localize(mesh, measured[: few + 1], measured)] == [Diagnosis.JOB]


def machine_fault(mesh, measured, *hosts):
    bad = {rank for host in hosts for rank in mesh.ranks_on(host)}
    return [group for group in measured if bad & set(group.ranks)]


def test_any_machine_or_two_of_a_larger_mesh_explain_all_their_groups():
    hosts = [f"machine-{index}" for index in range(16)]
    mesh = Mesh.grid(replica=4, shard=4, tensor=4, hosts=[hosts[rank // 4] for rank in range(64)])
    measured = groups_of(mesh, "replica", "shard", "tensor")
    for one, other in itertools.combinations_with_replacement(hosts, 2):
        (found,) = localize(mesh, machine_fault(mesh, measured, one, other), measured)
        assert (found.diagnosis, set(found.hosts)) == (Diagnosis.MACHINE, {one, other})
        assert found.endpoints == found.ranks


def test_two_faulty_machines_are_both_named():
    (found,) = localize_figure(shard(4, 5), tensor(4, 12), shard(10, 11), tensor(2, 10))
    assert (found.diagnosis, found.hosts) == (Diagnosis.MACHINE, ("machine-2", "machine-4"))
    assert (found.ranks, found.endpoints) == ((2, 4, 10, 12), (4, 10))


def test_two_faulty_machines_in_one_group_are_both_named():
    (found,) = localize_figure(shard(4, 5), tensor(4, 12), tensor(5, 13))
    assert (found.diagnosis, found.hosts) == (Diagnosis.MACHINE, ("machine-4", "machine-5"))


def test_separate_causes_are_separate_findings():
    machine, network = localize_figure(shard(4, 5), tensor(4, 12), shard(0, 1))
    assert (machine.diagnosis, machine.hosts) == (Diagnosis.MACHINE, ("machine-4",))
    assert (network.diagnosis, network.groups) == (Diagnosis.NETWORK, (shard(0, 1),))


def test_groups_between_machines_alone_name_the_one_machine_they_share():
    mesh = one_rank_per_machine(8)
    slow, normal = pairs((0, 1), (0, 2)), pairs((3, 4), (5, 6), (1, 7))
    (found,) = localize(mesh, slow, slow + normal)
    assert (found.diagnosis, found.hosts, found.endpoints) == (Diagnosis.MACHINE, ("machine-0",), (0,))
    assert not found.ambiguous


def test_groups_between_machines_alone_can_name_two():
    mesh = one_rank_per_machine(8)
    slow = pairs((0, 1), (0, 2), (4, 5), (4, 6))
    (found,) = localize(mesh, slow, slow)
    assert (found.diagnosis, found.hosts) == (Diagnosis.MACHINE, ("machine-0", "machine-4"))


def test_shared_machine_that_is_normal_inside_is_the_network():
    mesh = figure()
    slow = [shard(4, 5), Group("replica", (4, 6))]
    inside = [tensor(4, 12), tensor(5, 13), tensor(6, 14)]
    assert [f.diagnosis for f in localize(mesh, slow, slow + inside)] == [Diagnosis.NETWORK]
    assert [f.diagnosis for f in localize(mesh, slow, slow + inside[:1])] == [Diagnosis.NETWORK]
    assert [f.diagnosis for f in localize(mesh, slow, slow + inside[1:])] == [Diagnosis.MACHINE]


def test_one_group_between_machines_alone_is_ambiguous():
    (found,) = localize_figure(shard(4, 5), axes=("shard",))
    assert found.ambiguous
    assert found.hosts == ("machine-4", "machine-5")
    assert not found.names_machines


def test_equally_small_explanations_are_an_ambiguous_set():
    mesh = one_rank_per_machine(8)
    slow = [*pairs((0, 1), (2, 3)), Group("replica", (0, 1, 2, 3))]
    (found,) = localize(mesh, slow, slow)
    assert (found.diagnosis, found.ambiguous) == (Diagnosis.MACHINE, True)
    assert found.hosts == ("machine-0", "machine-1", "machine-2", "machine-3")


def test_machine_whose_groups_are_all_slow_is_preferred():
    mesh = one_rank_per_machine(8)
    slow = [*pairs((0, 1)), Group("replica", (0, 1, 2))]
    (undecided,) = localize(mesh, slow, slow)
    assert (undecided.hosts, undecided.ambiguous) == (("machine-0", "machine-1"), True)
    (found,) = localize(mesh, slow, [*slow, *pairs((1, 3), axis="context")])
    assert (found.hosts, found.ambiguous) == (("machine-0",), False)


def test_one_group_does_not_name_its_endpoint_by_the_others_innocence():
    mesh = one_rank_per_machine(8)
    slow = pairs((0, 1))
    (found,) = localize(mesh, slow, slow + pairs((1, 2), axis="replica"))
    assert (found.hosts, found.ambiguous) == (("machine-0", "machine-1"), True)


def test_the_same_members_on_two_axes_are_one_direction():
    mesh = one_rank_per_machine(8)
    slow = pairs((0, 1)) + pairs((0, 1), axis="expert")
    (found,) = localize(mesh, slow, slow + pairs((1, 2), axis="replica"))
    assert (found.hosts, found.ambiguous) == (("machine-0", "machine-1"), True)


def test_an_undecided_group_does_not_hide_the_network():
    inside = [tensor(*ranks) for ranks in [(0, 8), (1, 9), (2, 10), (3, 11)]]
    slow = [shard(0, 1), shard(4, 5)]
    undecided, network = localize(figure(), slow, slow + inside)
    assert (undecided.groups, undecided.ambiguous) == ((shard(4, 5),), True)
    assert (network.diagnosis, network.groups) == (Diagnosis.NETWORK, (shard(0, 1),))


def test_three_machines_without_inside_evidence_are_not_guessed():
    mesh = one_rank_per_machine(32)
    slow = pairs((0, 1), (0, 2), (4, 5), (4, 6), (8, 9), (8, 10))
    (found,) = localize(mesh, slow, slow)
    assert (found.diagnosis, found.ambiguous) == (Diagnosis.PROCESS_GROUP, True)
    assert len(found.hosts) == 9


def test_unknown_hosts_leave_the_process_groups():
    mesh = figure(hosts=False)
    (found,) = localize(mesh, [shard(4, 5), tensor(4, 12)], groups_of(mesh, "shard", "tensor"))
    assert (found.diagnosis, found.hosts) == (Diagnosis.PROCESS_GROUP, ())
    assert (found.ranks, found.endpoints) == ((4, 5, 12), (4,))


def test_nothing_slow_finds_nothing():
    assert localize_figure() == ()


# Incidents.


def record(surface, step=0):
    return EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=Manifestation.STRAGGLER,
        peers=(0, 2, 4),
        verdict=statistical([1.0, 1.0, 9.0]),
    )


RECORDS = [record(surface) for surface in SURFACES.values()]


@pytest.mark.parametrize(
    ("slow", "scope", "action", "words"),
    [
        (
            [shard(4, 5), tensor(4, 12)],
            Scope.MACHINE,
            Action.REPLACE,
            "{4, 5} and tensor group {4, 12} are slow and meet on machine-4 (ranks 4, 12; endpoint 4)",
        ),
        ([tensor(4, 12)], Scope.MACHINE, Action.INSPECT, "a fault inside machine-4 (ranks 4, 12)"),
        ([shard(4, 5)], Scope.PROCESS_GROUP, Action.INSPECT, "the network between machine-4 and machine-5"),
        (
            [shard(0, 1), shard(4, 5), tensor(2, 10), tensor(7, 15)],
            Scope.JOB,
            Action.CONTINUE,
            "software of the job, or contention across the cluster",
        ),
    ],
)
def test_incident_says_what_to_do_and_why(slow, scope, action, words):
    (found,) = localize_figure(*slow)
    result = incident(found, 40, RECORDS)
    assert (result.manifestation, result.scope, result.action) == (Manifestation.STRAGGLER, scope, action)
    assert (result.step, result.ranks, result.hosts) == (40, found.ranks, found.hosts)
    assert result.records == tuple(RECORDS)
    assert words in result.sentence
    assert result.sentence.startswith(("Shard group {", "Tensor group {"))


def test_ambiguous_incident_replaces_nothing():
    (found,) = localize_figure(shard(4, 5), axes=("shard",))
    result = incident(found, 40, RECORDS)
    assert (result.scope, result.action) == (Scope.PROCESS_GROUP, Action.INSPECT)
    assert "machine-4 and machine-5 or the network between them" in result.sentence


def test_sentence_stays_short_for_large_groups():
    mesh = Mesh.grid(replica=64, tensor=4, hosts=[f"machine-{rank // 4}" for rank in range(256)])
    measured = groups_of(mesh, "replica", "tensor")
    slow = [group for group in measured if set(group.ranks) & {0, 1, 2, 3}]
    (found,) = localize(mesh, slow, measured)
    assert "replica group {0, 4, 8, ..., 252}" in found.sentence
    assert "and 2 more are slow" in found.sentence


# Rounds.


def times(mesh, slow=(), axes=("shard", "tensor"), factor=5.0, jitter=None):
    """One round: 10 ms per collective, ``factor`` times that on the slow groups."""
    return [
        CollectiveTime(
            group.axis,
            group.ranks,
            SURFACES[group.axis],
            10.0 * (factor if group in slow else 1.0) * (jitter.lognormvariate(0, 0.03) if jitter else 1.0),
        )
        for group in groups_of(mesh, *axes)
    ]


def watch(diagnosis, rounds):
    """All incidents of the given rounds, each round a list of times."""
    return [found for step, round_ in enumerate(rounds) for found in diagnosis.observe(step, round_, RECORDS)]


def test_machine_is_reported_once_after_two_rounds():
    mesh, fault = figure(), [shard(4, 5), tensor(4, 12)]
    diagnosis = GroupDiagnosis(mesh, DEFAULTS)
    jitter = random.Random(0)
    reported = [diagnosis.observe(step, times(mesh, fault, jitter=jitter), RECORDS) for step in range(10)]
    assert [len(found) for found in reported] == [0, 1] + [0] * 8
    assert (reported[1][0].hosts, reported[1][0].ranks) == (("machine-4",), (4, 12))
    assert {proof.surface for proof in reported[1][0].records} == {"time/all_gather", "time/all_reduce"}


def test_more_confirmations_are_waited_for():
    mesh, fault = figure(), [tensor(4, 12)]
    diagnosis = GroupDiagnosis(mesh, StragglerConfig(confirmations=4))
    assert watch(diagnosis, [times(mesh, fault)] * 3) == []
    assert len(watch(diagnosis, [times(mesh, fault)])) == 1


def test_two_machines_are_confirmed_over_rounds():
    mesh, fault = figure(), [shard(4, 5), tensor(4, 12), shard(10, 11), tensor(2, 10)]
    (found,) = watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault)] * ROUNDS)
    assert (found.scope, found.hosts) == (Scope.MACHINE, ("machine-2", "machine-4"))


def test_job_wide_slowness_is_confirmed_over_rounds():
    mesh, fault = figure(), [shard(0, 1), shard(4, 5), tensor(2, 10), tensor(7, 15)]
    found = watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault)] * ROUNDS)
    assert (found[-1].scope, found[-1].ranks) == (Scope.JOB, ())


def test_job_wide_slowness_that_spreads_is_not_reported_again():
    mesh, jitter = figure(), random.Random(2)
    few = [tensor(0, 8), tensor(2, 10), tensor(7, 15)]
    rounds = [times(mesh, fault, jitter=jitter) for fault in [few] * ROUNDS + [[*few, shard(4, 5)]] * ROUNDS]
    assert [found.scope for found in watch(GroupDiagnosis(mesh, DEFAULTS), rounds)] == [Scope.JOB]


def test_clean_twin_is_silent():
    mesh, jitter = figure(), random.Random(1)
    axes = ("shard", "tensor", "replica")
    assert (
        watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, axes=axes, jitter=jitter) for _ in range(1500)])
        == []
    )


def test_one_off_slow_collective_is_silent():
    mesh, fault = figure(), [shard(4, 5), tensor(4, 12)]
    rounds = [times(mesh, fault if step % 10 == 5 else ()) for step in range(60)]
    assert watch(GroupDiagnosis(mesh, DEFAULTS), rounds) == []


def test_immaterial_slowness_is_silent():
    mesh, fault = figure(), [shard(4, 5), tensor(4, 12)]
    assert watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault, factor=1.08)] * ROUNDS) == []
    lenient = StragglerConfig(min_slowdown_ms=100.0)
    assert watch(GroupDiagnosis(mesh, lenient), [times(mesh, fault)] * ROUNDS) == []


def test_a_fast_group_is_not_an_incident():
    mesh = figure()
    assert watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, [shard(4, 5)], factor=0.1)] * ROUNDS) == []


def test_fast_small_collective_does_not_exonerate():
    mesh, fault = figure(), [shard(4, 5), tensor(4, 12)]
    small = [
        CollectiveTime(group.axis, group.ranks, "time/all_gather", 0.1, (8,))
        for group in groups_of(mesh, "tensor")
    ]
    other = [
        CollectiveTime(group.axis, group.ranks, "time/reduce_scatter", 9.0)
        for group in groups_of(mesh, "shard")
    ]
    (found,) = watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault) + small + other] * ROUNDS)
    assert (found.scope, found.hosts) == (Scope.MACHINE, ("machine-4",))
    assert "time/reduce_scatter" not in {proof.surface for proof in found.records}


def test_machine_does_not_pass_for_the_network_while_its_inside_is_being_confirmed():
    """The two axes are measured in turns, so that one is confirmed before the other."""
    mesh, fault = figure(), [shard(4, 5), tensor(4, 12)]
    rounds = [times(mesh, fault, axes=[axis]) for axis in ("shard", "tensor") * 3]
    assert [found.scope for found in watch(GroupDiagnosis(mesh, DEFAULTS), rounds)] == [Scope.MACHINE]


def test_a_group_that_hovers_at_the_edge_delays_but_does_not_silence():
    """Slow inside the machine once, then neither slow enough to count nor back to normal."""
    mesh, network = figure(), [shard(4, 5)]
    edge = CollectiveTime("tensor", (4, 12), SURFACES["tensor"], 12.5)
    noisy = [
        CollectiveTime("tensor", ranks, SURFACES["tensor"], 10.0 + 0.5 * (ranks[0] % 4))
        for ranks in mesh.groups_along("tensor")
        if ranks != (4, 12)
    ]
    between = times(mesh, network, axes=["shard"])
    once = [*between, *noisy, CollectiveTime("tensor", (4, 12), SURFACES["tensor"], 50.0)]
    found = watch(GroupDiagnosis(mesh, DEFAULTS), [once] + [[*between, *noisy, edge]] * ROUNDS)
    assert [(incident.scope, incident.step) for incident in found] == [(Scope.PROCESS_GROUP, 5)]


def test_each_finding_has_its_own_proof():
    mesh, fault = figure(), [shard(0, 1), tensor(4, 12)]
    proof = {
        found.scope: found.records
        for found in watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault)] * 3)
    }
    assert [record.surface for record in proof[Scope.MACHINE]] == ["time/all_reduce"]
    assert [record.surface for record in proof[Scope.PROCESS_GROUP]] == ["time/all_gather"]


def test_recovered_fault_is_reported_again_when_it_returns():
    mesh, fault = figure(), [tensor(4, 12)]
    rounds = [times(mesh, fault)] * 3 + [times(mesh)] * 3 + [times(mesh, fault)] * ROUNDS
    assert [found.hosts for found in watch(GroupDiagnosis(mesh, DEFAULTS), rounds)] == [("machine-4",)] * 2


@pytest.mark.parametrize("axes", [("replica",), ("replica", "tensor")])
def test_a_link_that_is_hardly_slow_is_reported_once(axes):
    """It is as fast as the others now and then, which does not make it a new fault each time."""
    mesh = Mesh.grid(replica=4, tensor=4, hosts=[f"machine-{rank // 4}" for rank in range(16)])
    jitter, fault = random.Random(5), [Group("replica", (0, 4, 8, 12))]
    measured = [*axes, "tensor"]
    rounds = [
        times(mesh, () if step % 8 == 7 else fault, axes=dict.fromkeys(measured), factor=1.4, jitter=jitter)
        for step in range(60)
    ]
    assert len(watch(GroupDiagnosis(mesh, DEFAULTS), rounds)) == 1


def test_a_finding_that_grows_is_reported_again_and_one_that_shrinks_is_not():
    mesh = figure()
    both = [tensor(4, 12), tensor(2, 10)]
    rounds = [times(mesh, both[:1])] * 3 + [times(mesh, both)] * ROUNDS + [times(mesh, both[:1])] * 3
    found = watch(GroupDiagnosis(mesh, DEFAULTS), rounds)
    assert [incident.hosts for incident in found] == [("machine-4",), ("machine-2", "machine-4")]


def test_two_corresponding_groups_are_inconclusive():
    mesh = Mesh.grid(replica=2, tensor=4, hosts=[f"machine-{rank // 4}" for rank in range(8)])
    fault = [tensor(4, 5, 6, 7)]
    (found,) = watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault, axes=["tensor"])] * ROUNDS)
    assert (found.scope, found.action) == (Scope.PROCESS_GROUP, Action.INSPECT)
    assert (found.ranks, found.hosts) == (tuple(range(8)), ("machine-0", "machine-1"))
    assert "no third" in found.sentence


def test_two_groups_that_agree_are_not_known_to_be_normal():
    """Neither machine was compared inside, so a slow group between them does not accuse the network."""
    mesh = Mesh.grid(replica=2, tensor=4, hosts=[f"machine-{rank // 4}" for rank in range(8)])
    fault = [Group("replica", (1, 5))]
    (found,) = watch(
        GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault, axes=["replica", "tensor"])] * ROUNDS
    )
    assert "machine-0 and machine-1 or the network" in found.sentence


def test_a_group_without_counterpart_says_nothing():
    mesh = Mesh.grid(tensor=4, hosts=["machine-0"] * 4)
    rounds = [times(mesh, axes=["tensor"])] * 3 + [
        times(mesh, [tensor(0, 1, 2, 3)], axes=["tensor"])
    ] * ROUNDS
    assert watch(GroupDiagnosis(mesh, DEFAULTS), rounds) == []


def test_a_round_that_measured_too_few_groups_is_no_majority():
    mesh, fault = figure(), [tensor(4, 12)]
    partial = [time for time in times(mesh, fault) if time.ranks in ((4, 12), (0, 8))]
    assert watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh)] * 2 + [partial] * ROUNDS) == []


def test_groups_with_another_placement_do_not_correspond():
    """One of four shard groups leaves its machine; being slower than those that do not is its nature."""
    mesh = Mesh.grid(replica=4, shard=2, hosts=["a", "a", "b", "b", "c", "c", "d", "e"])
    fault = [shard(6, 7)]
    assert watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault, axes=["shard"])] * ROUNDS) == []


def test_different_work_does_not_correspond():
    mesh = figure()
    uneven = [
        CollectiveTime("tensor", ranks, "time/all_to_all", 10.0 if ranks[0] else 50.0, (ranks[0] == 0,))
        for ranks in mesh.groups_along("tensor")
    ]
    records = [record("time/all_to_all")]
    diagnosis = GroupDiagnosis(mesh, DEFAULTS)
    assert [diagnosis.observe(step, uneven, records) for step in range(ROUNDS)] == [[]] * ROUNDS


def test_unknown_hosts_report_process_groups():
    mesh, fault = figure(hosts=False), [shard(4, 5), tensor(4, 12)]
    found = watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault)] * ROUNDS)
    assert (found[-1].scope, found[-1].hosts, found[-1].ranks) == (Scope.PROCESS_GROUP, (), (4, 5, 12))


def test_one_machine_among_16384_ranks():
    mesh = Mesh.grid(replica=128, shard=16, tensor=8, hosts=[f"machine-{rank // 8}" for rank in range(16384)])
    axes = ("replica", "shard", "tensor")
    fault = set(machine_fault(mesh, groups_of(mesh, *axes), "machine-777"))
    assert len(fault) == 17
    (found,) = watch(GroupDiagnosis(mesh, DEFAULTS), [times(mesh, fault, axes)] * 4)
    assert (found.scope, found.hosts, found.ranks) == (
        Scope.MACHINE,
        ("machine-777",),
        tuple(range(6216, 6224)),
    )


# The numbers that come in.


@pytest.mark.parametrize("ranks", [(), (3,), (5, 4), (4, 4)])
def test_bad_groups_are_refused(ranks):
    time = CollectiveTime("shard", ranks, "time/all_gather", 1.0)
    with pytest.raises(ValueError, match=r"a shard group needs .* got \(" + ", ".join(map(str, ranks))):
        GroupDiagnosis(figure(), DEFAULTS).observe(0, [time], RECORDS)


@pytest.mark.parametrize("milliseconds", [float("nan"), float("inf"), -1.0])
def test_bad_times_are_refused(milliseconds):
    time = CollectiveTime("shard", (4, 5), "time/all_gather", milliseconds)
    with pytest.raises(ValueError, match=rf"shard group {{4, 5}}: time/all_gather took {milliseconds} ms"):
        GroupDiagnosis(figure(), DEFAULTS).observe(0, [time], RECORDS)


@pytest.mark.parametrize("ranks", [(4, 16), (-1, 4)])
def test_unknown_ranks_are_refused(ranks):
    time = CollectiveTime("shard", ranks, "time/all_gather", 1.0)
    with pytest.raises(ValueError, match=f"{ranks[0]}, {ranks[1]}.* is not in a mesh of 16 ranks"):
        GroupDiagnosis(figure(), DEFAULTS).observe(0, [time], RECORDS)


def test_a_group_timed_twice_is_refused():
    time = CollectiveTime("shard", (4, 5), "time/all_gather", 1.0)
    with pytest.raises(ValueError, match=r"shard group \{4, 5\}: time/all_gather was timed twice"):
        GroupDiagnosis(figure(), DEFAULTS).observe(0, [time, time], RECORDS)


def test_times_without_a_record_are_refused():
    with pytest.raises(ValueError, match="no evidence record for time/all_gather"):
        GroupDiagnosis(figure(), DEFAULTS).observe(0, times(figure()), [record("time/all_reduce")])
