"""Real Gloo ranks without torchscout hang; `scout explain` names the cause from Flight Recorder dumps."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from typer.testing import CliRunner

from tests.support.ranks import RankError, run_ranks
from torchscout.cli.main import app
from torchscout.observer.flight_recorder import open_operations

SIZE = 4
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}
HANGING_SECONDS = 2.0

Body = Callable[[int, dist.ProcessGroup, dist.ProcessGroup], Any]


def job(rank: int, folder: str, body: Body, as_json: bool) -> None:
    """A few collectives that complete, then one asynchronous ``body``, then a dump while it hangs."""
    training = dist.new_group(timeout=timedelta(seconds=30), group_desc="training")
    other = dist.new_group(timeout=timedelta(seconds=30), group_desc="other")
    for _ in range(3):
        dist.all_reduce(torch.ones(8), group=training)
    dist.barrier(group=other)
    pending = body(rank, training, other)
    time.sleep(HANGING_SECONDS)
    name = f"rank{rank}.json" if as_json else f"trace_rank_{rank}"
    dump = c10d._dump_fr_trace_json() if as_json else c10d._dump_fr_trace()
    (Path(folder) / name).write_bytes(dump.encode() if isinstance(dump, str) else dump)
    time.sleep(1.0)  # nobody ends while others may still dump
    del pending


def late(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    if rank != 2:
        return dist.all_reduce(torch.ones(5), group=training, async_op=True)
    return None


def another_collective(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    if rank != 2:
        return dist.all_reduce(torch.ones(5), group=training, async_op=True)
    return dist.barrier(group=training, async_op=True)


def another_size(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    return dist.all_reduce(torch.ones(6 if rank == 2 else 5), group=training, async_op=True)


def left_out(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    first = None
    if rank != 2:
        first = dist.all_reduce(torch.ones(5), group=training, async_op=True)
    return first, dist.all_reduce(torch.ones(7), group=training, async_op=True)


def opposite_order(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    return dist.all_reduce(torch.ones(5), group=other if rank == 2 else training, async_op=True)


def healthy(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    dist.all_reduce(torch.ones(5), group=training)


def killed(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.all_reduce(torch.ones(5), group=training, async_op=True)


def explained(folder: Path, expect: int = 0, *options: str) -> dict[str, Any]:
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["explain", str(folder), "--json", *options])
    assert done.exit_code == expect, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture
def dumped(tmp_path: Path) -> Callable[..., Path]:
    def run(body: Body, *, as_json: bool = False) -> Path:
        run_ranks(job, SIZE, str(tmp_path), body, as_json, environment=RECORDER)
        return tmp_path

    return run


@pytest.mark.slow_cases("False")
@pytest.mark.long_cases("True")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_is_late(dumped: Callable[..., Path], as_json: bool):
    found = explained(dumped(late, as_json=as_json))
    assert found["ranks"] == [2]
    assert found["scope"] == "rank"


@pytest.mark.slow_cases("another_size", "left_out")
@pytest.mark.parametrize("body", [another_collective, another_size, left_out])
def test_a_rank_that_does_something_else(dumped: Callable[..., Path], body: Body):
    found = explained(dumped(body))
    assert found["ranks"] == [2]
    assert "as number 4 of group training" in found["sentence"]


def test_ranks_in_opposite_order(dumped: Callable[..., Path]):
    found = explained(dumped(opposite_order))
    assert found["ranks"] == [2]
    assert (
        "wait for each other, having entered operations in different orders or left one out"
        in found["sentence"]
    )


def test_a_job_that_does_not_hang(dumped: Callable[..., Path]):
    assert explained(dumped(healthy))["hang"] is False


def test_a_killed_rank(dumped: Callable[..., Path], tmp_path: Path):
    with pytest.raises(RankError):
        dumped(killed)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"trace_rank_{rank}" for rank in (0, 1, 3)]
    found = explained(tmp_path)
    assert (found["scope"], found["without_dump"]) == ("process_group", [2])
    assert "All 4 members but 1 entered all_reduce float32[5] number 4" in found["sentence"]
    assert "Rank 2 left no readable dump" in found["sentence"]


def timed_out(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Gloo gives up after a while; then the operation is over, and no dump says that it failed."""
    brief = dist.new_group(timeout=timedelta(seconds=1), group_desc="brief")
    dist.barrier(group=brief)
    if rank != 2:
        # The first rank to give up closes its connections, and the others may see that first.
        with pytest.raises(RuntimeError, match=r"Timed out|Connection closed"):
            dist.all_reduce(torch.ones(5), group=brief)


def test_a_rank_that_was_late_until_the_others_gave_up(dumped: Callable[..., Path]):
    found = explained(dumped(timed_out))
    assert found["ranks"] == [2]
    assert "all_reduce float32[5] number 2 of group brief" in found["sentence"]


def recorded_here(rank: int) -> tuple[Any, Any]:
    dist.all_reduce(torch.ones(3))
    before = open_operations()
    pending = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(40)] if rank else []
    time.sleep(1.0)
    during = open_operations()
    if not rank:
        time.sleep(2.0)  # until the other has looked
        pending = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(40)]
    for work in pending:
        work.wait()
    return before, during


def test_a_trainer_reports_which_of_its_operations_are_open():
    """As an incident's evidence: small, and plain enough for JSON."""
    (before, late), (_, waiting) = run_ranks(recorded_here, 2, environment=RECORDER)
    assert before == {"open": 0, "operations": []}
    assert late == {"open": 0, "operations": []}
    assert json.loads(json.dumps(waiting)) == waiting
    assert (waiting["open"], len(waiting["operations"])) == (40, 16)
    first = waiting["operations"][0]
    assert (first["group"], first["number"], first["operation"]) == ("default_pg", 2, "all_reduce float32[5]")
    assert first["state"] == "scheduled"


def without_recorder(rank: int) -> Any:
    dist.all_reduce(torch.ones(3))
    return open_operations()


def test_a_recorder_that_is_off_gives_no_entries():
    environment = {"TORCH_FR_BUFFER_SIZE": "0"}
    assert run_ranks(without_recorder, 2, environment=environment) == [None, None]
