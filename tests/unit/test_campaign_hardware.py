"""Cells on other hardware: which are reduced, which are skipped, and how tables and folders tell."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchscout.campaign import machine
from torchscout.campaign.campaigns import PAPER, paper_on, sampled
from torchscout.campaign.cells.cell import LAYOUTS, Cell, Hardware
from torchscout.campaign.cells.paper_cells import paper_cells
from torchscout.campaign.cells.training import is_busy, retried
from torchscout.campaign.grading import Flaw, Grade
from torchscout.campaign.machine import fitted, hardware_for
from torchscout.campaign.page import page
from torchscout.campaign.results import Result, Store
from torchscout.campaign.tables import markdown
from torchscout.cli.campaign import app, run_campaign
from torchscout.decision.records.record import Scope
from torchscout.faults.effects import DeviceSpin, Sleep
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import RankError
from torchscout.testing.moe_model import MoeTransformer
from torchscout.testing.transformer import Transformer

CUDA = Hardware("cuda", "nccl", 4)
CELLS = paper_cells(0)
BUSY = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."


def on_cuda() -> list[Cell]:
    cells, skipped = fitted(paper_on(CUDA).cells(0), CUDA)
    assert skipped == []
    return cells


def test_cells_are_unchanged_on_the_default_hardware():
    assert fitted(CELLS, Hardware()) == (CELLS, [])
    assert paper_on(Hardware()) is PAPER


def test_four_ranks_are_enough_for_every_cell_and_each_says_what_it_runs_on():
    cells = on_cuda()
    assert Counter(cell.row for cell in cells) == Counter(cell.row for cell in CELLS) + Counter(
        {"device-hang": 8}
    )
    assert {cell.place.ranks for cell in cells} == {1, 4}
    assert {(cell.place.device, cell.place.backend) for cell in cells} == {("cuda", "nccl")}
    assert len({cell.identity for cell in cells}) == len(cells)
    assert {cell.identity for cell in cells}.isdisjoint(cell.identity for cell in CELLS)
    names = [cell.identity.rpartition("@")[0] for cell in cells[: len(CELLS)]]
    assert names == [cell.identity.rpartition("@")[0] for cell in CELLS], "the same patterns choose them"


def test_every_fault_can_happen_in_the_smaller_job():
    dense, mixture = Transformer(), MoeTransformer()
    for cell in on_cuda():
        is_mixture = cell.row.startswith("moe")
        cell.faults.check(cell.place.mesh(), mixture if is_mixture else dense)
        assert all(fault.rank < cell.place.ranks for fault in cell.faults)


def test_a_fault_moves_to_the_rank_that_is_as_far_along():
    (slow,) = [cell for cell in on_cuda() if cell.identity.startswith("compute-straggler/ddp/")]
    assert {fault.rank for fault in slow.faults} == {2}  # 9 of 16
    assert [truth.ranks for truth in slow.truths] == [(2,)]


def test_slow_work_is_a_kernels_and_a_slow_link_or_a_late_rank_is_the_hosts():
    effects: dict[str, set[type]] = {}
    for cell in on_cuda():
        for fault in cell.faults:
            effects.setdefault(cell.row, set()).add(type(fault.effect))
    assert effects["compute-straggler"] == {DeviceSpin}
    assert effects["communication-straggler"] == {Sleep}
    assert effects["device-hang"] == {DeviceSpin}
    assert DeviceSpin not in effects["hang"]
    small, _ = fitted(CELLS, Hardware(max_ranks=4))
    assert DeviceSpin not in {type(fault.effect) for cell in small for fault in cell.faults}


def test_where_two_peers_cannot_settle_it_the_cell_says_that_less_is_to_be_named():
    for cell in on_cuda():
        is_group = any(truth.scope is Scope.PEER_GROUP for truth in cell.truths)
        is_link = cell.row == "communication-straggler"
        assert bool(cell.coarser) == (is_group or is_link), cell.identity
    (gradient,) = [cell for cell in on_cuda() if cell.identity.startswith("dense-sdc/hsdp/")]
    assert gradient.coarser == "peer group of 2 ranks instead of 1"


def test_what_needs_more_ranks_is_skipped_with_the_reason():
    cells, skipped = fitted(CELLS, Hardware(max_ranks=3))
    assert len(cells) + len(skipped) == len(CELLS)
    assert {cell.layout for cell in cells} == {"ddp", "fsdp2", "ddp-4", "fsdp2-4", "alone"}
    assert {LAYOUTS[each.cell.split("/")[1]].smaller for each in skipped} >= {"hsdp-8", "tensor-8", "dp-4"}
    assert {each.reason for each in skipped if "/hsdp/" in each.cell} == {
        "HSDP 4x4 needs more than 3 ranks, even if reduced"
    }


def test_a_quick_run_on_cuda_has_some_of_every_row():
    cells, skipped = fitted(sampled(paper_on(CUDA).cells(0), 0, PAPER.sample), CUDA)
    assert {cell.row for cell in cells} == {cell.row for cell in CELLS} | {"device-hang"}
    assert (len(cells) < 30, skipped) == (True, [])


def test_the_backend_follows_from_the_device(monkeypatch: pytest.MonkeyPatch):
    assert hardware_for("cpu", None, None) == Hardware("cpu", "gloo", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine.dist, "is_nccl_available", lambda: True)
    assert hardware_for("cuda", None, None) == Hardware("cuda", "nccl", 8)
    assert hardware_for("cuda", "gloo", 3) == Hardware("cuda", "gloo", 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "tpu"], "unknown device 'tpu'; choose cpu or cuda"),
        (["--backend", "nccl"], "unknown backend 'nccl' for cpu; choose gloo"),
    ],
)
def test_missing_hardware_is_refused_before_anything_starts(arguments: list[str], reason: str):
    done = CliRunner().invoke(app, ["paper", *arguments])
    assert done.exit_code == 2
    assert reason in " ".join(done.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    done = CliRunner().invoke(app, ["paper", "--device", "cuda"])
    assert done.exit_code == 2
    assert "needs a CUDA device" in done.output


def test_a_folder_belongs_to_one_device_and_backend(tmp_path: Path):
    Store(tmp_path, "paper", 0, CUDA)
    Store(tmp_path, "paper", 0, replace(CUDA, max_ranks=8))
    for other in (Hardware(), replace(CUDA, backend="gloo")):
        with pytest.raises(ValueError, match="belongs to another campaign"):
            Store(tmp_path, "paper", 0, other)


def test_results_without_a_device_count_as_cpu_results():
    kept = Result(CELLS[0].identity, CELLS[0].row, False, Grade()).to_json()
    for name in ("ranks", "device", "backend"):
        del kept[name]
    assert (Result.from_json(kept).device, Result.from_json(kept).backend) == ("cpu", "gloo")


def test_reports_name_the_device_and_list_what_was_reduced_skipped_or_failed(tmp_path: Path):
    """A campaign that is done already: every result is in its folder."""
    hardware = Hardware(max_ranks=3)
    cells, skipped = fitted([cell for cell in CELLS if cell.row == "dense-sdc"], hardware)
    store = Store(tmp_path, "paper", 0, hardware)
    for cell, flaw in zip(cells, (None, Flaw.MISSED), strict=True):
        store.add(Result(cell.identity, cell.row, False, Grade(flaw, "nothing was reported" if flaw else "")))
    report, screen = run_campaign(PAPER, cells, 0, 1, tmp_path, hardware=hardware, skipped=skipped)
    report = json.loads(json.dumps(report))
    assert (report["device"], report["backend"], report["max_ranks"]) == ("cpu", "gloo", 3)
    assert [each["cell"] for each in report["skipped"]] == ["dense-sdc/hsdp/gradient-shard"]
    assert report["rows"][0]["reduced"] == [
        "DDP on 3 ranks for DDP on 16",
        "FSDP2 on 3 ranks for FSDP2 on 16",
    ]
    for text in (screen, page(report), markdown(report)):
        assert "CPU ranks over Gloo, at most 3 ranks to a job; python " in text
        assert "HSDP 4x4 needs more than 3 ranks" in text
        assert "DDP on 3 ranks for DDP on 16" in text
        assert "nothing was reported" in text
    assert "| Dense SDC | 3 | **1/2** | 9.5 to 90.5 | 0 | 0 | 1 |  |  |" in markdown(report).splitlines()
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    done = CliRunner().invoke(app, ["table", str(path)])
    assert (done.exit_code, done.output) == (0, markdown(report) + "\n")


def test_ranks_are_started_again_while_the_device_is_busy_and_not_for_another_reason():
    failures = [{1: BUSY}, {0: "fine", 2: "... Error 807: MPS server is not ready to accept new clients"}]

    def start() -> str:
        if failures:
            raise RankError(failures.pop(0), 4)
        return "started"

    assert retried(start, pause_seconds=0.0) == "started"
    failures[:] = [{0: 'File "x.py", line 807, in f\nValueError: no such layer'}, {}]
    with pytest.raises(RankError, match="no such layer"):
        retried(start, pause_seconds=0.0)
    assert len(failures) == 1, "another failure is not tried again"
    failures[:] = [{0: BUSY}] * 5
    with pytest.raises(RankError, match="busy or unavailable"):
        retried(start, tries=3, pause_seconds=0.0)
    assert len(failures) == 2
    assert is_busy(RankError({0: BUSY}, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_spinning_kernel_without_a_device_is_refused_when_it_is_armed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = FaultPlan().delay(rank=0, at="0/forward", step=1, seconds=0.1, on_device=True)
    with pytest.raises(RuntimeError, match=r"DeviceSpin\(seconds=0.1\) needs a CUDA device"):
        Injector(faults, 0, model, optimizer)
