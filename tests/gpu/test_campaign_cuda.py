"""`scout campaign paper --device cuda`: cells of each kind over NCCL, on ranks that share a device.

Each kind of fault has a clean twin, and a fault that does not happen fails its cell.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import ranks  # noqa: F401  what the ranks of all tests preload
from torchscout.campaign.campaigns import MODULES, paper_on, run_kernel
from torchscout.campaign.cells.cell import Cell, Hardware, Processes
from torchscout.campaign.cells.moe import run_routed
from torchscout.campaign.cells.observed import run_observed
from torchscout.campaign.cells.paper_cells import REPLAYED, SLOW, slow_layers
from torchscout.campaign.cells.recovery import run_recovery
from torchscout.campaign.cells.warm import run_warm
from torchscout.campaign.grading import Flaw
from torchscout.campaign.machine import fitted
from torchscout.faults.effects import DeviceSpin
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import preload

pytestmark = pytest.mark.gpu
preload(*MODULES)
ROOT = Path(__file__).parents[2]
THREE, FOUR = Hardware("cuda", "nccl", 3), Hardware("cuda", "nccl", 4)


def on(hardware: Hardware, *cells: Cell) -> list[Cell]:
    """These cells, none of which is skipped."""
    fit, skipped = fitted(cells, hardware)
    assert skipped == []
    return fit


def of_campaign(hardware: Hardware, *names: str) -> list[Cell]:
    """Cells of the paper's campaign by ``ROW/LAYOUT/NAME``."""
    cells = {cell.identity.rpartition("@")[0]: cell for cell in paper_on(hardware).cells(0)}
    return on(hardware, *(cells[name] for name in names))


def test_a_spin_keeps_the_device_busy_for_its_time_and_the_host_goes_on():
    spin = DeviceSpin(0.25)
    spin.prepare()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before = time.perf_counter()
    begin.record()
    spin.happen()
    end.record()
    issued = time.perf_counter() - before
    end.synchronize()
    assert issued < 0.1
    assert begin.elapsed_time(end) == pytest.approx(250, rel=0.25)


@pytest.mark.nccl(3)
def test_wrong_numbers_and_slow_kernels_are_named_and_clean_cells_are_silent(tmp_path: Path):
    output = FaultPlan().flip_bit(rank=2, at="head/output", step=2, bit=0, calls=REPLAYED)
    parameter = FaultPlan().flip_bit(rank=1, at="layer.1.up/weight", step=2, bit=0)
    never = FaultPlan().flip_bit(rank=0, at="head/output", step=2, bit=0, calls=range(70, 71))
    cells = on(
        THREE,
        Cell("numerical-sdc", "output", "ddp-3", faults=output),
        Cell("numerical-sdc", "parameter", "ddp-3", faults=parameter),
        Cell("numerical-sdc", "never", "ddp-3", faults=never),
        Cell("numerical-clean", "clean", "ddp-3"),
        Cell("compute-straggler", "rank-2", "ddp-3", faults=slow_layers(2, SLOW)),
    )
    results = {each.cell.split("/")[2].partition("@")[0]: each for each in run_warm(cells, tmp_path, 0)}
    flaws = {name: each.grade.flaw for name, each in results.items()}
    assert flaws == {
        "output": None,
        "parameter": None,
        "never": Flaw.NOT_INJECTED,
        "clean": None,
        "rank-2": None,
    }, [each.grade.reason for each in results.values()]
    assert results["rank-2"].detail == "DeviceSpin(seconds=0.25)"
    assert {(each.ranks, each.device, each.backend) for each in results.values()} == {(3, "cuda", "nccl")}


@pytest.mark.nccl(3)
@pytest.mark.parametrize(
    "name",
    ["hang/ddp-4/late-0", "hang/ddp-4/frozen-0", "hang/ddp-4/input-0", "device-hang/ddp-4/stuck-0"],
)
def test_a_rank_that_is_held_up_is_named(tmp_path: Path, name: str):
    (result,) = run_observed(of_campaign(THREE, name), tmp_path, 1)
    assert result.grade.passed, result.grade.reason  # a fault that did not fire fails its cell


@pytest.mark.nccl(3)
def test_a_job_without_a_hang_is_silent(tmp_path: Path):
    (result,) = run_observed(of_campaign(THREE, "hang-clean/ddp-4/clean-0"), tmp_path, 1)
    assert (result.grade.passed, result.found) == (True, ()), result.grade.reason


@pytest.mark.nccl(3)
def test_corruption_is_excluded_and_the_state_before_it_restored_from_certified_memory(tmp_path: Path):
    (result,) = run_recovery(of_campaign(THREE, "dense-sdc/ddp/parameter"), tmp_path)
    assert result.grade.passed, result.grade.reason


@pytest.mark.nccl(4)
def test_wrong_experts_are_found_at_their_shape_over_all_to_all(tmp_path: Path):
    wrong, clean = run_routed(of_campaign(FOUR, "moe-sdc/ep4/rows-128", "moe-clean/ep4/clean"), tmp_path)
    assert wrong.grade.passed, wrong.grade.reason
    assert (clean.grade.passed, clean.found) == (True, ()), clean.grade.reason


@pytest.mark.nccl(4)
def test_a_wrong_work_item_of_the_compiled_kernel_names_its_rank(tmp_path: Path):
    (cell,) = of_campaign(FOUR, "moe-kernel/ep2/persistent")
    idle = replace(
        cell,
        name="idle",
        faults=FaultPlan(
            tuple(replace(each, effect=replace(each.effect, tile=10**6)) for each in cell.faults)
        ),
    )
    assert cell.processes is Processes.KERNEL
    faulty, healthy = run_kernel([cell, idle], tmp_path)
    assert faulty.grade.passed, faulty.grade.reason
    assert [each.ranks for each in faulty.found] == [(3,)]
    assert healthy.grade.flaw is Flaw.NOT_INJECTED


@pytest.mark.nccl(4)
def test_the_command_names_device_and_backend(tmp_path: Path):
    pattern = "numerical-sdc/ddp/head/output/*"
    scout = [sys.executable, "-c", "from torchscout.cli.main import app; app()", "campaign", "paper"]
    done = subprocess.run(
        [*scout, "--device", "cuda", "--cells", pattern, "--json", "--resume", tmp_path / "campaign"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["failed"]) == (0, []), done.stderr
    assert (report["device"], report["backend"]) == ("cuda", "nccl")
    assert "nccl" in report["versions"]
    assert all(row["passed"] == row["run"] > 0 for row in report["rows"])
