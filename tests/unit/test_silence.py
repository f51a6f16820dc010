"""When a silence is too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.config import ObserverConfig
from torchscout.decision.progress import Phase, Progress, Window
from torchscout.observer.silence import SilenceDetector, seconds_for, threshold

CONFIG = ObserverConfig(
    min_silence_seconds=5, silence_multiple=3, startup_seconds=300, repeat_seconds=10, poll_seconds=1
)
STEADY = [1.0] * 20


def progress(
    silent: float = 0.0, *, step: int = 7, operation: int = 3, phase: Phase = Phase.FORWARD
) -> Progress:
    return Progress(0, step, operation, phase, {}, Window(), at_communication=False, silent_seconds=silent)


@pytest.mark.parametrize(
    ("phase", "steps", "seconds"),
    [
        (Phase.OPTIMIZER, [1.0] * 990 + [50.0] * 10, 5.0),  # one step in a hundred may be longer
        (Phase.OPTIMIZER, [1.0] * 980 + [50.0] * 20, 150.0),
        (Phase.EVALUATION, [500.0], 1500.0),  # an allowance never shortens the usual
    ],
)
def test_the_threshold(phase: Phase, steps: list[float], seconds: float):
    """The usual ones are in ``tests/scenarios/test_hangs.py``."""
    assert threshold(CONFIG, phase, steps) == seconds


class Clock:
    """A trainer that went silent at 0, polled every second."""

    def __init__(self, config: ObserverConfig = CONFIG) -> None:
        self.detector = SilenceDetector(config)
        self.now = 0.0

    def due_until(
        self, end: float, *, paused: bool = False, since: float = 0.0, step: int = 7
    ) -> list[float]:
        """When a round was due; each is held at once."""
        times = []
        while self.now < end:
            self.now += 1
            seen = progress(self.now - since, step=step)
            if self.detector.is_due(seen, STEADY, paused=paused, now=self.now):
                times.append(self.now)
                self.detector.round_held(seen.coordinate, self.now)
        return times


def test_rounds_of_a_lasting_silence_repeat_at_growing_intervals():
    clock = Clock()
    assert clock.due_until(100) == [6, 16, 36, 76]
    assert clock.detector.rounds == 4
    assert clock.due_until(3000)[-2:] == [2416, 2716]  # never longer than five minutes


def test_a_rank_that_moved_starts_over():
    clock = Clock()
    clock.due_until(20)
    assert clock.due_until(30, since=21.0, step=8) == [27]
    assert clock.detector.rounds == 1


def test_a_round_announced_by_another_rank_counts():
    clock = Clock()
    clock.due_until(4)
    clock.detector.round_held(progress().coordinate, clock.now)
    assert clock.due_until(20) == [14]


def test_a_round_while_the_rank_moved_does_not_delay_its_next_one():
    clock = Clock()
    clock.detector.round_held((6, 0), 0.0)
    assert clock.due_until(10) == [6]


def test_nothing_is_due_while_paused_nor_right_after():
    clock = Clock()
    assert clock.due_until(50, paused=True) == []
    assert clock.due_until(60) == [56]  # though nothing was published for 50 s before


def test_time_while_the_observer_was_suspended_is_not_silence():
    clock = Clock()
    clock.due_until(2)
    clock.now = 1000.0  # the job was suspended
    assert clock.due_until(1010) == [1007]
    assert clock.detector.silent_seconds(progress(1010.0), 1010.0) == 9.0


def test_a_poll_that_is_a_little_late_changes_nothing():
    clock = Clock()
    clock.due_until(2)
    clock.now += 2.5
    assert clock.due_until(8) == [5.5]


def test_settings_can_change_while_it_watches():
    clock = Clock()
    assert clock.due_until(4) == []
    clock.detector.config = replace(CONFIG, min_silence_seconds=2.0, silence_multiple=1.0)
    assert clock.due_until(5) == [5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_silence_seconds", 0.0),
        ("evaluation_seconds", float("inf")),
        ("silence_multiple", 0.5),
        ("stack_signal", 10),
        ("port", 65529),
    ],
)
def test_settings_are_checked(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} must .*got {value}"):
        ObserverConfig(**{name: value})


def test_a_rank_close_to_its_timeout_announces_at_once():
    waiting, quick = progress(6.0, step=0), SilenceDetector(CONFIG)
    assert not quick.is_due(waiting, [], paused=False, now=200.0)
    assert quick.is_due(waiting, [], paused=False, now=200.1, near_timeout=True)
    assert not quick.is_due(waiting, [], paused=True, now=200.2, near_timeout=True)
    quick.round_held(waiting.coordinate, 200.3)
    assert not quick.is_due(waiting, [], paused=False, now=200.4, near_timeout=True), "once for a while"


@pytest.mark.parametrize(("size", "seconds"), [(3, 1.0), (1024, 1.0), (16_384, 1.768), (131_072, 7.5024)])
def test_time_limits_of_a_hub_grow_with_the_job(size: int, seconds: float):
    assert seconds_for(1.0, size) == pytest.approx(seconds)
