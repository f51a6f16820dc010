"""Whole jobs, run on paper until nobody moves: whoever stopped is named, and nobody else."""

from __future__ import annotations

import random

import pytest

from tests.support.stuck_job import Act, Busy, Enter, StuckJob, Wait
from torchscout.decision.progress import Phase
from torchscout.decision.records.record import Scope
from torchscout.mesh import Mesh

SHAPES = [
    {"replica": 4, "tensor": 2},
    {"replica": 2, "shard": 4},
    {"pipeline": 4, "tensor": 2},
    {"replica": 2, "tensor": 2, "pipeline": 3},
    {"replica": 3, "shard": 2, "tensor": 2, "pipeline": 2},
]


def pipeline_step(job: StuckJob, rank: int, lines: dict[str, dict[int, str]], microbatches: int) -> list[Act]:
    """Forward and backward of one rank, receives posted early, buckets reduced in the background."""
    stages = job.mesh.ranks_along("pipeline", rank)
    stage = stages.index(rank)
    before = stages[stage - 1] if stage else None
    after = stages[stage + 1] if stage + 1 < len(stages) else None
    acts: list[Act] = [Busy(Phase.INPUT)]
    for _ in range(microbatches):
        if after is not None:
            acts.append(Enter(job.pair(after, rank), "gradient", posted=True))
        if before is not None:
            acts.append(Enter(job.pair(before, rank), "activation"))
        acts += [Busy(Phase.FORWARD), Enter(lines["shard"][rank], "all_gather"), Enter(lines["tensor"][rank])]
        if after is not None:
            acts += [Enter(job.pair(rank, after), "activation"), Wait(job.pair(after, rank))]
        acts += [
            Busy(Phase.BACKWARD),
            Enter(lines["tensor"][rank]),
            Enter(lines["replica"][rank], posted=True),
        ]
        if before is not None:
            acts.append(Enter(job.pair(rank, before), "gradient"))
    return [*acts, Busy(Phase.OPTIMIZER), Wait(lines["replica"][rank])]


def job_with_programs(
    mesh: Mesh, *, stacks: bool = True, steps: int = 3, microbatches: int = 2
) -> tuple[StuckJob, dict[int, list[Act]]]:
    job = StuckJob(mesh, stacks=stacks)
    lines = {axis: job.along(axis) for axis in ("replica", "shard", "tensor")}
    return job, {rank: pipeline_step(job, rank, lines, microbatches) * steps for rank in range(len(mesh))}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("fault", ["stalled", "gone", "stopped"])
