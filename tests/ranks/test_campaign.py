"""`scout campaign` as it is run: cells that pass, cells that fail, and what an interruption leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer

from tests.support.small_job import until
from torchscout.campaign.campaigns import MODULES, PAPER, run_kernel
from torchscout.campaign.cells.cell import ROWS, Cell, Processes
from torchscout.campaign.cells.moe import run_routed
from torchscout.campaign.cells.observed import QUICK, observe, train
from torchscout.campaign.cells.paper_cells import REPLAYED
from torchscout.campaign.cells.warm import EVERY_STEP, run_warm
from torchscout.campaign.grading import Flaw
from torchscout.campaign.results import Result
from torchscout.cli.campaign import Options, print_campaign, run_campaign
from torchscout.faults.fault import since
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind
from torchscout.testing.local_ranks import preload
from torchscout.testing.moe_model import experts_at

preload(*MODULES)
ROOT = Path(__file__).parents[2]
SCOUT = [sys.executable, "-c", "from torchscout.cli.main import app; app()", "campaign"]
OUTPUT = FaultPlan().flip_bit(rank=2, at="head/output", step=2, bit=0, calls=REPLAYED)
PARAMETER = FaultPlan().flip_bit(rank=1, at="layer.1.up/weight", step=2, bit=0)


def scout(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCOUT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.slow
def test_an_interrupted_campaign_leaves_no_processes_and_resumes_where_it_stopped(tmp_path: Path):
    """Hangs of every kind and a job without one, through the real command."""
    folder, output = tmp_path / "campaign", tmp_path / "output.json"
    arguments = ["paper", "--cells", "hang*/ddp-4/*-0", "--jobs", "2", "--resume", folder]
    first = subprocess.Popen([*SCOUT, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: results_in(folder), "a result is there", 120)
    kept = results_in(folder)
    # Something must be running, or its end shows nothing: one job may be over and the next not begun.
    until(lambda: processes_of(folder), "the next job runs", 60)
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 130, errors
    again = f"scout campaign paper --cells 'hang*/ddp-4/*-0' --jobs 2 --resume {folder}"
    assert f"To continue: {again}\n" in errors
    assert f" of 5 results are in {folder}/results.jsonl." in errors
    assert processes_of(folder) == []
    assert not (folder / "memory").exists()

    done = scout(*arguments, "--json", "--output", output, "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report == json.loads(output.read_text())
    assert report["passed"]
    rows = {row["row"]: (row["passed"], row["run"]) for row in report["rows"]}
    assert rows == {"hang": (4, 4), "hang-clean": (1, 1)}
    done_now = results_in(folder)
    assert len(done_now) == len({*done_now}) == 5, "none of those that were done is run again"
    assert {*kept} <= {*done_now}
    assert "Hang and input stall" in (tmp_path / "page.html").read_text()


def results_in(folder: Path) -> list[str]:
    """The cells that are done."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [json.loads(line)["cell"] for line in lines]


