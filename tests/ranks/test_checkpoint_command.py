"""`scout checkpoint` as an operator runs it, on folders as a job leaves them, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import torchscout
from tests.support.checkpoint_folders import (
    GATE,
    JOB,
    flip,
    make_disk,
    make_memory,
    put_ledgers,
    put_shard,
    rewrite,
)
from tests.support.gates import train
from torchscout.checkpoint import folder as folders
from torchscout.checkpoint import ledger
from torchscout.checkpoint.folder import claim
from torchscout.checkpoint.gate import CheckpointGate, Generation, Recovered, transition
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.cli.main import app
from torchscout.utils.text import ranks_in_words

SCOUT = Path(sys.executable).with_name("scout")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return make_disk(tmp_path / "disk")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "memory"))
    return make_memory(tmp_path / "memory" / JOB)


def run(*arguments: str | Path, expect: int = 0) -> Result:
    """In this process, as the command would run."""
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == expect, done.output
    return done


def ask(*arguments: str | Path, expect: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--json", expect=expect).stdout)
    return document


def alone(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with its own terminal, or none."""
    paths = {"PYTHONPATH": str(Path(torchscout.__file__).parent.parent)}
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR"}}
    return subprocess.run(
        [SCOUT, "checkpoint", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, **paths, **environment},
    )


def shard(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step:010d}.lineage-0" / f"rank-{rank}-of-4.held-by-{rank}.shard"


def chosen(report: dict[str, Any]) -> dict[str, tuple[str | None, int | None, bool]]:
    return {
        each["failure"]: (each["role"], each["generation"] and each["generation"]["step"], each["tentative"])
        for each in report["decisions"]
    }


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [each["step"] for each in rows]


# list


def test_generations_are_listed_with_roles_owners_holders_and_sizes(disk: Path, memory: Path):
    report = ask("list", disk, memory)
    assert (report["job"], report["world_size"]) == (JOB, 4)
    assert {(each["path"], each["tier"]) for each in report["folders"]} == {
        (str(disk), "disk"),
        (str(memory), "memory"),
    }
    roles = {each["step"]: each["roles"] for each in report["generations"]}
    assert roles == {2: ["older verified"], 4: ["verified"], 6: ["candidate"], 7: ["latest"]}
    shards = report["generations"][2]["shards"]
    where = {(each["tier"], each["rank"], each["holder"]) for each in shards}
    assert where == {
        *(("disk", rank, rank) for rank in range(4)),
        *(("memory", rank, holder) for rank in range(4) for holder in (rank, (rank + 1) % 4)),
    }
    assert all(each["bytes"] == Path(each["file"]).stat().st_size for each in shards)


def test_the_ledgers_say_what_was_being_captured_when_the_job_ended(disk: Path):
    shown = run("list", disk).stdout
    for fact in ("4 of 4 ranks", "latest step 6", "candidate step 6", "verified step 4", "capturing step 7"):
        assert fact in shown


def test_missing_shards_are_listed_with_whose_they_are_and_a_damaged_header_is_as_good_as_none(disk: Path):
    shard(disk, 4, 3).unlink()
    flip(shard(disk, 4, 1), 50)
    generation = ask("list", disk)["generations"][1]
    assert generation["missing"] == [1, 3]
    assert "header" in generation["shards"][1]["problem"]
    assert "step 4: there is no usable shard of ranks 1 and 3 here" in run("list", disk).stdout


def test_a_copy_elsewhere_makes_up_for_a_missing_shard(disk: Path, memory: Path):
    shard(disk, 6, 3).unlink()
    assert ask("list", disk)["generations"][2]["missing"] == [3]
    assert ask("list", disk, memory)["generations"][2]["missing"] == []


def test_memory_is_told_from_disk_by_its_file_system(tmp_path: Path):
    folder = Path("/dev/shm") / f"scout-test-{os.getpid()}"
    if not folder.parent.is_dir():
        pytest.skip("there is no shared memory here")
    try:
        make_memory(folder)
        assert ask("list", folder)["folders"][0]["tier"] == "memory"
    finally:
        shutil.rmtree(folder)


