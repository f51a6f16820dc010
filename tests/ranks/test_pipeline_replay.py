"""Replay under pipeline parallelism: PyTorch's own schedules, plain stages and stages in FSDP2 or DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipeline_jobs import REPLAY, Piped, train
from tests.support.pipeline_stages import Layout, surfaces_on
from tests.support.ranks import run_ranks
from torchscout.faults.plan import FaultPlan


def with_and_without(rank: int, layout: Layout, run_dir: Path) -> tuple[bool, bool, Piped]:
    alone = train(rank, layout, None)
    checked = train(rank, layout, run_dir)
    return alone.bits == checked.bits, alone.settings == checked.settings, checked


def untouched(layout: Layout, run_dir: Path) -> None:
    if layout.obstacle is not None:
        pytest.skip(layout.obstacle)
    results = run_ranks(with_and_without, layout.ranks, layout, run_dir, timeout=240)
    for rank, (same, alike, found) in enumerate(results):
        assert found.failures == []
        assert found.incidents == [], found.sentences
        assert same
        assert alike
        unchecked = {(record.surface, record.reason) for record in found.records if record.verdict is None}
        assert unchecked == set()
        agreed = {record.surface for record in found.records if record.status == "agree"}
        assert surfaces_on(layout, rank) - agreed == set()
        assert (found.status["checks"], found.status["certified"]) == (12, 12)


SLOW = pytest.mark.slow
LAYOUTS = [
    Layout("1f1b", 2, pipeline_first=True),
    pytest.param(Layout("interleaved", 2, parallelism_from="degrees"), marks=SLOW),
    pytest.param(Layout("zbv", 2), marks=SLOW),
    pytest.param(Layout("1f1b", 2, "fsdp", pipeline_first=True), marks=SLOW),
]
LARGER = [
    Layout("zero bubble", 2),
    Layout("gpipe", 2),
    Layout("1f1b", 2, "ddp"),
    Layout("zbv", 2, "gathered fsdp", parallelism_from="degrees"),
    Layout("1f1b", 2, "checkpoints"),
    Layout("interleaved", 2, "compiled blocks"),
    Layout("zbv", 2, "compiled blocks"),
    Layout("zero bubble", 2, "checkpoints"),
    Layout("1f1b", 4),
    Layout("zero bubble", 4),
    Layout("dualpipe", 2),
    Layout("gpipe", 2, "fsdp"),
    Layout("interleaved", 2, "fsdp"),
    Layout("zero bubble", 2, "gathered fsdp"),
    Layout("dualpipe", 2, "gathered fsdp"),
    Layout("1f1b", 4, "fsdp"),
    Layout("zbv", 4, "gathered fsdp"),
    Layout("1f1b", 4, "hsdp", pipeline_first=True),
]


@pytest.mark.long_cases("1f1b of 4 ranks with nothing inside")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_bitwise_the_same_and_everything_is_checked(layout: Layout, tmp_path: Path):
    untouched(layout, tmp_path)


@SLOW
@pytest.mark.parametrize("layout", LARGER, ids=str)
def test_larger_jobs_and_more_schedules_are_bitwise_the_same(layout: Layout, tmp_path: Path):
    untouched(layout, tmp_path)


FAULTS = {
    2: (2, "layers.1/output", "layers.1/output"),
    3: (5, "layers.3/output", "layers.3/output"),
    4: (4, "layers.0/grad_input", "layers.0/grad_input"),
    5: (0, "layers.1.up/weight.gradient", "layers.1.up/weight.grad"),
    6: (1, "layers.4/grad_input", "layers.4/grad_input"),
    7: (3, "layers.3.up/weight.gradient", "layers.3.up/weight.grad"),
    8: (2, "layers.2.up/weight", "layers.2.up/weight"),
    9: (3, "output/weight", "output/weight"),
    10: (4, "layers.0.up/weight.exp_avg", "layers.0.up/weight.exp_avg"),
    11: (5, "layers.4.down/weight.exp_avg_sq", "layers.4.down/weight.exp_avg_sq"),
}
"""At a step, on a rank, at a place; and where it shows. Odd ranks have the last stage."""
INTERLEAVED = {
    "layers.0": "0.layers.0",
    "layers.1": "0.layers.1",
    "layers.2": "1.layers.3",
    "layers.3": "0.layers.2",
    "layers.4": "1.layers.4",
    "output": "1.output",
}
"""What stands at the same place where every rank has two of four stages."""


def placed(path: str, schedule: str) -> str:
    for plain, chunked in INTERLEAVED.items():
        if schedule == "interleaved" and path.startswith(plain):
            return path.replace(plain, chunked, 1)
    return path


@pytest.mark.slow_cases("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=SLOW)])
def test_a_wrong_number_in_one_stage_names_its_rank_and_no_other_stage(schedule: str, tmp_path: Path):
    faults, wanted, mended = FaultPlan(), [], {}
    for step, (rank, at, surface) in FAULTS.items():
        is_held = step >= 8
        calls = range(1) if is_held else REPLAY
        faults = faults.flip_bit(rank=rank, at=placed(at, schedule), step=step, bit=3, calls=calls)
        wanted.append(("rank", (rank,), placed(surface, schedule), step))
        if is_held:
            mended[step] = (rank // 2 + 1) % 3
    found = run_ranks(train, 6, Layout(schedule, 3), tmp_path, faults, 12, mended, timeout=240)
    for rank, result in enumerate(found):
        assert result.failures == []
        assert result.unfired == 0
        assert sorted(result.incidents, key=lambda each: each[-1]) == wanted, result.sentences
        for record in result.records:
            if record.scope is not None:
                guilty, _, _ = FAULTS[record.step]
                assert record.ranks == (guilty,)
                assert guilty % 2 == rank % 2


def test_stages_of_one_replica_that_are_wrong_at_once_are_separate_incidents(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at="layers.1/output", step=2, bit=3, calls=REPLAY)
    faults = faults.flip_bit(rank=3, at="layers.4/output", step=2, bit=3, calls=REPLAY)
    (result, *_) = run_ranks(train, 6, Layout("1f1b", 3), tmp_path, faults, 2, timeout=120)
    wanted = [("rank", (2,), "layers.1/output", 2), ("rank", (3,), "layers.4/output", 2)]
    assert sorted(result.incidents) == wanted, result.sentences


@pytest.mark.parametrize(
    ("rank", "at"), [(2, "layers.1/output"), pytest.param(1, "layers.4.up/weight", marks=SLOW)]
)
def test_two_replicas_of_a_stage_differ_as_a_group(rank: int, at: str, tmp_path: Path):
    calls = REPLAY if at.endswith("output") else range(1)
    faults = FaultPlan().flip_bit(rank=rank, at=at, step=2, bit=3, calls=calls)
    (result, *_) = run_ranks(train, 4, Layout("1f1b", 2), tmp_path, faults, 2, timeout=120)
    assert result.incidents == [("peer_group", (rank % 2, rank % 2 + 2), at, 2)], result.sentences


@SLOW
@pytest.mark.parametrize(("rank", "at"), [(2, "layers.1/output"), (5, "layers.4/grad_input")])
def test_a_wrong_number_in_a_sharded_stage_names_its_rank(rank: int, at: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=rank, at=at, step=2, bit=3, calls=REPLAY)
    (result, *_) = run_ranks(train, 6, Layout("1f1b", 3, "fsdp"), tmp_path, faults, 2, timeout=120)
    assert result.incidents == [("rank", (rank,), at, 2)], result.sentences
