"""Real Gloo ranks without torchscout hang; `scout explain` names the cause from Flight Recorder dumps."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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
from torchscout.utils._torch import default_store

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


def hanging(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup, what: str) -> Any:
    """Rank 2 does something else than the others, who all-reduce five numbers in their training group."""
    reduced = partial(dist.all_reduce, async_op=True)
    usual = partial(reduced, torch.ones(5), group=training)
    after_it = partial(reduced, torch.ones(7), group=training)
    of_others = {"left out": lambda: (usual(), after_it()), "healthy": lambda: usual().wait()}
    of_rank_2 = {
        "late": lambda: None,
        "another collective": partial(dist.barrier, group=training, async_op=True),
        "another size": partial(reduced, torch.ones(6), group=training),
        "another order": partial(reduced, torch.ones(5), group=other),
        "left out": after_it,
        "healthy": of_others["healthy"],
    }
    return (of_rank_2 if rank == 2 else of_others).get(what, usual)()


def killed(rank: int, training: dist.ProcessGroup, other: dist.ProcessGroup) -> Any:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.all_reduce(torch.ones(5), group=training, async_op=True)


def explained(folder: Path) -> dict[str, Any]:
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["explain", str(folder), "--json"])
    assert done.exit_code in (0, 1), done.output
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["hang"] is (done.exit_code == 1)
    return document


@pytest.fixture
def dumped(tmp_path: Path) -> Callable[..., Path]:
    def run(body: Body, *, as_json: bool = False) -> Path:
        run_ranks(job, SIZE, str(tmp_path), body, as_json, environment=RECORDER)
        return tmp_path

    return run


@pytest.mark.slow_cases("late-False*", "another size*", "left out*")
@pytest.mark.long_cases("late-True*")
@pytest.mark.parametrize(
    ("what", "as_json", "named"),
    [
        ("late", False, [2]),
        ("late", True, [2]),
        ("another collective", False, [2]),
        ("another size", False, [2]),
        ("another order", False, [2]),
        ("left out", False, [2]),
        ("healthy", False, []),
    ],
)
def test_the_rank_that_does_something_else_is_named(
    dumped: Callable[..., Path], what: str, as_json: bool, named: list[int]
):
    found = explained(dumped(partial(hanging, what=what), as_json=as_json))
    assert (found["ranks"], found["hang"]) == (named, bool(named))


def test_a_killed_rank(dumped: Callable[..., Path], tmp_path: Path):
    with pytest.raises(RankError):
        dumped(killed)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"trace_rank_{rank}" for rank in (0, 1, 3)]
    found = explained(tmp_path)
    assert (found["scope"], found["without_dump"]) == ("process_group", [2])
    assert "all_reduce float32[5] number 4" in found["sentence"]


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
    """What is open before rank 1 goes ahead of the other, and then."""

    def go_ahead() -> list[dist.Work]:
        return [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(40)]

    dist.all_reduce(torch.ones(3))
    before = open_operations()
    pending = go_ahead() if rank else []
    during = open_operations()
    store = default_store()
    store.set(f"rank {rank} has looked", "")
    store.wait([f"rank {1 - rank} has looked"])
    for work in pending or go_ahead():
        work.wait()
    return before, during


def test_a_trainer_reports_which_of_its_operations_are_open():
    """As an incident's evidence: small, and plain enough for JSON."""
    (before, late), (_, waiting) = run_ranks(recorded_here, 2, environment=RECORDER)
    assert before == late == {"open": 0, "operations": []}
    assert json.loads(json.dumps(waiting)) == waiting
    assert (waiting["open"], len(waiting["operations"])) == (40, 16)
    first = waiting["operations"][0]
    assert (first["group"], first["number"], first["operation"]) == ("default_pg", 2, "all_reduce float32[5]")
    assert first["state"] == "scheduled"
    assert run_ranks(recorded_here, 2, environment={"TORCH_FR_BUFFER_SIZE": "0"}) == [(None, None)] * 2
