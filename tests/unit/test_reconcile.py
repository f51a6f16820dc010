"""Ranks that stopped at different points: no generation is trusted more than by the least trusting rank.

Walks through the gate's events, seeded; ranks of one job differ in how far each came. Then gates that have
nothing to do with each other, which no job can produce: the promises hold all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest

from tests.unit.test_gate import train
from tests.unit.test_gate_model import events_for
from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import Checked, Lost, Outcome, Recovered, Sealed
from torchscout.checkpoint.trust.generation import Generation, TrustLevel
from torchscout.checkpoint.trust.ledger import newest, reconcile, settled
from torchscout.checkpoint.trust.selection import SweepResult, confirm, select_checkpoint
from torchscout.decision.types import Failure

Crashes: TypeAlias = list[list[CheckpointGate | None]]


def history(chance: random.Random, recipes: int | None, length: int) -> list[CheckpointGate]:
    """Every state on one way through the events; accepted checks are likelier than the rest."""
    gates = [CheckpointGate(recipes=recipes, persist_every=chance.choice([1, 2]), keep=chance.choice([0, 2]))]
    for _ in range(length):
        healthy = Checked(gates[-1].step + 1, Outcome.HEALTHY)
        healthy = healthy if gates[-1].pending is None else Sealed(gates[-1].pending)
        event = healthy if chance.random() < 0.5 else chance.choice([*events_for(gates[-1])])
        gates.append(transition(gates[-1], event)[0])
    return gates


@pytest.fixture(scope="module")
def crashes() -> Crashes:
    """Ranks of one job, some of them behind, some without a ledger; and jobs that are none."""
    cases = []
    for seed in range(3000):
        chance = random.Random(seed)
        recipes = chance.choice([None, 1, 2, 3])
        states = history(chance, recipes, chance.randrange(1, 40))
        behind = chance.choice([1, 1, 1, 3, 10])
        others = history(chance, chance.choice([None, 2]), chance.randrange(1, 20)) if seed % 5 == 0 else []
        pool = [*states[-1 - behind :], *others[-2:]]
        ranks = [chance.choice([*pool, None]) for _ in range(chance.randrange(1, 6))]
        cases.append(ranks)
    return cases


def trust(gate: CheckpointGate, generation: Generation) -> int:
    if generation in gate.trusted:
        return 3
    if generation == gate.candidate:
        return 2
    return 1 if generation in (*gate.captured, gate.interim) else 0


def known(ranks: Sequence[CheckpointGate | None]) -> list[CheckpointGate]:
    """Those with a ledger. What one of them knows to be sealed on every rank is so for the others, too."""
    gates = [gate for gate in ranks if gate is not None]
    sealed = {
        each for gate in gates for each in (*gate.captured, *gate.trusted, gate.candidate, gate.interim)
    }
    return [settled(gate, lambda _: True) if gate.pending in sealed else gate for gate in gates]


def test_no_generation_is_trusted_more_than_by_the_rank_that_trusts_it_least(crashes: Crashes):
    kept = 0
    for ranks in crashes:
        agreed = reconcile(ranks)
        for generation in agreed.held - {agreed.pending}:
            least = min(trust(gate, generation) for gate in known(ranks))
            assert 0 < trust(agreed, generation) <= least
            kept += least
        for generation in agreed.durable:
            assert all(generation in gate.durable for gate in known(ranks))
        if agreed.candidate:
            assert agreed.candidate in agreed.durable
    assert kept > len(crashes) / 2, "generations are trusted at all"


def test_what_every_rank_verified_stays_verified(crashes: Crashes):
    for ranks in filter(known, crashes):
        everywhere = set.intersection(*(set(gate.trusted) for gate in known(ranks)))
        assert set(reconcile(ranks).trusted) == everywhere


def test_corruption_that_any_rank_has_seen_is_not_forgotten(crashes: Crashes):
    seen = 0
    for ranks in filter(known, crashes):
        agreed = reconcile(ranks)
        assert (agreed.poisoned is not None) == any(gate.poisoned is not None for gate in known(ranks))
        if agreed.poisoned is not None:
            seen += 1
            assert set(agreed.captured) <= set(agreed.trusted)
            assert agreed.candidate is None
    assert seen > 100


def test_no_name_of_a_generation_can_be_used_again(crashes: Crashes):
    for ranks in filter(known, crashes):
        agreed = reconcile(ranks)
        assert agreed.lineage == max(gate.lineage for gate in known(ranks))
        begun, _ = transition(agreed, Recovered(agreed.verified)) if agreed.verified else (agreed, None)
        if agreed.verified:
            assert all(begun.lineage > each.lineage for gate in known(ranks) for each in gate.held)


def test_no_failure_makes_recovery_choose_what_some_rank_does_not_have_or_trust(crashes: Crashes):
    for ranks in filter(known, crashes):
        agreed = reconcile(ranks)
        decisions = [select_checkpoint(failure, agreed) for failure in Failure]
        decisions += [confirm(agreed, sweep) for sweep in SweepResult]
        for decision in decisions:
            if decision.generation is None:
                assert not agreed.trusted
            elif decision.role is TrustLevel.VERIFIED:
                assert all(decision.generation in gate.trusted for gate in known(ranks))
            else:
                assert all(decision.generation in gate.captured for gate in known(ranks))
                assert all(gate.poisoned is None for gate in known(ranks))


def test_the_order_of_ranks_and_the_way_they_are_combined_do_not_matter(crashes: Crashes):
    for seed, ranks in enumerate(crashes):
        agreed = reconcile(ranks)
        shuffled = random.Random(seed).sample(ranks, len(ranks))
        assert reconcile(shuffled) == agreed
        assert reconcile([agreed if known(ranks) else None]) == agreed, "again changes nothing"
        half = len(ranks) // 2
        parts = [part for part in (ranks[:half], ranks[half:]) if known(part)]
        assert reconcile([reconcile(part) for part in parts]) == agreed


def test_a_gate_that_all_ranks_have_is_kept_as_it_is_but_for_a_write_under_way(crashes: Crashes):
    for ranks in crashes:
        for gate in known(ranks):
            agreed = reconcile([gate, None, gate])
            expected = replace(gate, writing=None)
            if gate.candidate not in gate.durable:
                expected = replace(expected, candidate=None)
            assert agreed == expected


def test_ranks_without_a_ledger_know_nothing():
    assert reconcile([]) == reconcile([None, None]) == CheckpointGate()


def test_different_catalogs_are_the_larger_and_its_cycle_starts_again():
    ranks = [CheckpointGate(recipes=3, accepted=2), CheckpointGate(recipes=2, accepted=1)]
    agreed = reconcile(ranks)
    assert (agreed.recipes, agreed.accepted) == (3, 0)
    assert reconcile([*ranks, CheckpointGate()]).recipes == 3, "dense trusts sooner than any catalog"


def test_of_one_ranks_states_the_newest_counts():
    behind = train(CheckpointGate(), "hh")
    assert newest([behind, train(behind, "hhhh")]) == train(behind, "hhhh")
    corrupt = train(behind, "x")
    recovered, _ = transition(corrupt, Recovered(Generation(1)))
    assert newest([recovered, corrupt]) == recovered, "a recovery goes back in steps, and is newer"


@pytest.mark.parametrize("order", [1, -1])
def test_of_equally_new_states_the_least_trusting_counts(order: int):
    gate = train(CheckpointGate(), "hhh")
    lost, _ = transition(gate, Lost(Generation(3)))
    assert newest([gate, lost][::order]) == lost