CLAIM = "import sys; from torchscout.checkpoint.folder import claim; claim(sys.argv[1], 'live')"
CLAIM += "; print('held', flush=True); sys.stdin.readline()"


def test_a_running_job_is_shown_and_nothing_is_deleted_under_it(disk: Path):
    put_shard(disk, Generation(1), 0)
    command = [sys.executable, "-c", CLAIM, disk]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout
        assert job.stdout.readline() == "held\n"
        assert ask("list", disk)["folders"][0]["in_use_by"]["pid"] == job.pid
        for told in (run("list", disk).stdout, run("prune", disk, "--yes", "--keep", "0", expect=1).stderr):
            assert f"in use by job 'live', pid {job.pid}" in told
        assert len(shard_files(disk)) == 13
        assert "would be deleted" in run("prune", disk, "--keep", "0").stdout
        job.communicate("\n")
    run("prune", disk, "--yes", "--keep", "0")
    assert len(shard_files(disk)) == 8


# verify


def test_whole_folders_verify(disk: Path, memory: Path):
    report = ask("verify", disk, memory)
    assert report["whole"]
    assert (report["files"], report["damaged"]) == (28, [])
    assert "28 shards" in run("verify", disk, memory).stdout


def test_a_flipped_bit_is_named_with_its_file_and_tensor(disk: Path):
    flip(shard(disk, 6, 2))
    (damage,) = ask("verify", disk, expect=1)["damaged"]
    assert (damage["step"], damage["rank"], damage["tensors"]) == (6, 2, ["model/weight"])
    assert damage["file"] == str(shard(disk, 6, 2))
    results = run("verify", disk, expect=1).stdout
    for fact in (str(shard(disk, 6, 2)), "'model/weight'", "12 shards", "1 damaged"):
        assert fact in results


def test_a_file_that_is_cut_or_has_anothers_name_is_damaged(disk: Path):
    whole = shard(disk, 6, 2).read_bytes()
    for data in (b"", whole[:20], whole[:200], whole[:-1], shard(disk, 6, 1).read_bytes()):
        rewrite(shard(disk, 6, 2), data)
        (damage,) = ask("verify", disk, expect=1)["damaged"]
        assert damage["file"] == str(shard(disk, 6, 2))


@pytest.mark.parametrize("also_before", [False, True])
def test_a_damaged_ledger_is_damage(disk: Path, also_before: bool):
    put_ledgers(disk)  # again, so that there is one before
    flip(disk / "rank-3.ledger", 20)
    if also_before:
        flip(disk / "rank-3.ledger.previous", 20)
    report = ask("verify", disk, expect=1)
    assert len(report["ledgers"]) == 1
    assert "rank-3.ledger is damaged" in report["ledgers"][0]
    assert report["damaged"] == []
    roles = ask("list", disk)["roles"]
    assert roles["verified"]["step"] == 4, "the other ranks know it"


# explain


def test_what_recovery_chooses_after_each_failure_is_explained(disk: Path, memory: Path):
    report = ask("explain", disk, memory)
    assert chosen(report) == {
        "sdc": ("verified", 4, False),
        "hang": ("latest", 7, True),
        "machines_gone": ("verified", 4, False),
        "straggler": ("latest", 7, False),
        "other": ("latest", 7, True),
    }
    hang = next(each for each in report["decisions"] if each["failure"] == "hang")
    assert hang["otherwise"]["generation"] == {"step": 4, "lineage": 0}
    assert report["unusable"] == []


def test_what_is_not_there_cannot_be_chosen(disk: Path, memory: Path):
    """What was captured last is only in memory."""
    assert chosen(ask("explain", disk))["straggler"] == ("latest", 6, False)
    assert chosen(ask("explain", disk, memory))["straggler"] == ("latest", 7, False)
    assert str(memory) in run("explain", disk).stdout, "this machine has more of the job there"


