"""The wait graph against a naive search, rank by rank, in jobs that stop anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache

from tests.scenarios.paper import Act, Enter, Job, Work, pipeline_programs
from tests.scenarios.test_whole_programs import LAYOUTS
from tests.scenarios.today import rounds
from torchscout.decision.hang_graph import Evidence, WaitGraph
from torchscout.decision.progress import CommGroup, Process, RankReport

SEEDS = range(80)
Reports = Mapping[int, RankReport]


@cache
def some_job(seed: int) -> tuple[Evidence, int]:
    """Ranks that stop anywhere or communicate in any order, so that they wait in circles; with some of them
    dead or absent, and some stacks missing or unclear."""
    chance = random.Random(seed)
    stacks = chance.choice(["shown", "none", "none"])
    if chance.random() < 0.5:
        job = Job(replica=9, stacks=stacks)
        for name in "abcdef":
            job.group(name, *sorted(chance.sample(range(job.size), chance.randrange(2, 5))))
        programs = {rank: acts_in_any_order(chance, job, rank) for rank in range(job.size)}
    else:
        job = Job(**chance.choice(LAYOUTS), stacks=stacks).steps(1)
        programs = pipeline_programs(job)
    stopped = [rank for rank in chance.sample(range(job.size), 2) if programs[rank]]
    job.run(programs, stop={rank: chance.randrange(len(programs[rank])) for rank in stopped})
    for rank in chance.sample(range(job.size), chance.randrange(3)):
        job.stack(rank, chance.choice(["waits", "works", "unclear"]))
    fates: list[Callable[[int], object]] = [lambda rank: job.end("failed", rank), job.stop, job.no_answer]
    for rank, fate in zip(chance.sample(range(job.size), 3), fates, strict=True):
        if chance.random() < 0.3:
            fate(rank)
    _, reports = rounds.last_round(job.ask())
    return Evidence(reports, unheard=set(range(job.size)) - reports.keys()), job.size


def acts_in_any_order(chance: random.Random, job: Job, rank: int) -> list[Act]:
    acts: list[Act] = [
        Enter(name, posted=chance.random() < 0.3)
        for name, members in job.groups.items()
        if name != "world" and rank in members
    ]
    chance.shuffle(acts)
    return [each for act in acts for each in (act, *[Work("forward")] * chance.randrange(2))]


def last_of(report: RankReport, groups: Mapping[str, CommGroup]) -> tuple[str, int] | None:
    """The operation that a rank published last, if nothing came after it."""
    recent = [*report.progress.recent]
    if not recent or not report.progress.at_communication or recent[-1].group not in groups:
        return None
    return recent[-1].group, recent[-1].number


def naive_missing(reports: Reports, group: CommGroup, number: int, groups: Mapping[str, CommGroup]) -> list:
    """Who has not entered: whoever has issued less, or ended in the operation. Whoever is absent has issued
    everything."""
    missing = []
    for rank in [each for each in group.members if each in reports]:
        report = reports[rank]
        last = last_of(report, groups)
        is_inside = report.process is not Process.RUNNING and last is not None and last[0] == group.key
        if report.progress.issued.get(group.key, 0) - is_inside < number:
            missing.append(rank)
    return missing


def test_an_operation_misses_those_that_have_issued_less_or_ended_in_it():
    for seed in SEEDS:
        evidence, _ = some_job(seed)
        for report in evidence.reports.values():
            for each in report.progress.recent:
                if (group := evidence.groups.get(each.group)) is None:
                    continue  # of one member
                expected = naive_missing(evidence.reports, group, each.number, evidence.groups)
                reached = [rank for rank in group.members if evidence.reached(rank, group.key) < each.number]
                assert reached == expected, seed
                assert evidence.is_open((each.group, each.number)) is bool(expected), seed


def naive_waits(evidence: Evidence) -> tuple[dict[int, set[int]], set[int]]:
    """Whom each rank waits for, by [Note: Waiting] and [Note: Deaths], and who waits for certain."""
    reports, groups = evidence.reports, evidence.groups
    dead = {rank for rank, each in reports.items() if each.process is not Process.RUNNING}

    def missed(place: tuple[str, int]) -> set[int]:
        return {*naive_missing(reports, groups[place[0]], place[1], groups)}

    waits: dict[int, set[int]] = {}
    certain = set()
    for rank, report in reports.items():
        last = last_of(report, groups)
        is_inside = last is not None and bool(missed(last))
        if rank in dead:  # it is excused by those that ended before they had issued the operation
            ended = set[int]() if last is None else missed(last) & dead
            waits[rank] = {other for other in ended if evidence.issued(other, last[0]) < last[1]}
        elif report.waiting is False:
            waits[rank] = set()
        elif report.waiting is None and is_inside:
            waits[rank] = missed(last)
        else:  # any of what it has posted
            places = [(key, number) for key, number in report.progress.issued.items() if key in groups]
            waits[rank] = set[int]().union(*map(missed, places))
        if waits[rank] and (rank in dead or report.waiting or (report.waiting is None and is_inside)):
            certain.add(rank)
    return waits, certain


def reach(waits: Mapping[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    frontier = [start]
    while frontier:
        new = waits.get(frontier.pop(), set()) - found
        found |= new
        frontier += new
    return found


def test_sources_are_those_that_a_search_rank_by_rank_finds():
    some = in_circles = 0
    for seed in SEEDS:
        evidence, size = some_job(seed)
        graph = WaitGraph(evidence)
        waits, certain = naive_waits(evidence)
        assert graph.blocked == certain, seed
        reached = {rank: reach(waits, rank) for rank in range(size)}
        behind = {rank for start in certain for rank in reached[start]}
        # In a part of the graph that no wait leaves, whoever does not wait for certain is its source.
        ends = {rank for rank in behind if all(rank in reached[other] for other in reached[rank])}
        assert {*graph.sources} == ends - certain - graph.in_stalled, seed
        circles = {frozenset(reached[rank]) for rank in ends if reached[rank]}
        expected = {each for each in circles if each <= certain and each.isdisjoint(graph.in_stalled)}
        assert {*map(frozenset, graph.cycles)} == expected, seed
        for source in graph.sources:
            waiting = {rank for rank in certain if source in reached[rank]} - {source}
            assert graph.waiters([source]) == waiting, seed
            assert graph.missing(source), seed
        some, in_circles = some + bool(graph.sources), in_circles + bool(graph.cycles)
    assert min(some, in_circles) > 10
