"""Attribution of a disagreement: how many replays name a rank, and what is remembered."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from torchscout.decision.consensus.rules import exact
from torchscout.decision.records.record import EvidenceRecord, Manifestation
from torchscout.decision.repeatability import (
    BIAS,
    CHANCE,
    MAX_REPLAYS,
    Repeatability,
    Repeated,
    SurfaceHistory,
    unmet,
)

Round = Sequence[int]
PERSISTENT, INTERMITTENT = Repeatability.PERSISTENT, Repeatability.INTERMITTENT
NONDETERMINISTIC, UNDECIDED = Repeatability.NONDETERMINISTIC, Repeatability.UNDECIDED


def record(values: Round, *, surface: str = "layer.3/grad_input", **context) -> EvidenceRecord:
    return EvidenceRecord(
        step=20,
        surface=surface,
        manifestation=Manifestation.SDC,
        peers=tuple(10 + place for place in range(len(values))),
        verdict=exact(values),
        layer="layer.3",
        mode="backward",
        **context,
    )


def checked(
    history: SurfaceHistory, rounds: Callable[[int], Round], *, among: int = 1, is_held: bool = False
) -> Repeated | None:
    """One check whose n-th replay gives ``rounds(n)``; None if the first finds nothing."""
    first = record(rounds(0))
    if first.scope is None or history.reason(first.surface, first.layer) is not None:
        return None
    trial = history.trial(first, among=among, is_held=is_held)
    place = 0
    while trial.is_open:
        place += 1
        trial.observe(first.peers, rounds(place))
    return history.conclude(trial)


def needed(peers: int, among: int = 1) -> int:
    """By hand: a lone difference is the suspect's with b / (b + N - 1); N suspects, weight 2/3 and so on."""
    share = 2 * (1 - 2.0 ** -((peers - 1) // 2))
    return math.ceil(math.log(CHANCE / among / peers / share) / math.log(BIAS / (BIAS + peers - 1)))


@pytest.mark.parametrize("peers", [3, 4, 5, 8, 16, 128])
@pytest.mark.parametrize("among", [1, 100])
def test_a_persistent_rank_is_named_as_soon_as_chance_is_excluded(peers: int, among: int):
    found = checked(SurfaceHistory(), lambda _: [9] + [7] * (peers - 1), among=among)
    assert (found.kind, found.record.ranks) == (PERSISTENT, (10,))
    assert found.replays == found.differing == needed(peers, among)
    assert len(found.again) == 1
    assert found.replays <= MAX_REPLAYS


def test_the_smallest_jobs_need_less_than_what_is_allowed_even_with_thousands_of_surfaces():
    assert needed(3, 10_000) <= MAX_REPLAYS


def test_other_wrong_numbers_each_time_are_intermittent():
    found = checked(SurfaceHistory(), lambda place: [7, 7, 100 + place, 7])
    assert (found.kind, found.record.ranks) == (INTERMITTENT, (12,))
    assert found.differing == found.replays == needed(4)
    assert len(found.again) == found.replays - 1


def test_replays_in_which_all_agree_are_no_evidence():
    found = checked(SurfaceHistory(), lambda place: [7, 7, 7 if place % 2 else 9, 7, 7, 7, 7, 7])
    assert (found.kind, found.record.ranks) == (INTERMITTENT, (12,))
    assert found.differing == needed(8)
    assert found.replays == 2 * needed(8) - 1


@pytest.mark.parametrize("second", [[7, 5, 9, 7], [7, 5, 7, 7], [6, 6, 9, 6], [1, 2, 3, 4], [9, 9, 9, 9]])
def test_one_innocent_that_changes_means_the_kernel(second: Round):
    history = SurfaceHistory()
    found = checked(history, lambda place: second if place else [7, 7, 9, 7])
    assert (found.kind, found.replays) == (NONDETERMINISTIC, 2)
    assert (found.record.status, found.record.ranks) == ("not_checked", ())
    assert found.record.reason.startswith("nondeterministic kernel: replayed twice, rank")
    assert history.not_repeating() == {"layer.3/grad_input": found.record.reason}
    assert checked(history, lambda _: [7, 7, 9, 7]) is None, "it is left out for good"


def test_a_rare_difference_is_kept_and_added_up_over_checks():
    history, checks = SurfaceHistory(), 0
    once = [7, 7, 9, 7]
    while (found := checked(history, lambda place: once if place % 8 == 0 else [7] * 4)).kind is UNDECIDED:
        checks += 1
        assert found.record.status == "not_checked"
        assert found.record.reason.startswith("undecided: rank 12 differed 8 times in 64 replays")
        assert history.not_repeating() == {}
    assert found.kind is INTERMITTENT
    assert found.record.ranks == (12,)
    assert found.earlier == 8 * checks
    assert found.earlier + found.differing == needed(4)


def test_two_ranks_that_differ_in_different_checks_mean_the_kernel():
    history = SurfaceHistory()
    found = checked(history, lambda place: [7] * 8 if place else [7, 7, 9, 7, 7, 7, 7, 7])
    assert found.kind is UNDECIDED
    found = checked(history, lambda place: [7] * 8 if place else [7, 7, 7, 7, 9, 7, 7, 7])
    assert (found.kind, found.replays) == (NONDETERMINISTIC, 1)
    assert "ranks 12 and 14 did not repeat" in found.record.reason


def test_two_of_five_that_are_wrong_in_every_replay_are_both_named():
    found = checked(SurfaceHistory(), lambda _: [7, 9, 7, 8, 7])
    assert (found.kind, found.record.ranks) == (PERSISTENT, (11, 13))
    assert found.replays < needed(5), "two of five at once are rarer than one"


@pytest.mark.parametrize("values", [[7, 9], [7, 7, 9, 9], [1, 2, 3]])
def test_without_a_majority_it_must_repeat_and_nobody_is_named(values: Round):
    found = checked(SurfaceHistory(), lambda _: values)
    assert (found.kind, found.record.ranks) == (PERSISTENT, ())
    assert found.record.scope is not None
    ways = {2: 2, 4: 6, 3: 6}[len(values)]
    assert found.replays == 1 + math.ceil(math.log(1 / CHANCE) / math.log(ways))
    history = SurfaceHistory()
    found = checked(history, lambda place: values if place < 5 else values[::-1])
    assert (found.kind, found.replays) == (NONDETERMINISTIC, 6)
    assert history.not_repeating()


def test_held_state_is_read_once_more_and_its_rank_named_at_once():
    found = checked(SurfaceHistory(), lambda _: [7, 7, 9, 7], is_held=True)
    assert (found.kind, found.replays, found.record.ranks) == (PERSISTENT, 2, (12,))
    found = checked(SurfaceHistory(), lambda place: [7, 7, 7 if place else 9, 7], is_held=True)
    assert (found.kind, found.differing, found.record.ranks) == (INTERMITTENT, 1, (12,))
    found = checked(SurfaceHistory(), lambda place: [7, 5 if place else 7, 9, 7], is_held=True)
    assert (found.kind, found.record.ranks) == (NONDETERMINISTIC, ())


def test_a_rank_that_is_named_already_is_named_again_after_one_more_replay():
    history = SurfaceHistory()
    checked(history, lambda _: [7, 7, 9, 7])
    again = checked(history, lambda _: [7, 7, 9, 7])
    assert (again.replays, again.record.ranks) == (2, (12,))
    other = checked(history, lambda _: [7, 9, 7, 7])
    assert other.replays == needed(4), "of another rank nothing is known"


def test_a_replay_that_a_rank_failed_in_ends_the_trial():
    trial = SurfaceHistory().trial(record([7, 7, 9, 7]), among=1, is_held=False)
    trial.observe((10, 11, 12), [7, 7, 9])
    assert not trial.is_open
    assert trial.conclude().kind is UNDECIDED


def test_required_surfaces_that_were_left_out_are_reported():
    history = SurfaceHistory()
    noisy = checked(history, lambda place: [place, 7, 9, 7]).record
    for require in (("backward",), ("layer.*/grad_input",), ("forward", "*/grad_*")):
        assert unmet([noisy], require) == {"layer.3/grad_input": noisy.reason}
    for require in ((), ("forward",), ("layer.4/*",)):
        assert unmet([noisy, record([7] * 4)], require) == {}


def test_of_which_target_a_surface_does_not_repeat_is_said_where_its_name_does_not():
    history = SurfaceHistory()
    history.leave_out("optimizer/param", "stack.0.up/weight", "atomics")
    history.leave_out("stack.0/output", "stack.0", "atomics")
    assert {*history.not_repeating()} == {"optimizer/param (of stack.0.up/weight)", "stack.0/output"}
    assert history.reason("optimizer/param", "stack.0.down/weight") is None


def draws(rates: Sequence[float], results: int, source: random.Random) -> Callable[[int], Round]:
    """A kernel that differs on each rank at its own rate, with one of so many other results."""
    return lambda _: [source.randrange(1, results) if source.random() < rate else 0 for rate in rates]


@pytest.mark.parametrize("peers", [3, 8, 64])
@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 1e-3])
def test_a_nondeterministic_kernel_never_names_a_rank(peers: int, rate: float):
    """The whole of it: ``benchmarks/repeatability.py``."""
    source = random.Random(peers)
    for _ in range(100):
        odds = [rate / (1 - rate) * source.uniform(1, BIAS) / BIAS for _ in range(peers)]
        kernel = draws([each / (1 + each) for each in odds], source.choice((2, 3, 64)), source)
        history = SurfaceHistory()
        for _ in range(20):
            found = checked(history, kernel)
            assert found is None or found.record.scope is None, found


@pytest.mark.parametrize("peers", [1024, 16384])
def test_a_kernel_that_differs_on_almost_half_of_many_ranks_names_none_of_them(peers: int):
    source, few = random.Random(0), peers // 2 - 1
    kernel = [7] * (peers - few) + [9] * few
    found = checked(SurfaceHistory(), lambda _: source.sample(kernel, peers))
    assert (found.kind, found.record.ranks) == (NONDETERMINISTIC, ())
    assert found.replays == 2, "one replay does not distinguish so many ranks from a kernel"


def test_almost_half_of_many_ranks_that_are_wrong_in_every_replay_are_named():
    found = checked(SurfaceHistory(), lambda _: [7] * 513 + [9] * 511)
    assert (found.kind, len(found.record.ranks)) == (PERSISTENT, 511)
    assert found.replays > 1


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_a_rank_that_is_wrong_now_and_then_is_named_in_the_end(rate: float):
    source, history = random.Random(0), SurfaceHistory()
    kernel = draws([0.0, 0.0, rate, 0.0], 64, source)
    found = next(found for _ in range(500) if (found := checked(history, kernel)) and found.record.ranks)
    assert (found.kind, found.record.ranks) == (INTERMITTENT, (12,))