def processes_of(folder: Path) -> list[Path]:
    """Whoever has the campaign's folder in its environment, and is alive."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "environ").read_bytes():
                found.append(entry)
    return found


def flaws(results: list[Result]) -> dict[str, Flaw | None]:
    return {each.cell.split("/")[2].partition("@")[0]: each.grade.flaw for each in results}


@pytest.mark.long
def test_cells_fail_when_the_detector_is_broken_and_when_nothing_was_injected(tmp_path: Path):
    never = FaultPlan().flip_bit(rank=0, at="head/output", step=2, bit=0, calls=range(70, 71))
    cells = [
        Cell("numerical-sdc", "output", "ddp-4", faults=OUTPUT),
        Cell("numerical-sdc", "parameter", "ddp-4", faults=PARAMETER),
        Cell("numerical-sdc", "never", "ddp-4", faults=never),
        Cell("numerical-clean", "clean", "ddp-4"),
    ]
    whole = list(run_warm(cells, tmp_path / "whole", 0))
    right = {"output": None, "parameter": None, "never": Flaw.NOT_INJECTED, "clean": None}
    assert flaws(whole) == right, [each.grade.reason for each in whole]
    assert [each.seconds is not None for each in whole] == [True, True, False, False]

    # One that looks at the output layer alone.
    blind = replace(EVERY_STEP, recipes=("output",))
    campaign = replace(PAPER, run=lambda cells, folder, seed, _: run_warm(cells, folder, seed, replay=blind))
    report, screen = run_campaign(campaign, cells[:2], 0, 1, tmp_path / "blind")
    assert not report["passed"]
    assert [each["flaw"] for each in report["failed"]] == ["missed"]
    assert "nothing was reported of sdc of rank 1 (rank) in layer.1.up/weight" in " ".join(screen.split())
    with pytest.raises(typer.Exit) as left:
        print_campaign(report, screen, Options())
    assert left.value.exit_code == 1


def test_an_undetected_hang_fails_its_cell(tmp_path: Path):
    faults = FaultPlan().stall(rank=1, at="step", step=3, seconds=2.0)
    cell = Cell("hang", "late", "ddp-4", Processes.OBSERVED, faults)
    deaf = partial(train, observer=replace(QUICK, min_silence_seconds=60.0))
    seen = observe(cell, tmp_path / "run", threading.Event(), body=deaf)
    assert [firing.rank for firing in seen.fired] == [1]
    assert seen.grade(cell).grade.flaw is Flaw.MISSED


def wrong_weight(step: int) -> FaultPlan:
    """In the first layer, whose experts are replayed with 128 rows after step 5 and with 512 after step 7."""
    at = experts_at(0)
    flipped = FaultPlan().flip_bit(rank=7, at=f"{at}/up", step=step, bit=3)
    return flipped.showing(f"{at}/parameters", role=LayerKind.EXPERT)


@pytest.mark.slow
def test_a_wrong_expert_weight_must_be_found_when_its_shape_is_due(tmp_path: Path):
    cells = [
        Cell("moe-sdc", name, "ep2", Processes.ROUTED, faults)
        for name, faults in (("due", wrong_weight(5)), ("found-later", wrong_weight(6)))
    ]
    due, later = run_routed(cells, tmp_path)
    assert due.grade.passed, due.grade.reason
    assert [(each.ranks, each.scope) for each in due.found] == [((7,), "rank")]
    assert later.grade.flaw is Flaw.WRONG_NAME
    assert later.grade.reason.startswith("found at layer.0.mixture.experts x512 after step 7, not at ")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["found-later"], (
        "its evidence stays"
    )


@pytest.mark.slow
def test_a_corrupted_kernel_names_its_rank_and_an_unused_work_item_stays_clean(tmp_path: Path):
    at = experts_at(0)
    cells = [
        Cell("moe-kernel", name, "ep2", Processes.KERNEL, faults.showing(role=LayerKind.EXPERT))
        for name, faults in (
            ("faulty", FaultPlan().perturb_kernel(rank=7, at=f"{at}/forward", step=since(3))),
            ("healthy", FaultPlan().perturb_kernel(rank=7, at=f"{at}/forward", step=since(3), tile=999)),
        )
    ]
    faulty, healthy = run_kernel(cells, tmp_path)
    assert faulty.grade.passed, faulty.grade.reason
    assert [(each.ranks, each.surface) for each in faulty.found] == [((7,), f"{at}/output")]
    assert healthy.grade.flaw is Flaw.NOT_INJECTED
    assert "a wrong work item of rank 7 did not happen" in healthy.grade.reason


@pytest.mark.slow
def test_ranks_that_break_are_replaced_and_their_cell_fails(tmp_path: Path):
    cells = [
        Cell("hang", "killed", "ddp-4", faults=FaultPlan().kill(rank=1, step=2)),
        Cell("numerical-sdc", "output", "ddp-4", faults=OUTPUT),
    ]
    killed, after = run_warm(cells, tmp_path, 0)
    assert killed.grade.flaw is Flaw.BROKEN
    assert "replaced: rank 1: exited without an answer, exit code -9; " in killed.grade.reason
    assert after.grade.passed, after.grade.reason


@pytest.mark.slow
def test_a_quick_campaign_passes(tmp_path: Path):
    done = scout("paper", "--quick", "--seed", "3", "--json", "--resume", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert all(row["passed"] == row["run"] > 0 for row in report["rows"])
    assert [row["row"] for row in report["rows"]] == [row.key for row in ROWS]


@pytest.mark.slow
def test_an_ablation_of_each_piece_changes_the_result(tmp_path: Path):
    done = scout("ablation", "--quick", "--json", "--resume", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pieces = {each["piece"]: each for each in json.loads(done.stdout)["ablations"]}
    assert all(each["right_with"] == each["cells"] for each in pieces.values())
    for piece in ("majority", "confirmation", "wait_graph", "controlled_replay"):
        assert pieces[piece]["right"] < pieces[piece]["cells"], pieces[piece]
