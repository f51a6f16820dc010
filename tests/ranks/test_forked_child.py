"""A process that a trainer forks and that ends in the ordinary way: its parent is watched as before."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.run_dirs import read_roster
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism
from torchscout.observer.record.directory import open_record


def fork_and_go_on(rank: int, run_dir: Path, *, closes: bool) -> tuple[list[str], bool]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = Parallelism(replica=2)
    session = enable_resiliency(model, optimizer, replay=None, parallelism=replicas, run_dir=run_dir)
    child = os.fork()
    if not child:  # what ``sys.exit(0)`` does there, but for what the harness makes of it
        if closes:
            session.close()
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    entry = next(each for each in read_roster(run_dir) if each.rank == rank)
    open_record(Path(entry.record))  # it is still there
    observer = session.status()["observer"]
    dist.barrier()
    session.close()
    return session.failures, observer is not None


def test_a_forked_child_that_exits_leaves_its_parents_observer_alone(tmp_path: Path):
    for closes in (False, True):
        found = run_ranks(_forked, 2, tmp_path / str(closes), closes, timeout=60)
        assert found == [([], True)] * 2


def _forked(rank: int, run_dir: Path, closes: bool) -> tuple[list[str], bool]:
    return fork_and_go_on(rank, run_dir, closes=closes)
