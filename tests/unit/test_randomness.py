"""Random streams: the same on every peer in replay, and restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from tests.support.replay_by_hand import CPU
from torchscout.replay.capture.context import RngState, preserved_rng, register_tracker, seeded


class Streams:
    """A framework's own streams, as model-parallel ones are kept."""

    def __init__(self, **seeds: int) -> None:
        self.generators = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}

    def get_states(self) -> Mapping[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        assert states.keys() == self.generators.keys()
        for name, state in states.items():
            self.generators[name].set_state(state)

    def draw(self) -> list[float]:
        return [torch.rand((), generator=each).item() for each in self.generators.values()]


@pytest.fixture
def streams():
    tracker = Streams(model=1, expert=2)
    forget = register_tracker("framework", tracker)
    yield tracker
    forget()


def everything(streams: Streams) -> tuple:
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist(), streams.draw()


def test_a_captured_state_does_not_move_with_the_stream(streams: Streams):
    captured = RngState.now(CPU)
    before = {name: state.clone() for name, state in captured.states.items()}
    everything(streams)
    assert all(torch.equal(before[name], state) for name, state in captured.states.items())


def test_a_tracker_may_hand_out_its_own_memory():
    class Live:
        state = torch.zeros(4, dtype=torch.uint8)

        def get_states(self) -> Mapping[str, torch.Tensor]:
            return {"one": self.state}

        def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
            self.state.copy_(states["one"])

    tracker = Live()
    forget = register_tracker("live", tracker)
    try:
        with preserved_rng(CPU):
            tracker.state.add_(1)
    finally:
        forget()
    assert tracker.state.tolist() == [0] * 4


def test_after_applying_everything_draws_alike_wherever_it_stood(streams: Streams):
    captured = RngState.now(CPU)
    captured.apply(CPU)
    one = everything(streams)
    torch.manual_seed(98)
    random.seed(98)
    np.random.seed(98)
    captured.apply(CPU)
    assert everything(streams) == one


def standing(streams: Streams) -> tuple:
    """Seed everything; what would be drawn from here."""
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    expected = everything(streams)
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    streams.generators["model"].manual_seed(1)
    streams.generators["expert"].manual_seed(2)
    return expected


def test_draws_inside_do_not_change_the_outer_state(streams: Streams):
    expected = standing(streams)
    with preserved_rng(CPU):
        RngState.now(CPU).apply(CPU)
        everything(streams)
    assert everything(streams) == expected


def test_an_exception_inside_does_not_change_the_outer_state(streams: Streams):
    expected = standing(streams)

    def failing() -> None:
        with preserved_rng(CPU):
            everything(streams)
            raise RuntimeError("in the layer")

    with pytest.raises(RuntimeError, match="in the layer"):
        failing()
    assert everything(streams) == expected


def test_a_name_is_registered_once_and_can_be_unregistered(streams: Streams):
    with pytest.raises(ValueError, match="'framework' is already registered"):
        register_tracker("framework", Streams())
    forget = register_tracker("another", Streams(one=1))
    assert "another/one" in RngState.now(CPU).states
    forget()
    assert "another/one" not in RngState.now(CPU).states
    again = register_tracker("another", Streams(two=2))
    forget()
    assert "another/two" in RngState.now(CPU).states, "what was taken back once is not its to take"
    again()


@pytest.mark.parametrize("name", ["", "framework/model"])
def test_an_ambiguous_tracker_name_is_refused(name: str):
    with pytest.raises(ValueError, match="contain no '/'"):
        register_tracker(name, Streams())


def test_trackers_of_similar_names_are_kept_apart(streams: Streams):
    other = Streams(model=9)
    forget = register_tracker("frame", other)
    try:
        captured = RngState.now(CPU)
        first = streams.draw(), other.draw()
        captured.apply(CPU)
        assert (streams.draw(), other.draw()) == first
    finally:
        forget()


STREAMS = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand((), generator=g).item()),
    "python": (random.Random, random.Random.random),
    "numpy": (np.random.default_rng, lambda g: g.random()),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_seeded_generator_draws_alike_on_peers_and_is_restored(kind: str):
    make, draw = STREAMS[kind]
    twin, one, other = make(1), make(1), make(2)
    draw(twin), draw(one)
    backs = [seeded(one, 77), seeded(other, 77)]
    assert [draw(one) for _ in range(3)] == [draw(other) for _ in range(3)]
    for back in backs:
        back()
    assert draw(one) == draw(twin)


def test_objects_that_are_not_generators_are_not_seeded():
    assert [seeded(value, 1) for value in (None, 3, "text", torch.rand(2), random)] == [None] * 5
