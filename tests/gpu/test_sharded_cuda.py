"""FSDP2 and HSDP over NCCL: a replayed pass that fails; healthy and faulty jobs are in the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.jobs.catalog import CATALOG
from tests.support.failing_job import FAILURES, with_failures
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(4)]


@pytest.mark.parametrize("name", ["fsdp2-bfloat16", "hsdp-two-replicas"])
def test_a_replayed_pass_that_fails_on_one_rank_leaves_training_as_it_was(name: str, tmp_path: Path):
    ranks = CATALOG[name].ranks
    for results in run_ranks(with_failures, ranks, name, FAILURES, tmp_path, timeout=300, backend="nccl"):
        for fault, (same, found) in zip(FAILURES, results, strict=True):
            assert same, fault
            assert (found.failures, found.incidents) == ([], [])
            unchecked = found.status["replay"]["not_checked"]
            assert unchecked, fault
            assert all(surface.startswith("blocks.0") for surface in unchecked)
            assert all("replay failed on rank 1" in reason for reason in unchecked.values())
