"""The wait graph against a naive search, rank by rank, in jobs that stop anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache

from tests.scenarios.paper import Job, pipeline_programs
from tests.scenarios.test_whole_programs import LAYOUTS
from tests.scenarios.today import rounds
from torchscout.decision.hang_graph import Evidence, WaitGraph
from torchscout.decision.progress import CommGroup, Process, RankReport

SEEDS = range(40)
Reports = Mapping[int, RankReport]


@cache
def some_job(seed: int) -> tuple[Evidence, int]:
    """Stopped anywhere, with some ranks dead or absent, and some stacks missing or unclear."""
    chance = random.Random(seed)
    job = Job(**chance.choice(LAYOUTS), stacks=chance.choice(["shown", "none"])).steps(1)
    programs = pipeline_programs(job)
    job.run(
        programs,
        stop={rank: chance.randrange(len(programs[rank])) for rank in chance.sample(range(job.size), 2)},
    )
    for rank in chance.sample(range(job.size), 2):
        job.stack(rank, chance.choice(["waits", "works", "unclear"]))
    fates: list[Callable[[int], object]] = [lambda rank: job.end("failed", rank), job.stop, job.no_answer]
    for rank, fate in zip(chance.sample(range(job.size), 3), fates, strict=True):
        if chance.random() < 0.5:
            fate(rank)
    _, reports = rounds.last_round(job.ask())
    return Evidence(reports, unheard=set(range(job.size)) - reports.keys()), job.size


def last_of(report: RankReport, groups: Mapping[str, CommGroup]) -> tuple[str, int] | None:
    """The operation that a rank published last, if nothing came after it."""
    assert report.progress is not None
    recent = [*report.progress.recent]
    if not recent or not report.progress.at_communication or recent[-1].group not in groups:
        return None
    return recent[-1].group, recent[-1].number


def naive_missing(reports: Reports, group: CommGroup, number: int, groups: Mapping[str, CommGroup]) -> list:
    """Who has not entered: whoever has issued less, or ended in the operation. Whoever is absent has issued
    everything."""
    missing = []
    for rank in group.members:
        if rank not in reports:
            continue
        report = reports[rank]
        assert report.progress is not None
        last = last_of(report, groups)
        is_inside = report.process is not Process.RUNNING and last is not None and last[0] == group.key
        if report.progress.issued.get(group.key, 0) - is_inside < number:
            missing.append(rank)
    return missing


def test_an_operation_misses_those_that_have_issued_less_or_ended_in_it():
    for seed in SEEDS:
        evidence, _ = some_job(seed)
        for report in evidence.reports.values():
            assert report.progress is not None
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
        assert report.progress is not None
        last = last_of(report, groups)
        is_inside = last is not None and bool(missed(last))
        if rank in dead:  # it is excused by those that ended before they had issued the operation
            waits[rank] = (
                {other for other in missed(last) & dead if evidence.issued(other, last[0]) < last[1]}
                if last is not None
                else set()
            )
        elif report.waiting is False:
            waits[rank] = set()
        elif report.waiting is None and is_inside:
            assert last is not None
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
    some = 0
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
        circles = {rank for cycle in graph.cycles for rank in cycle}
        assert circles <= ends & certain, seed
        for source in graph.sources:
            waiting = {rank for rank in certain if source in reached[rank]} - {source}
            assert graph.waiters([source]) == waiting, seed
            assert graph.missing(source), seed
        some += bool(graph.sources)
    assert some > len(SEEDS) / 2, "most of these jobs have a source"
