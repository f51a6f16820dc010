"""How many replays it takes to name a rank, among few peers and many."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from torchscout.decision.consensus import exact
from torchscout.decision.repeatability import (
    BIAS,
    CHANCE,
    MAX_REPLAYS,
    Repeatability,
    Repeated,
    SurfaceHistory,
)
from torchscout.decision.types import EvidenceRecord, Manifestation

Round = Sequence[int]


def checked(history: SurfaceHistory, rounds: Callable[[int], Round], *, among: int = 1) -> Repeated | None:
    """One check whose n-th replay gives ``rounds(n)``; None if the first finds nothing."""
    values = rounds(0)
    first = EvidenceRecord(
        step=20,
        surface="layer.3/grad_input",
        manifestation=Manifestation.SDC,
        peers=tuple(10 + place for place in range(len(values))),
        verdict=exact(values),
        layer="layer.3",
        mode="backward",
    )
    if first.scope is None or history.reason(first.surface, first.layer) is not None:
        return None
    trial, place = history.trial(first, among=among, is_held=False), 0
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
def test_a_rank_is_named_as_soon_as_chance_is_excluded(peers: int, among: int):
    for change in (0, 1):  # the same wrong number in every replay, or another one
        rest = [7] * (peers - 1)
        found = checked(
            SurfaceHistory(), lambda place, by=change, rest=rest: [9 + by * place, *rest], among=among
        )
        assert found.record.ranks == (10,)
        assert found.replays == found.differing == needed(peers, among) <= MAX_REPLAYS


def test_the_smallest_jobs_need_less_than_what_is_allowed_even_with_thousands_of_surfaces():
    assert needed(3, 10_000) <= MAX_REPLAYS


def test_replays_in_which_all_agree_are_no_evidence():
    found = checked(SurfaceHistory(), lambda place: [7, 7, 7 if place % 2 else 9, 7, 7, 7, 7, 7])
    assert (found.kind, found.record.ranks) == (Repeatability.INTERMITTENT, (12,))
    assert (found.differing, found.replays) == (needed(8), 2 * needed(8) - 1)


def test_a_rare_difference_is_kept_and_added_up_over_checks():
    history, checks, once = SurfaceHistory(), 0, [7, 7, 9, 7]
    while True:
        found = checked(history, lambda place: once if place % 8 == 0 else [7] * 4)
        if found.kind is not Repeatability.UNDECIDED:
            break
        checks += 1
        assert (found.record.status, found.differing) == ("not_checked", 8)
    assert (found.kind, found.record.ranks) == (Repeatability.INTERMITTENT, (12,))
    assert found.earlier == 8 * checks == needed(4) - found.differing


@pytest.mark.parametrize("second", [[7, 5, 9, 7], [7, 5, 7, 7], [6, 6, 9, 6], [1, 2, 3, 4], [9, 9, 9, 9]])
def test_one_innocent_that_changes_means_the_kernel(second: Round):
    history = SurfaceHistory()
    found = checked(history, lambda place: second if place else [7, 7, 9, 7])
    assert (found.kind, found.replays) == (Repeatability.NONDETERMINISTIC, 2)
    assert history.not_repeating() == {"layer.3/grad_input": found.record.reason}
    assert checked(history, lambda _: [7, 7, 9, 7]) is None, "it is left out for good"


@pytest.mark.parametrize("values", [[7, 9], [7, 7, 9, 9], [1, 2, 3]])
def test_without_a_majority_it_must_repeat_and_nobody_is_named(values: Round):
    ways = {2: 2, 4: 6, 3: 6}[len(values)]
    found = checked(SurfaceHistory(), lambda _: values)
    assert (found.kind, found.record.ranks) == (Repeatability.PERSISTENT, ())
    assert found.replays == 1 + math.ceil(math.log(1 / CHANCE) / math.log(ways))
    found = checked(SurfaceHistory(), lambda place: values if place < 5 else values[::-1])
    assert (found.kind, found.replays) == (Repeatability.NONDETERMINISTIC, 6)


def test_of_which_target_a_surface_does_not_repeat_is_said_where_its_name_does_not():
    history = SurfaceHistory()
    history.leave_out("optimizer/param", "stack.0.up/weight", "atomics")
    history.leave_out("stack.0/output", "stack.0", "atomics")
    assert {*history.not_repeating()} == {"optimizer/param (of stack.0.up/weight)", "stack.0/output"}
    assert history.reason("optimizer/param", "stack.0.down/weight") is None


@pytest.mark.parametrize("peers", [3, 8, 64])
@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 1e-3])
def test_a_nondeterministic_kernel_never_names_a_rank(peers: int, rate: float):
    """Each rank differs at its own rate. The whole of it: ``benchmarks/repeatability.py``."""
    source = random.Random(peers)
    for _ in range(100):
        odds = [rate / (1 - rate) * source.uniform(1, BIAS) / BIAS for _ in range(peers)]
        rates, results = [each / (1 + each) for each in odds], source.choice((2, 3, 64))

        def kernel(_: int, rates: list[float] = rates, results: int = results) -> Round:
            return [source.randrange(1, results) if source.random() < each else 0 for each in rates]

        history = SurfaceHistory()
        for _ in range(20):
            found = checked(history, kernel)
            assert found is None or found.record.scope is None, found


def test_almost_half_of_many_ranks_are_named_if_they_are_always_the_same():
    source, kernel = random.Random(0), [7] * 513 + [9] * 511
    found = checked(SurfaceHistory(), lambda _: source.sample(kernel, 1024))
    assert (found.kind, found.record.ranks, found.replays) == (Repeatability.NONDETERMINISTIC, (), 2)
    found = checked(SurfaceHistory(), lambda _: kernel)
    assert (found.kind, len(found.record.ranks)) == (Repeatability.PERSISTENT, 511)
    assert found.replays > 1, "one replay does not distinguish so many ranks from a kernel"
