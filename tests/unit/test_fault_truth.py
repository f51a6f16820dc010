"""Every fault knows what a detector that makes no mistakes says of it."""

from __future__ import annotations

import signal

import pytest

from tests.support.incidents import incident_from
from torchscout.decision.consensus import exact
from torchscout.decision.types import EvidenceRecord, Manifestation, Scope
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind, Mesh

SDC, STRAGGLER, HANG, CRASH = (
    Manifestation.SDC,
    Manifestation.STRAGGLER,
    Manifestation.HANG,
    Manifestation.CRASH,
)
RANK, PEERS, GROUP, MACHINE, JOB = (
    Scope.RANK,
    Scope.PEER_GROUP,
    Scope.PROCESS_GROUP,
    Scope.MACHINE,
    Scope.JOB,
)
PAIR, FOUR, FIVE = (Mesh.grid(replica=size) for size in (2, 4, 5))
SHARDS = Mesh.grid(shard=4)
HYBRID = Mesh.grid(replica=2, shard=2)
TENSOR = Mesh.grid(replica=4, tensor=2)
EXPERTS = Mesh.grid(replica=4).carve_experts(2)
THREE_AXES = Mesh.grid(replica=4, shard=2, tensor=2).on([f"host-{rank // 2}" for rank in range(16)])
STEP = {"step": 7}
TRAINING = {"at": "all_reduce@training", "axis": "replica", **STEP}
WAITS = "issued/*|entered/*"
AMONG = "issued/training|entered/training"


def flipped(rank: int, at: str) -> FaultPlan:
    return FaultPlan().flip_bit(rank=rank, at=at, bit=1, **STEP)


def wrong(*ranks: int) -> FaultPlan:
    plan = FaultPlan()
    for rank in ranks:
        plan = plan.set_value(rank=rank, at="layer.2/weight", value=1, **STEP)
    return plan


def slow(*where: tuple[int, str]) -> FaultPlan:
    plan = FaultPlan()
    for rank, at in where:
        plan = plan.delay(rank=rank, at=at, seconds=1, **STEP)
    return plan


def slow_group(ranks: list[int], operation: str, axis: str, plan: FaultPlan | None = None) -> FaultPlan:
    return (plan or FaultPlan()).slow_collective(ranks=ranks, at=operation, axis=axis, seconds=1, **STEP)


def stalled(*ranks: int, at: str = "step") -> FaultPlan:
    plan = FaultPlan()
    for rank in ranks:
        plan = plan.stall(rank=rank, at=at, seconds=60, **STEP)
    return plan


def killed(*ranks: int) -> FaultPlan:
    plan = FaultPlan()
    for rank in ranks:
        plan = plan.kill(rank=rank, **STEP)
    return plan


TENSOR_GROUP = slow_group([5], "all_reduce@tp", "tensor")
GATHERED = slow_group([0, 1], "all_gather@s", "shard")
MEETING = slow_group([4, 6], "all_gather@s", "shard", slow_group([4, 5], "all_reduce@tp", "tensor"))
STUCK = FaultPlan().stick_collective(ranks=range(1, 8, 2), seconds=60, **TRAINING)
SKIPPED = FaultPlan().skip_collective(rank=1, **TRAINING)
EXPERT = flipped(2, "layer.0.expert/weight")
ALL_SLOW = slow(*((rank, "layer.0/forward") for rank in range(4)))
SHOWING = flipped(3, "stack.1.up/output").showing("stack.1/output", scope=MACHINE, ranks=(2, 3))
ORDER = "deadlock|fingerprint/training"

