"""`scout discover` as an operator runs it, with the kernel interpreted on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchscout
from torchscout.experts.catalog import load, text_of

SCOUT = Path(sys.executable).with_name("scout")
ROOT = Path(torchscout.__file__).parent.parent
SMALL = ("--hidden", "16", "--intermediate", "16", "--programs", "2", "--device", "cpu")


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCOUT, "discover", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "COLUMNS": "200"},
    )


def finished(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    process = started(*arguments)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


@pytest.mark.slow
def test_an_interrupted_discovery_goes_on_and_makes_the_same_catalog(tmp_path: Path):
    arguments = ("--rows", "0:4", *SMALL, "--layers", "2", "--positions", "3")
    folder = tmp_path / "kept"
    first = started(*arguments, "--resume", folder)
    journal = folder / "16x16.jsonl"
    while not (journal.exists() and journal.read_text().count("\n") > 2):
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert not out
    again = "scout discover --rows 0:4 --hidden 16 --intermediate 16 --layers 2 --positions 3 --device cpu"
    assert f"To continue: {again} --programs 2 --resume {folder}\n" in err
    assert f"in {folder}" in err
    before = journal.read_text().splitlines()
    assert len(before) < 6

    out, err = finished(*arguments, "--resume", folder, "--output", tmp_path / "catalog.json")
    assert "16x16: 5 of 5 shapes" in err
    assert journal.read_text().splitlines()[: len(before)] == before
    catalog = load(tmp_path / "catalog.json")
    (table,) = catalog.tables
    assert table.admitted == 5
    assert table.facts["triton"]
    assert table.covered == table.occurrences > 0
    assert catalog.representatives("layer.1", 2) == ((0,), (1,))
    assert f"{table.covered} of {table.occurrences}" in out

    out, _ = finished(*arguments, "--json")
    assert out == text_of(catalog) + "\n"
    assert out.encode() == (tmp_path / "catalog.json").read_bytes()

    _, err = finished(*arguments, "--regime", "waves", "--resume", folder, code=1)
    assert "belongs to another discovery: regime was 'pressure' and is 'waves'" in err


@pytest.mark.slow
def test_every_routing_to_two_experts_is_covered(tmp_path: Path):
    routed = ("--experts", "2", "--heterogeneous", "--tokens", "3")
    out, _ = finished("--rows", "2", *SMALL, *routed, "--output", tmp_path / "catalog.json")
    catalog = load(tmp_path / "catalog.json")
    _, templates = catalog.tables
    assert not catalog.gaps
    assert templates.admitted == 4
    assert "every routing of 3 rows to 2 experts" in out
    chosen = {tuple(sorted(each.rows)) for each in templates.selected}
    assert len(chosen) == 2
    assert (0,) in {rows[:1] for rows in chosen}
    assert set(catalog.representatives("layer.0", 0)) >= {each.rows for each in templates.selected}
