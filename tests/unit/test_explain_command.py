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
from torchscout.cli.main import app


def run(*arguments: str | Path, expect: int = 0) -> Result:
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["explain", *map(str, arguments)])
    assert done.exit_code == expect, done.output
    assert "Traceback" not in done.output
    return done


def ask(*arguments: str | Path, expect: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--json", expect=expect).stdout)
    return document


def late_rank(*, size: int = 4, timed: bool = True) -> Recorders:
    job = Recorders(size, timed=timed)
    job.collective()
    job.collective()
    job.collective("all_gather", [5], ranks=[rank for rank in range(size) if rank != 2], state="started")
    return job


def test_the_screen_says_who_what_and_where(tmp_path: Path):
    shown = run(write_pickles(tmp_path / "dumps", late_rank().documents())).stdout
    sentence, *rest = shown.splitlines()
    assert sentence.startswith("Rank 2 has not entered all_gather float32[5] number 3 of group default_pg")
    assert "3 ranks wait" in sentence
    rows = [line.split() for line in rest]
    assert ["ranks", "0,", "1", "and", "3", "started", "all_gather", "float32[5]", "3"] in rows
    assert ["rank", "2", "not", "entered", "-", "2"] in rows
    assert "  /job/train.py:11 train_2" in rest
    many = run(write_json(tmp_path / "many", late_rank(size=200).documents())).stdout
    assert len(many.splitlines()) < 20
    assert "ranks 0, 1 and 3-199" in many


def test_json_and_pickles_say_the_same(tmp_path: Path):
    documents = late_rank().documents()
    pickled = ask(write_pickles(tmp_path / "pickles", documents))
    written = ask(write_json(tmp_path / "json", documents))
    assert pickled["ranks"] == written["ranks"] == [2]
    assert pickled["hang"] is True
    assert pickled["groups"] == written["groups"]
    assert pickled["last_operations"][0]["frames"][-1] == "/job/train.py:11 train_2"
    assert written["last_operations"][0]["frames"] == []
    assert "pickled dumps have one" in run(tmp_path / "json").stdout


def test_nothing_is_said_of_what_the_dumps_do_not_show(tmp_path: Path):
    healthy, untimed = Recorders(3), Recorders(2, timed=False)
    healthy.collective()
    untimed.collective()
    untimed.collective(ranks=[0], state="scheduled")
    assert "no hang" in run(write_json(tmp_path / "healthy", healthy.documents())).stdout
    assert "TORCH_NCCL_ENABLE_TIMING=1" in run(write_json(tmp_path / "untimed", untimed.documents())).stdout


def test_a_killed_rank_left_no_file(tmp_path: Path):
    folder = write_pickles(tmp_path / "dumps", late_rank().documents())
    (folder / "nccl_trace_rank_2").unlink()
    found = ask(folder)
    assert (found["scope"], found["without_dump"]) == ("process_group", [2])
    assert "Rank 2 left no readable dump" in found["sentence"]
    assert {"ranks": [2], "operation": "", "state": "no readable dump", "last_number": None} in found[
        "groups"
    ][0]["rows"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty"),
        (b"   \n", "it is empty"),
        (b'{"entries": [', "invalid JSON"),
        (b'{"entries": 3}', "entries must be a list"),
        (b"[1, 2]", "a dump is a dictionary"),
        (b"{}", "not a dump of the Flight Recorder"),
        (b"\x80\x02}q\x00(X\x07", "it is incomplete or damaged"),
        (b"hello", "damaged"),
        (pickle.dumps(os.getcwd), "could run any code"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, content: bytes, problem: str):
    folder = write_pickles(tmp_path / "dumps", late_rank().documents())
    (folder / "nccl_trace_rank_0").write_bytes(content)
    found = ask(folder)
    assert found["ranks"] == [2], "the others tell it"
    assert found["sentence"].endswith(" Rank 0 left no readable dump.")
    assert any("nccl_trace_rank_0: " in note and problem in note for note in found["notes"]), found["notes"]
    refused = run(folder / "nccl_trace_rank_0", expect=1)
    assert refused.stdout == ""
    assert problem in refused.stderr


def test_a_pickle_cannot_run_code(tmp_path: Path):
    witness = tmp_path / "witness"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(PickleRefusedError):
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
        with pytest.raises(PickleRefusedError):
            load(whole[:-cut])


def test_repeated_references_in_a_pickle_are_not_expanded(tmp_path: Path):
    bomb: list[Any] = []
    for _ in range(100):
        bomb = [bomb, bomb]
    document = late_rank().document(0)
    document["entries"][0] |= {"profiling_name": bomb}
    document["entries"][1] |= {"input_sizes": [bomb], "collective_seq_id": bomb}
    document["pg_status"] = {"0": {"last_enqueued_collective": bomb}, "1": bomb}
    folder = write_pickles(tmp_path / "dumps", {0: document})
    found = ask(folder, expect=1)
    assert any("2 of 3 entries could not be read" in note for note in found["notes"])


def test_too_few_dumps_name_nobody(tmp_path: Path):
    documents = late_rank().documents()
    found = ask(write_json(tmp_path / "json", {0: documents[0]}), expect=1)
    assert (found["hang"], found["ranks"]) == (None, [])
    assert "ranks 1, 2 and 3 left no readable dump, so the missing rank" in found["sentence"]
    assert found["groups"][0]["number"] == 3


def test_a_file_whose_rank_is_not_in_its_name(tmp_path: Path):
    for rank, document in late_rank().documents().items():
        write_json(tmp_path / f"worker{rank}-host", {rank: document})
        (tmp_path / f"worker{rank}-host" / f"rank{rank}.json").rename(
            tmp_path / f"worker{rank}-host" / "dump.json"
        )
    files = sorted(tmp_path.glob("worker*/dump.json"))
    refused = run(*files, expect=1)
    assert "does not end with a rank" in refused.stderr
    assert "--rank-pattern" in refused.stderr
    assert ask(*files, "--rank-pattern", r"worker(\d+)-")["ranks"] == [2]


def without_start(rank: int) -> dict[int, Any]:
    documents = late_rank().documents()
    documents[rank]["entries"] = documents[rank]["entries"][1:]
    return documents


def two_hours_older(rank: int) -> dict[int, Any]:
    documents = late_rank().documents()
    for entry in documents[rank]["entries"]:
        entry["time_created_ns"] -= 7200 * 10**9
    return documents


@pytest.mark.parametrize(
    ("documents", "note"),
    [
        (two_hours_older(2), "rank 2 is more than an hour older"),
        (without_start(0), "Older operations of rank 0"),
    ],
)
def test_doubts_are_noted(documents: dict[int, Any], note: str, tmp_path: Path):
    notes = ask(write_json(tmp_path / "json", documents))["notes"]
    assert any(note in each for each in notes), notes


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
    assert problem in run(folder, *options, expect=1).stderr


def test_two_files_of_one_rank_and_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_pickles(tmp_path / "dumps", late_rank().documents())
    with monkeypatch.context() as patched:
        patched.setattr(dump_files, "MOST_BYTES", 10)
        assert "at most 10 are read" in run(folder, expect=1).stderr
    write_json(folder, {0: late_rank().document(0)})
    assert "both of rank 0" in run(folder, expect=1).stderr


def test_torch_is_not_imported(tmp_path: Path):
    folder = write_json(tmp_path / "json", late_rank().documents())
    code = (
        "import sys; from torchscout.cli.main import app\n"
        "app(['explain', sys.argv[1]], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True, capture_output=True)
