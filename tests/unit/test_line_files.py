"""Incidents of a long run: the files are bounded, and the newest and the first of each kind stay."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.unit.test_record import INCIDENT, RESOLVED
from torchscout.decision.records.recorder import IncidentLog, JsonlRecorder, Stamped, read
from torchscout.decision.types import Action, Decision, Failure, Incident, Manifestation, Scope
from torchscout.report.reading import read_events

MOST = 20_000
FILE = "incidents.jsonl"


def number(step: int, **changes: object) -> Incident:
    return replace(INCIDENT, step=step, sentence=f"Incident {step}.", **changes)


def decision(step: int, *hosts: str) -> Decision:
    action = Action.REPLACE
    return Decision(step=step, action=action, failure=Failure.SDC, ranks=(5,), hosts=hosts, sentence="Go.")


def steps_of(run_dir: Path) -> list[int]:
    return [each.step for each in IncidentLog.read(run_dir).incidents]


def test_incidents_are_bounded_and_all_are_shown_or_counted(tmp_path: Path):
    recorder, most = JsonlRecorder(tmp_path, 0, most_bytes=MOST), 0
    for step in range(1, 401):
        hang = {"manifestation": Manifestation.HANG, "scope": Scope.PROCESS_GROUP} if step in (50, 90) else {}
        recorder.record(number(step, **hang))
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
    recorder.close()
    line = (tmp_path / FILE).read_bytes().index(b"\n") + 1
    # Two full files, two lines that are the first of their kinds, and counts.
    assert 2 * MOST < most < 2 * (MOST + line) + 2 * line + 4000
    log = IncidentLog.read(tmp_path)
    steps = steps_of(tmp_path)
    assert steps[:2] == [1, 50], "the first of each kind"
    assert steps[2:] == [*range(steps[2], 401)], "the newest, in order"
    assert len(steps) - 2 > MOST // line
    assert log.left_out + len(steps) == 400


def test_a_run_with_few_incidents_has_one_file_and_keeps_all(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path, 0)
    for step in range(20):
        recorder.record(number(step))
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert steps_of(tmp_path) == [*range(20)]
    assert IncidentLog.read(tmp_path).left_out == 0
    assert read_events(tmp_path).problems == []


def test_the_end_of_an_incident_that_is_kept_is_kept_too(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path, 0, most_bytes=MOST)
    for item in (INCIDENT, RESOLVED, *(number(step) for step in range(1, 101))):
        recorder.record(item)
    recorder.close()
    assert IncidentLog.read(tmp_path).entries[0] == (INCIDENT, RESOLVED)


def test_no_machine_that_must_not_be_used_again_is_forgotten(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path, 0, most_bytes=MOST)
    for step in range(1, 201):
        recorder.record(number(step))
        recorder.record(decision(step, f"node-{step % 7}"))
    recorder.close()
    kept = IncidentLog.read(tmp_path).decisions
    assert {each.hosts[0] for each in kept} == {f"node-{each}" for each in range(7)}
    assert len(kept) < 200


def test_a_follower_reads_every_incident_once_while_files_become_full(tmp_path: Path):
    recorder, log, seen = JsonlRecorder(tmp_path, 0, most_bytes=MOST), IncidentLog(tmp_path), []
    for step in range(1, 201):
        recorder.record(number(step))
        if step % 3 == 0:  # so that lines are added to a file before it is renamed
            seen += [line.item.step for line in log.new()]
    recorder.close()
    seen += [line.item.step for line in log.new()]
    assert seen == [*range(1, 201)]
    assert len(steps_of(tmp_path)) < 200, "whoever comes later sees less"


WRITER = """
import sys
from pathlib import Path
from tests.unit.test_line_files import number
from torchscout.decision.records.recorder import JsonlRecorder
first, most = int(sys.argv[2]), int(sys.argv[3])
recorder = JsonlRecorder(Path(sys.argv[1]), first, most_bytes=most)
print("ready", flush=True)
sys.stdin.readline()
for step in range(first, first + 100):
    recorder.record(number(step))
recorder.close()
"""


def test_several_processes_that_fill_a_file_lose_no_line(tmp_path: Path):
    """Three quarters of what they write fill it: each may find it full, and one of them renames it."""
    line = len(number(1000).to_json().__str__())
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [
        subprocess.Popen(
            [*command, str(first), str(300 * line)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (1000, 2000, 3000, 4000)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert (tmp_path / f"{FILE}.1").exists()
    assert sorted(steps_of(tmp_path)) == [
        first + place for first in range(1000, 5000, 1000) for place in range(100)
    ]


def test_a_damaged_line_is_left_out_and_the_rest_is_kept(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path, 0, most_bytes=MOST)
    recorder.record(number(1))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "incident"}\n[1\n')
    for step in range(2, 101):
        recorder.record(number(step))
    recorder.close()
    assert all(isinstance(each, Stamped) for each in read(tmp_path / FILE))
    assert steps_of(tmp_path)[0] == 1
    assert IncidentLog.read(tmp_path).left_out + len(steps_of(tmp_path)) == 102


def test_the_report_says_how_many_are_left_out(tmp_path: Path):
    recorder = JsonlRecorder(tmp_path, 0, most_bytes=MOST)
    for step in range(1, 101):
        recorder.record(number(step))
    recorder.close()
    run, left_out = read_events(tmp_path), IncidentLog.read(tmp_path).left_out
    assert left_out > 0
    (problem,) = run.problems
    assert f"{left_out} older incidents, ends of incidents and decisions are left out" in problem
    assert len(run.incidents) == 100 - left_out
