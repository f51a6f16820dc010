"""A preflight on NCCL ranks that share a CUDA device, in all precisions that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nccl_ranks import UNEVEN
from tests.support.preflight_jobs import Job, Result, run
from tests.support.ranks import run_ranks
from torchscout.faults.fault import since
from torchscout.faults.plan import FaultPlan

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(4)]
HOSTS = ("a", "a", "b", "b")
GEMM = "layers.gemm_bfloat16_32x32x48"


def reports(faults: FaultPlan, folder: Path, seconds: float = 30.0) -> list[Result]:
    job = Job(HOSTS, seconds=seconds, faults=faults, replay=UNEVEN, device="cuda")
    return run_ranks(run, len(HOSTS), job, folder, backend="nccl", timeout=240)


def test_healthy_devices_are_silent_in_every_precision(tmp_path: Path):
    for result in reports(FaultPlan(), tmp_path):
        report = result.report
        assert (report["conclusion"], report["incidents"]) == ("healthy", []), report
        layers = {name.removeprefix("layers.") for name in report["coverage"]["layers"]}
        assert {f"gemm_{each}_32x32x48" for each in ("float32", "tf32", "bfloat16", "float16")} <= layers
        assert {"attention_math", "attention_flash"} <= layers
        assert report["coverage"]["not_checked"] == {}
        assert report["devices"][0]["uuid"]


def test_wrong_results_of_a_device_name_its_rank(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at=f"{GEMM}/output", step=since(2), bit=20, calls=None)
    results = reports(faults, tmp_path)
    assert [bool(each.fired) for each in results] == [False, False, True, False]
    report = results[0].report
    assert (report["exit_code"], report["ranks"], report["hosts"]) == (1, [2], ["b"]), report["incidents"]


def test_a_slow_device_is_named(tmp_path: Path):
    faults = FaultPlan()
    for layer in (GEMM, "layers.attention_math"):
        faults = faults.delay(
            rank=1, at=f"{layer}/forward", step=since(2), seconds=0.5, calls=None, on_device=True
        )
    results = reports(faults, tmp_path, seconds=60.0)
    assert results[1].fired
    report = results[0].report
    assert (report["exit_code"], report["ranks"]) == (1, [1]), report["incidents"]
    assert {each["manifestation"] for each in report["incidents"]} == {"straggler"}