def test_a_damaged_verified_generation_falls_back_to_the_older_verified_one(disk: Path, memory: Path):
    flip(shard(disk, 4, 1))
    report = ask("explain", disk, memory)
    assert chosen(report)["sdc"] == ("verified", 2, False)
    assert chosen(report)["straggler"] == ("latest", 7, False)
    (unusable,) = report["unusable"]
    assert (unusable["step"], unusable["roles"], unusable["missing"]) == (4, ["verified"], [1])
    assert unusable["damaged"][0]["file"] == str(shard(disk, 4, 1))
    assert "step 4 (verified) cannot be loaded" in run("explain", disk).stdout
    assert ask("explain", disk, memory, "--quick")["unusable"] == [], "headers do not tell"


def flip_shared(path: Path) -> None:
    """In the optimizer's state, which is the same on every rank here."""
    (entry,) = [each for each in shards.inspect(path).entries if each.name == "optimizer/exp_avg"]
    flip(path, entry.offset)


def test_what_resume_would_repair_is_chosen_and_not_called_lost(disk: Path, memory: Path):
    """See test_checkpoint_damage.py, where a job is resumed from such folders."""
    flip_shared(shard(disk, 4, 1))
    report = ask("explain", disk, memory)
    assert chosen(report)["sdc"] == ("verified", 4, False)
    assert report["unusable"] == []
    (repairable,) = report["repairable"]
    (said,) = repairable["repairs"]
    assert (repairable["step"], repairable["ranks"]) == (4, [1])
    assert "rank 1" in said
    assert "rank 0" in said
    assert said in run("explain", disk).stdout
    results = run("verify", disk, expect=1).stdout
    for fact in (str(shard(disk, 4, 1)), "'optimizer/exp_avg'", said):
        assert fact in results
    assert ask("verify", disk, expect=1)["repairable"] == report["repairable"]


def test_what_no_peer_has_cannot_be_repaired(disk: Path):
    """The same tensor is damaged on every rank, or another rank's shard is gone."""
    for rank in range(4):
        flip_shared(shard(disk, 4, rank))
    flip_shared(shard(disk, 6, 1))
    shard(disk, 6, 2).unlink()
    report = ask("explain", disk)
    assert report["repairable"] == []
    assert [(each["step"], each["missing"]) for each in report["unusable"]] == [
        (4, [0, 1, 2, 3]),
        (6, [1, 2]),
    ]


def test_without_a_ledger_nothing_is_trusted(disk: Path):
    for path in disk.glob("*.ledger*"):
        path.unlink()
    report = ask("explain", disk)
    assert not report["has_ledger"]
    assert {each[:2] for each in chosen(report).values()} == {(None, None)}
    assert "There is no ledger here" in run("explain", disk).stdout
    assert "there is no ledger here" in run("prune", disk, expect=1).stderr


# prune


def test_nothing_is_deleted_without_yes(disk: Path):
    put_shard(disk, Generation(1), 0)
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    report = ask("prune", disk, "--keep", "0")
    assert report["dry_run"]
    assert (steps(report["kept"]), steps(report["removed"])) == ([4, 6], [1, 2])
    assert "--yes" in run("prune", disk).stdout
    assert {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [4, 6]), (1, [2, 4, 6]), (2, [2, 3, 4, 6]), (9, [1, 2, 3, 4, 6])]
)
def test_as_many_more_stay_as_asked_for_and_verified_ones_first(disk: Path, keep: int, left: list[int]):
    for step in (1, 3):
        for rank in range(4):
            put_shard(disk, Generation(step), rank)
    ledgers = sorted(disk.glob("*.ledger"))
    report = ask("prune", disk, "--yes", "--keep", str(keep))
    assert steps(report["kept"]) == left == sorted({each.generation.step for each in shard_files(disk)})
    assert not report["dry_run"]
    assert sorted(disk.glob("*.ledger")) == ledgers
    assert run("prune", disk, "--keep", str(keep)).stdout.count("would be deleted") == 0