# The plan, the mesh, and what is to be reported: its kind, ranks, scope and surface.
TRUTHS = [
    # A wrong number shows where it is compared first.
    (flipped(2, "layer.2/weight"), FOUR, (SDC, (2,), RANK, "layer.2/weight")),
    (flipped(2, "layer.2/weight.exp_avg"), FOUR, (SDC, (2,), RANK, "layer.2/weight.exp_avg")),
    (flipped(2, "layer.2/weight.grad"), FOUR, (SDC, (2,), RANK, "layer.2/weight")),
    (flipped(2, "layer.2/weight.gradient"), FOUR, (SDC, (2,), RANK, "layer.2/weight.grad")),
    (flipped(2, "layer.2/output"), FOUR, (SDC, (2,), RANK, "layer.2/output")),
    (flipped(2, "layer.2/input"), FOUR, (SDC, (2,), RANK, "layer.2/output")),
    (flipped(2, "layer.2/grad_input"), FOUR, (SDC, (2,), RANK, "layer.2/grad_input")),
    (flipped(2, "layer.2/grad_output"), FOUR, (SDC, (2,), RANK, "layer.2/grad_input")),
    (flipped(2, "/weight"), FOUR, (SDC, (2,), RANK, "model/weight")),
    # Two peers that differ are both named; shards of two replicas compute alike and hold different state.
    (flipped(1, "layer.2/weight"), PAIR, (SDC, (0, 1), PEERS, "layer.2/weight")),
    (flipped(3, "layer.2/output"), HYBRID, (SDC, (3,), RANK, "layer.2/output")),
    (flipped(3, "layer.2/weight"), HYBRID, (SDC, (1, 3), PEERS, "layer.2/weight")),
    # State that one rank owns shows in its own records.
    (flipped(3, "layer.2/weight"), SHARDS, (SDC, (3,), RANK, "optimizer/update")),
    (flipped(1, "layer.2/weight.exp_avg"), SHARDS, (SDC, (1,), RANK, "state/owned")),
    (flipped(1, "layer.2/weight.exp_avg"), Mesh.grid(shard=2), (SDC, (1,), RANK, "state/owned")),
    # Wrong ranks at one place are one finding unless they are half.
    (wrong(4, 1), FIVE, (SDC, (1, 4), RANK, "layer.2/weight")),
    (wrong(4, 1), FIVE.on(["a"] * 5), (SDC, (1, 4), MACHINE, "layer.2/weight")),
    (wrong(1, 2), FOUR, (SDC, (0, 1, 2, 3), PEERS, "layer.2/weight")),
    # Experts have peers of their own.
    (EXPERT.showing(role=LayerKind.EXPERT), EXPERTS, (SDC, (0, 2), PEERS, "layer.0.expert/weight")),
    (EXPERT.showing(role=LayerKind.DENSE), EXPERTS, (SDC, (2,), RANK, "layer.0.expert/weight")),
    (SHOWING, Mesh.grid(replica=3, tensor=2), (SDC, (2, 3), MACHINE, "stack.1/output")),
    # A slow rank shows in what it does by itself.
    (slow((1, "layer.0/forward")), FOUR, (STRAGGLER, (1,), RANK, "time/module")),
    (slow((1, "layer.0/backward")), FOUR, (STRAGGLER, (1,), RANK, "time/module_backward")),
    (slow((1, "input")), FOUR, (STRAGGLER, (1,), RANK, "time/input")),
    (slow((1, "checkpoint_read")), FOUR, (STRAGGLER, (1,), RANK, "time/checkpoint_read")),
    (slow((1, "checkpoint_write")), FOUR, (STRAGGLER, (1,), RANK, "time/checkpoint_write")),
    (slow((1, "layer.0/forward")), PAIR, (STRAGGLER, (0, 1), PEERS, "time/module")),
    (slow((1, "layer.0/backward"), (1, "layer.1/forward")), FOUR, (STRAGGLER, (1,), RANK, "time/module")),
    (ALL_SLOW, FOUR, (STRAGGLER, (), JOB, "time/module")),
    # A slow collective belongs to its process group or machine; of two corresponding groups both are named.
    (TENSOR_GROUP, TENSOR, (STRAGGLER, (4, 5), GROUP, "time/*all_reduce*@tensor")),
    (GATHERED, HYBRID, (STRAGGLER, (0, 1, 2, 3), GROUP, "time/*all_gather*")),
    # A rank that is late, frozen, held or stopped holds up the others.
    (stalled(1), PAIR, (HANG, (1,), RANK, WAITS)),
    (FaultPlan().freeze(rank=1, seconds=60, **STEP), PAIR, (HANG, (1,), RANK, WAITS)),
    (FaultPlan().hold_interpreter(rank=1, seconds=60, **STEP), PAIR, (HANG, (1,), RANK, WAITS)),
    (FaultPlan().signal(rank=1, number=signal.SIGSTOP, **STEP), PAIR, (HANG, (1,), RANK, WAITS)),
    (stalled(1, 3), FOUR, (HANG, (1, 3), RANK, WAITS)),
    (stalled(1, 3), FOUR.on("abcb"), (HANG, (1, 3), MACHINE, WAITS)),
    (stalled(1, at="all_reduce@training"), PAIR, (HANG, (1,), RANK, AMONG)),
    # A process that has ended is named whether others wait for it or not.
    (killed(1), PAIR, (CRASH, (1,), RANK, "process")),
    (killed(1, 3), FOUR, (CRASH, (1, 3), RANK, "process")),
    (killed(1, 3), FOUR.on("abcb"), (CRASH, (1, 3), MACHINE, "process")),
    (killed(0, 1), PAIR, (CRASH, (0, 1), JOB, "process")),
    (
        FaultPlan().signal(rank=1, number=signal.SIGSEGV, **STEP),
        PAIR,
        (CRASH, (1,), RANK, "process"),
    ),
    # Who differs in a collective is for its members to say; where all have entered it, nobody is to blame.
    (
        FaultPlan().change_collective(rank=1, what="shape", **TRAINING),
        FOUR,
        (HANG, (1,), RANK, "fingerprint/training"),
    ),
    (FaultPlan().swap_collectives(rank=1, **TRAINING), FOUR, (HANG, (1,), RANK, ORDER)),
    (SKIPPED, FOUR, (HANG, (1,), RANK, ORDER)),
    (SKIPPED, PAIR, (HANG, (0, 1), GROUP, ORDER)),
    (SKIPPED, TENSOR, (HANG, (1,), RANK, ORDER)),  # it is in the group of the odd ranks
    (STUCK, TENSOR, (HANG, (1, 3, 5, 7), GROUP, AMONG)),
]


