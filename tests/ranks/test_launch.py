"""What `scout run` does inside workers, from ``init_process_group`` on, on real Gloo ranks."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import incidents, wait_for_incident
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import ObserverConfig, Parallelism, ReplayConfig
from torchscout.decision.types import Manifestation
from torchscout.launch import attachment
from torchscout.launch.agreement import agree
from torchscout.launch.settings import VARIABLE, Settings
from torchscout.launch.template import document_of
from torchscout.session.session import Session
from torchscout.utils._torch import default_store

QUIET = ObserverConfig(min_silence_seconds=60.0)
EAGER = ObserverConfig(min_silence_seconds=1.0, startup_seconds=1.5, silence_multiple=1.5)
STEPS = 6


class Log(logging.Handler):
    """The messages of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("torchscout").addHandler(self)
        logging.getLogger("torchscout").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def having(self, text: str) -> int:
        return sum(text in line for line in self.lines)


def join(run_dir: Path, **settings: Any) -> Log:
    """Do what happens after ``init_process_group`` under `scout run`."""
    log = Log()
    given = {"observer": QUIET, "replay": ReplayConfig(interval=2), "attach_seconds": 20.0, **settings}
    os.environ[VARIABLE] = json.dumps(document_of(Settings(run_dir=str(run_dir), **given)))
    attachment.joined()
    return log


def session() -> Session | None:
    return attachment._attachments[-1].session


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def trained(rank: int, after: Callable[[int, nn.Module], None] = lambda *_: None) -> str:
    """Train a model under DDP, and return a digest of its weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # once: a number that is drawn besides would change all batches after it
    for step in range(1, STEPS + 1):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step, model)
    return hashlib.sha256(
        b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    ).hexdigest()


def bits(rank: int, run_dir: Path) -> tuple[str, str, list[str], int]:
    alone = trained(rank)
    gc.collect()  # this process has trained before, which no script under `scout run` has
    log = join(run_dir)
    watched = trained(rank)
    opened = session()
    assert opened is not None
    return alone, watched, log.lines, opened.status()["replay"]["checks"]


def test_a_script_trains_with_the_same_bits_and_is_checked(tmp_path: Path):
    answers = run_ranks(bits, 2, tmp_path, timeout=90)
    for alone, watched, _, checks in answers:
        assert watched == alone
        assert checks >= 2
    attached = "attached to DistributedDataParallel(Sequential) and AdamW after step 1"
    assert [sum(attached in line for line in lines) for _, _, lines, _ in answers] == [1, 0]
    assert incidents(tmp_path) == []


def flip(rank: int, run_dir: Path) -> None:
    def after(step: int, model: nn.Module) -> None:
        if (step, rank) == (4, 1):
            with torch.no_grad():
                model.module[1].weight.view(torch.int32)[0, 3] ^= 1 << 20

    join(run_dir)
    trained(rank, after)


@pytest.mark.long
def test_a_flipped_bit_is_found(tmp_path: Path):
    run_ranks(flip, 3, tmp_path, timeout=90)
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.ranks) == (Manifestation.SDC, (1,))


def adding(rank: int, run_dir: Path, late: int | None) -> None:
    join(run_dir, observer=EAGER)
    for step in range(5):
        if (step, rank) == (3, late):
            wait_for_incident(run_dir)
        dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("late", [1, None])
def test_a_late_rank_is_named_without_a_model(late: int | None, tmp_path: Path):
    run_ranks(adding, 3, tmp_path, late, timeout=90)
    found = [(each.manifestation, each.ranks) for each in incidents(tmp_path)]
    assert found == ([] if late is None else [(Manifestation.HANG, (1,))])


def two_models(rank: int, run_dir: Path) -> tuple[int, int]:
    log = join(run_dir)
    models = [DistributedDataParallel(network()) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
    for _ in range(3):
        models[1](models[0](torch.randn(4, 16))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    opened = session()
    assert opened is not None
    return log.having("not clear which is the model"), opened.step


def test_of_two_models_none_is_attached_and_hangs_are_still_watched(tmp_path: Path):
    answers = run_ranks(two_models, 2, tmp_path, timeout=90)
    assert sorted(answers) == [(0, 3), (1, 3)], "one rank says so, and steps are counted all the same"


def own_session(rank: int, run_dir: Path, before: int) -> tuple[bool, int, int]:
    """The script attaches after so many steps, and trains for three more."""
    log = join(run_dir)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()

    for _ in range(before):
        step()
    with enable_resiliency(model, optimizer, observer=None, run_dir=run_dir) as mine:
        for _ in range(3):
            step()
        return session() is not mine, mine.step, log.having("scout run attached to")


@pytest.mark.parametrize("before", [0, 2])
def test_a_script_that_attaches_itself_has_its_own_session(before: int, tmp_path: Path):
    said = [int(before > 0), 0]
    assert run_ranks(own_session, 2, tmp_path, before, timeout=90) == [(True, 3, each) for each in said]


def partly(rank: int, run_dir: Path) -> tuple[int, bool]:
    """Rank 1 was not started by `scout run`."""
    log = Log()
    if rank == 0:
        log = join(run_dir, attach_seconds=1.0)
    trained(rank)
    found = log.having("only 1 of 2 ranks were there")
    return found, rank == 1 or session() is None


def test_ranks_that_were_not_started_by_scout_run_block_nobody(tmp_path: Path):
    assert run_ranks(partly, 2, tmp_path, timeout=60) == [(1, True), (0, True)]


def never_updates(rank: int, run_dir: Path) -> tuple[int, bool]:
    """Rank 1 has no optimizer, as where some ranks train and others generate."""
    log = join(run_dir, attach_seconds=1.0, parallelism=Parallelism(replica=2))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        if rank == 0:
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        dist.all_reduce(torch.ones(4))
    return log.having("only 1 of 2 ranks were there"), session() is not None


def test_a_rank_that_never_updates_a_model_blocks_nobody(tmp_path: Path):
    answers = run_ranks(never_updates, 2, tmp_path, timeout=60)
    assert answers == [(1, True), (0, True)]


def agreed(rank: int, late: float) -> list[str | None]:
    """Agree twice: rank 1 is late by so many seconds, then it has a problem."""
    first = dist.PrefixStore("first", default_store())
    time.sleep(late if rank == 1 else 0)
    answers = [agree(first, rank, 2, 1.0, document=rank)]
    second = dist.PrefixStore("second", default_store())
    answers.append(agree(second, rank, 2, 20.0, problem="mine" if rank == 1 else None))
    return [each.problem for each in answers]


@pytest.mark.parametrize(("late", "problem"), [(0.0, None), (2.5, "after 1 s only 1 of 2 ranks were there")])
def test_all_ranks_agree_in_bounded_time(late: float, problem: str | None):
    assert run_ranks(agreed, 2, late, timeout=60) == [[problem, "mine"], [problem, "mine"]]
