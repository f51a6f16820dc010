"""Every fault knows what a detector that makes no mistakes says of it."""

from __future__ import annotations

import signal

import pytest

from tests.support.incidents import incident_from
from torchscout.decision.consensus.rules import exact
from torchscout.decision.records.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind, Mesh

SDC, STRAGGLER, HANG = Manifestation.SDC, Manifestation.STRAGGLER, Manifestation.HANG
FOUR = Mesh.grid(replica=4)
PAIR = Mesh.grid(replica=2)
ONE = range(7, 8)


@pytest.mark.parametrize(
    ("at", "surface"),
    [
        ("layer.2/weight", "layer.2/weight"),
        ("layer.2/weight.exp_avg", "layer.2/weight.exp_avg"),
        ("layer.2/weight.grad", "layer.2/weight"),
        ("layer.2/weight.gradient", "layer.2/weight.grad"),
        ("layer.2/output", "layer.2/output"),
        ("layer.2/input", "layer.2/output"),
        ("layer.2/grad_input", "layer.2/grad_input"),
        ("layer.2/grad_output", "layer.2/grad_input"),
        ("/weight", "model/weight"),
    ],
)
def test_a_wrong_number_shows_where_it_is_compared_first(at: str, surface: str):
    plan = FaultPlan().flip_bit(rank=2, at=at, step=7, bit=30)
    assert plan.truth(FOUR) == (GroundTruth(SDC, (2,), Scope.RANK, surface, ONE),)


def test_two_peers_that_differ_are_both_named():
    plan = FaultPlan().flip_bit(rank=1, at="layer.2/weight", step=7, bit=30)
    assert plan.truth(PAIR) == (GroundTruth(SDC, (0, 1), Scope.PEER_GROUP, "layer.2/weight", ONE),)
    slow = FaultPlan().delay(rank=1, at="layer.0/forward", step=7, seconds=1)
    assert slow.truth(PAIR) == (GroundTruth(STRAGGLER, (0, 1), Scope.PEER_GROUP, "time/module", ONE),)


def test_two_replicas_of_two_shards_settle_what_they_compute_and_not_what_they_hold():
    mesh = Mesh.grid(replica=2, shard=2)
    computed = FaultPlan().flip_bit(rank=3, at="layer.2/output", step=7, bit=1)
    held = FaultPlan().flip_bit(rank=3, at="layer.2/weight", step=7, bit=1)
    assert computed.truth(mesh)[0].ranks == (3,)
    assert held.truth(mesh) == (GroundTruth(SDC, (1, 3), Scope.PEER_GROUP, "layer.2/weight", ONE),)


def test_corruption_of_owned_state_appears_in_its_owners_records():
    mesh = Mesh.grid(shard=4)
    plan = FaultPlan().flip_bit(rank=3, at="layer.2/weight", step=7, bit=1)
    assert plan.truth(mesh) == (GroundTruth(SDC, (3,), Scope.RANK, "optimizer/update", ONE),)
    for size in (4, 2):
        expected = (
            FaultPlan()
            .flip_bit(rank=1, at="layer.2/weight.exp_avg", step=7, bit=1)
            .truth(Mesh.grid(shard=size))
        )
        assert expected == (GroundTruth(SDC, (1,), Scope.RANK, "state/owned", ONE),)


def test_wrong_ranks_at_one_place_are_one_finding_unless_they_are_half():
    def wrong(ranks: tuple[int, ...], mesh: Mesh) -> tuple[GroundTruth, ...]:
        plan = FaultPlan()
        for rank in ranks:
            plan = plan.set_value(rank=rank, at="layer.2/weight", step=7, value=1)
        return plan.truth(mesh)

    five = Mesh.grid(replica=5)
    assert wrong((4, 1), five) == (GroundTruth(SDC, (1, 4), Scope.RANK, "layer.2/weight", ONE),)
    assert wrong((4, 1), five.on(["a"] * 5))[0].scope is Scope.MACHINE
    assert wrong((1, 2), FOUR) == (GroundTruth(SDC, (0, 1, 2, 3), Scope.PEER_GROUP, "layer.2/weight", ONE),)


