"""Training with a check at every step is bitwise the training without, however people write it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.support.call_recorder import CallRecorder
from tests.support.ranks import run_ranks
from tests.support.variations import VARIATIONS, Trained, train
from torchscout.attach import enable_resiliency
from torchscout.collectives.interceptor import listen
from torchscout.config import Parallelism, ReplayConfig
from torchscout.decision.records.record import EvidenceRecord, Manifestation
from torchscout.decision.records.recorder import Stamped, read

STEPS, RANKS = 12, 3
EVERY_STEP = ReplayConfig(interval=1, variants=(1.0, 0.1), records="all")
SLOW = {
    "calls by name and returns trees",
    "checkpoints activations by wrappers",
    "has several optimizers",
    "has frozen parameters",
    "compiles its blocks in place",
    "has no wrapper",
    "varies its sequence length",
}


def with_and_without(rank: int, name: str, run_dir: Path) -> tuple[list[int], list[str], dict]:
    """The steps that differ, what failed, and the last outcome of every surface."""
    variation = VARIATIONS[name]
    *_, alone = train(variation, rank, STEPS)
    with_scout = train(variation, rank, STEPS)
    trained = next(with_scout)
    hooks = hooks_of(trained)
    session = enable_resiliency(
        trained.model,
        trained.optimizers,
        replay=EVERY_STEP,
        observer=None,
        parallelism=Parallelism(replica=RANKS),
        run_dir=run_dir,
    )
    *_, trained = with_scout
    failures, incidents = list(session.failures), session.incidents
    session.close()
    assert hooks_of(trained) == hooks
    assert not incidents, incidents[0].sentence
    differing = [step for step in range(STEPS) if alone.steps[step] != trained.steps[step]]
    return differing, failures, outcomes(run_dir, rank)


def hooks_of(trained: Trained) -> list[int]:
    registries = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    counts = [len(getattr(each, name)) for each in trained.net.modules() for name in registries]
    return counts + [
        len(each._optimizer_step_pre_hooks) + len(each._optimizer_step_post_hooks)
        for each in trained.optimizers
    ]


def outcomes(run_dir: Path, rank: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in read(run_dir / "records" / f"rank-{rank}.jsonl"):
        assert isinstance(line, Stamped)
        record = line.item
        assert isinstance(record, EvidenceRecord)
        if record.manifestation is not Manifestation.SDC:
            continue
        outcome = record.status if record.reason is None else f"{record.status}: {record.reason}"
        found.setdefault(record.surface, set()).add(outcome)
    return found


@pytest.mark.slow_cases(
    "accumulates gradients",
    "casts to bfloat16",
    "changes its input in place",
    "checkpoints activations reentrantly",
    "checkpoints activations",
    "compiles its blocks",
    "compiles its model in place",
    "compiles its model",
    "draws from other generators",
    "evaluates, skips updates and clips",
    "ties its embeddings",
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in VARIATIONS]
)
def test_training_is_bitwise_the_same_with_replay(name: str, tmp_path: Path):
    for differing, failures, found in run_ranks(with_and_without, RANKS, name, tmp_path, timeout=240):
        assert failures == []
        assert differing == []
        unchecked = VARIATIONS[name].unchecked
        for part in ("look_up", "trunk.0", "trunk.1", "trunk.2", "say"):
            if part.startswith(unchecked or ("nothing",)):
                assert all("not_checked" in outcome for outcome in found[f"{part}/layer"]), found
            else:
                assert found[f"{part}/output"] == {"agree"}, found
                assert found[f"{part}/parameters"] == {"agree"}, found
        assert found["state/parameters"] == found["state/optimizer"] == {"agree"}
        assert found["optimizer/reproduced"] == {"agree"}, found


def due_steps_only(rank: int, run_dir: Path) -> list[int]:
    """Tensors alive after each step: those that replay holds on to."""
    listen(
        CallRecorder()
    ).remove()  # from then on Python sees every collective's tensors, DDP's buckets among them
    training = train(VARIATIONS["plain"], rank, 11)
    trained = next(training)
    config = ReplayConfig(interval=4)
    session = enable_resiliency(
        trained.model, trained.optimizers, replay=config, observer=None, run_dir=run_dir
    )
    alive = []
    for _ in training:
        gc.collect()
        alive.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        hooked = any(block._forward_pre_hooks for block in trained.net.trunk)
        assert hooked == ((session.step + 1) % 4 == 0), "hooks are there only in a step that is due"
    session.close()
    return alive


@pytest.mark.slow
def test_no_memory_is_retained_between_checks(tmp_path: Path):
    for alive in run_ranks(due_steps_only, RANKS, tmp_path, timeout=90):
        assert alive[1:3] == alive[4:6] == alive[8:10]
