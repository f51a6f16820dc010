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
from torchscout.cli.explain import dump_files
from torchscout.cli.explain.dump_files import PickleRefusedError, load
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
    shown = run(write_pickles(tmp_path / "dumps", late_rank().documents())).stdout.splitlines()
    sentence = (
        "Rank 2 has not entered all_gather float32[5] number 3 of group default_pg; its last operation is "
        "all_reduce float32[1024] number 2 of group default_pg, which is completed. 3 ranks wait for it."
    )
    assert shown[:3] == [sentence, "", "Group default_pg, 4 members, operation number 3:"]
    assert shown[6:] == [
        "",
        "Rank 2's last operation: all_reduce float32[1024] number 2 of default_pg, completed",
        "  /job/train.py:11 train_2",
    ]
    assert [line.split() for line in shown[3:6]] == [
        ["state", "operation", "last", "number", "issued"],
        ["ranks", "0,", "1", "and", "3", "started", "all_gather", "float32[5]", "3"],
        ["rank", "2", "not", "entered", "-", "2"],
    ]


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


def test_the_document_goes_to_a_file_too(tmp_path: Path):
    folder = write_json(tmp_path / "json", late_rank().documents())
    run(folder, "--output", tmp_path / "document.json")
    assert json.loads((tmp_path / "document.json").read_text())["ranks"] == [2]


def test_a_job_that_does_not_hang(tmp_path: Path):
    job = Recorders(3)
    job.collective()
    shown = run(write_json(tmp_path / "json", job.documents())).stdout
    assert shown == "The dumps show no hang: no operation waits for a rank.\n"


def test_a_killed_rank_left_no_file(tmp_path: Path):
    folder = write_pickles(tmp_path / "dumps", late_rank().documents())
    (folder / "nccl_trace_rank_2").unlink()
    found = ask(folder)
    assert (found["scope"], found["without_dump"]) == ("process_group", [2])
    assert "Rank 2 left no readable dump" in found["sentence"]
    assert {"ranks": [2], "operation": "", "state": "no readable dump", "last_number": None} in found[
        "groups"
    ][0]["rows"]


def test_dumps_without_times_say_nothing_about_devices(tmp_path: Path):
    job = Recorders(2, timed=False)
    job.collective()
    job.collective(ranks=[0], state="scheduled")
    assert "TORCH_NCCL_ENABLE_TIMING=1" in run(write_json(tmp_path / "json", job.documents())).stdout


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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_from_every_protocol(protocol: int):
    plain = {"a": [1, -2, 1 << 70, 2.5, None, True, False], "b": ((), ("x",), ("x", "y"), "é"), "c": {}}
    assert load(pickle.dumps(plain, protocol)) == plain


@pytest.mark.parametrize("cut", range(1, 200, 7))
def test_a_pickle_that_was_cut_off_is_damaged(cut: int):
    whole = pickle.dumps(late_rank().document(0), 2)
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


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_pickles(tmp_path / "dumps", late_rank().documents())
    monkeypatch.setattr(dump_files, "MOST_BYTES", 10)
    assert "at most 10 are read" in run(folder, expect=1).stderr


def test_two_files_of_one_rank(tmp_path: Path):
    folder = write_pickles(tmp_path / "dumps", late_rank().documents())
    write_json(folder, {0: late_rank().document(0)})
    refused = run(folder, expect=1)
    assert "are both of rank 0: give one dump of each rank" in refused.stderr


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


@pytest.mark.parametrize(("pattern", "problem"), [("(", "not a regular expression"), ("x", "no parentheses")])
def test_a_bad_pattern_is_refused(tmp_path: Path, pattern: str, problem: str):
    folder = write_json(tmp_path / "json", late_rank().documents())
    assert problem in run(folder, "--rank-pattern", pattern, expect=2).stderr


def test_no_such_file_and_an_empty_folder(tmp_path: Path):
    assert "does not exist" in run(tmp_path / "gone", expect=2).stderr
    assert "there is no file in" in run(tmp_path, expect=2).stderr


def test_jobs_of_different_sizes(tmp_path: Path):
    documents = {**late_rank().documents(), 3: late_rank(size=8).document(3)}
    refused = run(write_json(tmp_path / "json", documents), expect=1)
    assert "different jobs: rank 2 is one of 4, rank 3 is one of 8" in refused.stderr


def test_a_rank_outside_of_the_job(tmp_path: Path):
    documents = {**late_rank().documents(), 9: late_rank().document(3)}
    assert "not of one job of 4 ranks" in run(write_json(tmp_path / "json", documents), expect=1).stderr
    folder = write_json(tmp_path / "other", late_rank().documents())
    assert "not of one job of 2 ranks" in run(folder, "--world-size", "2", expect=1).stderr


def test_a_file_of_an_earlier_run_is_suspected(tmp_path: Path):
    documents = late_rank().documents()
    for entry in documents[2]["entries"]:
        entry["time_created_ns"] -= 7200 * 10**9
    notes = ask(write_json(tmp_path / "json", documents))["notes"]
    assert any("rank 2 is more than an hour older" in note for note in notes)


def test_entries_that_are_lost_are_mentioned(tmp_path: Path):
    documents = late_rank().documents()
    documents[0]["entries"] = documents[0]["entries"][1:]
    notes = ask(write_json(tmp_path / "json", documents))["notes"]
    assert any("Older operations of rank 0 are not in the dumps" in note for note in notes)


def test_many_ranks_are_shown_in_few_lines(tmp_path: Path):
    job = late_rank(size=200)
    folder = write_json(tmp_path / "json", job.documents())
    assert len(run(folder).stdout.splitlines()) < 20
    assert "ranks 0, 1 and 3-199" in run(folder).stdout


def test_torch_is_not_imported(tmp_path: Path):
    folder = write_json(tmp_path / "json", late_rank().documents())
    code = (
        "import sys; from torchscout.cli.main import app\n"
        f"app(['explain', {str(folder)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
