"""What certification covers, in words."""

from __future__ import annotations

from torchscout.session.replay.coverage import Covered, left_out


def test_what_is_left_out_is_named_with_its_reason():
    surfaces = [f"blocks.{number}/weight/optimizer" for number in range(5)]
    missing = left_out(dict.fromkeys(surfaces, "cannot be replayed: rank 0: Muon communicates"))
    covered = Covered(compared=0.96, watched=0.04, parts=6, updates=0, optimizers=1, missing=missing)
    facts = ("96%", "4%", "6 modules", "0 of 1", "blocks.0/weight/optimizer", "2 more", "Muon communicates")
    assert all(fact in covered.sentence() for fact in facts)
    assert covered.to_json()["missing"] == missing


def test_what_is_watched_or_only_failed_this_time_is_not_left_out():
    reasons = {
        "layers.0/weight.exp_avg": "differs by design: only some ranks hold it",
        "layers.1/layer": "rank 1: OutOfMemoryError: no memory",
        "layers.2/output": "nondeterministic kernel: atomics",
    }
    assert left_out(reasons) == {"nondeterministic kernel: atomics": ["layers.2/output"]}
