"""Reports as posts: what is sent is read, an ordinary one is small, and a malformed one is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from torchscout.decision.progress import (
    CommGroup,
    IssuedOp,
    Phase,
    Process,
    Progress,
    RankReport,
    Window,
)
from torchscout.observer.rounds.post import HEADER, MISTAKES, ROW, RUN, Header, Post, Row
from torchscout.observer.rounds.post_writer import post_of

WORLD = CommGroup("world", (0, 1, 2), "world", timeout=600.0)
PAIR = CommGroup("0>2", (0, 2), "0 -> 2", pair=True)
RECENT = Window(
    [IssuedOp("world", n, (1 << 64) - n, n << 40, "all_reduce float32[8] sum") for n in (7, 8, 9)]
)
PROGRESS = Progress(
    rank=1,
    step=7,
    operation=3,
    phase=Phase.BACKWARD,
    issued={"world": 9, "0>2": 0},
    recent=RECENT,
    at_communication=True,
    silent_seconds=6.25,
    device_step=5,
    entered={"world": 8},
    device_busy=True,
    captured=2,
)
REPORT = RankReport(
    1,
    progress=PROGRESS,
    groups=(WORLD, PAIR),
    stalled=replace(PROGRESS, recent=Window()),
    operations={"step": 7, "open": []},
    phase_seconds={Phase.INPUT: 0.5},
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"process": Process.GONE, "gone_seconds": 0.0, "how": "killed", "wait_status": 9},
        {"process": Process.GONE, "gone_seconds": 2.5, "how": "failed", "wait_status": 1 << 8},
        {"process": Process.GONE, "gone_seconds": 2.5, "how": "unknown", "wait_status": None},
        {"process": Process.STOPPED},
        *({name: True} for name in ("moving", "excused", "is_incomplete", "is_restarting", "waiting")),
        *({name: True} for name in ("near_timeout", "has_timed_out")),
        {"waiting": False},
        {"groups": (replace(WORLD, timeout=None), replace(PAIR, timeout=0.5))},
        {"progress": None, "stalled": None, "operations": None, "phase_seconds": {}},
        {"progress": replace(PROGRESS, device_step=None, device_busy=None, entered={})},
        {"progress": replace(PROGRESS, device_busy=False, at_communication=False, recent=Window())},
    ],
    ids=str,
)
def test_everything_is_read_as_it_was_sent(changes: dict[str, Any]):
    report = replace(REPORT, **changes)
    post = Post(post_of(report, 3), 3)
    assert post.report() == report
    assert (post.header.round, post.kind, post.process) == (3, "report", report.process)
    assert post.gone_seconds == report.gone_seconds
    assert post.is_still is (report.process is Process.RUNNING and not report.moving)


def some_progress(chance: random.Random, groups: list[CommGroup]) -> Progress:
    """Of a rank that issues operations of several groups in turn, and whose record begins anywhere."""
    issued = Counter({group.key: chance.randrange(100) for group in groups})
    recent = []
    for _ in range(chance.randrange(65)):
        key, splits = chance.choice(groups).key, None
        issued[key] += 1
        fingerprint = chance.randrange(5)
        if chance.random() < 0.1:
            splits = tuple(chance.randrange(1 << 40) for _ in range(3))
        text = f"operation {fingerprint}"
        recent.append(IssuedOp(key, issued[key], fingerprint, chance.getrandbits(64), text, splits, splits))
    entered = {key: chance.randrange(count + 1) for key, count in issued.items() if chance.random() < 0.5}
    return replace(PROGRESS, issued=dict(issued), recent=Window(recent), entered=entered)


def test_a_posted_window_says_the_same_before_and_after_its_operations_are_read():
    for seed in range(50):
        chance = random.Random(seed)
        groups = [CommGroup(f"group {n}", tuple(range(n + 1)), f"g{n}") for n in range(8)]
        progress = some_progress(chance, groups)
        found = Post(post_of(RankReport(1, progress=progress, groups=groups)), 8).report().progress
        assert found is not None
        mine, theirs = progress.recent, found.recent
        assert (theirs.newest, theirs.digests) == (mine.newest, mine.digests), seed
        assert theirs.last_numbers == mine.last_numbers, seed
        for group in groups:
            assert theirs.has_splits(group.key) is mine.has_splits(group.key), seed
            assert theirs.of(group.key) == mine.of(group.key), seed
        assert theirs.last_entered(found.entered) == mine.last_entered(progress.entered), seed
        assert found == progress, seed


def test_an_ordinary_post_has_a_few_kib_at_most():
    """A rank of a job of 131,072 with five axes, in the middle of a pipeline."""
    rank, size = 70_000, 131_072
    groups = [
        CommGroup(name, tuple(range(rank % stride, size, stride))[:count], f"{name} group {stride}")
        for name, stride, count in (
            *(("world", 1, size), ("data", 128, 1024), ("data and context", 64, 2048), ("expert", 8, 64)),
            *(("context", 16, 4), ("tensor", 1, 8), ("pipeline", 1024, 16), ("embedding", 4096, 2)),
        )
    ]
    for first, second in ((rank - 1024, rank), (rank, rank + 1024)):
        ends = ((first, second), (second, first))
        groups += [CommGroup(f"pp@1234abcd/{a}>{b}#0", (a, b), f"{a} -> {b}", pair=True) for a, b in ends]
    recent = [
        IssuedOp(groups[n % 12].key, 5000 + n // 12, n % 9, n << 50, f"all_reduce bfloat16[{n % 9}] sum")
        for n in range(64)
    ]
    issued = {group.key: 5000 + sum(each.group == group.key for each in recent) - 1 for group in groups}
    progress = replace(PROGRESS, rank=rank, issued=issued, recent=Window(recent), entered=issued)
    data = post_of(RankReport(rank, progress=progress, groups=groups))
    assert len(data) <= 2560
    found = Post(data, size).report()
    assert (found.progress, found.groups) == (progress, tuple(groups))


def test_splits_of_the_last_operation_of_each_group_are_sent():
    splits = tuple(range(64))
    recent = [IssuedOp("world", n, 1, n, "all_to_all", splits, splits) for n in range(1, 65)]
    progress = replace(PROGRESS, issued={"world": 64}, entered={}, recent=Window(recent))
    data = post_of(RankReport(1, progress=progress, groups=(WORLD,)))
    assert len(data) < 3000
    read = Post(data, 3).report().progress.recent
    assert read[-1] == recent[-1]
    assert read[0] == replace(recent[0], sends=None, receives=None)


def with_header(data: bytes, **changes: float) -> bytes:
    header = Header._make(HEADER.unpack_from(data))._replace(**changes)
    return HEADER.pack(*header) + data[HEADER.size :]


def with_row(data: bytes, **changes: int) -> bytes:
    row = Row._make(ROW.unpack_from(data, HEADER.size))._replace(**changes)
    return data[: HEADER.size] + ROW.pack(*row) + data[HEADER.size + ROW.size :]


def with_run(data: bytes, *run: int) -> bytes:
    at = Post(data, 3).starts[2]
    return data[:at] + RUN.pack(*run) + data[at + RUN.size :]


WHOLE = post_of(replace(REPORT, gone_seconds=0.0, how="killed", wait_status=9), 3)
OPERATIONS_END = Post(WHOLE, 3).starts[2]
MALFORMED = {
    "empty": b"",
    "cut in its header": WHOLE[:50],
    "cut": WHOLE[:-1],
    "too long": WHOLE + b" ",
    "kind": with_header(WHOLE, kind=3),
    "rank": with_header(WHOLE, rank=3),
    "waiting": with_header(WHOLE, flags=3 << 8),
    "busy": with_header(WHOLE, flags=3 << 10),
    "process": with_header(WHOLE, flags=3 << 12),
    "phase": with_header(WHOLE, flags=15 << 16),
    "operations without progress": with_header(WHOLE, flags=0),
    "silence": with_header(WHOLE, silent_seconds=float("nan")),
    "end": with_header(WHOLE, gone_seconds=float("inf")),
    "rows": with_header(WHOLE, rows=3),
    "strings": with_header(WHOLE, strings=0, rest=0),
    "operations of a row": with_row(WHOLE, operations=2),
    "runs of a row": with_row(WHOLE, runs=0),
    "key of a row": with_row(WHOLE, key=0),
    "phrase": WHOLE[: OPERATIONS_END - 1] + b"\x03" + WHOLE[OPERATIONS_END:],
    "rank of the stall": WHOLE.replace(b'"rank":1', b'"rank":2'),
    "seconds of a phase": WHOLE.replace(b'"input":0.5', b'"input":NaN'),
    "unknown key": WHOLE.replace(b'"operations":{', b'"operation_":{'),
    "how it ended": WHOLE.replace(b'"killed"', b'"kissed"'),
    "wait status": WHOLE.replace(b'"killed",9', b'"killed",['),
} | {
    f"members {run}": with_run(WHOLE, *run)
    for run in ((0, 1, 4), (0, 1, -1), (-1, 1, 2), (2, -2, 3), (0, 0, 0), (0, 1 << 30, 3))
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_post_is_refused(data: bytes):
    assert data != WHOLE
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
