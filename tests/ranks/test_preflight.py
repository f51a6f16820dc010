"""A preflight names bad and slow ranks, links and ranks that stop, and is silent on healthy ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.preflight_jobs import GEMM, Job, Result, run
from tests.support.ranks import RankError, run_ranks
from torchscout.config import ObserverConfig
from torchscout.faults.fault import since
from torchscout.faults.plan import FaultPlan
from torchscout.preflight.groups import links_among

pytestmark = pytest.mark.slow
FOUR = ("a", "a", "b", "b")
LAYERS = [GEMM, "layers.gemm_float64_32x32x48", "layers.attention_math", "layers.attention_flash"]
ROOT = Path(__file__).parents[2]


def reports(job: Job, folder: Path) -> list[Result]:
    results = run_ranks(run, len(job.hosts), job, folder, timeout=180)
    for each in results[1:]:  # the same conclusion everywhere
        for name in ("conclusion", "ranks", "hosts", "incidents", "devices"):
            assert each.report[name] == results[0].report[name]
    assert {rank for rank, each in enumerate(results) if each.fired} == {each.rank for each in job.faults}
    return results


def wrong(rank: int) -> FaultPlan:
    return FaultPlan().flip_bit(rank=rank, at=f"{GEMM}/output", step=since(2), bit=20, calls=None)


def found(report: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    return [(each["manifestation"], each["scope"], each["ranks"]) for each in report["incidents"]]


def test_healthy_ranks_are_silent_and_everything_is_covered(tmp_path: Path):
    report = reports(Job(FOUR), tmp_path)[0].report
    assert (report["conclusion"], report["exit_code"]) == ("healthy", 0), report
    assert (report["incidents"], report["reasons"], report["ranks"]) == ([], [], [])
    coverage = report["coverage"]
    assert [*coverage["layers"]] == LAYERS
    assert min(coverage["layers"].values()) >= 2
    assert {*coverage["recipes"]} == {"layer", "optimizer", "replicated_state", "process_groups"}
    assert coverage["links"] == {"job": 1, "machine": 2, "rail": 2, "pair": 2}
    assert coverage["not_checked"] == {}


def test_wrong_results_name_their_rank(tmp_path: Path):
    report = reports(Job(FOUR, faults=wrong(2)), tmp_path)[0].report
    assert (report["exit_code"], report["ranks"], report["hosts"]) == (1, [2], ["b"]), report
    assert {each[0] for each in found(report)} == {"sdc"}


def test_two_ranks_that_differ_are_undecided(tmp_path: Path):
    report = reports(Job(("a", "b"), faults=wrong(1)), tmp_path)[0].report
    assert (report["conclusion"], report["exit_code"], report["ranks"]) == ("undecided", 2, [])
    assert {each[1:] == ("peer_group", [0, 1]) for each in found(report)} == {True}, report["incidents"]


def test_a_slow_rank_is_named(tmp_path: Path):
    faults = FaultPlan()
    for layer in LAYERS:
        faults = faults.delay(rank=3, at=f"{layer}/forward", step=since(2), seconds=0.25, calls=None)
    report = reports(Job(FOUR, seconds=30.0, faults=faults), tmp_path)[0].report
    assert (report["exit_code"], report["ranks"], report["hosts"]) == (1, [3], ["b"]), report
    assert found(report) == [("straggler", "rank", [3])], report["incidents"]


def test_a_slow_link_names_its_two_ends(tmp_path: Path):
    # Ranks 0 and 3 are a pair between machines, of which there are four.
    faults = FaultPlan().slow_collective(
        ranks=(0, 3), at="all_reduce@pair 0-3", axis="replica", step=since(2), seconds=0.25
    )
    report = reports(Job(FOUR, seconds=30.0, faults=faults), tmp_path)[0].report
    assert (report["exit_code"], report["ranks"]) == (1, [0, 3]), report
    assert found(report) == [("straggler", "process_group", [0, 3])], report["incidents"]


def test_a_rank_that_sleeps_ends_the_preflight_and_is_named(tmp_path: Path):
    watched = ObserverConfig(min_silence_seconds=5.0, silence_multiple=2.0, startup_seconds=60.0)
    faults = FaultPlan().stall(rank=1, at="step", step=6, seconds=600)
    job = Job(FOUR, seconds=300.0, faults=faults, observer=watched)
    with pytest.raises(RankError, match="exited without an answer, exit code 1"):
        run_ranks(run, 4, job, tmp_path, timeout=150)
    assert [path.name for path in tmp_path.glob("fired-*")] == ["fired-1"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_code"], report["ranks"], report["hosts"]) == (1, [1], ["a"]), report
    assert {each[0] for each in found(report)} == {"hang"}


def scout(*arguments: str, launcher: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torchscout", "preflight", *arguments, "--", *launcher]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def torchrun(ranks: int) -> tuple[str, ...]:
    return sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"


def test_the_command_starts_the_launcher_and_shows_a_page(tmp_path: Path):
    run_dir, output = tmp_path / "run", tmp_path / "report.json"
    page = tmp_path / "page.html"
    files = (f"--run-dir={run_dir}", f"--output={output}", f"--html={page}")
    done = scout("--seconds=12", *files, launcher=torchrun(3))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "3 ranks on 1 machine" in done.stdout
    assert json.loads(output.read_text())["conclusion"] == "healthy"
    assert "attention_flash" in page.read_text()
    assert "<script" not in page.read_text()


def test_one_rank_cannot_be_compared(tmp_path: Path):
    done = scout("--seconds=1", "--json", f"--run-dir={tmp_path / 'run'}", launcher=torchrun(1))
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "there is only one" in json.loads(done.stdout)["reasons"][0]


def test_all_pairs_of_a_small_job_are_linked_once():
    for size in range(2, 17):
        rounds = links_among([f"host-{rank}" for rank in range(size)])
        ranks = [link.ranks for links in rounds for link in links]
        assert len(ranks) == len({*ranks})
        assert sum(len(each) == 2 for each in ranks) == size * (size - 1) // 2
        for links in rounds:  # in each round a rank has one link at most
            members = [rank for link in links for rank in link.ranks]
            assert len(members) == len({*members})
