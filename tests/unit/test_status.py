"""`scout status`: running, finished, interrupted, failed and killed jobs are distinguished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.test_record import INCIDENT
from torchscout.cli.main import app
from torchscout.decision.records.record import Manifestation, Resolved
from torchscout.decision.records.recorder import REPLAY_FILE, JsonlRecorder
from torchscout.observer.record.directory import End, How, RankEntry, read_roster
from torchscout.session.ending import add_run, mark_recovered

STRAGGLER = replace(INCIDENT, manifestation=Manifestation.STRAGGLER, sentence="rank 5 is slow")
TRAINER = """
import sys, time
from pathlib import Path
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.record.directory import RankEntry
run_dir = Path(sys.argv[1])
writer = ProgressWriter.create(run_dir / "records", 0) if sys.argv[2] == "observer" else None
if writer:
    writer.next_step()
RankEntry.own(0, writer and writer.path, 1).write(run_dir)
print(flush=True)
time.sleep(600)
"""


@contextmanager
def trainer(run_dir: Path, kind: str = "observer") -> Iterator[subprocess.Popen[bytes]]:
    """A process that has entered itself in the run directory as rank 0, and sleeps."""
    command = [sys.executable, "-c", TRAINER, str(run_dir), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def ended(run_dir: Path, how: How, rank: int = 0, size: int = 1, why: str = "") -> None:
    """A rank whose end is on record."""
    run_dir.mkdir(exist_ok=True)
    entry = RankEntry.own(rank, run_dir / "gone", size)
    entry.write(run_dir)
    End(rank, how, 12, entry.record, why).write(run_dir)


def ask(*arguments: Path | str) -> Result:
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


def report(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ask(run_dir, "--json").stdout)
    return document


@pytest.mark.parametrize("kind", ["observer", "no observer"])
def test_a_rank_that_runs_and_one_that_was_killed(tmp_path: Path, kind: str):
    with trainer(tmp_path, kind) as process:
        assert report(tmp_path)["state"] == "running"
        assert ask(tmp_path).exit_code == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = report(tmp_path)
    assert (found["state"], found["exit_status"], ask(tmp_path).exit_code) == ("killed", 1, 1)
    assert "killed" in found["sentence"]
    assert "rank 0" in found["sentence"]


@pytest.mark.parametrize(
    ("how", "exit_status"), [("finished", 0), ("interrupted", 0), ("failed", 1), ("killed", 1)]
)
def test_how_a_rank_ended_is_read_from_its_marker(tmp_path: Path, how: How, exit_status: int):
    ended(tmp_path, how, why="ValueError: two\nlines")
    done = ask(tmp_path)
    assert done.exit_code == exit_status
    assert f"{how}, step 12" in done.output
    assert "ValueError: two lines" in done.output


def test_the_marker_of_an_earlier_session_does_not_count(tmp_path: Path):
    ended(tmp_path, "failed")
    with trainer(tmp_path):
        assert report(tmp_path)["state"] == "running"


@pytest.mark.parametrize(
    ("hows", "state"),
    [
        (("finished", "finished"), "finished"),
        (("finished", "interrupted"), "interrupted"),
        (("interrupted", "failed"), "failed"),
        (("failed", "killed"), "killed"),
    ],
)
def test_a_job_is_as_its_worst_rank(tmp_path: Path, hows: tuple[How, ...], state: str):
    for rank, how in enumerate(hows):
        ended(tmp_path, how, rank, len(hows))
    assert report(tmp_path)["state"] == state


def test_a_job_that_finished_on_corrupt_state_does_not_look_healthy(tmp_path: Path):
    ended(tmp_path, "finished")
    JsonlRecorder(tmp_path, 0).record(INCIDENT)
    done = ask(tmp_path)
    assert done.exit_code == 1
    assert "finished, step 12; its state is corrupt and was not recovered; 1 open incident" in done.output


def test_corruption_that_was_recovered_from_says_so_in_the_run_that_found_it(tmp_path: Path):
    """By a later run with another run directory, which has loaded an earlier state."""
    first, second, checkpoints = (tmp_path / name for name in ("first", "second", "checkpoints"))
    checkpoints.mkdir()
    for run_dir in (first, second):
        ended(run_dir, "finished")
        add_run(checkpoints, run_dir)
    JsonlRecorder(first, 0).record(INCIDENT)
    JsonlRecorder(first, 0).record(STRAGGLER)
    mark_recovered(checkpoints, INCIDENT.step)
    assert {each["state"] for each in report(first)["incidents"]} == {"open"}, "it has loaded what is corrupt"
    mark_recovered(checkpoints, INCIDENT.step - 1)
    mark_recovered(checkpoints, INCIDENT.step - 2)
    sdc, slow = report(first)["incidents"]
    assert (sdc["state"], sdc["recovered"], slow["state"]) == ("recovered", 6, "open")
    done = ask(first)
    assert f"step 7, recovered by resuming from step 6: {INCIDENT.sentence}" in " ".join(done.output.split())
    assert "is corrupt" not in done.output
    assert ask(second).exit_code == 0


def test_a_hang_that_is_over_is_resolved(tmp_path: Path):
    ended(tmp_path, "finished")
    lines = JsonlRecorder(tmp_path, 0)
    hang = replace(INCIDENT, manifestation=Manifestation.HANG)
    lines.record(hang)
    assert ask(tmp_path).exit_code == 1
    lines.record(Resolved(step=7, ranks=(5,), sentence=hang.sentence, stalled_seconds=6.0))
    assert ask(tmp_path).exit_code == 0
    assert report(tmp_path)["incidents"][0]["state"] == "resolved"


def test_what_cannot_be_told_is_not_healthy(tmp_path: Path):
    """Ranks of another machine, which does not share the run directory, and no run at all."""
    ended(tmp_path / "run", "finished", rank=0, size=3)
    done = ask(tmp_path / "run")
    assert done.exit_code == 2
    assert "the state of ranks 1 and 2 is unknown here" in done.output
    assert ask(tmp_path / "none").exit_code == 2


def test_ranks_of_other_machines_are_not_looked_at(tmp_path: Path):
    ended(tmp_path, "finished", rank=0, size=2)
    replace(RankEntry.own(1, tmp_path / "record", 2), host="another", hostname="another").write(tmp_path)
    _, other = report(tmp_path)["ranks"]
    assert (other["state"], other["inside"]) == ("elsewhere", "run scout status on another")


def test_without_an_argument_the_newest_run_of_the_folder_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert ask().exit_code == 2
    for age, name in enumerate(("scout-run-b", "scout-run-c", "scout-run-a")):
        ended(tmp_path / name, "finished")
        os.utime(tmp_path / name / "ranks", (1e9 + age, 1e9 + age))
    (tmp_path / "data").mkdir()
    assert "scout-run-a: finished" in ask().output


def test_watching_ends_with_the_job(tmp_path: Path):
    with trainer(tmp_path) as process:
        command = [Path(sys.executable).with_name("scout"), "status", tmp_path, "--watch"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert "running, step 1" in watching.stdout.readline()
            (entry,) = read_roster(tmp_path)
            End(0, "finished", 3, entry.record).write(tmp_path)
            process.kill()
            rest, _ = watching.communicate(timeout=30)
    assert "finished, step 3" in rest
    assert watching.returncode == 0
    assert ask(tmp_path, "--watch", "--json").exit_code == 2


def test_a_job_whose_checks_are_off_says_since_when(tmp_path: Path):
    ended(tmp_path, "finished")
    assert report(tmp_path)["replay"] is None
    sentence = "checks are off since step 60, next attempt at step 100 (2 of 4): ChannelError: late"
    (tmp_path / REPLAY_FILE).write_text(json.dumps({"on": False, "since": 60, "sentence": sentence}))
    assert report(tmp_path)["replay"]["since"] == 60
    assert sentence in " ".join(ask(tmp_path).stdout.split())
    for damaged in ("", "[]", "{}"):
        (tmp_path / REPLAY_FILE).write_text(damaged)
        assert report(tmp_path)["replay"] is None


def test_checks_that_stay_off_are_an_open_incident_and_no_corruption(tmp_path: Path):
    ended(tmp_path, "finished")
    off = replace(INCIDENT, manifestation=Manifestation.NOT_CHECKED, sentence="checks stay off")
    with closing(JsonlRecorder(tmp_path, 0)) as lines:
        lines.record(off)
    found = report(tmp_path)
    assert (found["exit_status"], found["incidents"][0]["manifestation"]) == (1, "not_checked")
    assert "corrupt" not in found["sentence"]
