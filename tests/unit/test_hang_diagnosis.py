"""Who is named for a hang, and above all who is not: the victims, who stand still as well."""

from __future__ import annotations

import pytest

from tests.support.stuck_job import (
    ALL_REDUCE,
    Busy,
    Enter,
    StuckJob,
    Wait,
    found,
    four_by_two,
    others,
    replicas,
    with_and_without_stacks,
)
from torchscout.decision.consensus.rules import Status
from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.progress import Phase
from torchscout.decision.records.record import Action, Scope
from torchscout.mesh import Mesh

# a, b, c: one rank is late.


@with_and_without_stacks
@pytest.mark.parametrize(
    "phase", [Phase.FORWARD, Phase.INPUT, Phase.CHECKPOINT_WRITE], ids=["late", "input", "checkpoint"]
)
def test_rank_that_has_not_entered_is_named(stacks: bool, phase: Phase):
    job = replicas(stacks=stacks)
    job.issue("world", *others(5))
    job.busy(5, phase=phase)
    job.silent[5] = 6.2
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.hosts) == (Scope.RANK, (5,), ("node-2",))
    assert incident.action is Action.RESTART
    assert incident.step == 7
    assert incident.sentence == (
        f"Rank 5 on node-2 has not entered {ALL_REDUCE} number 4 of group world; "
        f"it has been in {phase.value.replace('_', ' ')} for 6.2 s. 7 ranks wait for it."
    )


def test_proof_is_the_line_first_and_the_vote_of_equivalent_peers_last():
    job = replicas()
    job.issue("world", *others(5))
    job.busy(5, phase=Phase.INPUT)
    job.silent[5] = 6.5
    line, vote = found(job).records
    assert (line.surface, line.peers, line.ranks) == ("issued/world", tuple(range(8)), (5,))
    assert line.verdict is not None
    assert line.verdict.evidence == (4, 4, 4, 4, 4, 3, 4, 4)
    assert (line.progress["rank"], line.progress["phase"]) == (5, "input")
    assert line.fingerprints == (ALL_REDUCE,) * 3
    assert line.stall_seconds == 6.5
    assert vote.status == Status.AGREE.value, "it has published as much, on another path"
    job.busy(5)
    assert found(job).records[-1].ranks == (5,)


# f, g, h, q: groups that cross.


@with_and_without_stacks
def test_rank_that_never_enters_an_all_gather_of_its_shards(stacks: bool):
    job = StuckJob(Mesh.grid(replica=2, shard=4), stacks=stacks)
    shard, replica = job.along("shard"), job.along("replica")
    for rank in range(8):
        job.issue(replica[rank], rank)
    job.busy(*range(8))
    for rank in others(6):
        job.issue(shard[rank], rank, text="all_gather bfloat16[4096]")
    for rank in range(4):  # the other replica goes on until it needs this one
        job.issue(replica[rank], rank, text="reduce_scatter bfloat16[4096] sum")
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.hosts) == (Scope.RANK, (6,), ())
    assert "all_gather bfloat16[4096] number 1 of group shard.4" in incident.sentence
    assert "7 ranks wait for it" in incident.sentence


@with_and_without_stacks
def test_stalled_rank_is_named_and_not_its_tensor_parallel_victim(stacks: bool):
    job = four_by_two(stacks)
    tensor, replica = job.along("tensor"), job.along("replica")
    job.issue(tensor[5], 5)  # rank 5 waits here for 4, and 1, 3, 7 wait for 5
    for rank in others(4, 5):
        job.issue(tensor[rank], rank)
        job.issue(replica[rank], rank)
    job.busy(4, phase=Phase.INPUT)
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.hosts) == (Scope.RANK, (4,), ("node-2",))
    assert "7 ranks wait for it" in incident.sentence
    assert {record.surface for record in incident.records[:-1]} == {"issued/tensor.4", "issued/replica.0"}
    assert incident.records[-1].peers == (0, 2, 4, 6)


