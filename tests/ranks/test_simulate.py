"""The simulator and a real Gloo job with the same fault come to the same diagnosis."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evaluation.simulate.hangs import Hangs
from evaluation.simulate.job import Job
from evaluation.simulate.layouts import layout_of
from tests.ranks.test_hangs import ddp_job
from tests.support.hangs import FAULTY_STEP, STALL, incidents
from tests.support.ranks import run_ranks
from torchscout.faults.plan import FaultPlan


def test_a_late_rank_is_the_same_incident_in_the_simulator(tmp_path: Path):
    faults = FaultPlan().stall(rank=2, at="step", step=FAULTY_STEP, seconds=STALL)
    run_ranks(ddp_job, 4, tmp_path, faults, timeout=90)
    (real,) = incidents(tmp_path)

    job = Job(layout_of("1x1x4"))
    made = Hangs(job)
    seeds = (np.random.default_rng(seed) for seed in range(100))
    hang = next(
        each for each in (made.make("stall", "clean", seed) for seed in seeds) if each.truth.ranks == {2}
    )
    (simulated,), _ = hang.decide()
    for field in ("manifestation", "scope", "ranks", "action"):
        assert getattr(simulated, field) == getattr(real, field), (simulated.sentence, real.sentence)
    kinds = {each.records[0].surface.partition("/")[0] for each in (simulated, real)}
    assert kinds <= {"issued", "entered"}
    assert simulated.sentence.startswith("Rank 2")
    assert real.sentence.startswith("Rank 2")
