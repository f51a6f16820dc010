"""What replay suffers is its own affair: training goes on, whatever fails, stalls, dies or is changed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.hangs import QUICK, STALL, incidents, wait_for_incident
from tests.support.ranks import RankError, run_ranks
from tests.support.replay_jobs import (
    Job,
    bytes_of,
    differing,
    in_replay,
    reasons,
    records,
    steps_of,
)
from tests.support.replayed_job import REPLAY, Block, Net
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.decision.types import EvidenceRecord, Manifestation, Scope
from torchscout.faults.effects import ProcessEffect, Signal, Sleep
from torchscout.faults.injector import Injector
from torchscout.faults.plan import Fault, FaultPlan

STEPS, FAULTY_STEP = 5, 3
"""At odd steps ``stack.0`` is replayed, where every step is checked."""


def in_replayed_layer(rank: int, effect: ProcessEffect) -> FaultPlan:
    """Something happens to a rank while it replays ``stack.0``."""
    steps = range(FAULTY_STEP, FAULTY_STEP + 1)
    return FaultPlan((Fault(rank, "stack.0.up/forward", steps, effect, Manifestation.HANG, calls=REPLAY),))


def out_of_memory_job(rank: int, run_dir: Path) -> tuple[list[str], list[EvidenceRecord]]:
    job = Job(rank)
    with job.attach(run_dir) as session:
        if rank == 2:
            in_replay(job.net.stack[0].down, run_out_of_memory)
        job.train(STEPS)
        assert session.incidents == []
        return session.failures, records(run_dir, rank)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("nothing is left")


def test_a_rank_out_of_memory_in_replay_leaves_the_others_to_compare(tmp_path: Path):
    for rank, (failures, found) in enumerate(run_ranks(out_of_memory_job, 4, tmp_path, timeout=90)):
        assert failures == []
        seen = [each for each in found if each.surface == "stack.0/output"]
        assert {(each.peers, each.status) for each in seen} == {((0, 1, 3), "agree"), ((2,), "not_checked")}
        (reason,) = reasons(found, "stack.0/output")
        assert "replay failed on rank 2" in reason
        assert ("OutOfMemoryError: nothing is left" in reason) is (rank == 2)
        others = {(each.peers, each.status) for each in found if each.surface == "stack.1/output"}
        assert others == {((0, 1, 2, 3), "agree")}, "the next layer is checked on all ranks"


class Fragile:
    """An argument whose description fails."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be described")


class WithHint(Block):
    def forward(self, x: torch.Tensor, hint: Any = None) -> torch.Tensor:  # noqa: ARG002
        return super().forward(x)


