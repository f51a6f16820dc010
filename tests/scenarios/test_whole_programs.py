"""Whole training programs on paper that stop anywhere: whoever stopped is named, and nobody else."""

from __future__ import annotations

import random

from tests.scenarios.paper import BARRIER, Enter, Job, Work, pipeline_programs
from tests.scenarios.rows import Finding, crash, divergence, either, hang, lost
from tests.scenarios.today import rounds

LAYOUTS = [
    {"replica": 4, "tensor": 2},
    {"replica": 2, "shard": 4},
    {"pipeline": 4, "tensor": 2},
    {"replica": 2, "tensor": 2, "pipeline": 3},
]


def some_job(chance: random.Random, stacks: str = "shown") -> Job:
    return Job(**chance.choice(LAYOUTS), stacks=stacks).steps(2)


def named(answer: list[Finding]) -> set[int]:
    return {rank for finding in answer for rank in finding.named}


def somewhere(chance: random.Random, program: list) -> int:
    """An act that is not in the last step: that its end is missing holds nobody up."""
    return chance.randrange(2 * len(program) // 3)


def some_operation(chance: random.Random, job: Job, program: list, members: int) -> int:
    """The place of an operation that the rank waits for, of at least so many members."""
    return chance.choice(
        [
            place
            for place, act in enumerate(program[: 2 * len(program) // 3])
            # What is only posted holds nobody up before it is waited for, and then the last one does.
            if isinstance(act, Enter) and not act.posted and len(job.members(act.where)) >= members
        ]
    )


def number_of(program: list, place: int) -> int:
    where = program[place].where
    return sum(isinstance(act, Enter) and act.where == where for act in program[: place + 1])


def test_one_rank_sleeps_ends_or_is_stopped():
    answers = {
        "sleeps": lambda rank: [hang([rank], "rank", "restart")],
        "ends": lambda rank: [crash([rank], "rank", "restart")],
        "is stopped": lambda rank: [hang([rank], "rank", "restart")],
    }
    for seed in range(18):
        chance = random.Random(seed)
        fault, stacks = chance.choice([*answers]), chance.choice(["shown", "none"])
        job = some_job(chance, stacks)
        programs = pipeline_programs(job)
        culprit = chance.randrange(job.size)
        place = somewhere(chance, programs[culprit])
        if fault == "sleeps" and stacks == "none":
            # Right after it has posted something, to work and to wait look the same from outside.
            while not isinstance(programs[culprit][place - 1], Work):
                place = somewhere(chance, programs[culprit])
        job.run(programs, stop={culprit: place})
        if fault == "ends":
            job.end("failed", culprit)
        elif fault == "is stopped":
            job.stop(culprit)
        (answer,) = rounds.conclusions(job.ask())
        assert answers[fault](culprit) == answer, f"seed {seed}: rank {culprit} {fault}"


def test_two_ranks_stop_and_no_victim_is_named():
    for seed in range(6):
        chance = random.Random(seed)
        job = some_job(chance)
        programs = pipeline_programs(job)
        culprits = chance.sample(range(job.size), 2)
        job.run(programs, stop={rank: somewhere(chance, programs[rank]) for rank in culprits})
        (answer,) = rounds.conclusions(job.ask())
        assert named(answer), f"seed {seed}"
        assert named(answer) <= {*culprits}, f"seed {seed}"


def test_an_observer_that_does_not_answer_covers_for_nobody():
    for seed in range(6):
        chance = random.Random(seed)
        job = some_job(chance)
        programs = pipeline_programs(job)
        culprit, absent = chance.sample(range(job.size), 2)
        job.run(programs, stop={culprit: somewhere(chance, programs[culprit])}).no_answer(absent)
        *_, answer = rounds.conclusions(job.ask().ask(3))
        assert hang([culprit], "rank", "restart") in answer, f"seed {seed}"
        assert named(answer) == {culprit}, f"seed {seed}"


def test_a_rank_that_stops_and_does_not_answer_is_among_those_that_are_listed():
    for seed in range(6):
        chance = random.Random(seed)
        job = some_job(chance)
        programs = pipeline_programs(job)
        culprit = chance.randrange(job.size)
        job.run(programs, stop={culprit: somewhere(chance, programs[culprit])}).no_answer(culprit)
        *_, answer = rounds.conclusions(job.ask().ask(3))
        assert culprit in {rank for finding in answer for rank in finding.ranks}, f"seed {seed}"
        assert named(answer) <= {culprit}, f"seed {seed}"


def test_a_machine_of_eight_ranks_is_lost():
    machines = [f"machine {rank // 8}" for rank in range(32)]
    job = Job(replica=4, tensor=4, pipeline=2, machines=machines, stacks="shown")
    programs = pipeline_programs(job.steps(2), steps=2, microbatches=1)
    job.run(programs, stop={11: len(programs[11]) // 2}).no_answer(*range(8, 16))
    *_, answer = rounds.conclusions(job.ask().ask(3))
    assert answer == [lost(range(8, 16), "machine", "replace")]


def test_an_operation_that_never_returns_is_a_stall_of_its_group():
    for seed in range(6):
        chance = random.Random(seed)
        job = some_job(chance)
        programs = pipeline_programs(job)
        program = programs[chance.randrange(job.size)]
        place = some_operation(chance, job, program, members=2)
        where = program[place].where
        job.run(programs, stuck=(where, number_of(program, place)))
        (answer,) = rounds.conclusions(job.ask())
        members = sorted(job.members(where))
        must_come = either(*([hang(members, "process group", action)] for action in ("inspect", "preflight")))
        assert must_come == answer, f"seed {seed}"


def test_a_rank_that_enters_another_operation_is_named_wherever_that_is():
    for seed in range(6):
        chance = random.Random(seed)
        job = Job(replica=2, shard=3, tensor=3).steps(2)
        programs = pipeline_programs(job)
        culprit = chance.randrange(job.size)
        program = programs[culprit] = [*programs[culprit]]
        place = some_operation(chance, job, program, members=3)
        where = program[place].where
        program[place] = Enter(where, BARRIER)
        job.run(programs, stuck=(where, number_of(program, place)))
        (answer,) = rounds.conclusions(job.ask())
        must_come = either(*([divergence([culprit], "rank", action)] for action in ("restart", "stop")))
        assert must_come == answer, f"seed {seed}"


def test_programs_that_run_to_their_end_are_no_hang():
    for seed in range(6):
        chance = random.Random(seed)
        job = some_job(chance, chance.choice(["shown", "none"]))
        assert rounds.conclusions(job.run(pipeline_programs(job)).ask()) == [[]], f"seed {seed}"
