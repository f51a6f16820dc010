"""`scout demo` as a newcomer runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_campaign import processes_of
from torchscout.decision.types import Incident
from torchscout.run.reader import IncidentLog

SCOUT = Path(sys.executable).with_name("scout")
STEPS = 12


def scout(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCOUT, *arguments], capture_output=True, text=True, check=False, timeout=300)


def reported(run_dir: Path) -> list[Incident]:
    return IncidentLog.read(run_dir).incidents


def named(report: dict[str, Any]) -> list[tuple[str, str, list[int], str]]:
    return [
        (each["manifestation"], each["scope"], each["ranks"], each["surface"]) for each in report["incidents"]
    ]


@pytest.mark.long_cases("of three ranks")
@pytest.mark.parametrize(
    ("arguments", "ranks", "slow", "wrong", "stuck", "group"),
    [
        pytest.param([], 8, 7, 5, 6, "mesh_tensor", id="as it is", marks=pytest.mark.slow),
        pytest.param(["--ranks", "3", "--rank", "1"], 3, 0, 1, 2, "default_pg", id="of three ranks"),
    ],
)
def test_a_slow_rank_a_flipped_bit_and_a_hang_are_named_and_recovered_from(
    arguments: list[str], ranks: int, slow: int, wrong: int, stuck: int, group: str, tmp_path: Path
):
    report_at = ["--json", "--output", tmp_path / "report.json"]
    done = scout("demo", *arguments, "--run-dir", tmp_path, *report_at)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["exact"]
    assert report["recovered"]
    assert {(each["rank"], each["step"]) for each in report["injected"]} == {
        *((slow, step) for step in (3, 4, 5)),
        (wrong, 7),
        (stuck, 10),
    }
    assert named(report) == [
        ("straggler", "rank", [slow], "time/module"),
        ("sdc", "rank", [wrong], "layer.2.attention.query/weight"),
        ("hang", "rank", [stuck], f"issued/{group}"),
    ]
    lives = [(each["resumed"]["step"], each["end"], each["step"]) for each in report["lives"]]
    assert lives == [(0, "corrupted", 7), (6, "hung", 9), (9, "finished", STEPS)]
    assert report["lives"][2]["resumed"]["swept"] == "clean"
    decided = [(each["action"], each["ranks"], each["is_carried_out"]) for each in report["decisions"]]
    assert decided == [
        ("continue", [slow], False),
        ("replace_machine", [wrong], True),
        ("replace_machine", [stuck], True),  # all ranks share one machine, which has failed before
    ]
    assert [each.to_json() for each in reported(tmp_path)] == report["incidents"]
    assert len(list((tmp_path / "records").iterdir())) == ranks
    assert not (tmp_path / "memory").exists()
    assert "\x1b" not in done.stderr, "plain where there is no terminal"


@pytest.mark.slow
def test_the_same_three_faults_in_a_mixture_of_experts(tmp_path: Path):
    done = scout("demo", "--mesh", "replica=3,expert=2", "--run-dir", tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"]
    assert report["recovered"]
    assert named(report) == [
        ("straggler", "rank", [1], "time/experts"),
        ("sdc", "rank", [5], "layer.1.mixture.experts/down"),
        ("hang", "rank", [0], "issued/mesh_expert"),
    ]
    slow, wrong, _ = report["incidents"]
    assert slow["peers"] == wrong["peers"] == [1, 3, 5], "those who have the same experts"
    lives = [(each["resumed"]["step"], each["end"], each["step"]) for each in report["lives"]]
    assert lives == [(0, "corrupted", 7), (6, "hung", 9), (9, "finished", STEPS)]
    assert {"experts", "all_to_all", "expert_state"} <= set(report["status"]["replay"]["coverage"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fault", "none"], []),
        (["--fault", "sdc", "--rank", "0", "--at", "layer.0.mlp_norm/bias"], [("sdc", "rank", [0])]),
        (["--fault", "straggler", "--ranks", "3", "--rank", "0"], [("straggler", "rank", [2])]),
        (["--fault", "hang", "--mesh", "replica=3,tensor=1", "--rank", "2"], [("hang", "rank", [0])]),
        (
            ["--ranks", "5", "--rank", "4"],
            [("straggler", "rank", [1]), ("sdc", "rank", [4]), ("hang", "rank", [0])],
        ),
    ],
)
def test_each_fault_on_chosen_ranks_and_meshes(arguments: list[str], expected: list[Any], tmp_path: Path):
    done = scout("demo", *arguments, "--run-dir", tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [each[:3] for each in named(report)] == expected


@pytest.mark.slow
def test_an_interrupted_demo_says_where_its_evidence_is_and_leaves_nothing_running(tmp_path: Path):
    command = [SCOUT, "demo", "--ranks", "3", "--run-dir", tmp_path]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    assert any(line.startswith("step  1") for line in running.stderr)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert str(tmp_path) in err.splitlines()[-1], "it says where the evidence is"
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_on_a_terminal_the_ranks_are_a_live_table(tmp_path: Path):
    master, slave = pty.openpty()
    with subprocess.Popen(
        [SCOUT, "demo", "--fault", "sdc", "--run-dir", tmp_path],
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
        text=True,
    ) as running:
        os.close(slave)
        shown = b""
        with suppress(OSError):  # nobody has it open any more
            while True:
                shown += os.read(master, 65536)
        screen = running.communicate(timeout=60)[0]
    os.close(master)
    assert running.returncode == 0, screen
    assert b"sdc: layer.2.attention.query/weight" in shown
    assert "bitwise" in screen