def test_experts_have_peers_of_their_own():
    mesh = Mesh.grid(replica=4).carve_experts(2)
    plan = FaultPlan().flip_bit(rank=2, at="layer.0.expert/weight", step=7, bit=1)
    assert plan.showing(role=LayerKind.EXPERT).truth(mesh)[0].ranks == (0, 2)
    assert plan.showing(role=LayerKind.DENSE).truth(mesh)[0].ranks == (2,)


@pytest.mark.parametrize(
    ("at", "surface"),
    [
        ("layer.0/forward", "time/module"),
        ("layer.0/backward", "time/module_backward"),
        ("input", "time/input"),
        ("checkpoint_read", "time/checkpoint_read"),
        ("checkpoint_write", "time/checkpoint_write"),
    ],
)
def test_a_slow_rank_shows_in_what_it_does_by_itself(at: str, surface: str):
    plan = FaultPlan().delay(rank=1, at=at, step=range(3, 6), seconds=0.25)
    assert plan.truth(FOUR) == (GroundTruth(STRAGGLER, (1,), Scope.RANK, surface, range(3, 6)),)


def test_a_rank_slow_in_several_layers_is_one_finding_and_all_ranks_slow_are_the_job():
    plan = FaultPlan()
    for at in ("layer.0/backward", "layer.0/forward", "layer.1/forward"):
        plan = plan.delay(rank=1, at=at, step=7, seconds=1)
    assert plan.truth(FOUR) == (GroundTruth(STRAGGLER, (1,), Scope.RANK, "time/module", ONE),)
    for rank in (0, 2, 3):
        plan = plan.delay(rank=rank, at="layer.0/forward", step=7, seconds=1)
    assert plan.truth(FOUR) == (GroundTruth(STRAGGLER, (), Scope.JOB, "time/module", ONE),)


def test_a_slow_collective_belongs_to_its_process_group_or_machine():
    mesh = Mesh.grid(replica=4, tensor=2)
    plan = FaultPlan().slow_collective(ranks=[5], at="all_reduce@tp", axis="tensor", step=7, seconds=1)
    assert plan.truth(mesh) == (
        GroundTruth(STRAGGLER, (4, 5), Scope.PROCESS_GROUP, "time/*all_reduce*@tensor", ONE),
    )
    placed = mesh.on([f"host-{rank // 2}" for rank in range(8)])
    assert plan.truth(placed)[0].scope is Scope.MACHINE
    (undecided,) = plan.truth(Mesh.grid(replica=3, tensor=2))[0:1]
    assert undecided.ranks == (4, 5)


def test_of_two_corresponding_groups_both_are_listed():
    mesh = Mesh.grid(replica=2, shard=2)
    plan = FaultPlan().slow_collective(ranks=[0, 1], at="all_gather@s", axis="shard", step=7, seconds=1)
    assert plan.truth(mesh) == (
        GroundTruth(STRAGGLER, (0, 1, 2, 3), Scope.PROCESS_GROUP, "time/*all_gather*", ONE),
    )


def test_slow_groups_that_meet_on_a_machine_are_one_finding():
    mesh = Mesh.grid(replica=4, shard=2, tensor=2)
    mesh = mesh.on([f"host-{rank // 2}" for rank in range(16)])  # tensor-parallel ranks share one
    plan = FaultPlan().slow_collective(ranks=[4, 5], at="all_reduce@tp", axis="tensor", step=7, seconds=1)
    plan = plan.slow_collective(ranks=[4, 6], at="all_gather@s", axis="shard", step=7, seconds=1)
    (truth,) = plan.truth(mesh)
    assert (truth.scope, truth.ranks) == (Scope.MACHINE, (4, 5))


def test_who_holds_others_up_is_named_in_a_group_of_any_size():
    for plan in (
        FaultPlan().stall(rank=1, at="step", step=7, seconds=60),
        FaultPlan().signal(rank=1, step=7, number=signal.SIGSTOP),
    ):
        assert plan.truth(PAIR) == (GroundTruth(HANG, (1,), Scope.RANK, "issued/*|entered/*", ONE),)
    both = (
        FaultPlan().stall(rank=1, at="step", step=7, seconds=60).stall(rank=3, at="step", step=7, seconds=60)
    )
    assert both.truth(FOUR) == (GroundTruth(HANG, (1, 3), Scope.RANK, "issued/*|entered/*", ONE),)
    assert both.truth(FOUR.on("abcb"))[0].scope is Scope.MACHINE


