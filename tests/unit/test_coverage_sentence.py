"""What certification covers, in words."""

from __future__ import annotations

from torchscout.session.replay.coverage import Covered, left_out

BETWEEN = "Wrong numbers between two checks are found if they leave a trace in what is compared or watched."
MUON = "the step of Muon issues all_gather among 4 ranks, which a replay must not repeat"


def test_a_job_of_which_everything_is_checked():
    covered = Covered(compared=1.0, watched=0.0, parts=6, updates=1, optimizers=1)
    assert covered.sentence() == (
        "All of the parameters are compared among replicas, 6 modules are replayed in turn and "
        f"updates of 1 of 1 optimizers are recomputed. {BETWEEN}"
    )


def test_what_is_left_out_is_named_with_its_reason_once():
    surfaces = [f"blocks.{number}/weight/optimizer" for number in range(5)]
    missing = left_out(dict.fromkeys(surfaces, f"cannot be replayed: rank 0: {MUON}"))
    covered = Covered(compared=0.96, watched=0.04, parts=6, updates=0, optimizers=1, missing=missing)
    assert covered.sentence() == (
        "96% of the parameters are compared among replicas, 4% are watched between updates, 6 modules are "
        "replayed in turn and updates of 0 of 1 optimizers are recomputed. Not covered: "
        "blocks.0/weight/optimizer, blocks.1/weight/optimizer, blocks.2/weight/optimizer and 2 more "
        f"({MUON}). {BETWEEN}"
    )
    assert covered.to_json()["missing"] == missing


def test_what_is_watched_or_only_failed_this_time_is_not_left_out():
    reasons = {
        "layers.0/weight.exp_avg": "differs by design: only some ranks hold it",
        "layers.1/layer": "rank 1: OutOfMemoryError: no memory",
        "layers.2/output": "nondeterministic kernel: atomics",
    }
    assert left_out(reasons) == {"nondeterministic kernel: atomics": ["layers.2/output"]}