def test_the_verified_one_that_recovery_would_take_stays_when_the_newest_is_damaged(disk: Path):
    flip(shard(disk, 4, 1))
    report = ask("prune", disk, "--yes", "--keep", "0")
    assert steps(report["kept"]) == [2, 4, 6]
    assert chosen(ask("explain", disk))["sdc"] == ("verified", 2, False)


def test_what_any_rank_still_needs_stays(disk: Path):
    """Rank 0 has written down a promotion that the others have not."""
    behind = train(CheckpointGate(recipes=2), "hhhhh")
    for rank in (1, 2, 3):
        ledger.write(disk, rank, behind, job=JOB, world_size=4)
    report = ask("prune", disk, "--keep", "0")
    assert steps(report["kept"]) == [2, 4, 6]


def test_what_killed_writers_left_is_removed_too(disk: Path):
    left = disk / "step-0000000004.lineage-0" / ".rank-0-of-4.held-by-0.shard.0123.writing"
    left.touch()
    run("prune", disk)
    assert left.exists()
    run("prune", disk, "--yes")
    assert not left.exists()


def test_a_step_trained_twice_is_two_generations(disk: Path):
    corrupt = train(GATE, "x")
    again, _ = transition(corrupt, Recovered(Generation(4)))
    put_ledgers(disk, train(again, "hh"))
    for rank in range(4):
        put_shard(disk, Generation(6, 1), rank)
    report = ask("prune", disk, "--yes", "--keep", "0")
    assert [(each["step"], each["lineage"]) for each in report["kept"]] == [(4, 0), (6, 1)]
    assert {each.generation for each in shard_files(disk)} == {Generation(4), Generation(6, 1)}


# what folders may be


def test_what_is_no_checkpoint_folder_is_said(disk: Path, tmp_path: Path):
    assert f"{tmp_path}/none does not exist" in run("list", tmp_path / "none", expect=2).stderr
    (tmp_path / "file").touch()
    assert "/file is not a folder" in run("verify", tmp_path / "file", expect=2).stderr
    (tmp_path / "empty").mkdir()
    results = run("explain", tmp_path / "empty", expect=2).stderr
    assert "is not a checkpoint folder: it holds neither shards nor ledgers" in results
    assert f"did you mean {disk}?" in run("list", tmp_path, expect=2).stderr


def test_of_several_jobs_one_must_be_chosen(disk: Path):
    for rank in range(4):
        put_shard(disk, Generation(9), rank, job="other")
    results = run("list", disk, expect=2).stderr
    for fact in ("--job", "'llm-41f0' (16 files)", "'other' (4 files)"):
        assert fact in results
    assert steps(ask("list", disk, "--job", "other")["generations"]) == [9]
    assert steps(ask("list", disk, "--job", JOB)["generations"]) == [2, 4, 6]
    assert "there is no job 'third' here" in run("list", disk, "--job", "third", expect=2).stderr
    flip(shard(disk, 2, 1), 50)
    run("prune", disk, "--job", JOB, "--yes", "--keep", "0")
    assert {each.generation.step for each in shard_files(disk)} == {2, 4, 6, 9}, "another job's stay"
    assert shard(disk, 2, 1).exists(), "and what may be another's"
    assert not shard(disk, 2, 0).exists()


def test_of_several_world_sizes_one_must_be_chosen(disk: Path):
    for rank in range(2):
        put_shard(disk, Generation(9), rank, of=2)
    results = run("explain", disk, expect=2).stderr
    for fact in ("--world-size", "2 ranks (2 files)", "4 ranks (16 files)"):
        assert fact in results
    assert steps(ask("list", disk, "--world-size", "2")["generations"]) == [9]
    assert steps(ask("list", disk, "--world-size", "4")["generations"]) == [2, 4, 6]
    assert "nothing of a job of 3 ranks here" in run("list", disk, "--world-size", "3", expect=2).stderr


# how it is printed


RANKS = {
    "rank 3": [3],
    "ranks 1 and 3": [1, 3],
    "ranks 0, 1 and 3": [0, 1, 3],
    "ranks 1, 3-5 and 9": [9, 3, 4, 5, 1],
    "ranks 1-999": range(1, 1000),
    "any rank": range(1000),
}