@pytest.mark.parametrize("stacks", [True, False], ids=["stacks", "no-stacks"])
def test_one_rank_stops_anywhere_in_its_program(seed: int, fault: str, stacks: bool):
    chance = random.Random(seed)
    mesh = Mesh.grid(**chance.choice(SHAPES))
    job, programs = job_with_programs(mesh, stacks=stacks)
    culprit = chance.randrange(len(mesh))
    # Not in the last step: that its end is missing holds nobody up.
    stops = range(2 * len(programs[culprit]) // 3)
    if fault == "stalled" and not stacks:
        # Right after it has posted something, to work and to wait look the same from outside.
        stops = [index for index in stops if isinstance(programs[culprit][index - 1], Busy)]
    job.run(programs, stop={culprit: chance.choice(stops)})
    if fault != "stalled":
        getattr(job, fault)(culprit)
    incident = job.diagnose()
    assert incident is not None
    assert (incident.scope, incident.ranks) == (Scope.RANK, (culprit,)), incident.sentence


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("stacks", [True, False], ids=["stacks", "no-stacks"])
def test_one_rank_stops_and_is_absent(seed: int, stacks: bool):
    """As if its report was lost beside a stall: it is among those that are reported, and nobody is named."""
    chance = random.Random(seed)
    mesh = Mesh.grid(**chance.choice(SHAPES))
    job, programs = job_with_programs(mesh, stacks=stacks)
    culprit = chance.randrange(len(mesh))
    job.run(programs, stop={culprit: chance.randrange(2 * len(programs[culprit]) // 3)})
    job.absent.add(culprit)
    incident = job.diagnose()
    assert incident is not None
    assert incident.scope in (Scope.PROCESS_GROUP, Scope.JOB)
    assert culprit in incident.ranks, incident.sentence
    assert f"Rank {culprit} did not answer: it is not known whether it" in incident.sentence


@pytest.mark.parametrize("seed", range(60))
def test_two_ranks_stop_and_no_victim_is_named(seed: int):
    chance = random.Random(seed)
    mesh = Mesh.grid(**chance.choice(SHAPES))
    job, programs = job_with_programs(mesh)
    culprits = chance.sample(range(len(mesh)), 2)
    job.run(programs, stop={rank: chance.randrange(2 * len(programs[rank]) // 3) for rank in culprits})
    incident = job.diagnose()
    assert incident is not None
    assert set(incident.ranks) <= set(culprits), incident.sentence


@pytest.mark.parametrize("seed", range(60))
def test_missing_observer_does_not_cover_for_the_rank_that_stopped(seed: int):
    chance = random.Random(seed)
    mesh = Mesh.grid(**chance.choice(SHAPES))
    job, programs = job_with_programs(mesh)
    culprit, unheard = chance.sample(range(len(mesh)), 2)
    job.run(programs, stop={culprit: chance.randrange(2 * len(programs[culprit]) // 3)})
    job.absent.add(unheard)
    incident = job.diagnose()
    assert incident is not None
    assert incident.ranks == (culprit,), incident.sentence


def some_operation(chance: random.Random, job: StuckJob, program: list[Act], members: int) -> int:
    """The index of an operation of at least so many members, not in the last step."""
    entered = [index for index, act in enumerate(program[: 2 * len(program) // 3]) if isinstance(act, Enter)]
    return chance.choice(
        [
            index
            for index in entered
            # What is only posted holds nobody up before it is waited for, and then the last one does.
            if len(job.lines[program[index].line].members) >= members and not program[index].posted
        ]
    )


def number_of(program: list[Act], index: int) -> int:
    line = program[index].line
    return sum(isinstance(act, Enter) and act.line == line for act in program[: index + 1])


@pytest.mark.parametrize("seed", range(60))
def test_operation_that_never_returns_is_a_stall_of_its_line(seed: int):
    chance = random.Random(seed)
    mesh = Mesh.grid(**chance.choice(SHAPES))
    job, programs = job_with_programs(mesh)
    program = programs[chance.randrange(len(mesh))]
    index = some_operation(chance, job, program, members=2)
    job.run(programs, stuck=(program[index].line, number_of(program, index)))
    incident = job.diagnose()
    assert incident is not None
    members = tuple(sorted(job.lines[program[index].line].members))
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, members), incident.sentence


@pytest.mark.parametrize("seed", range(60))
def test_different_operation_on_one_rank_is_found_wherever_it_is(seed: int):
    chance = random.Random(seed)
    mesh = Mesh.grid(replica=2, shard=3, tensor=3)
    job, programs = job_with_programs(mesh)
    culprit = chance.randrange(len(mesh))
    index = some_operation(chance, job, programs[culprit], members=3)
    line = programs[culprit][index].line
    programs[culprit] = list(programs[culprit])
    programs[culprit][index] = Enter(line, "broadcast")
    job.run(programs, stuck=(line, number_of(programs[culprit], index)))
    incident = job.diagnose()
    assert incident is not None
    assert (incident.scope, incident.ranks) == (Scope.RANK, (culprit,)), incident.sentence


@pytest.mark.parametrize("seed", range(20))
def test_job_that_runs_to_its_end_has_no_incident(seed: int):
    chance = random.Random(seed)
    job, programs = job_with_programs(Mesh.grid(**chance.choice(SHAPES)), stacks=chance.random() < 0.5)
    job.run(programs)
    assert job.diagnose() is None


def large_job(replica: int, tensor: int, pipeline: int) -> tuple[StuckJob, int]:
    size = replica * tensor * pipeline
    mesh = Mesh.grid(
        replica=replica, tensor=tensor, pipeline=pipeline, hosts=[f"node-{rank // 8}" for rank in range(size)]
    )
    job, programs = job_with_programs(mesh, steps=2, microbatches=1)
    culprit = size // 2 + size // 3
    job.run(programs, stop={culprit: len(programs[culprit]) // 2 + 3})
    return job, culprit


@pytest.mark.parametrize(
    ("replica", "tensor", "pipeline"),
    [(8, 8, 16), pytest.param(128, 8, 16, marks=pytest.mark.slow)],
)
def test_one_rank_among_many(replica: int, tensor: int, pipeline: int):
    job, culprit = large_job(replica, tensor, pipeline)
    incident = job.diagnose()
    assert incident is not None
    assert (incident.scope, incident.ranks) == (Scope.RANK, (culprit,))
    assert incident.hosts == (f"node-{culprit // 8}",)
    assert f"{len(job.mesh) - 1} ranks wait for it" in incident.sentence


def test_lost_machine_among_many():
    job, culprit = large_job(8, 8, 16)
    machine = job.mesh.ranks_on(f"node-{culprit // 8}")
    job.absent |= set(machine)
    incident = job.diagnose()
    assert incident is not None
    assert (incident.scope, incident.ranks) == (Scope.MACHINE, machine)
