"""Heartbeats: who writes them and until when, and what a reader makes of them.

That a real observer writes them is in ``ranks/test_observer_process``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_job import QUICK
from torchscout.observer import process as observer
from torchscout.observer.process import ObserverProcess
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.spec import ObserverSpec
from torchscout.run.folder import Heartbeat, Identity, RankEntry, read_heartbeat
from torchscout.run.reader import read_run


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObserverSpec]:
    monkeypatch.setattr(observer, "HEARTBEAT_SECONDS", 0.0)
    (tmp_path / "run").mkdir()
    writer = ProgressWriter.create(tmp_path / "progress", 0)
    writer.next_step()
    run = Identity(str(tmp_path / "run"))
    yield ObserverSpec(rank=0, size=2, record=str(writer.path), run=run, token="t" * 16, config=QUICK)
    writer.close()


def beats(observing: ObserverProcess) -> bool:
    """Whether it writes a heartbeat now."""
    path = observing._spec.run_dir / "heartbeat.json"
    path.unlink(missing_ok=True)
    observing._act()
    if observing._heartbeat is not None:
        observing._heartbeat.join()
    return path.exists()


def test_rank_0_is_heard_of_until_its_trainer_has_ended(spec: ObserverSpec):
    observing = ObserverProcess(spec)
    assert beats(observing)
    beat = read_heartbeat(spec.run_dir) or pytest.fail("it cannot be read")
    assert (beat.rank, beat.record, beat.step) == (0, spec.record, 1)
    assert beats(observing)
    observing._obey({"close": True})
    assert not beats(observing)


def test_of_the_other_ranks_only_those_that_copy_for_their_machine_are(spec: ObserverSpec):
    observing = ObserverProcess(replace(spec, rank=1))
    assert not beats(observing)
    observing._copied = frozenset({0})
    assert beats(observing)


def test_what_cannot_be_written_is_logged_once(spec: ObserverSpec, capfd: pytest.CaptureFixture[str]):
    observing = ObserverProcess(spec)
    spec.run_dir.rmdir()
    assert not any(beats(observing) for _ in range(3))
    assert capfd.readouterr().err.count("FileNotFoundError:") == 1
    assert not spec.run_dir.exists()
    spec.run_dir.mkdir()
    assert beats(observing)


@pytest.mark.parametrize(("age", "is_fresh"), [(0, True), (80, True), (100, False), (-3600, False)])
def test_a_heartbeat_is_fresh_for_three_intervals(tmp_path: Path, age: float, is_fresh: bool):
    """One from the future says that clocks differ, and nothing about the job."""
    entry = RankEntry.own(0, tmp_path / "record")
    entry.write(tmp_path)
    assert read_run(tmp_path).last_heartbeat() is None
    Heartbeat(0, entry.record, 7, 30.0).write(tmp_path)
    written = time.time() - age
    os.utime(tmp_path / "heartbeat.json", (written, written))
    beat = read_run(tmp_path).last_heartbeat() or pytest.fail("it cannot be read")
    assert (beat.step, beat.time, beat.is_fresh) == (7, pytest.approx(written), is_fresh)


def test_the_heartbeat_of_an_earlier_session_says_nothing(tmp_path: Path):
    entry = RankEntry.own(0, tmp_path / "record")
    Heartbeat(0, entry.record, 7, 30.0).write(tmp_path)
    replace(entry, record="another").write(tmp_path)
    assert read_run(tmp_path).last_heartbeat() is None
