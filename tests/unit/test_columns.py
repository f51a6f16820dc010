"""The columns of a round say what its standings say, and a diagnosis from them blames the same ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from tests.support.stuck_job import StuckJob, found, replicas
from tests.unit.test_hangs_of_whole_jobs import SHAPES, job_with_programs
from torchscout.decision.hang.diagnosis import diagnose, explain
from torchscout.decision.hang.evidence import HangEvidence, Members
from torchscout.decision.hang.table import NOTHING, Rows, table_of
from torchscout.decision.hang.wait_graph import WaitGraph
from torchscout.decision.progress import CommGroup, Phase, Process, RankStatus
from torchscout.mesh import Mesh
from torchscout.observer.rounds import columns as round_columns
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reports import Reports

SEEDS = range(40)


def some_job(seed: int) -> StuckJob:
    """Stopped anywhere, with some ranks dead or absent, some stacks missing, and one line not known."""
    chance = random.Random(seed)
    job, programs = job_with_programs(Mesh.grid(**chance.choice(SHAPES)), stacks=chance.random() < 0.5)
    size = len(job.mesh)
    stop = {rank: chance.randrange(len(programs[rank])) for rank in chance.sample(range(size), 2)}
    job.run(programs, stop=stop)
    for rank, fate in zip(
        chance.sample(range(size), 3), (job.gone, job.stopped, job.absent.add), strict=True
    ):
        if chance.random() < 0.5:
            fate(rank)
    for rank in chance.sample(range(size), 2):
        job.waiting[rank] = chance.choice([True, False, None])
    del job.lines[chance.choice(sorted(job.lines))]
    return job


def evidence_of(job: StuckJob, **more: RankStatus) -> HangEvidence:
    standings = job.standings() | {each.rank: each for each in more.values()}
    return HangEvidence.of(standings.values(), job.lines, job.mesh)


def posted_evidence(job: StuckJob) -> HangEvidence:
    """What a hub has of the job after its observers have posted; it knows the lines from their posts."""
    reports = {rank: RankReport(each, tuple(job.lines.values())) for rank, each in job.standings().items()}
    return HangEvidence(round_columns.table_of(Reports.of(reports)), job.mesh)


# What a rank says.


@pytest.mark.parametrize("make", [evidence_of, posted_evidence])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_is_found_in_the_columns(seed: int, make: Callable[[StuckJob], HangEvidence]):
    job = some_job(seed)
    evidence, standings = make(job), job.standings()
    columns, table = evidence.columns, evidence.table
    for rank in range(len(job.mesh)):
        assert columns.answered[rank] == (rank in standings)
        if rank not in standings:
            continue
        standing, progress = standings[rank], standings[rank].progress
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
        assert operation(evidence, columns.last_event[rank]) == (
            newest if progress.at_communication else None
        )


def operation(evidence: HangEvidence, place: int) -> object:
    return None if place == NOTHING else evidence.table.issued_op(int(place))


@pytest.mark.parametrize("seed", range(150))
def test_posts_lead_to_the_same_incident_as_statuses(seed: int):
    job = some_job(seed)
    expected = diagnose(job.standings().values(), job.lines, job.mesh)
    assert explain(posted_evidence(job)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_a_post_that_calls_its_lines_by_other_names_is_diagnosed(seed: int):
    """The strings of one post are damaged, and its hashes are not."""
    job, chance = some_job(seed), random.Random(seed)
    reports = {rank: RankReport(each, tuple(job.lines.values())) for rank, each in job.standings().items()}
    posts = dict(Reports.of(reports).posts)
    damaged = chance.choice([rank for rank in sorted(posts) if posts[rank].header.strings])
    data, begin = bytearray(posts[damaged].data), posts[damaged].starts[4]
    for place in range(begin, begin + posts[damaged].header.strings, 3):
        data[place] ^= 1
    posts[damaged] = Post(bytes(data), len(job.mesh))
    evidence = HangEvidence(round_columns.table_of(Reports(posts)), job.mesh)
    incident = explain(evidence)
    assert incident is None or all(rank in range(len(job.mesh)) for rank in incident.ranks)
    places = np.flatnonzero(
        evidence.table.row_line[evidence.table.row_of(np.arange(evidence.table.starts[-1]))] >= 0
    )
    assert all(evidence.table.issued_op(place).line in evidence.lines for place in places.tolist())


def test_ranks_that_published_nothing_or_did_not_answer_have_no_values():
    job = replicas(4)
    job.device = {0: 9}
    job.absent.add(2)
    columns = evidence_of(job, dead=RankStatus(3, Process.GONE, None)).columns
    assert columns.answered.tolist() == [True, True, False, True]
    assert columns.published.tolist() == [True, True, False, False]
    assert columns.running.tolist() == [True, True, False, False]
    assert columns.device_step.tolist() == [9, NOTHING, NOTHING, NOTHING]
    assert columns.newest.tolist()[2:] == [NOTHING, NOTHING]


def test_operations_of_one_line_and_number_have_one_place():
    job = replicas(3)
    job.issue("world", 0, 1)
    job.issue("world", 2, text="barrier")
    evidence = evidence_of(job)
    operations = np.arange(len(evidence.table.digest))
    places: dict[tuple[str, int], set[int]] = {}
    for each, place in zip(operations.tolist(), evidence.places(operations).tolist(), strict=True):
        issued = evidence.table.issued_op(each)
        places.setdefault((issued.line, issued.number), set()).add(place)
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) == len(places) == 4


# What the members of a line have issued.


def test_members_are_given_line_by_line_with_what_each_has_issued():
    job = StuckJob(Mesh.grid(replica=4))
    job.issue(job.group("three", 3, 0, 1), 3, 1)
    job.issue("three", 1)
    job.issue(job.pair(2, 2), 2)  # to itself: one rank is two members
    members = Members.of(table_of(job.standings(), job.lines))
    assert members.rank.tolist() == [3, 0, 1, 2, 2]
    assert members.issued.tolist() == [1, 0, 2, 1, 1]
    assert members.rank[members.of_line(1)].tolist() == [2, 2]


def test_counts_on_unknown_lines_and_of_strangers_are_left_out():
    job = replicas(3)
    job.issue("elsewhere", 0, 1, 2)
    lines = {"world": CommGroup("world", (0, 1), "world")}
    assert Members.of(table_of(job.standings(), lines)).issued.tolist() == [3, 3]
    assert Members.of(table_of(job.standings(), {})).issued.tolist() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_ranks_have_issued_less_or_died_in_the_operation(seed: int):
    job = some_job(seed)
    standings = job.standings()
    evidence = HangEvidence.of(standings.values(), job.lines, job.mesh)
    table = evidence.table
    known = table.expanded(np.flatnonzero(table.row_line != NOTHING))[0]
    for place in known.tolist():
        issued = table.issued_op(place)
        expected = naive_missing(standings, evidence.lines[issued.line], issued.number)
        line, number = np.array([evidence.lines.index(issued.line)]), np.array([issued.number])
        assert evidence.missing(line, number, np.array([False]))[0].tolist() == expected
        assert evidence.are_open(np.array([place])).tolist() == [bool(expected)]
        assert (place in evidence.open) == bool(expected)


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


@pytest.mark.parametrize("seed", range(150))
def test_sources_are_those_that_a_search_rank_by_rank_finds(seed: int):
    job = some_job(seed)
    standings = job.standings()
    evidence = HangEvidence.of(standings.values(), job.lines, job.mesh)
    graph = WaitGraph(evidence)
    waits, certain = naive_waits(standings, evidence)
    assert sorted(rank for rank in range(len(job.mesh)) if graph.blocked[rank]) == sorted(certain)
    reached = {rank: reach(waits, rank) for rank in range(len(job.mesh))}
    behind = {rank for start in certain for rank in reached[start]}
    # In a part of the graph that no wait leaves, whoever does not wait for certain is its source.
    ends = {rank for rank in behind if all(rank in reached[other] for other in reached[rank])}
    expected = ends - certain
    assert {rank for rank in expected if not graph.stalled.ranks[rank]} == set(graph.sources)
    for source in graph.sources:
        waiting = {rank for rank in certain if source in reached[rank]} - {source}
        assert graph.waiters([source]) == waiting


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


def test_a_paused_job_has_no_source():
    job = replicas()
    job.busy(*range(8), phase=Phase.EVALUATION)
    graph = WaitGraph(HangEvidence.of(job.standings().values(), job.lines, job.mesh))
    assert (graph.sources, graph.cycles, graph.stalled.lines) == ([], [], {})
    assert not graph.blocked.any()


def test_a_lost_machine_is_the_source_and_no_line_is_stalled():
    job = replicas(4)
    job.issue("world", 0, 1)
    job.absent |= {2, 3}
    graph = WaitGraph(HangEvidence.of(job.standings().values(), job.lines, job.mesh))
    assert (graph.sources, graph.stalled.lines) == ([2, 3], {})


def test_suspect_that_did_not_answer_is_shown_in_the_proof():
    job = replicas(4)
    job.issue("world", 0, 1, 3)
    job.absent.add(2)
    record = found(job).records[0]
    assert (record.peers, record.verdict.evidence) == ((0, 1, 2, 3), (4, 4, -1, 4))


# The parts.


def test_rows_keep_the_order_of_their_values():
    row_of = np.array([place % 3 for place in range(600)])
    rows = Rows.grouped(row_of, np.arange(600), count=4)
    assert [rows[row].tolist() for row in range(4)] == [*(list(range(row, 600, 3)) for row in range(3)), []]
