"""What the gate refuses, when files are written, and the gate as a document.

Which checkpoints may be trusted is in ``scenarios/test_gate``, and ``test_gate_model`` walks through all
sequences of events.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gates import finished, train
from torchscout.checkpoint.gate import (
    Changed,
    Checked,
    CheckpointGate,
    Event,
    Generation,
    Outcome,
    Recovered,
    transition,
)


def after_events(gate: CheckpointGate, *events: Event) -> CheckpointGate:
    for event in events:
        gate, _ = transition(gate, event)
    return gate


def steps(gate: CheckpointGate) -> tuple[int | None, ...]:
    return tuple(each and each.step for each in (gate.latest, gate.candidate, gate.verified))


def in_files(gate: CheckpointGate) -> list[int]:
    return [each.step for each in gate.in_files]


def test_whether_a_capture_is_sealed_is_known_before_the_next_check():
    gate = after_events(CheckpointGate(), Checked(1, Outcome.HEALTHY))
    with pytest.raises(ValueError, match="report step 1 as sealed or lost before the next check"):
        transition(gate, Checked(2, Outcome.HEALTHY))
    with pytest.raises(ValueError, match="step 2 is not being captured; pending is step 1"):
        transition(gate, Changed("sealed", Generation(2)))


def test_one_capture_at_a_time_waits_for_its_verdict():
    gate = after_events(train(CheckpointGate(), "hh"), Changed("begun", Generation(3)))
    for step in (2, 4):
        with pytest.raises(ValueError, match=f"step {step} cannot be captured before the verdict"):
            transition(gate, Changed("begun", Generation(step)))


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


def test_a_job_that_lost_everything_starts_over():
    gate = after_events(train(CheckpointGate(), "h"), Changed("lost", Generation(1)), Recovered(None))
    assert train(gate, "h").latest == Generation(1, lineage=1)


@pytest.mark.parametrize("event", [Checked(3, Outcome.HEALTHY), Checked(1, Outcome.SDC)])
def test_checks_come_in_the_order_of_training(event: Event):
    with pytest.raises(ValueError, match="cannot follow step 3"):
        transition(train(CheckpointGate(), "hhh"), event)


def test_a_candidate_has_files():
    gate = train(CheckpointGate(recipes=2, persist_every=9), "hhhhh", write=False)
    assert steps(gate) == (5, None, None)
    gate = after_events(gate, Changed("written", Generation(2)))
    assert steps(gate) == (5, 2, None)
    assert steps(train(gate, "h")) == (6, 6, 2)


def test_within_a_long_cycle_files_are_written_in_between_and_are_never_promoted():
    gate, seen = CheckpointGate(recipes=7, persist_every=2, keep=0), []
    for _ in range(14):
        gate = train(gate, "h")
        seen.append((gate.interim and gate.interim.step, in_files(gate)))
    within = [(None, []), (2, [2]), (2, [2]), (4, [4]), (4, [4]), (6, [6])]
    assert seen[:8] == [*within, (None, [7]), (None, [7])]
    assert seen[8] == (9, [7, 9])
    assert (steps(gate), seen[-1]) == ((14, 14, 7), (None, [7, 14]))


def test_verified_files_are_not_called_candidates_in_between():
    gate = train(CheckpointGate(persist_every=2), "hh")
    assert (steps(gate), in_files(gate), gate.interim) == ((2, None, 2), [1], None)


def test_files_in_between_that_are_late_delay_the_end_of_a_cycle_by_a_check():
    gate = train(CheckpointGate(recipes=3, persist_every=2), "hhh", write=False)
    assert (steps(gate), gate.writing) == ((3, None, None), Generation(2))
    gate = after_events(gate, Changed("written", Generation(2)))
    assert steps(train(gate, "h")) == (4, 4, None)


def test_a_check_after_which_nothing_can_be_captured_counts_for_the_cycle():
    unready = Checked(3, Outcome.HEALTHY, can_capture=False)
    gate = after_events(train(CheckpointGate(recipes=3), "hh"), unready)
    assert steps(gate) == (2, None, None)
    assert steps(train(gate, "h")) == (4, 4, None), "the three before it were accepted in a row"
    promoted = after_events(train(CheckpointGate(recipes=1), "hh"), unready)
    assert steps(promoted) == (2, None, 2), "what was captured before it needs no other capture"
    assert steps(after_events(train(CheckpointGate(), "hh"), unready)) == (2, None, 2)


def written_of(gate: CheckpointGate, checks: int) -> list[int]:
    written = []
    for step in range(gate.step + 1, gate.step + checks + 1):
        gate, effects = transition(gate, Checked(step, Outcome.HEALTHY))
        assert effects.capture is not None
        written += [step] * effects.capture.due
        gate = finished(gate, effects.capture)
    return written


def test_the_first_certified_generation_is_written_and_then_every_third():
    assert written_of(CheckpointGate(persist_every=3), 9) == [1, 4, 7]


def test_after_a_recovery_from_memory_the_next_one_is_written():
    gate = CheckpointGate(persist_every=5)
    lost = after_events(gate, Checked(1, Outcome.HEALTHY), Changed("lost", Generation(1)))
    assert written_of(lost, 3) == [2], "the first that is not lost"
    failed = after_events(train(gate, "h", write=False), Changed("write_failed", Generation(1)))
    assert written_of(after_events(failed, Recovered(Generation(1))), 3) == [2]
    from_files = after_events(failed, Recovered(Generation(1), in_files=True))
    assert in_files(from_files) == [1]
    assert written_of(from_files, 6) == [6]


def test_a_disk_that_stays_full_is_not_tried_at_every_check():
    gate = train(CheckpointGate(persist_every=3), "h", write=False)
    gate = after_events(gate, Changed("write_failed", Generation(1)))
    assert written_of(gate, 4) == [3]


def test_as_many_older_ones_are_kept_as_asked_for():
    gate = train(CheckpointGate(recipes=1, keep=2), "h" * 8)
    assert [each.step for each in gate.trusted] == [5, 6, 7]


def test_memory_holds_the_latest_and_what_is_being_captured_and_what_still_goes_to_files():
    gate = after_events(train(CheckpointGate(keep=5), "hhh", write=False), Checked(4, Outcome.HEALTHY))
    assert [each.step for each in sorted(gate.in_memory)] == [1, 3, 4]
    gate = after_events(gate, Changed("written", Generation(1)))
    assert [each.step for each in sorted(gate.in_memory)] == [3, 4]
    assert Generation(1) in gate.held


def test_a_state_survives_json():
    gate = train(train(CheckpointGate(recipes=2, keep=3), "hhhhh"), "h", write=False)
    gate = after_events(gate, Checked(7, Outcome.HEALTHY))
    assert gate.pending
    assert CheckpointGate.from_json(json.loads(json.dumps(gate.to_json()))) == gate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "not the state of a checkpoint gate"),
        ({"accepted_recipes": 2}, "do not fit a cycle of 2"),
        ({"accepted_recipes": True}, "accepted_recipes must be a whole number"),
        ({"recipes": 0}, "recipes must be a whole number of at least 1"),
        ({"keep": -1}, "keep must be"),
        ({"lineage": None}, "lineage must be"),
        ({"rows": 5}, "must be a list"),
        ({"rows": [{"generation": [2]}]}, "a generation is a step and a lineage"),
        ({"rows": [{"generation": [2, 0], "sealed": True}]}, "other fields than"),
        ({"rows": [{**train(CheckpointGate(), "h").to_json()["rows"][0], "due": 1}]}, "other fields than"),
        ({"poisoned": 4}, "only what is verified is sealed"),
        ({"step": 3}, "newer than the last check"),
        ({"recipes": None}, "no cycle"),
    ],
)
def test_a_state_that_cannot_exist_is_refused(change: dict[str, Any], message: str):
    document = train(CheckpointGate(recipes=2), "hhhh").to_json()
    with pytest.raises(ValueError, match=message):
        CheckpointGate.from_json({**document, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sealed": False}, "what is in memory, in files or verified is sealed"),
        ({"accepted": False}, "what is sealed or due was accepted"),
        ({"due": True}, "what is due is not in files yet"),
        ({"generation": [4, 1]}, "newer than the last check"),
        ({"generation": [1, 0]}, "ascending steps"),
    ],
)
def test_a_row_that_cannot_exist_is_refused(change: dict[str, Any], message: str):
    document = train(CheckpointGate(recipes=2), "hhhh").to_json()
    document["rows"][-1] |= change
    with pytest.raises(ValueError, match=message):
        CheckpointGate.from_json(document)


@pytest.mark.parametrize("document", [None, [], {}, {"schema": 1}])
def test_what_is_no_state_is_refused(document: object):
    with pytest.raises(ValueError, match="checkpoint gate"):
        CheckpointGate.from_json(document)