@with_and_without_stacks
@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
def test_stalled_pipeline_stage_is_named_and_nobody_up_or_downstream(stalled: int, stacks: bool):
    job = StuckJob(Mesh.grid(pipeline=4), stacks=stacks)
    forward = {stage: job.pair(stage, stage + 1) for stage in range(3)}
    back = {stage: job.pair(stage, stage - 1) for stage in range(1, 4)}
    programs = {
        stage: [
            *([Enter(forward[stage - 1], "activation")] if stage else []),
            Busy(Phase.FORWARD),
            *([Enter(forward[stage], "activation"), Enter(back[stage + 1], "gradient")] if stage < 3 else []),
            Busy(Phase.BACKWARD),
            *([Enter(back[stage], "gradient")] if stage else []),
        ]
        * 3
        for stage in range(4)
    }
    job.run(programs, stop={stalled: len(programs[stalled]) // 3 + 2})
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (stalled,))
    assert "3 ranks wait for it" in incident.sentence
    assert incident.records[-1].status == "not_checked", "a stage without replicas has no equivalent peer"


@pytest.mark.parametrize(
    ("stacks", "published_since"),
    # With neither a stack nor a publication, to have posted and to wait look the same.
    [(True, True), (True, False), (False, True)],
)
def test_stage_that_posted_a_receive_early_and_then_sleeps_is_a_source(stacks: bool, published_since: bool):
    """A receive that is only posted is no wait; taken for one, it would close a cycle with stage 2."""
    job = StuckJob(Mesh.grid(pipeline=3), stacks=stacks)
    down, up, first = job.pair(1, 2), job.pair(2, 1), job.pair(0, 1)
    job.issue(first, 0, 1)
    job.issue(up, 1)  # posted: the gradient that stage 2 will send
    if published_since:
        job.busy(1)
    else:
        job.waiting[1] = False
    job.issue(down, 2)  # stage 2 receives from the sleeping stage 1
    job.issue(first, 0)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))


def test_rank_whose_stack_shows_it_at_work_does_not_wait_for_what_it_posted():
    job = StuckJob(Mesh.grid(pipeline=3))
    job.issue(job.pair(0, 1), 0)
    job.issue(job.pair(2, 1), 1)
    job.busy(1, 2)
    assert found(job).ranks == (1,)


@pytest.mark.parametrize("first", ["a", "z"])
def test_sentence_quotes_the_operation_that_was_due_first(first: str):
    """Rank 0 is missed twice; rank 1 waits for what comes earlier in everybody's program."""
    job = StuckJob(Mesh.grid(replica=3))
    job.busy(0, 1, 2)
    job.issue(job.group(first, 0, 1), 1)
    job.busy(2)
    job.issue(job.group("m", 0, 2), 2)
    assert f"of group {first};" in found(job).sentence


def test_waiting_stack_makes_an_edge_of_a_posted_operation():
    """Data-parallel buckets are reduced in the background; the wait comes after other publications."""
    job = replicas()
    job.issue("world", *others(3))
    job.busy(*others(3), phase=Phase.BACKWARD)
    job.busy(3, phase=Phase.INPUT)
    job.waiting |= dict.fromkeys(others(3), True)
    assert found(job).ranks == (3,)


def test_without_any_stack_posted_operations_alone_hold_nobody_up():
    job = replicas(stacks=False)
    job.issue("world", *others(3))
    job.busy(*others(3), phase=Phase.EVALUATION)
    job.busy(3, phase=Phase.EVALUATION)
    assert job.diagnose() is None


def test_rank_without_a_stack_that_may_wait_for_the_culprit_is_not_named_in_its_place():
    """Rank 1 has posted to 2 and gives no stack. 0 waits for 1; that 2 is late explains both."""
    job = StuckJob(Mesh.grid(replica=3), stacks=False)
    job.issue(job.group("a", 1, 2), 1)
    job.busy(1)
    job.issue(job.group("b", 0, 1), 0)
    job.busy(2, phase=Phase.INPUT)
    incident = found(job)
    assert incident.ranks == (2,)
    assert "1 rank waits for it" in incident.sentence, "of rank 1 it is not known"