def test_ranks_are_told_however_many_there_are():
    assert [ranks_in_words([*ranks], 1000) for ranks in RANKS.values()] == [*RANKS]


def test_json_is_one_document_and_nothing_else_and_a_file_gets_the_same(disk: Path, tmp_path: Path):
    for command in ("list", "verify", "explain", "prune"):
        done = alone(command, disk, "--json", "--output", tmp_path / "report.json")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == json.loads((tmp_path / "report.json").read_text())


def test_a_pipe_gets_plain_lines_that_are_not_broken(disk: Path):
    done = alone("list", disk, "--files")
    assert "\x1b" not in done.stdout
    assert str(shard(disk, 4, 2)) in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_narrow_screens_break_between_words_and_never_within_a_path(disk: Path):
    flip(shard(disk, 4, 1))
    for command in ("list", "verify", "explain", "prune"):
        done = alone(command, disk, COLUMNS="60", NO_COLOR="1")
        assert "\x1b" not in done.stdout
        long = [line for line in done.stdout.splitlines() if len(line) > 60]
        assert all(len(line.split()) == 1 or str(disk) in line for line in long), long
    assert str(shard(disk, 4, 1)) in alone("verify", disk, COLUMNS="60").stdout


def test_torch_is_not_imported(disk: Path):
    code = (
        "import sys; from torchscout.cli.main import app\n"
        "for command in ('list', 'verify', 'explain', 'prune'):\n"
        f"    app(['checkpoint', command, {str(disk)!r}], standalone_mode=False)\n"
        "    assert 'torch' not in sys.modules, command\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_adopt_lets_a_job_take_over_what_another_one_has_written(disk: Path):
    damaged = disk / "step-0000000002.lineage-0" / "rank-3-of-4.held-by-3.shard"
    flip(damaged)
    before = {path: shards.verify(path) for path in disk.rglob("*.shard")}
    spoiled = damaged.read_bytes()
    ledger.write(disk, 0, GATE, job=JOB, world_size=4, coverage="Checks cover everything.")
    with claim(disk, "run7"):
        assert "is in use by job 'run7'" in run("adopt", disk, "--as", "mine", expect=1).output
    assert folders.name_in(disk) is None
    report = ask("adopt", disk, "--as", "mine")
    assert (report["shards"], report["ledgers"], len(report["damaged"])) == (11, 4, 1)
    assert report["damaged"][0].startswith(f"{damaged}: tensor ")
    assert damaged.read_bytes() == spoiled
    assert (disk / "job").read_text() == "mine\n"
    for path, old in before.items():
        new = shards.verify(path)
        if path == damaged:
            continue
        assert new.whole
        assert old.header is not None
        assert new.header is not None
        assert new.header.identity == replace(old.header.identity, job="mine")
        assert (new.header.role, new.header.document) == (old.header.role, old.header.document)
        described = [
            [(each.name, each.dtype, each.shape, each.digest) for each in header.entries]
            for header in (old.header, new.header)
        ]
        assert described[0] == described[1]
    found = [ledger.inspect(disk, rank) for rank in range(4)]
    assert {(each and each.job, each and each.world_size, each and each.gate) for each in found} == {
        ("mine", 4, GATE)
    }
    assert found[0] is not None
    assert found[0].coverage == "Checks cover everything."
    inodes = {path: path.stat().st_ino for path in disk.rglob("*.shard")}
    assert ask("adopt", disk, "--as", "mine")["shards"] == 11, "idempotent"
    assert {path: path.stat().st_ino for path in disk.rglob("*.shard")} == inodes, "and nothing is rewritten"
    assert ask("list", disk, "--job", "mine")["job"] == "mine"
    (disk / "rank-0.ledger").unlink()
    assert ledger.inspect(disk, 0, job="mine"), "nor is the previous ledger of the other job"
    run("adopt", disk, "--as", "not a name", expect=2)
