"""`scout status`: what it finds, and what it shows.

What it concludes about a run is in ``scenarios/test_reports``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.run_dirs import read_roster
from tests.unit.test_record import INCIDENT
from torchscout.cli.main import app
from torchscout.decision.types import Action, Decision, Failure, Incident, Manifestation, Resolved
from torchscout.report.document import documented
from torchscout.report.live import LiveRun
from torchscout.run.folder import REPLAY_FILE, End, Heartbeat, How, RankEntry, Unwatched
from torchscout.run.writer import RunWriter
from torchscout.session.ending import add_run, mark_recovered

STRAGGLER = replace(INCIDENT, manifestation=Manifestation.STRAGGLER, sentence="rank 5 is slow")
TRAINER = """
import sys, time
from pathlib import Path
from torchscout.run.folder import RankEntry
RankEntry.own(0, None, 1).write(Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@contextmanager
def trainer(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process without an observer that has entered itself in the run directory as rank 0, and sleeps."""
    with subprocess.Popen([sys.executable, "-c", TRAINER, run_dir], stdout=subprocess.PIPE) as process:
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


def test_a_rank_without_an_observer_runs_or_was_killed(tmp_path: Path):
    with trainer(tmp_path) as process:
        assert report(tmp_path)["state"] == "running"
        process.kill()
        process.wait()
        assert report(tmp_path)["state"] == "killed"


def test_it_is_shown_where_and_why_a_rank_ended(tmp_path: Path):
    ended(tmp_path, "failed", why="ValueError: two\nlines")
    output = ask(tmp_path).output
    assert "failed, step 12" in output
    assert "ValueError: two lines" in output


def test_corruption_that_was_recovered_from_says_so_in_the_run_that_found_it(tmp_path: Path):
    """By a later run with another run directory, which has loaded an earlier state."""
    first, second, checkpoints = (tmp_path / name for name in ("first", "second", "checkpoints"))
    checkpoints.mkdir()
    for run_dir in (first, second):
        ended(run_dir, "finished")
        add_run(checkpoints, run_dir)
    RunWriter(first, 0).record(INCIDENT)
    RunWriter(first, 0).record(STRAGGLER)
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


def test_it_is_shown_of_which_ranks_nothing_is_known(tmp_path: Path):
    """Their machine does not share the run directory."""
    ended(tmp_path, "finished", rank=0, size=3)
    assert "ranks 1 and 2" in ask(tmp_path).output


def test_ranks_that_lost_their_observer_are_named(tmp_path: Path):
    for rank in range(3):
        ended(tmp_path, "finished", rank=rank, size=3)
    assert ask(tmp_path).exit_code == 0
    Unwatched(0, str(tmp_path / "of an earlier session")).write(tmp_path)
    Unwatched(1, str(tmp_path / "gone")).write(tmp_path)
    shown = ask(tmp_path)
    assert "not watched for hangs any more: rank 1\n" in shown.output
    assert shown.exit_code == 2


def test_the_report_counts_a_rank_that_left_no_end_as_status_does(tmp_path: Path):
    """After SIGKILL of everything on the machine."""
    ended(tmp_path, "killed", rank=0, size=2)
    replace(RankEntry.own(1, None, 2), pid=2**22 + 1).write(tmp_path)
    assert "2 killed: ranks 0-1" in " ".join(ask(tmp_path).output.split())
    assert "2 killed; last step 12." in documented(tmp_path)["sentence"]
    assert "2 killed; last step 12." in LiveRun(tmp_path).document()["sentence"]


def test_ranks_of_other_machines_are_not_looked_at(tmp_path: Path):
    ended(tmp_path, "finished", rank=0, size=2)
    replace(RankEntry.own(1, tmp_path / "record", 2), host="another", hostname="another").write(tmp_path)
    _, other = report(tmp_path)["ranks"]
    assert (other["state"], other["inside"]) == ("unknown", "run scout status on another")


def elsewhere(run_dir: Path, size: int) -> list[RankEntry]:
    entries = [
        replace(RankEntry.own(rank, run_dir / f"record-{rank}", size), host="another", hostname="another")
        for rank in range(size)
    ]
    for each in entries:
        each.write(run_dir)
    return entries


def test_many_ranks_are_counted_and_only_those_that_need_attention_are_listed(tmp_path: Path):
    entries = elsewhere(tmp_path, 200)
    Heartbeat(0, entries[0].record, 40, 30.0).write(tmp_path)
    for entry in entries[100:]:
        End(entry.rank, "failed", 39, entry.record, "ValueError: no").write(tmp_path)
    lines = [" ".join(line.split()) for line in ask(tmp_path).stdout.splitlines()]
    assert "100 running: ranks 0-99, step 40" in lines
    assert "100 failed: ranks 100-199, step 39" in lines
    assert len([line for line in lines if "another" in line and "ValueError" in line]) == 64
    assert len(report(tmp_path)["ranks"]) == 200


def test_open_incidents_come_first_each_with_its_job_and_its_decision(tmp_path: Path):
    elsewhere(tmp_path, 4)
    sick = replace(STRAGGLER, launcher="Slurm job 4711")
    over = replace(INCIDENT, sentence="rank 1 was late")
    writer = RunWriter(tmp_path, 0)
    for item in (
        sick,
        over,
        decided(over, sentence="restart because of rank 1"),
        decided(sick, sentence="replace the machine of rank 5"),
        decided(replace(sick, sentence="of another run"), sentence="stop the job"),
        Resolved(incident=over.id, step=7, ranks=(1,), sentence=over.sentence, stalled_seconds=3.0),
    ):
        writer.record(item)
    writer.close()
    output = ask(tmp_path).stdout
    told = ["Slurm job 4711", "rank 5 is slow", "replace the machine of rank 5", "rank 1 was late"]
    told += ["restart because of rank 1", "stop the job", "4 unknown: ranks 0-3"]
    places = [output.index(each) for each in told]
    assert places == sorted(places)
    assert [each["id"] for each in report(tmp_path)["incidents"]] == [sick.id, over.id]


def decided(incident: Incident, sentence: str) -> Decision:
    return Decision(
        step=incident.step,
        action=Action.RESTART,
        failure=Failure.HANG,
        ranks=incident.ranks,
        hosts=(),
        sentence=sentence,
        incident=incident.id,
    )


def test_a_run_whose_incidents_cannot_be_read_is_unknown(tmp_path: Path):
    ended(tmp_path, "finished")
    assert ask(tmp_path).exit_code == 0
    (tmp_path / "incidents" / "rank-0.jsonl").mkdir(parents=True)
    assert ask(tmp_path).exit_code == 2
    assert "rank-0.jsonl" in "".join(ask(tmp_path).stdout.split())


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
            assert "running" in watching.stdout.readline()
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
