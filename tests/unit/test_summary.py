"""Comparisons without a finding are counted, everything else is written in full, and files stay bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_record import EVIDENCE
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact
from torchscout.decision.types import Agreements, EvidenceRecord, Manifestation, Recordable
from torchscout.run.reader import Problem, Stamped, read
from torchscout.run.writer import RunWriter
from torchscout.session.replay.summary import SummaryRecorder

CONFIG = StragglerConfig(min_slowdown_ratio=1.1, min_slowdown_ms=1.0)
RECORDS = Path("records") / "rank-0.jsonl"


class Kept:
    """A recorder that keeps what it is given, on a disk that may be full."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.items: list[Recordable] = []
        self.is_full, self.is_closed = is_full, False

    def record(self, item: Recordable) -> None:
        self.items.append(item)
        if self.is_full:
            raise OSError("no space left")

    def close(self) -> None:
        self.is_closed = True


def agreeing(
    step: int, surface: str = "layer.3/output", peers: tuple[int, ...] = (0, 1, 2)
) -> EvidenceRecord:
    verdict = exact([5] * len(peers))
    return EvidenceRecord(
        step=step, surface=surface, manifestation=Manifestation.SDC, peers=peers, verdict=verdict
    )


def written(items: Sequence[Recordable], kept: Kept | None = None) -> list[Recordable]:
    kept = kept or Kept()
    recorder = SummaryRecorder(kept, CONFIG)
    for item in items:
        with suppress(OSError):
            recorder.record(item)
    with suppress(OSError):
        recorder.close()
    assert kept.is_closed
    return kept.items


def counts(items: Sequence[Recordable]) -> list[list[tuple[str, int, int, int]]]:
    """Of each line: what was compared, how often, from which step to which."""
    assert all(isinstance(each, Agreements) for each in items)
    return [[(e.surface, e.count, e.first, e.last) for e in each.surfaces] for each in items]


def test_the_first_check_has_a_line_and_later_ones_are_counted():
    items = [agreeing(20), agreeing(20, "layer.4/output"), agreeing(40), agreeing(60)]
    assert counts(written(items)) == [
        [("layer.3/output", 1, 20, 20), ("layer.4/output", 1, 20, 20)],
        [("layer.3/output", 2, 40, 60)],
    ]


def test_lines_become_rarer_up_to_a_limit():
    checks = [count for ((_, count, _, _),) in counts(written([agreeing(step) for step in range(1, 1001)]))]
    assert checks[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert set(checks[7:-1]) == {100}
    assert sum(checks) == 1000


def test_counts_are_written_after_a_limited_time():
    now, kept = 0.0, Kept()
    recorder = SummaryRecorder(kept, CONFIG, lambda: now)
    for step in range(1, 402):
        recorder.record(agreeing(step))
    before = len(kept.items)
    now = 601.0
    recorder.record(agreeing(402))
    assert len(kept.items) == before + 1


def test_memory_of_unwritten_counts_is_bounded():
    many = [agreeing(step, f"surface {step}.{number}") for step in range(1, 300) for number in range(100)]
    assert max(len(each) for each in counts(written(many))) <= 1000


def test_each_group_of_peers_has_a_line_of_its_own():
    lines = written([agreeing(1, peers=(0, 1)), agreeing(1, peers=(0, 1, 2)), agreeing(2, peers=(0, 1))])
    assert sorted(each.peers for each in lines) == [(0, 1), (0, 1), (0, 1, 2)]


def test_a_line_that_cannot_be_written_costs_no_other():
    kept = Kept(is_full=True)
    recorder = SummaryRecorder(kept, CONFIG)
    for peers in ((0, 1), (0, 1, 2)):
        recorder.record(agreeing(1, peers=peers))
    with pytest.raises(OSError, match="no space left"):
        recorder.close()
    assert len(kept.items) == 2
    lines = counts(written([agreeing(step) for step in range(1, 301)], Kept(is_full=True)))
    assert sum(count for ((_, count, _, _),) in lines) == 300


def test_a_line_of_counts_is_small(tmp_path: Path):
    recorder, peers = RunWriter(tmp_path, 0), tuple(range(128))
    recorder.record(agreeing(1, peers=peers))
    whole = (tmp_path / RECORDS).stat().st_size
    (tmp_path / RECORDS).unlink()
    counted = SummaryRecorder(recorder, CONFIG)
    for step in range(1, 1001):
        for number in range(10):
            counted.record(agreeing(step, f"layer.{number}/output", peers=peers))
    counted.close()
    size = (tmp_path / RECORDS).stat().st_size
    assert size * 100 < whole * 10_000, (size, whole)
    assert all(json.loads(line)["kind"] == "agreements" for line in (tmp_path / RECORDS).open())


def steps_in(path: Path) -> list[int]:
    return [each.item.step for each in read(path) if isinstance(each, Stamped)]


def test_a_file_that_becomes_full_while_it_is_opened_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recorder = RunWriter(tmp_path, 0, most_bytes=3000)
    for step in (1, 2):
        recorder.record(replace(EVIDENCE, step=step))
    opened = Path.open

    def open_and_rotate(path: Path, *args: str) -> object:
        file = opened(path, *args)
        if path == tmp_path / RECORDS:
            for step in range(3, 9):
                recorder.record(replace(EVIDENCE, step=step))
        return file

    monkeypatch.setattr(Path, "open", open_and_rotate)
    steps = steps_in(tmp_path / RECORDS)
    assert (tmp_path / "records" / "rank-0.jsonl.1").exists()
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 2


def test_a_full_file_alone_is_read(tmp_path: Path):
    recorder = RunWriter(tmp_path, 0)
    recorder.record(EVIDENCE)
    recorder.close()
    (tmp_path / RECORDS).rename(tmp_path / "records" / "rank-0.jsonl.1")
    assert steps_in(tmp_path / RECORDS) == [7]
    assert steps_in(tmp_path / "records" / "rank-1.jsonl") == []


def test_a_problem_names_the_file_that_has_it(tmp_path: Path):
    path = tmp_path / "rank-0.jsonl"
    path.write_text("{}\n")
    (tmp_path / "rank-0.jsonl.1").write_text("\n[]\n")
    found = [(each.path.name, each.line) for each in read(path) if isinstance(each, Problem)]
    assert found == [("rank-0.jsonl.1", 2), ("rank-0.jsonl", 1)]