def test_batch_of_sends_and_receives_without_stacks_waits_for_any_of_them():
    """The last one posted is already answered; the batch waits for an earlier one."""
    job = StuckJob(Mesh.grid(pipeline=3), stacks=False)
    left, right = job.pair(0, 1), job.pair(1, 2)
    job.issue(left, 1)
    job.issue(right, 1)
    job.issue(right, 2)
    job.issue(job.group("tied", 1, 2), 2)
    job.busy(0, phase=Phase.INPUT)
    assert found(job).ranks == (0,)


# n: who is ahead.


@with_and_without_stacks
def test_minority_that_is_ahead_is_not_blamed_for_the_majority(stacks: bool):
    job = replicas(4, stacks=stacks, on_each=1)
    job.issue("world", 3)
    job.busy(0, 1, 2, phase=Phase.CHECKPOINT_WRITE)
    job.busy(3)
    job.inside.add(3)  # one coordinate further: by the vote it is the outlier
    incident = found(job)
    assert incident.records[-1].ranks == (3,)
    assert incident.ranks == (0, 1, 2)


# Who else is or is not blamed.


@with_and_without_stacks
def test_silence_in_which_nobody_waits_is_a_pause(stacks: bool):
    job = replicas(stacks=stacks)
    job.busy(*range(8), phase=Phase.EVALUATION)
    assert job.diagnose() is None


def test_stopped_or_gone_trainer_that_nobody_waits_for_is_no_hang():
    job = replicas()
    job.stopped(3)
    job.gone(4)
    assert job.diagnose() is None


def test_no_answers_are_no_evidence():
    job = replicas()
    assert diagnose([], job.lines, job.mesh) is None


@with_and_without_stacks
def test_two_sources_at_once_are_both_named(stacks: bool):
    job = replicas(stacks=stacks)
    job.issue("world", *others(2, 5))
    job.busy(2, phase=Phase.INPUT)
    job.gone(5)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2, 5))
    for part in ("Rank 2 on node-1 has not entered", "it has been in input", "its process is gone"):
        assert part in incident.sentence
    assert "6 ranks wait for them" in incident.sentence


def test_two_sources_on_one_machine_have_machine_scope():
    job = replicas()
    job.issue("world", *others(4, 5))
    job.busy(4, 5, phase=Phase.INPUT)
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.hosts) == (Scope.MACHINE, (4, 5), ("node-2",))
    assert incident.action is Action.INSPECT


# What comes in.


def test_standings_may_come_as_a_sequence_and_only_once_per_rank():
    job = replicas()
    job.issue("world", *others(5))
    standings = list(job.standings().values())
    assert diagnose(standings, job.lines, job.mesh) == job.diagnose()
    with pytest.raises(ValueError, match="rank 0 answered twice"):
        diagnose([*standings, standings[0]], job.lines, job.mesh)


def test_operations_on_an_unknown_line_are_ignored():
    job = replicas()
    job.issue("elsewhere", 0, 1)
    assert job.diagnose() is None


def test_long_lists_of_ranks_are_shortened():
    job = replicas(32)
    job.issue("world", 31)
    job.busy(*range(31))
    incident = found(job)
    assert incident.ranks == tuple(range(31))
    assert incident.sentence.startswith(
        "Ranks 0, 1, 2, 3, 4, 5, 6 and 24 more hold up the job. Rank 0 on node-0 has not"
    )
    assert incident.sentence.count("has not entered") == 2
    assert incident.sentence.endswith(" 1 rank waits for them.")


def test_wait_after_a_posted_operation_in_a_program():
    """The same from a run: buckets are posted, the optimizer waits for them."""
    job = StuckJob(Mesh.grid(replica=4))
    world = job.group("world", 0, 1, 2, 3)
    step = [Busy(Phase.INPUT), Enter(world, posted=True), Busy(Phase.BACKWARD), Wait(world)] * 3
    job.run(dict.fromkeys(range(4), step), stop={1: 9})
    assert found(job).ranks == (1,)