TRAINING = {"at": "all_reduce@training", "axis": "replica", "step": 7}


@pytest.mark.parametrize(
    ("plan", "surface"),
    [
        (FaultPlan().change_collective(rank=1, what="shape", **TRAINING), "fingerprint/training"),
        (FaultPlan().skip_collective(rank=1, **TRAINING), "deadlock|fingerprint/training"),
        (FaultPlan().swap_collectives(rank=1, **TRAINING), "deadlock|fingerprint/training"),
    ],
)
def test_who_differs_in_a_collective_is_for_its_members_to_say(plan: FaultPlan, surface: str):
    assert plan.truth(FOUR) == (GroundTruth(HANG, (1,), Scope.RANK, surface, ONE),)
    assert plan.truth(PAIR) == (GroundTruth(HANG, (0, 1), Scope.PROCESS_GROUP, surface, ONE),)
    within = Mesh.grid(replica=4, tensor=2)  # rank 1 is in the group of the odd ranks
    assert plan.truth(within) == (GroundTruth(HANG, (1,), Scope.RANK, surface, ONE),)


def test_where_all_have_entered_a_collective_nobody_in_it_is_to_blame():
    plan = FaultPlan().stick_collective(ranks=range(1, 8, 2), seconds=60, **TRAINING)
    mesh = Mesh.grid(replica=4, tensor=2)
    assert plan.truth(mesh) == (
        GroundTruth(HANG, (1, 3, 5, 7), Scope.PROCESS_GROUP, "issued/training|entered/training", ONE),
    )
    late = FaultPlan().stall(rank=1, at="all_reduce@training", step=7, seconds=60)
    assert late.truth(PAIR) == (GroundTruth(HANG, (1,), Scope.RANK, "issued/training|entered/training", ONE),)


def test_a_killed_rank_may_be_missed_before_it_is_waited_for():
    (truth,) = FaultPlan().kill(rank=1, step=7).truth(PAIR)
    assert truth.matches(incident(HANG, (1,), Scope.RANK, "process"))
    assert truth.matches(incident(HANG, (1,), Scope.RANK, "issued/default_pg"))


def test_an_explicit_truth_in_the_plan_is_used():
    plan = FaultPlan().flip_bit(rank=3, at="stack.1.up/output", step=7, bit=1)
    plan = plan.showing("stack.1/output", scope=Scope.MACHINE, ranks=(2, 3))
    mesh = Mesh.grid(replica=3, tensor=2)
    assert plan.truth(mesh) == (GroundTruth(SDC, (2, 3), Scope.MACHINE, "stack.1/output", ONE),)


def incident(manifestation: Manifestation, ranks: tuple[int, ...], scope: Scope, surface: str) -> Incident:
    record = EvidenceRecord(
        step=7, surface=surface, manifestation=manifestation, peers=(0, 1, 2), verdict=exact([1, 1, 2])
    )
    return incident_from(record, ranks, scope=scope, action=Action.INSPECT, sentence="")


def test_a_truth_matches_the_incidents_that_report_it():
    truth = GroundTruth(HANG, (2,), Scope.RANK, "issued/*", ONE)
    assert truth.matches(incident(HANG, (2,), Scope.RANK, "issued/mesh_dp"))
    assert not truth.matches(incident(SDC, (2,), Scope.RANK, "issued/mesh_dp"))
    assert not truth.matches(incident(HANG, (1,), Scope.RANK, "issued/mesh_dp"))
    assert not truth.matches(incident(HANG, (2,), Scope.MACHINE, "issued/mesh_dp"))
    assert not truth.matches(incident(HANG, (2,), Scope.RANK, "coordinate"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (FaultPlan().flip_bit(rank=4, at="layer.2/weight", step=7, bit=1), "rank 4 is not in a mesh of 4"),
        (FaultPlan().delay(rank=1, at="step", step=7, seconds=1), "cannot be detected"),
        (FaultPlan().delay(rank=1, at="all_reduce@tp", step=7, seconds=1), "pass axis, one of"),
    ],
)
def test_a_plan_without_a_known_truth_is_refused(plan: FaultPlan, message: str):
    with pytest.raises(ValueError, match=message):
        plan.truth(FOUR)
