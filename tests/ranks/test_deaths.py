"""A rank of a real job under torchrun dies: everybody who looks, wherever it is, sees that and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.dying_job import EXCEPTION, STEP, VICTIM
from tests.support.http_server import http_server
from tests.support.small_job import until
from torchscout.decision.types import Manifestation
from torchscout.report.document import documented
from torchscout.run.reader import read_run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "dying_job.py"
LAUNCHER = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
from typing import Any
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what its children leave behind becomes its own child
status = subprocess.run(sys.argv[1:]).returncode
while left := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
sys.exit(status)
"""
"""Runs a command and kills whatever is left when it returns, as a container does."""


@dataclass(frozen=True)
class Death:
    how: str
    words: str
    """What is said about it everywhere."""
    ends: str
    """How it ended, in the run directory."""


DEATHS = [
    Death("killed", "was killed by SIGKILL", "killed"),
    pytest.param(Death("aborts", "was ended by SIGABRT", "killed"), marks=pytest.mark.slow),
    pytest.param(Death("exits", "failed with exit status 3 between", "failed"), marks=pytest.mark.slow),
    pytest.param(Death("raises", EXCEPTION, "failed"), marks=pytest.mark.long),
    pytest.param(Death("mismatch", "issued all_reduce float32[7]", "killed"), marks=pytest.mark.long),
    pytest.param(Death("memory", "out of memory", "killed"), marks=pytest.mark.long),
]


@pytest.fixture
def cgroup(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """A cgroup with little memory, where the system permits one."""
    if request.getfixturevalue("death").how != "memory":
        yield None
        return
    for parent, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        folder = Path("/sys/fs/cgroup", parent, f"torchscout-{os.getpid()}")
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(1 << 30))
                yield folder
                return
            finally:
                folder.rmdir()
    pytest.skip("this system permits no cgroup")


def launched(how: str, url: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the job as ``torchrun | tee`` would, under a launcher that kills what is left."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--rdzv-id=night-7"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "TORCHSCOUT_JOB": "llama"} | variables
    arguments = [how, url, str(folder / "run"), str(folder)]
    return subprocess.run(
        [sys.executable, "-c", LAUNCHER, *torchrun, str(SCRIPT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.how)
def test_a_death_is_seen_everywhere(death: Death, tmp_path: Path, cgroup: Path | None):
    seen_everywhere(death, tmp_path, **({} if cgroup is None else {"CGROUP": str(cgroup)}))


def seen_everywhere(death: Death, tmp_path: Path, **variables: str) -> None:
    """Run the job, and check everything that it leaves."""
    with http_server(lambda number: 503 if number < 3 else 200) as received:
        done = launched(death.how, received.url, tmp_path, **variables)
    assert (tmp_path / "run" / "fired").read_text() == death.how
    assert done.returncode

    (reported,) = read_run(tmp_path / "run").incidents
    incident = reported.incident
    assert incident.ranks == (VICTIM,), incident.sentence
    assert death.words in incident.sentence
    assert incident.launcher == "torchrun night-7"

    said = [line for line in done.stdout.splitlines() if "torchscout: " in line and "incident (" in line]
    assert len(said) == 1, done.stdout
    for fact in (incident.sentence, "job llama", "torchrun night-7", f"scout status {tmp_path / 'run'}"):
        assert fact in said[0]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d torchscout: ", said[0])
    assert "no incidents" not in done.stdout

    *failed, posted = map(json.loads, received.bodies)
    assert failed == [posted] * 2
    assert (posted["id"], posted["job"], posted["sentence"]) == (incident.id, "llama", incident.sentence)

    (end,) = [each for each in read_run(tmp_path / "run").ends if each.rank == VICTIM]
    assert end.how == death.ends
    status = subprocess.run(
        [sys.executable, "-m", "torchscout", "status", str(tmp_path / "run"), "--json"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert status.returncode == 1
    (shown,) = json.loads(status.stdout)["incidents"]
    assert (shown["id"], shown["launcher"]) == (incident.id, "torchrun night-7")
    (page,) = documented(tmp_path / "run")["incidents"]
    assert (page["sentence"], page["launcher"]) == (incident.sentence, "torchrun night-7")


@pytest.mark.long
def test_a_rank_that_is_killed_with_its_observer_is_reported_by_the_others(tmp_path: Path):
    with http_server() as received:
        done = launched("container", received.url, tmp_path)
    assert (tmp_path / "run" / "fired").read_text() == "container"
    (reported,) = read_run(tmp_path / "run").incidents
    incident = reported.incident
    assert VICTIM in incident.ranks
    assert incident.manifestation is Manifestation.CRASH, incident.sentence
    assert f"rank {VICTIM} did not answer" in incident.sentence.lower()
    assert incident.sentence in done.stdout
    assert "no incidents" not in done.stdout
    assert [json.loads(each)["id"] for each in received.bodies] == [incident.id]


@pytest.mark.long
def test_nothing_is_told_of_a_healthy_job(tmp_path: Path):
    with http_server() as received:
        done = launched("healthy", received.url, tmp_path)
    assert done.returncode == 0, done.stdout
    assert received.bodies == []
    assert "no incidents" in done.stdout
    assert read_run(tmp_path / "run").incidents == []
    assert not [*tmp_path.glob("*.prom")], "nobody else knows their age"


@pytest.mark.long
def test_the_last_metrics_of_a_rank_that_was_killed_count_its_incident(tmp_path: Path):
    """Without the launcher that kills what is left."""
    pytest.importorskip("prometheus_client")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    with http_server() as received:
        arguments = ["killed", received.url, str(tmp_path / "run"), str(tmp_path)]
        command = [*torchrun, str(SCRIPT), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    path = tmp_path / f"torchscout-rank-{VICTIM}.prom"
    counted = re.compile(r'^torchscout_incidents_total\{.*"crash".*"rank".*\} 1\.0$', re.MULTILINE)
    until(lambda: counted.search(path.read_text()), "its observer has written them", 30.0)
    metrics = path.read_text()
    assert re.search(rf"^torchscout_step\{{.*\}} {STEP}\.0$", metrics, re.M)
    assert "torchscout_certified_step" in metrics, "what the trainer had exported stays"
