"""`scout explain` as a person runs it, on dumps that are whole, damaged, mixed up or hostile."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.flight_recorder import Recorders, write_json, write_pickles
from torchscout.cli import explain
from torchscout.cli.explain import load
from torchscout.cli.main import app

NO_HANG, HANG, UNKNOWN = 0, 1, 2


def run(*arguments: str | Path, expect: int = HANG) -> Result:
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["explain", *map(str, arguments)])
    assert done.exit_code == expect, done.output
    assert "Traceback" not in done.output
    return done


def ask(*arguments: str | Path, expect: int = HANG) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--json", expect=expect).stdout)
    return document


def refused(*arguments: str | Path) -> str:
    """What is said of files of which nothing can be told; lines are joined."""
    done = run(*arguments, expect=UNKNOWN)
    assert done.stdout == ""
    return " ".join(done.stderr.split())


def late_rank(*, size: int = 4) -> Recorders:
    job = Recorders(size).collective().collective()
    return job.collective(
        "all_gather", [5], ranks=[rank for rank in range(size) if rank != 2], state="started"
    )


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Rank 2 is late, and all have left a dump."""
    return write_pickles(tmp_path / "dumps", late_rank().documents())


def test_the_screen_says_who_what_and_where(dumps: Path, tmp_path: Path):
    sentence, *rest = run(dumps).stdout.splitlines()
    assert sentence.startswith("Rank 2 has not entered all_gather float32[5] number 3 of group default_pg")
    rows = [line.split() for line in rest]
    assert ["ranks", "0,", "1", "and", "3", "started", "all_gather", "float32[5]", "3"] in rows
    assert ["rank", "2", "not", "entered", "-", "2"] in rows
    assert "  /job/train.py:11 train_2" in rest
    many = run(write_json(tmp_path / "many", late_rank(size=200).documents())).stdout
    assert len(many.splitlines()) < 20
    assert "ranks 0, 1 and 3-199" in many


def test_json_and_pickles_say_the_same(dumps: Path, tmp_path: Path):
    pickled, written = ask(dumps), ask(write_json(tmp_path / "json", late_rank().documents()))
    assert (pickled["hang"], pickled["ranks"], pickled["world_size"]) == (True, [2], 4)
    assert pickled["groups"] == written["groups"]
    assert pickled["last_operations"][0]["frames"][-1] == "/job/train.py:11 train_2"
    assert "pickled dumps have one" in run(tmp_path / "json").stdout


def test_a_job_that_does_not_hang(tmp_path: Path):
    folder = write_json(tmp_path / "json", Recorders(3).collective().documents())
    assert "no hang" in run(folder, expect=NO_HANG).stdout


def test_a_killed_rank_left_no_file(dumps: Path):
    (dumps / "nccl_trace_rank_2").unlink()
    found = ask(dumps)
    assert (found["scope"], found["without_dump"]) == ("process_group", [2])
    absent = {"ranks": [2], "operation": "", "state": "no readable dump", "last_number": None}
    assert absent in found["groups"][0]["rows"]


def test_too_few_dumps_name_nobody(dumps: Path):
    found = ask(dumps / "nccl_trace_rank_0", expect=UNKNOWN)
    assert (found["hang"], found["ranks"], found["groups"][0]["number"]) == (None, [], 3)
    assert "ranks 1, 2 and 3 left no readable dump, so the missing rank" in found["sentence"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"   \n", "it is empty"),
        (b'{"entries": [', "invalid JSON"),
        (b'{"entries": 3}', "entries must be a list"),
        (b"[1, 2]", "a dump is a dictionary"),
        (b"{}", "not a dump of the Flight Recorder"),
        (b"\x80\x02}q\x00(X\x07", "it is incomplete or damaged"),
        (b"hello", "damaged"),
        (pickle.dumps(os.getcwd), "could run any code"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "too large"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(dumps: Path, content: bytes, problem: str):
    path = dumps / "nccl_trace_rank_0"
    path.write_bytes(content)
    found = ask(dumps)
    assert found["ranks"] == [2], "the others tell it"
    assert found["sentence"].endswith(" Rank 0 left no readable dump.")
    assert any(str(path) in note and problem in note for note in found["notes"]), found["notes"]
    assert problem in refused(path)


def test_other_files_may_lie_among_the_dumps(dumps: Path):
    for name in ("stderr.log", "core.12345", "nccl_trace_rank_2.err"):
        (dumps / name).write_text("something else")
    found = ask(dumps)
    assert (found["ranks"], found["world_size"], found["without_dump"]) == ([2], 4, [])
    assert any("stderr.log: its name does not end with a rank" in note for note in found["notes"])


def test_a_pickle_cannot_run_code(tmp_path: Path):
    witness = tmp_path / "witness"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError, match="could run any code"):
            load(pickle.dumps({"entries": [Hostile()]}, protocol))
    assert not witness.exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert witness.exists(), "it would have"


