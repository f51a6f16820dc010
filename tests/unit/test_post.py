"""Reports as posts: what is sent is read, an ordinary one is small, and a malformed one is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evaluation.simulate.job import Job
from evaluation.simulate.layouts import layout_of
from evaluation.simulate.reports import Reporter
from tests.unit.test_columns import some_job
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.observer.rounds.post import HEADER, MISTAKES, ROW, RUN, Header, Post, Row
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.rank_report import RankReport

WORLD = CommGroup("world", (0, 1, 2), "world")
PROGRESS = Progress(
    rank=1,
    step=7,
    operation=3,
    phase=Phase.BACKWARD,
    issued={"world": 9},
    recent=tuple(
        IssuedOp("world", n, (1 << 64) - n, n << 40, "all_reduce float32[8] sum") for n in (7, 8, 9)
    ),
    at_communication=True,
    silent_seconds=6.25,
    device_step=5,
    entered={"world": 8},
    device_busy=True,
    captured=2,
)
REPORT = RankReport(
    RankStatus(1, Process.STOPPED, PROGRESS, waiting=False),
    (WORLD, CommGroup("0>2", (0, 2), "0 -> 2", pair=True)),
    excused=True,
    gone_seconds=0.0,
    stalled=replace(PROGRESS, recent=()),
    has_timed_out=True,
    operations={"step": 7, "open": []},
    phase_seconds={Phase.INPUT: 0.5},
)


def test_everything_is_read_as_it_was_sent():
    found = Post(post_of(REPORT, 3), 3).report()
    issued = {"world": 9, "0>2": 0}
    progress = replace(PROGRESS, issued=issued)
    assert found == replace(REPORT, status=replace(REPORT.status, progress=progress))


def test_ranks_of_stuck_jobs_are_read_as_they_were_sent():
    for seed in range(8):
        job = some_job(seed)
        lines = tuple(job.lines.values())
        for rank, status in job.standings.items():
            found = Post(post_of(RankReport(status, lines)), len(job.mesh)).report()
            assert found.lines == lines
            assert found.status.progress.recent == status.progress.recent
            assert status.progress.issued.items() <= found.status.progress.issued.items()
            assert replace(found.status, progress=None) == replace(status, progress=None, stack=""), rank


@pytest.mark.parametrize("name", ["llama3-405b", "megascale", "megatron-1t", "megascale-moe", "deepseek-v3"])
def test_an_ordinary_post_has_two_kib_at_most(name: str):
    job = Job(layout_of(name))
    reporter = Reporter(job)
    for rank in range(0, job.size, job.size // 7):
        assert len(post_of(reporter.report(rank, 5000, 4990), 1)) <= 2048


def test_a_post_of_many_members_is_small():
    line = CommGroup("world", tuple(range(131_072)), "world")
    assert len(post_of(RankReport(RankStatus(0, Process.RUNNING, None), (line,)))) < 200


def test_splits_of_the_last_operation_on_each_line_are_sent():
    splits = tuple(range(64))
    recent = tuple(IssuedOp("world", n, 1, n, "all_to_all", splits, splits) for n in range(1, 65))
    progress = replace(PROGRESS, issued={"world": 64}, recent=recent)
    data = post_of(RankReport(RankStatus(1, Process.RUNNING, progress), (WORLD,)))
    assert len(data) < 3000
    read = Post(data, 3).report().status.progress.recent
    assert read[-1] == recent[-1]
    assert read[0] == replace(recent[0], sends=None, receives=None)


def with_header(data: bytes, **changes: int | float) -> bytes:
    header = Header._make(HEADER.unpack_from(data))._replace(**changes)
    return HEADER.pack(*header) + data[HEADER.size :]


def with_row(data: bytes, **changes: int) -> bytes:
    row = Row._make(ROW.unpack_from(data, HEADER.size))._replace(**changes)
    return data[: HEADER.size] + ROW.pack(*row) + data[HEADER.size + ROW.size :]


WHOLE = post_of(REPORT, 3)
RUNS_AT = Post(WHOLE, 3).starts[2]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WHOLE[:50],
        WHOLE[:-1],
        WHOLE + b" ",
        with_header(WHOLE, kind=3),
        with_header(WHOLE, rank=3),
        with_header(WHOLE, flags=3 << 8),
        with_header(WHOLE, flags=3 << 12),
        with_header(WHOLE, flags=15 << 16),
        with_header(WHOLE, flags=0),
        with_header(WHOLE, silent_seconds=float("nan")),
        with_header(WHOLE, gone_seconds=float("inf")),
        with_header(WHOLE, rows=3),
        with_header(WHOLE, strings=0, rest=0),
        with_row(WHOLE, operations=2),
        with_row(WHOLE, runs=0),
        with_row(WHOLE, key=0),
        *(
            WHOLE[:RUNS_AT] + RUN.pack(*run) + WHOLE[RUNS_AT + RUN.size :]
            for run in ((0, 1, 4), (0, 1, -1), (-1, 1, 2), (2, -2, 3), (0, 0, 0), (0, 1 << 30, 3))
        ),
        WHOLE[: RUNS_AT - 1] + b"\x03" + WHOLE[RUNS_AT:],
        WHOLE.replace(b'"rank":1', b'"rank":2'),
        WHOLE.replace(b'"input":0.5', b'"input":NaN'),
        WHOLE.replace(b'"operations":{', b'"operation_":{'),
    ],
)
def test_a_malformed_post_is_refused(data: bytes):
    with pytest.raises(MISTAKES):
        Post(data, 3)


def test_any_other_bytes_are_refused_or_read():
    chance = random.Random(0)
    for _ in range(2000):
        data = bytearray(WHOLE)
        for _ in range(chance.choice((1, 4))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            post = Post(bytes(data), 3)
        except MISTAKES:
            continue
        post_of(post.report())
