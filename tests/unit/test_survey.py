"""When an observer asks for a survey: which durations call for one, and how often."""

from __future__ import annotations

import itertools

import pytest

from torchscout.config import ObserverConfig
from torchscout.decision.progress import Phase
from torchscout.observer.trainer import SAMPLES, SurveySchedule, typical_seconds

CONFIG = ObserverConfig(repeat_seconds=10.0)
STEPS = [1.0] * 20
_jitter = itertools.count()


def times(seconds: float, count: int) -> list[float]:
    """As measured: no two are the same."""
    return [seconds + 1e-9 * next(_jitter) for _ in range(count)]


def durations(phase: Phase = Phase.INPUT, values: list[float] | None = None) -> dict[Phase, list[float]]:
    return {each: [] for each in SAMPLES} | {phase: values or []}


@pytest.mark.parametrize(
    ("values", "due"),
    [
        pytest.param(times(0.3, 5), True, id="slow from the start"),
        pytest.param(times(0.3, 4), False, id="too few to tell"),
        pytest.param(times(0.1, 40), False, id="a tenth of the step, as ever"),
        pytest.param(times(0.02, 20) + times(0.1, 5), True, id="a tenth of the step, five times the usual"),
        pytest.param(times(0.001, 20) + times(0.03, 5), False, id="much slower but still nothing"),
        pytest.param(times(0.02, 20) + times(0.9, 2), False, id="two slow batches"),
    ],
)
def test_durations_that_call_for_a_survey(values: list[float], due: bool):
    assert SurveySchedule(CONFIG).is_due(durations(values=values), STEPS, 0.0) is due


def test_durations_below_phase_ms_or_before_the_first_steps_call_for_none():
    for seconds, steps in ((0.009, [0.01] * 20), (0.3, []), (0.3, [0.0]), (0.3, [0.0, 2.0])):
        assert not SurveySchedule(CONFIG).is_due(durations(values=times(seconds, 20)), steps, 0.0)


def test_surveys_repeat_at_growing_intervals():
    schedule, asked, values = SurveySchedule(CONFIG), [], []
    for now in range(200):
        values = (values + times(0.3, 1))[-64:]
        if schedule.is_due(durations(values=values), STEPS, now):
            asked.append(now)
            schedule.announced(now)
            schedule.held(durations(values=values), now)
    assert asked == [4, 14, 34, 74, 154]


def test_after_a_long_calm_intervals_start_over():
    schedule = SurveySchedule(CONFIG)
    for now in (0.0, 10.0, 30.0, 70.0, 1000.0):
        schedule.held(durations(), now)
    slow = durations(values=times(0.3, 5))
    assert not schedule.is_due(slow, STEPS, 1009.0)
    assert schedule.is_due(slow, STEPS, 1010.0)


def test_intervals_are_bounded():
    schedule = SurveySchedule(CONFIG)
    for now in range(5000):
        schedule.held(durations(), now)
    assert schedule.is_due(durations(values=times(0.3, 5)), STEPS, 4999.0 + 300.0)


def test_the_same_durations_are_not_compared_twice():
    schedule, values = SurveySchedule(CONFIG), times(0.3, 5)
    schedule.held(durations(values=values), 0.0)
    values += times(0.3, 4)
    assert not schedule.is_due(durations(values=values), STEPS, 99.0)
    values += times(0.3, 1)
    assert schedule.is_due(durations(values=values), STEPS, 99.0)


def test_a_survey_that_no_hub_held_is_announced_again():
    schedule, slow = SurveySchedule(CONFIG), durations(values=times(0.3, 5))
    schedule.announced(0.0)
    assert not schedule.is_due(slow, STEPS, 9.0)
    assert schedule.is_due(slow, STEPS, 10.0)


def test_a_phase_that_became_slow_is_surveyed_again():
    schedule, before = SurveySchedule(CONFIG), times(0.01, 40)
    assert schedule.is_due(durations(values=before + times(0.1, 5)), STEPS, 0.0)
    schedule.held(durations(values=before + times(0.1, 5)), 0.0)
    assert schedule.is_due(durations(values=times(0.1, 64)), STEPS, 10.0)
    assert not schedule.is_due(durations(values=times(0.1, 64)), STEPS, 100.0)


@pytest.mark.parametrize(("every", "due"), [(100.0, False), (6.0, True)])
def test_checkpoints_are_compared_with_how_often_they_are_written(every: float, due: bool):
    """Two seconds are longer than a step, which is nothing remarkable."""
    schedule, values, asked = SurveySchedule(CONFIG), [], False
    for count in range(8):
        values += times(2.0, 1)
        asked |= schedule.is_due(durations(Phase.CHECKPOINT_WRITE, values), STEPS, count * every)
    assert asked is due


def test_a_checkpoint_that_became_slow_is_remarkable():
    schedule, values, asked = SurveySchedule(CONFIG), [], []
    for count in range(8):
        values += times(1.0 if count < 4 else 9.0, 1)
        if schedule.is_due(durations(Phase.CHECKPOINT_WRITE, values), STEPS, count * 100.0):
            asked.append(count)
    assert asked == [5, 6, 7]


def test_the_reported_duration_is_the_median_of_the_latest():
    values = [9.0] * 20 + [1.0, 2.0, 3.0, 4.0, 50.0]
    assert typical_seconds(durations(values=values)) == {Phase.INPUT: 3.0}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("phase_share", 0, "phase_share must lie between 0 and 1, got 0"),
        ("phase_share", 1, "phase_share must lie between 0 and 1, got 1"),
        ("phase_ms", -1, "phase_ms must not be negative and must be finite, got -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: float, message: str):
    with pytest.raises(ValueError, match=message):
        ObserverConfig(**{field: value})