def test_plain_data_is_read_from_every_protocol_and_damage_is_found():
    plain = {"a": [1, -2, 1 << 70, 2.5, None, True, False], "b": ((), ("x",), ("x", "y"), "é"), "c": {}}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert load(pickle.dumps(plain, protocol)) == plain
    whole = pickle.dumps(late_rank().document(0), 2)
    for cut in range(1, 200, 7):
        with pytest.raises(ValueError, match="damaged"):
            load(whole[:-cut])


def test_repeated_references_in_a_pickle_are_not_expanded(tmp_path: Path):
    bomb: list[Any] = []
    for _ in range(100):
        bomb = [bomb, bomb]
    document = late_rank().document(0)
    document["entries"][0] |= {"profiling_name": bomb}
    document["entries"][1] |= {"input_sizes": [bomb], "collective_seq_id": bomb}
    folder = write_pickles(tmp_path / "dumps", {0: document})
    notes = ask(folder, expect=UNKNOWN)["notes"]
    assert "2 of 3 entries of rank 0 could not be read." in notes


def test_a_file_whose_rank_is_elsewhere_in_its_name(tmp_path: Path):
    for rank, document in late_rank().documents().items():
        folder = write_json(tmp_path / f"worker{rank}-host", {rank: document})
        (folder / f"rank{rank}.json").rename(folder / "dump.json")
    files = sorted(tmp_path.glob("worker*/dump.json"))
    assert "--rank-pattern" in refused(*files)
    assert ask(*files, "--rank-pattern", r"worker(\d+)-")["ranks"] == [2]
    assert "parentheses" in refused(*files, "--rank-pattern", r"worker\d+-")


def changed(rank: int, field: str = "", by: int = 0, drop: int = 0) -> dict[int, Any]:
    documents = late_rank().documents()
    entries = documents[rank]["entries"] = documents[rank]["entries"][drop:]
    for entry in entries if field else ():
        entry[field] += by
    return documents


def untimed() -> dict[int, Any]:
    job = Recorders(4, timed=False).collective()
    return job.collective(ranks=[0, 1, 3], state="scheduled").documents()


def over_gloo() -> dict[int, Any]:
    documents = late_rank().documents()
    for document in documents.values():
        document["pg_config"] = {}
        for entry in document["entries"]:
            entry["process_group"] = ["7", "training"]
            entry["profiling_name"] = entry["profiling_name"].replace("nccl", "gloo")
    return documents


@pytest.mark.parametrize(
    ("documents", "note"),
    [
        (changed(2, "time_created_ns", -7200 * 10**9), "The dump of rank 2 is more than an hour older"),
        (changed(0, drop=1), "Older operations of rank 0"),
        (untimed(), "TORCH_NCCL_ENABLE_TIMING=1"),
        (over_gloo(), "The members of group training are not recorded"),
        (over_gloo(), "Gloo does not record sends"),
        (over_gloo(), "The world size is not recorded; 4 is assumed"),
    ],
)
def test_doubts_are_noted(documents: dict[int, Any], note: str, tmp_path: Path):
    found = ask(write_json(tmp_path / "json", documents))
    assert found["ranks"] == [2]
    assert any(note in each for each in found["notes"]), found["notes"]


@pytest.mark.parametrize(
    ("documents", "options", "problem"),
    [
        ({3: late_rank(size=8).document(3)}, (), "rank 2 is one of 4, rank 3 is one of 8"),
        ({9: late_rank().document(3)}, (), "not of one job of 4 ranks"),
        ({}, ("--world-size", "2"), "not of one job of 2 ranks"),
    ],
)
def test_dumps_that_do_not_belong_together_are_refused(
    documents: dict[int, Any], options: tuple[str, ...], problem: str, tmp_path: Path
):
    folder = write_json(tmp_path / "json", {**late_rank().documents(), **documents})
    assert problem in refused(folder, *options)


def test_two_dumps_of_one_rank_and_files_that_are_too_large(dumps: Path, monkeypatch: pytest.MonkeyPatch):
    write_json(dumps, {0: late_rank().document(0)})
    assert "both of rank 0" in refused(dumps)
    monkeypatch.setattr(explain, "MOST_BYTES", 10)
    assert "at most 10 are read" in refused(dumps)


def test_torch_is_not_imported(dumps: Path):
    code = (
        "import sys; from torchscout.cli.main import app\n"
        "app(['explain', sys.argv[1]], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, dumps], check=True, capture_output=True)
