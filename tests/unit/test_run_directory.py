"""Run directories: bounded files, a disk that is full for a moment, folders that are removed or merged."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_record import INCIDENT, RESOLVED
from torchscout.decision.types import Incident, Resolved
from torchscout.run.reader import Follower, IncidentLog, Problem, Stamped, read, read_run
from torchscout.run.writer import RunWriter, line_of

FILE = Path("incidents", "rank-0.jsonl")
MOST = 20_000
AGAIN = replace(INCIDENT, occurrence="again")


def number(step: int) -> Incident:
    return replace(INCIDENT, step=step, sentence=f"Incident {step}.")


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


def entries(log: IncidentLog) -> list[tuple[Incident, Resolved | None]]:
    return [(each.incident, each.end) for each in log.reported]


@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_disk_that_is_full_for_a_moment_swallows_no_incident(tmp_path: Path, room: int):
    recorder, path = RunWriter(tmp_path, 0), tmp_path / FILE
    recorder.record(INCIDENT)
    with room_for(path.stat().st_size + room), pytest.raises(OSError):  # noqa: PT011  either error is right
        recorder.record(INCIDENT)
    assert items_of(path) == [INCIDENT]
    recorder.record(INCIDENT)
    recorder.close()
    assert items_of(path) == [INCIDENT] * 3
    assert len([each for each in read(path) if isinstance(each, Problem)]) == bool(room)


def test_what_waits_for_a_full_disk_is_written_at_the_end(tmp_path: Path):
    recorder, path = RunWriter(tmp_path, 0), tmp_path / FILE
    recorder.record(INCIDENT)
    with room_for(path.stat().st_size), pytest.raises(OSError):  # noqa: PT011
        recorder.record(INCIDENT)
    recorder.close()
    assert items_of(path) == [INCIDENT] * 2


def test_a_run_folder_that_is_removed_is_made_again(tmp_path: Path):
    recorder = RunWriter(tmp_path / "run", 0)
    recorder.record(INCIDENT)
    shutil.rmtree(tmp_path / "run")
    recorder.record(INCIDENT)
    recorder.close()
    assert items_of(tmp_path / "run" / FILE) == [INCIDENT]


def test_a_file_that_is_moved_away_gets_a_successor(tmp_path: Path):
    """As a log rotation does it."""
    recorder, path = RunWriter(tmp_path, 0), tmp_path / FILE
    recorder.record(INCIDENT)
    path.rename(tmp_path / "old")
    recorder.record(INCIDENT)
    recorder.close()
    assert items_of(path) == items_of(tmp_path / "old") == [INCIDENT]


def test_a_log_of_incidents_is_followed_to_their_ends(tmp_path: Path):
    recorder, log = RunWriter(tmp_path / "run", 0), IncidentLog(tmp_path / "run")
    assert log.new() == []
    recorder.record(INCIDENT)
    assert [line.item for line in log.new()] == [INCIDENT]
    recorder.record(RESOLVED)
    assert (log.new(), entries(log)) == ([], [(INCIDENT, RESOLVED)])
    recorder.close()


def test_what_happens_again_after_it_was_resolved_is_open(tmp_path: Path):
    recorder = RunWriter(tmp_path, 0)
    for item in (INCIDENT, RESOLVED, AGAIN):
        recorder.record(item)
    recorder.close()
    log = IncidentLog.read(tmp_path)
    assert entries(log) == [(INCIDENT, RESOLVED), (AGAIN, None)]


def test_what_two_processes_write_is_merged_in_any_order(tmp_path: Path):
    """The end may be read before its incident, and machines without a shared disk write the same lines."""
    for rank, by, items in (
        (0, "observer", [RESOLVED]),
        (3, "rank", [INCIDENT, AGAIN]),
        (7, "rank", [INCIDENT]),
    ):
        writer = RunWriter(tmp_path, rank, by=by)
        for item in items:
            writer.record(item)
        writer.close()
    log = IncidentLog.read(tmp_path)
    assert entries(log) == [(INCIDENT, RESOLVED), (AGAIN, None)]
    assert {each.name for each in (tmp_path / "incidents").iterdir()} == {
        "observer-0.jsonl",
        "rank-3.jsonl",
        "rank-7.jsonl",
    }
    run = read_run(tmp_path)
    assert [(each.incident, each.end) for each in run.incidents] == entries(log)
    assert run.problems == []


def test_files_are_bounded_and_keep_the_first_and_the_newest_lines(tmp_path: Path):
    recorder, most = RunWriter(tmp_path, 0, most_bytes=MOST), 0
    for step in range(1, 401):
        recorder.record(number(step))
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "incidents").iterdir()))
    recorder.close()
    line = (tmp_path / FILE).read_bytes().index(b"\n") + 1
    assert 2 * MOST < most < 3 * (MOST + line)
    steps = [each.step for each in IncidentLog.read(tmp_path).incidents]
    (gap,) = [place for place in range(1, len(steps)) if steps[place] != steps[place - 1] + 1]
    assert steps == [*range(1, gap + 1), *range(steps[gap], 401)]
    assert gap >= MOST // line
    assert len(steps) - gap > MOST // line


def test_a_follower_reads_every_incident_once_while_files_become_full(tmp_path: Path):
    recorder, follower, seen = RunWriter(tmp_path, 0, most_bytes=MOST), Follower(tmp_path / FILE), []
    assert [*follower.fresh()] == []
    for step in range(1, 201):
        recorder.record(number(step))
        if step % 3 == 0:  # so that lines are added to a file before it is renamed
            seen += [line.item.step for line in follower.fresh()]
    recorder.close()
    seen += [line.item.step for line in follower.fresh()]
    follower.close()
    assert seen == [*range(1, 201)]


def test_a_follower_leaves_a_line_until_it_is_complete_and_skips_a_foreign_one(tmp_path: Path):
    line, path, seen = line_of(INCIDENT), tmp_path / "news", []
    follower = Follower(path)
    for part in (b"{}\n" + line + line[:100], line[100:-1], b"\n" + line):
        with path.open("ab") as file:
            file.write(part)
        seen.append([each.item for each in follower.fresh()])
    follower.close()
    assert seen == [[INCIDENT], [], [INCIDENT] * 2]


def test_a_log_of_incidents_skips_a_foreign_line(tmp_path: Path):
    recorder, path = RunWriter(tmp_path, 0), tmp_path / FILE
    recorder.record(INCIDENT)
    with path.open("a") as file:
        file.write("{}\n")
    recorder.record(AGAIN)
    recorder.close()
    assert IncidentLog.read(tmp_path).incidents == [INCIDENT, AGAIN]


def test_where_there_is_no_run_directory_there_are_no_incidents(tmp_path: Path):
    (tmp_path / "file").touch()
    assert IncidentLog.read(tmp_path / "nothing").incidents == []
    assert IncidentLog.read(tmp_path / "file").incidents == []