class Oddly(Net):
    """Calls its layers in another manner on one rank."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.stack = nn.ModuleList([WithHint(), WithHint()])
        self.manner = manner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = CALLS[self.manner](block, x)
        return self.head(self.final(x))


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "as others do": lambda block, x: block(x),
    "behind its hooks": lambda block, x: block.forward(x),
    "by name": lambda block, x: block(x=x),
    "with what cannot be described": lambda block, x: block(x, Fragile()),
}


def odd_job(rank: int, manner: str, run_dir: Path) -> tuple[list[str], list[EvidenceRecord], dict]:
    torch.manual_seed(0)
    job = Job(rank, Oddly(manner if rank == 1 else "as others do"))
    with job.attach(run_dir) as session:
        job.train(4)
        return session.failures, records(run_dir, rank), session.status()["replay"]["not_checked"]


@pytest.mark.parametrize(
    ("manner", "seen"),
    [
        ("behind its hooks", "rank 1: it was not called in this step"),
        ("by name", "rank 1: arguments have a different structure than the source's"),
        ("with what cannot be described", "rank 1: RuntimeError: not to be described"),
    ],
)
def test_what_one_rank_cannot_capture_is_replayed_nowhere(tmp_path: Path, manner: str, seen: str):
    for failures, found, status in run_ranks(odd_job, 3, manner, tmp_path, timeout=90):
        assert failures == []
        assert differing(found) == {}
        of_layer = [each for each in found if each.layer == "stack.0"]
        assert {each.status for each in of_layer} == {"not_checked"}
        # Where the odd rank is the source itself, the others find its call odd.
        assert any(seen in str(each.reason) for each in found), [each.reason for each in of_layer]
        assert "stack.1/layer" in status
        assert steps_of(found, "head/output") == [1, 2, 3, 4], "all else is checked as ever"


def blocked_job(rank: int, what: str, run_dir: Path) -> tuple[dict, list[str], bytes]:
    """Rank 0 cannot write its records, or nothing at all; rank 2 holds a wrong weight in the end."""
    job = Job(rank)
    if rank == 0:
        blocked = run_dir / "records" / "rank-0.jsonl" if what == "records" else run_dir
        blocked.parent.mkdir(parents=True, exist_ok=True)
        blocked.mkdir() if what == "records" else blocked.write_text("a file in the way")
    dist.barrier()
    faults = FaultPlan().set_value(rank=2, at="stack.0.up/weight", step=4, value=3.0)
    with Injector(faults, rank, job.net, job.optimizer), job.attach(run_dir) as session:
        job.train(STEPS)
        status = session.status()["replay"]
    assert session.status()["replay"] == {"off": "it has stopped: the session is closed"}
    return status, session.failures, bytes_of(job.net.parameters())


def test_a_rank_that_cannot_write_its_records_still_checks_and_reports(tmp_path: Path):
    results = run_ranks(blocked_job, 4, "records", tmp_path, timeout=90)
    for rank, (status, failures, _) in enumerate(results):
        assert status["checks"] == STEPS
        assert status["last"]["stack.1"] == {"step": 4, "clean": True}
        assert any("rank-0.jsonl" in each for each in failures) is (rank == 0), failures
    for rank in (1, 2, 3):
        assert steps_of(records(tmp_path, rank), "state/parameters") == [1, 2, 3, 4, 5]
    (incident,) = incidents(tmp_path)
    assert (incident.ranks, incident.step) == ((2,), 4), "rank 0 is the one that reports"


def test_without_a_run_directory_checks_and_training_go_on(tmp_path: Path):
    results = run_ranks(blocked_job, 4, "everything", tmp_path / "run", timeout=90)
    for status, failures, _ in results:
        assert status["checks"] == STEPS
        assert failures
    weights = [each for *_, each in results]
    assert weights[0] == weights[1] == weights[3] != weights[2]


def dying_job(rank: int, run_dir: Path, observer: ObserverConfig | None) -> None:
    """Ends with the step in which rank 2 dies; who survives writes down where it stands."""
    job = Job(rank)
    config = ReplayConfig(interval=1, timeout_seconds=2.5)
    session = job.attach(run_dir, config, observer=observer)
    faults = in_replayed_layer(2, Signal(signal.SIGKILL))
    with Injector(faults, rank, job.net, job.optimizer):
        job.train(FAULTY_STEP)
    session.close()
    seen = {"step": session.step, "replay": session.status()["replay"], "failures": session.failures}
    (run_dir / f"survivor-{rank}.json").write_text(json.dumps(seen))


@pytest.mark.slow_cases("with the observer")
@pytest.mark.parametrize("observer", [None, QUICK], ids=["replay alone", "with the observer"])
def test_a_rank_killed_in_a_check_strands_nobody(tmp_path: Path, observer: ObserverConfig | None):
    with pytest.raises(
        RankError, match="1 of 4 ranks failed\nrank 2: exited without an answer, exit code -9"
    ):
        run_ranks(dying_job, 4, tmp_path, observer, timeout=60)
    for rank in (0, 1, 3):
        seen = json.loads((tmp_path / f"survivor-{rank}.json").read_text())
        assert seen["step"] == FAULTY_STEP
        assert seen["replay"]["off"].startswith(f"checks are off since step {FAULTY_STEP}"), seen
        assert len(seen["failures"]) == 1
    if observer is not None:
        wait_for_incident(tmp_path)
        assert {each.ranks for each in incidents(tmp_path)} == {(2,)}


def late_job(rank: int, run_dir: Path) -> tuple[str, int, list[str], bytes]:
    job = Job(rank)
    with (
        Injector(in_replayed_layer(1, Sleep(6.0)), rank, job.net, job.optimizer),
        job.attach(run_dir, ReplayConfig(interval=1, timeout_seconds=2.5)) as session,
    ):
        job.train(STEPS)
        weights = bytes_of(job.net.parameters())
        return session.status()["replay"]["off"], session.step, session.failures, weights


def alone_job(rank: int) -> bytes:
    job = Job(rank)
    job.train(STEPS)
    return bytes_of(job.net.parameters())


def test_a_check_that_outlasts_patience_is_given_up_and_training_is_what_it_would_have_been(tmp_path: Path):
    results = run_ranks(late_job, 3, tmp_path, timeout=90)
    for off, step, failures, weights in results:
        assert off.startswith(f"checks are off since step {FAULTY_STEP}")
        assert (step, len(failures)) == (STEPS, 1)
        assert weights == results[0][-1]
    assert run_ranks(alone_job, 3, timeout=60) == [weights for *_, weights in results]


class LateForInputs:
    """Delays one rank before it receives the inputs of a check, longer than its peers wait."""

    def __init__(self, job: Job) -> None:
        self._job, self.has_fired = job, False

    def before(self, call: Call) -> None:
        if self._job.rank == 1 and call.group.is_scouts and call.operation == "broadcast" and self._is_turn():
            self.has_fired = True
            time.sleep(6.0)

    def issued(self, call: Call, token: object, pending: Pending | None) -> None:
        """Nothing is done after a collective."""

    def _is_turn(self) -> bool:
        return self._job.step == FAULTY_STEP and not self.has_fired


def late_for_inputs_job(rank: int, run_dir: Path) -> tuple[bool, str, int, list[str], bytes]:
    job = Job(rank)
    late = LateForInputs(job)
    with job.attach(run_dir, ReplayConfig(interval=1, timeout_seconds=2.5)) as session, listen(late):
        job.train(STEPS)
        off = session.status()["replay"]["off"]
        return late.has_fired, off, session.step, session.failures, bytes_of(job.net.parameters())


def test_a_rank_that_is_late_for_the_inputs_of_a_check_does_not_divide_the_ranks(tmp_path: Path):
    # The source sends the inputs and goes on, or times out. Some ranks would check, others would train.
    results = run_ranks(late_for_inputs_job, 3, tmp_path, timeout=90)
    assert [fired for fired, *_ in results] == [False, True, False]
    for _, off, step, failures, weights in results:
        assert off.startswith(f"checks are off since step {FAULTY_STEP}")
        assert (step, len(failures)) == (STEPS, 1)
        assert weights == results[0][-1]
    assert run_ranks(alone_job, 3, timeout=60) == [weights for *_, weights in results]


def stalled_job(rank: int, run_dir: Path) -> dict:
    job = Job(rank)
    with (
        Injector(in_replayed_layer(1, Sleep(STALL)), rank, job.net, job.optimizer),
        job.attach(run_dir, observer=QUICK) as session,
    ):
        for _ in range(STEPS):
            time.sleep(0.02)
            job.train()
        dist.barrier()
        return session.status()["replay"]


@pytest.mark.long
def test_a_rank_that_stalls_in_a_replayed_layer_is_named_by_the_observer(tmp_path: Path):
    for status in run_ranks(stalled_job, 4, tmp_path, timeout=90):
        assert status["checks"] == STEPS
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.ranks) == (Manifestation.HANG, (1,))
    assert incident.scope is Scope.RANK
