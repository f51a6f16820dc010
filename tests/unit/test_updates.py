"""Listeners to the updates of an optimizer without hooks, added and removed in any order."""

from __future__ import annotations

import pytest

from torchscout.adapters.base import UpdateHooks


class Wrapped:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, scale: float = 1.0) -> float:
        self.calls.append("step")
        return 2 * scale


def listening(updates: UpdateHooks, events: list[str], name: str):
    return updates.add(lambda: events.append(f"{name} before"), lambda: events.append(f"{name} after"))


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_removing_one_listener_leaves_the_other_in_place(first_to_leave: int):
    optimizer, events = Wrapped(), list[str]()
    updates = UpdateHooks(optimizer)
    leave = [listening(updates, events, name) for name in "ab"]
    assert optimizer.step(scale=3) == 6
    assert events == ["a before", "b before", "a after", "b after"]
    leave[first_to_leave]()
    events.clear()
    optimizer.step()
    stays = "ba"[first_to_leave]
    assert events == [f"{stays} before", f"{stays} after"]
    leave[1 - first_to_leave]()
    leave[first_to_leave]()
    events.clear()
    optimizer.step()
    assert (events, vars(optimizer).keys()) == ([], {"calls"})
    assert optimizer.calls == ["step"] * 3


def test_an_instance_attribute_step_is_restored():
    optimizer = Wrapped()
    own = optimizer.step = lambda: 7
    leave = UpdateHooks(optimizer).add(lambda: None, lambda: None)
    assert optimizer.step is not own
    assert optimizer.step() == 7
    leave()
    assert optimizer.step is own


def test_the_context_is_entered_with_the_first_listener_and_left_with_the_last():
    events: list[str] = []

    def meanwhile():
        events.append("begun")
        return lambda: events.append("ended")

    updates = UpdateHooks(Wrapped(), meanwhile)
    for _ in range(2):
        leave = [updates.add(lambda: None, lambda: None) for _ in range(2)]
        assert events == ["begun"]
        for each in leave:
            each()
        assert events == ["begun", "ended"]
        events.clear()


def test_an_update_that_fails_ends_no_step():
    optimizer, events = Wrapped(), list[str]()
    optimizer.step = lambda: 1 / 0
    listening(UpdateHooks(optimizer), events, "a")
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert events == ["a before"]
