"""The columns of a round say what its standings say, and a diagnosis from them blames the same ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from torchscout.decision.hang.diagnosis import diagnose, explain
from torchscout.decision.hang.evidence import HangEvidence, Members
from torchscout.decision.hang.table import NOTHING, Rows, ordered, table_of
from torchscout.decision.hang.wait_graph import WaitGraph
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reports import Reports

from tests.scenarios.paper import BARRIER, Job, pipeline_programs, replicas
from tests.scenarios.test_whole_programs import LAYOUTS
from tests.scenarios.today import rounds
from torchscout.decision.hang import evidence as evidence_module
from torchscout.decision.progress import CommGroup, Process, RankStatus
from torchscout.mesh import Mesh
from torchscout.observer.rounds import columns as round_columns
from torchscout.observer.rounds.post import Post

SEEDS = range(24)


class Stuck:
    """A job in which nobody moves: what its observers report."""

    def __init__(self, job: Job, *, forget: random.Random | None = None) -> None:
        """``forget``: choose one line that nobody knows."""
        _, reports = rounds.last_round(job.ask())
        self.mesh = Mesh.grid(**job.axes, hosts=job.machines)
        self.lines: dict[str, CommGroup] = {}
        for each in reports.values():
            self.lines |= {line.key: line for line in each.lines}
        if forget is not None:
            del self.lines[forget.choice(sorted(self.lines))]
        self.standings = {rank: each.status for rank, each in reports.items()}

    @property
    def reports(self) -> Reports:
        lines = tuple(self.lines.values())
        return Reports.of({rank: RankReport(each, lines) for rank, each in self.standings.items()})

    def evidence(self) -> HangEvidence:
        return HangEvidence.of(self.standings.values(), self.lines, self.mesh)

    def posted_evidence(self) -> HangEvidence:
        """What a hub has after its observers have posted; it knows the lines from their posts."""
        return HangEvidence(round_columns.table_of(self.reports), self.mesh)

    def incident(self) -> object:
        return diagnose(self.standings.values(), self.lines, self.mesh)


@cache
def some_job(seed: int) -> Stuck:
    """Stopped anywhere, with some ranks dead or absent, some stacks missing, and one line not known."""
    chance = random.Random(seed)
    job = Job(**chance.choice(LAYOUTS), stacks=chance.choice(["shown", "none"])).steps(1)
    programs = pipeline_programs(job)
    job.run(
        programs,
        stop={rank: chance.randrange(len(programs[rank])) for rank in chance.sample(range(job.size), 2)},
    )
    for rank in chance.sample(range(job.size), 2):
        job.stack(rank, chance.choice(["waits", "works", "unclear"]))
    fates = (lambda rank: job.end("failed", rank), job.stop, job.no_answer)
    for rank, fate in zip(chance.sample(range(job.size), 3), fates, strict=True):
        if chance.random() < 0.5:
            fate(rank)
    return Stuck(job, forget=chance)


def each_job() -> Iterator[tuple[int, Stuck]]:
    return ((seed, some_job(seed)) for seed in SEEDS)


# What a rank says.


@pytest.mark.parametrize("make", [Stuck.evidence, Stuck.posted_evidence])
def test_every_rank_is_found_in_the_columns(make):
    for seed, job in each_job():
        evidence = make(job)
        for rank in range(len(job.mesh)):
            assert evidence.columns.answered[rank] == (rank in job.standings), seed
            if rank in job.standings:
                check_columns(evidence, job.standings[rank])


def check_columns(evidence: HangEvidence, standing: RankStatus) -> None:
    columns, table, rank, progress = evidence.columns, evidence.table, standing.rank, standing.progress
    assert columns.running[rank] == (standing.process is Process.RUNNING)
    assert columns.waiting[rank] == (NOTHING if standing.waiting is None else standing.waiting)
    assert (columns.step[rank], columns.operation[rank]) == progress.coordinate
    assert columns.silent_seconds[rank] == progress.silent_seconds
    known = [each for each in progress.recent if each.line in evidence.lines]
    rows = np.flatnonzero((table.row_rank == rank) & (table.row_line != NOTHING))
    own = table.expanded(rows)[0]
    own = own[np.argsort(table.order[own])]
    assert [table.issued_op(place) for place in own.tolist()] == known
    assert table.digest[own].tolist() == [each.digest for each in known]
    assert table.fingerprints(own).tolist() == [each.fingerprint for each in known]
    newest = known[-1] if known[-1:] == list(progress.recent[-1:]) and known else None
    assert operation(evidence, columns.newest[rank]) == newest
    assert operation(evidence, columns.last_event[rank]) == (newest if progress.at_communication else None)


def operation(evidence: HangEvidence, place: int) -> object:
    return None if place == NOTHING else evidence.table.issued_op(int(place))


def test_posts_lead_to_the_same_incident_however_many_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch):
    for chunk in (round_columns._CHUNK, 1, 3):
        monkeypatch.setattr(round_columns, "_CHUNK", chunk)
        for seed, job in each_job():
            assert explain(job.posted_evidence()) == job.incident(), seed


def test_a_post_that_calls_its_lines_by_other_names_is_diagnosed():
    """The strings of one post are damaged, and its hashes are not."""
    for seed, job in each_job():
        chance, posts = random.Random(seed), dict(job.reports.posts)
        damaged = chance.choice([rank for rank in sorted(posts) if posts[rank].header.strings])
        data, begin = bytearray(posts[damaged].data), posts[damaged].starts[4]
        for place in range(begin, begin + posts[damaged].header.strings, 3):
            data[place] ^= 1
        posts[damaged] = Post(bytes(data), len(job.mesh))
        evidence = HangEvidence(round_columns.table_of(Reports(posts)), job.mesh)
        incident = explain(evidence)
        assert incident is None or all(rank in range(len(job.mesh)) for rank in incident.ranks)
        table = evidence.table
        places = np.flatnonzero(table.row_line[table.row_of(np.arange(table.starts[-1]))] >= 0)
        assert all(table.issued_op(place).line in evidence.lines for place in places.tolist())


def test_ranks_that_published_nothing_or_did_not_answer_have_no_values():
    job = Stuck(replicas().devices_finish(9, 0).no_answer(2))
    job.standings[3] = RankStatus(3, Process.GONE, None)
    columns = job.evidence().columns
    assert columns.answered.tolist() == [True, True, False, True]
    assert columns.published.tolist() == [True, True, False, False]
    assert columns.running.tolist() == [True, True, False, False]
    assert columns.device_step.tolist() == [9, NOTHING, NOTHING, NOTHING]
    assert columns.newest.tolist()[2:] == [NOTHING, NOTHING]


def test_operations_of_one_line_and_number_have_one_place():
    table = Stuck(replicas(3).enter("world", 0, 1).enter("world", 2, operation=BARRIER))
    evidence = table.evidence()
    operations = np.arange(len(evidence.table.digest))
    places: dict[tuple[str, int], set[int]] = {}
    for each, place in zip(operations.tolist(), evidence.places(operations).tolist(), strict=True):
        issued = evidence.table.issued_op(each)
        places.setdefault((issued.line, issued.number), set()).add(place)
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) == len(places) == 4


# What the members of a line have issued.


def test_members_are_given_line_by_line_with_what_each_has_issued():
    job = Job(replica=4).group("three", 3, 0, 1).enter("three", 3, 1).enter("three", 1).send(2, 2)
    members = Members.of(table_of(*told(job)))
    assert members.rank.tolist() == [3, 0, 1, 2, 2], "to itself: one rank is two members"
    assert members.issued.tolist() == [1, 0, 2, 1, 1]
    assert members.rank[members.of_line(1)].tolist() == [2, 2]


def told(job: Job) -> tuple[dict[int, RankStatus], dict[str, CommGroup]]:
    stuck = Stuck(job)
    return stuck.standings, stuck.lines


def test_counts_on_unknown_lines_and_of_strangers_are_left_out():
    standings, lines = told(replicas(3))
    (world,) = lines.values()
    assert Members.of(table_of(standings, {world.key: replace(world, members=(0, 1))})).issued.tolist() == [
        3,
        3,
    ]
    assert Members.of(table_of(standings, {})).issued.tolist() == []


def test_missing_ranks_have_issued_less_or_died_in_the_operation():
    for seed, job in each_job():
        evidence = job.evidence()
        table = evidence.table
        for place in table.expanded(np.flatnonzero(table.row_line != NOTHING))[0].tolist():
            issued = table.issued_op(place)
            expected = naive_missing(job.standings, evidence.lines[issued.line], issued.number)
            line, number = np.array([evidence.lines.index(issued.line)]), np.array([issued.number])
            missing = evidence.missing(line, number, np.array([False]))[0].tolist()
            assert missing == expected, seed
            assert evidence.are_open(np.array([place])).tolist() == [bool(expected)], seed
            assert (place in evidence.open) == bool(expected), seed


def naive_missing(standings: Mapping[int, RankStatus], line: CommGroup, number: int) -> list[int]:
    """Rank by rank; in a job without known machines, whoever is absent is taken to have issued all."""
    missing = []
    for rank in line.members:
        if rank in standings:
            standing, progress = standings[rank], standings[rank].progress
            last = progress.recent[-1] if progress.recent and progress.at_communication else None
            died_in_it = (
                standing.process is not Process.RUNNING and last is not None and last.line == line.key
            )
            if progress.issued.get(line.key, 0) - died_in_it < number:
                missing.append(rank)
    return missing


# Who is behind it all.


def test_sources_are_those_that_a_search_rank_by_rank_finds():
    for seed, job in each_job():
        evidence, ranks = job.evidence(), range(len(job.mesh))
        graph = WaitGraph(evidence)
        waits, certain = naive_waits(job.standings, evidence)
        assert {rank for rank in ranks if graph.blocked[rank]} == certain, seed
        reached = {rank: reach(waits, rank) for rank in ranks}
        behind = {rank for start in certain for rank in reached[start]}
        # In a part of the graph that no wait leaves, whoever does not wait for certain is its source.
        ends = {rank for rank in behind if all(rank in reached[other] for other in reached[rank])}
        expected = ends - certain
        assert {rank for rank in expected if not graph.stalled.ranks[rank]} == {*graph.sources}, seed
        for source in graph.sources:
            waiting = {rank for rank in certain if source in reached[rank]} - {source}
            assert graph.waiters([source]) == waiting, seed


def naive_waits(
    standings: Mapping[int, RankStatus], evidence: HangEvidence
) -> tuple[dict[int, set[int]], set[int]]:
    """Whom each rank waits for, by [Note: Waiting] and [Note: Deaths], and who waits for certain."""
    waits: dict[int, set[int]] = {}
    certain = set()
    for rank, standing in standings.items():
        recent = [each for each in standing.progress.recent if each.line in evidence.lines]
        at_last = standing.progress.at_communication and recent[-1:] == list(standing.progress.recent[-1:])
        last = recent[-1:] if at_last else []
        dead = standing.process is not Process.RUNNING
        missed_by_last = [
            other
            for each in last
            for other in naive_missing(standings, evidence.lines[each.line], each.number)
        ]
        if dead or (standing.waiting is None and missed_by_last):
            shown = last
        else:
            shown = recent if standing.waiting is not False else []
        targets = {
            other
            for each in shown
            for other in naive_missing(standings, evidence.lines[each.line], each.number)
            if not dead or (other in evidence.dead and evidence.issued(other, each.line) < each.number)
        }
        waits[rank] = targets
        if targets and (dead or standing.waiting or (standing.waiting is None and missed_by_last)):
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


# The parts.


def test_rows_keep_the_order_of_their_values():
    row_of = np.array([place % 3 for place in range(600)])
    rows = Rows.grouped(row_of, np.arange(600), count=4)
    assert [rows[row].tolist() for row in range(4)] == [*(list(range(row, 600, 3)) for row in range(3)), []]


@pytest.mark.parametrize("most", [1, 1 << 16, 1 << 20, 1 << 32])
def test_order_sorts_numbers_of_any_size_and_keeps_equal_ones_in_order(most: int):
    values = np.random.default_rng(0).integers(0, most, 5000)
    values[::7] = values[0]
    assert ordered(values).tolist() == np.argsort(values, kind="stable").tolist()
    assert ordered(values[:0]).tolist() == []


def test_the_last_operation_that_a_device_has_reached_is_found_across_gaps():
    """Rows usually show the last operations of a line without a gap; a damaged post may have some."""
    chance = random.Random(0)
    ages = [sorted(chance.sample(range(12), chance.randrange(1, 9)), reverse=True) for _ in range(1000)]
    starts = np.cumsum([0, *map(len, ages)])
    behind = [chance.randrange(-1, 13) for _ in ages]
    table = SimpleNamespace(
        issued=np.full(len(ages), 20),
        entered=20 - np.array(behind),
        starts=starts,
        age=np.array([age for row in ages for age in row]),
    )
    expected = []
    for row, least in enumerate(behind):
        reached = [place for place, age in enumerate(ages[row]) if age >= least]
        expected.append(int(starts[row]) + reached[-1] if reached else NOTHING)
    assert evidence_module._last_reached(table, np.arange(len(ages))).tolist() == expected
