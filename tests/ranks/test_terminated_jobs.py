"""torchrun terminates the ranks of a real job: because a machine is lost, or because somebody wants it to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks.test_standby import own_address
from tests.support.hangs import incidents
from tests.support.http_server import http_server
from tests.support.run_dirs import read_ends
from tests.support.small_job import until
from torchscout.decision.types import Action, Incident, Scope, Status
from torchscout.utils.procfs import processes_with

ROOT = Path(__file__).parents[2]
SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """What a job has left."""

    run_dir: Path
    output: str
    incidents: list[Incident]
    posted: list[str]
    """The ids of what the webhook got."""


def ended(how: str, folder: Path, is_over: Callable[[Path, list[int]], bool]) -> Ended:
    """Run ``tests.support.terminated_job`` until ``is_over`` of its run directory and its processes."""
    run_dir, output = folder / "run", folder / "output"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={len(how)}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += [str(ROOT / "tests" / "support" / "terminated_job.py"), how]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TERMINATED_JOB": str(folder)}
    mark = f"TERMINATED_JOB={folder}"
    with http_server() as received, output.open("wb") as file:
        job = subprocess.Popen(
            [*command, received.url, own_address(), str(run_dir)],
            env=os.environ | environment,
            stdout=file,
            stderr=file,
        )
        try:
            assert job.wait(SECONDS), "it was terminated"
            assert (run_dir / "fired").read_text() == how
            until(lambda: is_over(run_dir, [*processes_with(mark)]), "there is a verdict", SECONDS)
            found = incidents(run_dir)
            until(lambda: len(received.bodies) == len(found), "it is posted", SECONDS)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{output.read_text()}") from error
        finally:
            for pid in (job.pid, *processes_with(mark)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
        return Ended(run_dir, output.read_text(), found, [json.loads(each)["id"] for each in received.bodies])


def reported_everywhere(how: str, folder: Path) -> Incident:
    """Return the one incident of the job, which is in its run directory and output, and was posted."""

    def is_shown(run_dir: Path, _: list[int]) -> bool:
        said = run_dir.with_name("output").read_text()
        return any(each.sentence in said for each in incidents(run_dir))

    job = ended(how, folder, is_shown)
    (incident,) = job.incidents
    assert job.posted == [incident.id]
    assert job.output.count(incident.sentence) == 1, job.output
    assert "no incidents" not in job.output
    ends = read_ends(job.run_dir)
    survivors = [rank for rank, machine in enumerate(how) if machine.islower()]
    assert {rank: ends[rank].how for rank in survivors} == dict.fromkeys(survivors, "interrupted")
    return incident


@pytest.mark.long
def test_a_machine_that_is_lost_is_named_though_the_other_ranks_are_only_terminated(tmp_path: Path):
    incident = reported_everywhere("aaBB", tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.MACHINE, (2, 3)), incident.sentence
    assert (incident.hosts, incident.action) == (("machine-b",), Action.REPLACE)


@pytest.mark.slow
def test_so_is_the_machine_of_the_hub(tmp_path: Path):
    incident = reported_everywhere("AAbb", tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.MACHINE, (0, 1)), incident.sentence


@pytest.mark.slow
def test_a_rank_that_is_terminated_alone_names_nobody(tmp_path: Path):
    """It may be the one that is cut off."""
    incident = reported_everywhere("aBCD", tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.JOB, (0, 1, 2, 3)), incident.sentence
    assert incident.records[0].verdict is not None
    assert incident.records[0].verdict.status is Status.INCONCLUSIVE


@pytest.mark.long
def test_a_healthy_job_that_is_terminated_is_no_incident(tmp_path: Path):
    job = ended("aabb", tmp_path, lambda _, processes: not processes)
    assert (job.incidents, job.posted) == ([], [])
    assert "no incidents" in job.output, "nobody has waited for a verdict in vain"
    assert {rank: end.how for rank, end in read_ends(job.run_dir).items()} == dict.fromkeys(
        range(4), "interrupted"
    )
