"""`scout demo` as a newcomer runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchscout.decision import recorder
from torchscout.decision.record import Manifestation
from torchscout.decision.recorder import Stamped

SCOUT = Path(sys.executable).with_name("scout")


def scout(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCOUT, *arguments], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("rank", "step", "at", "bit", "peers"),
    [
        (5, 7, "layer.2.attention.query/weight", 12, [1, 3, 5, 7]),  # a shard of a tensor-parallel weight
        pytest.param(  # the lowest bit of a replicated one, at once
            0, 1, "layer.0.mlp_norm/bias", 0, [0, 2, 4, 6], marks=pytest.mark.slow
        ),
    ],
)
def test_the_flipped_bit_is_named_exactly(tmp_path: Path, rank, step, at, bit, peers):
    fault = ["--rank", str(rank), "--step", str(step), "--at", at, "--bit", str(bit)]
    done = scout("demo", *fault, "--run-dir", tmp_path, "--json", "--output", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    (firing,), (incident,) = report["injected"], report["incidents"]
    assert (firing["rank"], firing["step"], firing["at"]) == (rank, step, at)
    assert (incident["ranks"], incident["step"], incident["surface"]) == ([rank], step, at)
    assert (incident["manifestation"], incident["scope"], incident["peers"]) == ("sdc", "rank", peers)
    assert report["exact"]
    # Started again, it goes on from the last state that was certified, if there was one.
    assert (report["resumed"]["step"], report["resumed"]["role"]) == (
        (step - 1, "verified") if step > 1 else (0, None)
    )
    assert report["recovered"]

    (line,) = recorder.read(tmp_path / "incidents.jsonl")
    assert isinstance(line, Stamped)
    assert line.item.to_json() == incident
    records = [line.item for line in recorder.read(tmp_path / "records" / f"rank-{rank}.jsonl")]
    assert {record.step for record in records} == set(range(1, 11))  # of both lives of the job
    numbers = [record for record in records if record.manifestation is Manifestation.SDC]
    differing = {(record.step, record.surface) for record in numbers if record.scope}
    assert min(differing)[0] == step
    layer = at.split(".")[1]
    # The weight itself, and its layer's turn; though rounding may heal a low bit later.
    assert {surface for _, surface in differing} <= {at, f"layer.{layer}/parameters"}


@pytest.mark.slow
def test_without_a_fault_nobody_is_named(tmp_path: Path):
    done = scout("demo", "--clean", "--run-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "named      nobody" in done.stdout
    assert "bitwise the state of one that was never disturbed" in done.stdout
    assert not (tmp_path / "incidents.jsonl").exists()
    assert len(list((tmp_path / "records").iterdir())) == 8
    assert done.stderr.count("loss") == 10  # progress, for who watches


def test_a_mistyped_tensor_is_refused_before_anything_runs():
    done = scout("demo", "--at", "layer.2.attention.queries/weight")
    assert done.returncode == 2
    assert "layer.2.attention.query/weight" in done.stderr
    assert "step" not in done.stdout
