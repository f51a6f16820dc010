"""Layers that training has stopped calling before torchscout is attached, as with CUDA graphs."""

from __future__ import annotations

from pathlib import Path

from evaluation.jobs.contracts import Attempt, Ranks
from evaluation.jobs.job import Trial


def test_layers_that_were_never_called_are_left_out_with_the_reason(tmp_path: Path):
    trial = Trial(steps=8, interval=1, run_dir=tmp_path, attach_after=4, keeps_records=True)
    with Ranks(Attempt("cuda-graph", tmp_path, tmp_path)) as ranks:
        for found in ranks.train(trial).reports:
            assert (found.incidents, found.failures) == ([], [])
            assert "must be captured after torchscout is attached" in str(found.unchecked["blocks.0/layer"])
            assert "state/parameters" in found.agreed
            assert found.certified == trial.steps
