"""Run folders under failures: a disk that is full for a moment, a folder that is removed."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.test_record import INCIDENT, RESOLVED
from torchscout.decision.records.recorder import IncidentLog, JsonlRecorder, Problem, Stamped, read


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may be larger: the kernel then writes a part, or nothing, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def items_of(path: Path) -> list[object]:
    return [each.item for each in read(path) if isinstance(each, Stamped)]


@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_disk_that_is_full_for_a_moment_swallows_no_incident(tmp_path: Path, room: int):
    recorder, path = JsonlRecorder(tmp_path, 0), tmp_path / "incidents.jsonl"
    recorder.record(INCIDENT)
    with room_for(path.stat().st_size + room), pytest.raises(OSError):  # noqa: PT011  either error is right
        recorder.record(INCIDENT)
    assert items_of(path) == [INCIDENT]
    recorder.record(INCIDENT)
    recorder.close()
    assert items_of(path) == [INCIDENT] * 3
    assert len([each for each in read(path) if isinstance(each, Problem)]) == bool(room)


def test_another_rank_is_not_swallowed_either(tmp_path: Path):
    first, second = JsonlRecorder(tmp_path, 0), JsonlRecorder(tmp_path, 1)
    second.record(INCIDENT)
    with room_for((tmp_path / "incidents.jsonl").stat().st_size + 9), pytest.raises(OSError):  # noqa: PT011
        first.record(INCIDENT)
    second.record(INCIDENT)
    first.close()
    second.close()
    assert items_of(tmp_path / "incidents.jsonl") == [INCIDENT] * 3


def test_what_waits_for_a_full_disk_is_written_at_the_end(tmp_path: Path):
    recorder, path = JsonlRecorder(tmp_path, 0), tmp_path / "incidents.jsonl"
    recorder.record(INCIDENT)
    with room_for(path.stat().st_size), pytest.raises(OSError):  # noqa: PT011
        recorder.record(INCIDENT)
    recorder.close()
    assert items_of(path) == [INCIDENT] * 2


def test_a_run_folder_that_is_removed_is_made_again(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path / "run", 0)
    recorder.record(INCIDENT)
    shutil.rmtree(tmp_path / "run")
    recorder.record(INCIDENT)
    recorder.close()
    assert items_of(tmp_path / "run" / "incidents.jsonl") == [INCIDENT]


def test_a_file_that_is_moved_away_gets_a_successor(tmp_path: Path):
    """As a log rotation does it."""
    recorder, path = JsonlRecorder(tmp_path, 0), tmp_path / "incidents.jsonl"
    recorder.record(INCIDENT)
    path.rename(tmp_path / "old")
    recorder.record(INCIDENT)
    recorder.close()
    assert items_of(path) == items_of(tmp_path / "old") == [INCIDENT]


def test_a_log_of_incidents_is_followed_to_their_ends(tmp_path: Path):
    recorder, log = JsonlRecorder(tmp_path / "run", 0), IncidentLog(tmp_path / "run", strict=True)
    assert log.new() == []
    recorder.record(INCIDENT)
    assert [line.item for line in log.new()] == log.open_incidents == [INCIDENT]
    recorder.record(RESOLVED)
    assert (log.new(), log.entries, log.open_incidents) == ([], [(INCIDENT, RESOLVED)], [])
    recorder.close()


def test_what_happens_again_after_it_was_resolved_is_open(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path, 0)
    for item in (INCIDENT, RESOLVED, INCIDENT):
        recorder.record(item)
    recorder.close()
    log = IncidentLog.read(tmp_path)
    assert log.entries == [(INCIDENT, RESOLVED), (INCIDENT, None)]
    assert log.incidents == [INCIDENT, INCIDENT]
    assert log.open_incidents == [INCIDENT]


def test_a_strict_log_refuses_a_line_that_another_one_skips(tmp_path: Path):
    recorder, path = JsonlRecorder(tmp_path, 0), tmp_path / "incidents.jsonl"
    recorder.record(INCIDENT)
    with path.open("a") as file:
        file.write("{}\n")
    recorder.record(INCIDENT)
    recorder.close()
    assert IncidentLog.read(tmp_path).incidents == [INCIDENT, INCIDENT]
    with pytest.raises(ValueError, match=f"{path}:2: schema None"):
        IncidentLog(tmp_path, strict=True).new()


def test_where_there_is_no_run_directory_there_are_no_incidents(tmp_path: Path):
    (tmp_path / "file").touch()
    assert IncidentLog.read(tmp_path / "nothing").entries == IncidentLog.read(tmp_path / "file").entries == []
