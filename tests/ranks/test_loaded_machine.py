"""A machine with more work than cores: no rank is called slow for that, and a slow rank is still named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.types import EvidenceRecord, Incident
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.replay.recipe import Observation
from torchscout.replay.timing import _HostClock, timed
from torchscout.run.reader import read

CPU_SECONDS = 0.06
"""What a layer computes. With three others on its core it takes four times as long."""
CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(
    len(CORES) < 2 or not Path("/proc/thread-self/schedstat").exists(),
    reason="needs two cores, and a system that tells how long a thread has waited for one",
)


@contextmanager
def others_on(core: int, count: int = 3) -> Iterator[None]:
    """Other processes that never give this core away."""
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


class Computing(nn.Module):
    """Keeps its core busy for as long on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.thread_time() + CPU_SECONDS
        while time.thread_time() < end:
            pass
        return self.linear(x)


def training(rank: int, faults: FaultPlan, run_dir: Path) -> tuple[list[Incident], list[float]]:
    """The last rank has the first core, the others have the second; every step is checked.

    Returns the incidents, and how far beyond the median the last rank's own times were.
    """
    last = torch.distributed.get_world_size() - 1
    os.sched_setaffinity(0, {CORES[0] if rank == last else CORES[1]})
    torch.manual_seed(0)
    net = nn.Sequential(Computing(), Computing())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ReplayConfig(interval=1, recipes=("layer",), records="all")
    with Injector(faults, rank, net, optimizer):
        session = enable_resiliency(model, optimizer, replay=config, observer=None, run_dir=run_dir)
        for step in range(7):
            optimizer.zero_grad()
            model(torch.full((2, 8), float(step + rank))).sum().backward()
            optimizer.step()
    incidents = session.incidents
    session.close()
    records = [each.item for each in read(run_dir / "records" / f"rank-{rank}.jsonl")]
    return incidents, [*_excesses(records, last)]


def _excesses(records: Sequence[object], rank: int) -> Iterator[float]:
    for each in records:
        if isinstance(each, EvidenceRecord) and each.surface == "time/module" and each.verdict is not None:
            times = sorted(each.verdict.evidence)
            yield each.verdict.evidence[each.peers.index(rank)] - times[len(times) // 2]


def slow(rank: int) -> FaultPlan:
    faults = FaultPlan()
    for layer in (0, 1):
        faults = faults.delay(rank=rank, at=f"{layer}/forward", step=range(3, 7), seconds=0.3, calls=None)
    return faults


@pytest.mark.long
def test_a_rank_whose_core_others_use_is_not_slow(tmp_path: Path):
    with others_on(CORES[0]):
        found = run_ranks(training, 3, FaultPlan(), tmp_path, timeout=200)
    assert [each.sentence for each in found[0][0]] == []
    assert len(found[0][1]) >= 5  # its times were compared


@pytest.mark.slow
@pytest.mark.parametrize("core", [0, 1], ids=["its own", "its peers'"])
def test_a_slow_rank_is_named_though_others_use_a_core(tmp_path: Path, core: int):
    """If they use that of its peers, these need as long as it does, by the clock on the wall."""
    with others_on(CORES[core]):
        found = run_ranks(training, 3, slow(2), tmp_path, timeout=200)
    assert {(each.manifestation.value, each.ranks) for each in found[0][0]} == {("straggler", (2,))}


def test_time_never_runs_backwards_where_a_core_is_shared():
    """The clock and the waits are read one after the other, and a wait may come in between."""
    before, clock = os.sched_getaffinity(0), _HostClock()
    os.sched_setaffinity(0, {CORES[0]})
    try:
        with others_on(CORES[0]):
            marks, end = [clock.mark()], time.perf_counter() + 2.0
            while time.perf_counter() < end:
                marks.append(clock.mark())
    finally:
        os.sched_setaffinity(0, before)
    assert min(clock.own_milliseconds(*each) for each in pairwise(marks)) > -1


def test_waits_for_a_core_are_left_out_of_a_time_and_sleep_is_not():
    def clocked() -> tuple[float, float]:
        seen, begin = Observation(), time.perf_counter()
        with timed(torch.device("cpu"), seen, work="time/module", communication="time/{}"):
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass
            time.sleep(0.3)
        whole = 1e3 * (time.perf_counter() - begin)
        seen.read()
        return seen.times["time/module"], whole

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[0]})
    try:
        with others_on(CORES[0]):
            own, whole = clocked()
    finally:
        os.sched_setaffinity(0, before)
    assert whole > 900  # 0.3 s of sleep, and a quarter of a core for what takes 0.2 s on a whole one
    assert 490 < own < whole - 200