@pytest.mark.parametrize(("plan", "mesh", "truth"), TRUTHS)
def test_what_is_to_be_reported(plan: FaultPlan, mesh: Mesh, truth: tuple):
    assert plan.truth(mesh) == (GroundTruth(*truth, range(7, 8)),)


def test_slow_groups_that_meet_on_a_machine_are_one_finding():
    placed = TENSOR.on([f"host-{rank // 2}" for rank in range(8)])
    for plan, mesh in ((TENSOR_GROUP, placed), (MEETING, THREE_AXES)):
        (truth,) = plan.truth(mesh)
        assert (truth.scope, truth.ranks) == (MACHINE, (4, 5))


def test_a_truth_matches_the_incidents_that_report_it():
    def matches(
        truth: GroundTruth,
        kind: Manifestation = HANG,
        ranks: tuple[int, ...] = (2,),
        scope: Scope = RANK,
        surface: str = "issued/mesh_dp",
    ) -> bool:
        verdict = exact([1, 1, 2])
        record = EvidenceRecord(step=7, surface=surface, manifestation=kind, peers=(0, 1, 2), verdict=verdict)
        return truth.matches(incident_from(record, ranks, scope=scope))

    late = GroundTruth(HANG, (2,), RANK, "issued/*", range(7, 8))
    assert matches(late)
    assert not matches(late, kind=SDC)
    assert not matches(late, ranks=(1,))
    assert not matches(late, scope=MACHINE)
    assert not matches(late, surface="coordinate")
    either = GroundTruth(HANG, (2,), RANK, "deadlock|issued/*", range(7, 8))
    assert matches(either, surface="deadlock"), "timing decides which shows first"
    assert matches(either)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (flipped(4, "layer.2/weight"), "rank 4 is not in a mesh of 4"),
        (slow((1, "step")), "cannot be detected"),
        (slow((1, "all_reduce@tp")), "pass axis"),
    ],
)
def test_a_plan_without_a_known_truth_is_refused(plan: FaultPlan, message: str):
    with pytest.raises(ValueError, match=message):
        plan.truth(FOUR)
