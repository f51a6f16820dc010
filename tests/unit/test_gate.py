"""What the gate refuses, when files are written, and the gate as a document.

Which checkpoints may be trusted is in ``scenarios/test_gate``, and ``test_gate_model`` walks through all
sequences of events.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import (
    Checked,
    Effects,
    Event,
    Lost,
    Outcome,
    Recovered,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.checkpoint.trust.generation import Generation

OUTCOMES = {
    "h": Outcome.HEALTHY,
    "s": Outcome.STRAGGLER,
    "?": Outcome.NOT_CHECKED,
    "r": Outcome.REJECTED,
    "x": Outcome.SDC,
}


def after_events(gate: CheckpointGate, *events: Event) -> tuple[CheckpointGate, list[Effects]]:
    effects = []
    for event in events:
        gate, effect = transition(gate, event)
        effects.append(effect)
    return gate, effects


def train(gate: CheckpointGate, outcomes: str, *, write: bool = True) -> CheckpointGate:
    """One check a step; what is captured is sealed, and what is to be persisted written, before the next."""
    for outcome in outcomes:
        if gate.pending is not None:
            gate, _ = transition(gate, Sealed(gate.pending))
        gate, effects = transition(gate, Checked(gate.step + 1, OUTCOMES[outcome]))
        if effects.capture:
            gate, _ = transition(gate, Sealed(effects.capture))
        if write and effects.persist:
            gate, _ = transition(gate, Written(effects.persist))
    return gate


def steps(gate: CheckpointGate) -> tuple[int | None, ...]:
    return tuple(each and each.step for each in (gate.latest, gate.candidate, gate.verified))


def test_whether_a_capture_is_sealed_is_known_before_the_next_check():
    gate, _ = after_events(CheckpointGate(), Checked(1, Outcome.HEALTHY))
    with pytest.raises(ValueError, match="report step 1 as sealed or lost before the next check"):
        transition(gate, Checked(2, Outcome.HEALTHY))
    with pytest.raises(ValueError, match="step 2 is not being captured; pending is step 1"):
        transition(gate, Sealed(Generation(2)))


def test_what_may_be_loaded():
    gate = train(CheckpointGate(recipes=1), "hhhh")
    with pytest.raises(ValueError, match="step 9 may not be loaded; available: step 2, step 3, step 4"):
        transition(gate, Recovered(Generation(9)))
    with pytest.raises(ValueError, match="step 3 of lineage 1 may not"):
        transition(gate, Recovered(Generation(3, 1)))
    with pytest.raises(ValueError, match="step 4 may not be loaded"):
        transition(train(gate, "x"), Recovered(Generation(4)))
    with pytest.raises(ValueError, match="cannot start from step 0 while step 3 is verified"):
        transition(gate, Recovered(None))


def test_a_job_that_lost_everything_starts_over_and_says_so():
    gate, effects = after_events(train(CheckpointGate(), "h"), Lost(Generation(1)), Recovered(None))
    assert "step 0 as lineage 1" in effects[-1].reason
    assert train(gate, "h").latest == Generation(1, lineage=1)


def in_files(gate: CheckpointGate) -> list[int]:
    return [each.step for each in gate.durable]


def test_a_candidate_that_is_still_being_written_waits_for_the_next_check():
    gate = train(CheckpointGate(recipes=2, persist_every=9), "hhhhh", write=False)
    assert steps(gate) == (5, 2, None)
    gate, _ = after_events(gate, Written(Generation(2)))
    assert steps(train(gate, "h")) == (6, 6, 2)


def test_within_a_long_cycle_files_are_written_in_between_and_are_never_promoted():
    gate, seen = CheckpointGate(recipes=7, persist_every=2, keep=0), []
    for _ in range(14):
        gate = train(gate, "h")
        seen.append((gate.interim and gate.interim.step, in_files(gate)))
    assert seen[:8] == [
        (None, []),
        (2, [2]),
        (2, [2]),
        (4, [4]),
        (4, [4]),
        (6, [6]),
        (None, [7]),  # the end of the cycle
        (None, [7]),
    ]
    assert seen[8] == (9, [7, 9])
    assert (steps(gate), seen[-1]) == ((14, 14, 7), (None, [7, 14]))


def test_files_in_between_that_are_late_delay_the_end_of_a_cycle_by_a_check():
    gate = train(CheckpointGate(recipes=3, persist_every=2), "hhh", write=False)
    assert (steps(gate), gate.writing) == ((3, None, None), Generation(2))
    gate, _ = after_events(gate, Written(Generation(2)))
    assert steps(train(gate, "h")) == (4, 4, None)


def written_of(gate: CheckpointGate, checks: int) -> list[int]:
    written = []
    for step in range(gate.step + 1, gate.step + checks + 1):
        gate, effects = transition(gate, Checked(step, Outcome.HEALTHY))
        gate, _ = transition(gate, Sealed(Generation(step, gate.lineage)))
        if effects.persist:
            written.append(step)
            gate, _ = transition(gate, Written(effects.persist))
    return written


def test_the_first_certified_generation_is_written_and_then_every_third():
    assert written_of(CheckpointGate(persist_every=3), 9) == [1, 4, 7]


def test_after_a_recovery_from_memory_the_next_one_is_written():
    gate = CheckpointGate(persist_every=5)
    lost, _ = after_events(gate, Checked(1, Outcome.HEALTHY), Lost(Generation(1)))
    assert written_of(lost, 3) == [2], "the first that is not lost"
    failed, _ = after_events(train(gate, "h", write=False), WriteFailed(Generation(1)))
    from_memory, _ = after_events(failed, Recovered(Generation(1)))
    assert written_of(from_memory, 3) == [2]
    from_files, _ = after_events(failed, Recovered(Generation(1), in_files=True))
    assert from_files.durable == (Generation(1),)
    assert written_of(from_files, 6) == [6]


def test_as_many_older_ones_are_kept_as_asked_for():
    gate = train(CheckpointGate(recipes=1, keep=2), "h" * 8)
    assert [each.step for each in gate.trusted] == [5, 6, 7]


@pytest.mark.parametrize("event", [Checked(3, Outcome.HEALTHY), Checked(1, Outcome.SDC)])
def test_checks_come_in_the_order_of_training(event: Event):
    with pytest.raises(ValueError, match="cannot follow step 3"):
        transition(train(CheckpointGate(), "hhh"), event)


def test_a_check_that_counts_has_a_recipe():
    with pytest.raises(ValueError, match="at least 1 recipe, not 0"):
        transition(CheckpointGate(recipes=5), Checked(1, Outcome.HEALTHY, 0))


def test_a_disk_that_stays_full_is_not_tried_at_every_check():
    gate = train(CheckpointGate(persist_every=3), "h", write=False)
    gate, _ = after_events(gate, WriteFailed(Generation(1)))
    assert train(gate, "h").durable == ()


def test_a_state_survives_json():
    gate = train(train(CheckpointGate(recipes=2, keep=3), "hhhhh"), "h", write=False)
    gate, _ = after_events(gate, Checked(7, Outcome.HEALTHY))
    assert gate.pending
    assert CheckpointGate.from_json(json.loads(json.dumps(gate.to_json()))) == gate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "of schema 1"),
        ({"extra": 1}, "unknown fields .* state: .'extra'"),
        ({"accepted": 2}, "do not fit a cycle of 2"),
        ({"accepted": True}, "accepted must be a whole number"),
        ({"recipes": 0}, "recipes must be a whole number of at least 1"),
        ({"keep": -1}, "keep must be"),
        ({"lineage": None}, "lineage must be"),
        ({"trusted": 5}, "must be lists"),
        ({"trusted": [[2]]}, "a generation is a step and a lineage"),
        ({"trusted": [[2, 0], [1, 0]]}, "ascending"),
        ({"captured": [[1, 0], [2, 0], [3, 0]]}, "two generations at most"),
        ({"candidate": [1, 0]}, "newer than what is verified"),
        ({"poisoned": 4}, "only what is trusted remains"),
        ({"durable": [[3, 0]]}, "is durable"),
        ({"writing": [3, 0], "recipes": None, "candidate": None, "durable": [[2, 0]]}, "writes only"),
        ({"interim": [3, 0]}, "is in files"),
        ({"interim": [2, 0]}, "newer than other files"),
        ({"writing": [2, 0]}, "not durable yet"),
        ({"step": 3}, "newer than the last check"),
        ({"recipes": None}, "no candidate"),
        ({"pending": [4, 0]}, "newer than all that is sealed"),
        ({"pending": [5, 0]}, "newer than the last check"),
        (
            {"pending": [5, 0], "step": 5, "poisoned": 5, "captured": [], "candidate": None, "durable": []},
            "nothing is pending after corruption",
        ),
    ],
)
def test_a_state_that_cannot_exist_is_refused(change: dict[str, Any], message: str):
    document = train(CheckpointGate(recipes=2), "hhhh").to_json()
    with pytest.raises(ValueError, match=message):
        CheckpointGate.from_json({**document, **change})


@pytest.mark.parametrize("document", [None, [], {}, {"schema": 1}])
def test_what_is_no_state_is_refused(document: object):
    with pytest.raises(ValueError, match="checkpoint gate"):
        CheckpointGate.from_json(document)


def test_a_state_of_an_earlier_version_is_read():
    document = train(CheckpointGate(), "hh").to_json()
    del document["pending"], document["interim"]
    document["captured"] = [[1, 0], [2, 0]]
    read = CheckpointGate.from_json(document)
    assert (read.pending, read.latest) == (None, Generation(2))


def test_memory_holds_the_latest_and_what_is_being_captured_and_what_still_goes_to_files():
    gate, _ = after_events(train(CheckpointGate(keep=5), "hhh", write=False), Checked(4, Outcome.HEALTHY))
    assert [each.step for each in sorted(gate.in_memory)] == [1, 3, 4]
    gate, _ = after_events(gate, Written(Generation(1, 0)))
    assert [each.step for each in sorted(gate.in_memory)] == [3, 4]
    assert Generation(1, 0) in gate.held
