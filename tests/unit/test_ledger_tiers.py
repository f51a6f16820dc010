"""The gate with its two tiers, each of which may fail at any moment: what the ledgers name is there.

A model of one rank: the gate, the last ledger of each tier, and the shards in memory and in files. The walk
goes through every short sequence of events, and many long ones, with every combination of ledgers that could
be written. After each change the job may be killed, alone or with its machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from tests.support.replica_ranks import seal
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.checkpoint.trust import ledger
from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import (
    Checked,
    Event,
    Lost,
    Outcome,
    Recovered,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.checkpoint.trust.generation import Generation
from torchscout.checkpoint.trust.ledger_tiers import LedgerKeeper, LedgerTiers

SLOTS = 3
LENGTH = 5
WALKS, EVENTS = 120, 40
Shards = frozenset[Generation]


@dataclass(frozen=True)
class Rank:
    """One rank between two checks."""

    gate: CheckpointGate
    memory: CheckpointGate | None = None
    """The ledger there."""
    disk: CheckpointGate | None = None
    captured: Shards = frozenset()
    """The shards in memory."""
    files: Shards = frozenset()
    unneeded: tuple[Shards, Shards] = (frozenset(), frozenset())
    """What was given up in memory and in files, and could not be deleted yet."""


def events_for(rank: Rank) -> Iterator[Event]:
    gate = rank.gate
    outcomes = (Outcome.HEALTHY, Outcome.REJECTED, Outcome.SDC)
    if gate.pending is not None:  # before anything else: the next check says so
        yield Sealed(gate.pending) if gate.pending in rank.captured else Lost(gate.pending)
        return
    yield from (Checked(gate.step + 1, outcome) for outcome in outcomes)
    if gate.writing:
        yield Written(gate.writing)
        yield WriteFailed(gate.writing)
    if gate.verified is not None:
        yield Recovered(gate.verified)


def follow(rank: Rank, event: Event, memory_works: bool, disk_works: bool) -> Rank:
    """As ``session.checkpoints.manager`` does it, with a look after every change."""
    gate, effects = transition(rank.gate, event)
    tiers = LedgerTiers(rank.memory, rank.disk)
    left = rank.gate.in_memory.union(effects.retire) - gate.in_memory
    tiers.give_up(Tier.MEMORY, rank.unneeded[0] | left)
    tiers.give_up(Tier.DISK, rank.unneeded[1].union(effects.retire))
    if isinstance(event, Written):
        rank = replace(rank, files=rank.files | {event.generation})
    rank = replace(rank, gate=gate)
    look(rank)
    if memory_works:
        tiers.written(Tier.MEMORY, gate)
        rank = replace(rank, memory=gate)
    look(rank)
    rank = look(replace(rank, captured=rank.captured - tiers.deletable(Tier.MEMORY)))
    if effects.capture is not None:
        rank = look(replace(rank, captured=taken(rank, effects.capture, tiers)))
    if disk_works:
        tiers.written(Tier.DISK, gate)
        rank = look(replace(rank, disk=gate))
    rank = look(replace(rank, captured=rank.captured - tiers.deletable(Tier.MEMORY)))
    rank = look(replace(rank, files=rank.files - tiers.deletable(Tier.DISK)))
    still = [rank.unneeded[0] | left, rank.unneeded[1].union(effects.retire)]
    return replace(rank, unneeded=(still[0] & rank.captured, still[1] & rank.files))


def taken(rank: Rank, fresh: Generation, tiers: LedgerTiers) -> Shards:
    """A slot for the new capture, if one is free or holds what nobody counts on."""
    captured = rank.captured
    if len(captured) < SLOTS:
        return captured | {fresh}
    free = sorted(captured - tiers.named(Tier.MEMORY) - rank.gate.in_memory)
    return captured - {free[0]} | {fresh} if free else captured


def look(rank: Rank) -> Rank:
    """What a restart would find now."""
    ledgers = [each for each in (rank.memory, rank.disk) if each is not None]
    if ledgers:
        found = ledger.newest(ledgers)
        assert set(found.durable) <= rank.files, "the job is killed"
        assert in_memory(found) <= rank.captured, "the job is killed"
        if found.trusted:
            assert (rank.files | rank.captured) & set(found.trusted), "there is something to go back to"
    if rank.disk is not None:
        assert set(rank.disk.durable) <= rank.files, "the machine is lost"
    return rank


def in_memory(gate: CheckpointGate) -> set[Generation]:
    """What is pending may not be captured yet when a ledger names it."""
    return set(gate.captured) - set(gate.durable)


def renumbered(rank: Rank) -> object:
    ledgers = [each for each in (rank.gate, rank.memory, rank.disk) if each is not None]
    known = {*rank.captured, *rank.files, *(each for gate in ledgers for each in gate.held)}
    steps = {step: i for i, step in enumerate(sorted({x.step for x in known} | {g.step for g in ledgers}))}
    lineages = sorted({x.lineage for x in known} | {g.lineage for g in ledgers})

    def short(each: Generation | None) -> object:
        return each and (steps[each.step], lineages.index(each.lineage))

    def renumber_gate(gate: CheckpointGate | None) -> object:
        return gate and (
            *(tuple(map(short, getattr(gate, name))) for name in ("captured", "trusted", "durable")),
            *(short(getattr(gate, name)) for name in ("candidate", "interim", "writing", "pending")),
            (gate.accepted, gate.unwritten, gate.poisoned is None),
            (steps[gate.step], lineages.index(gate.lineage)),
        )

    sets = (rank.captured, rank.files, *rank.unneeded)
    return (
        *map(renumber_gate, (rank.gate, rank.memory, rank.disk)),
        *(frozenset(map(short, each)) for each in sets),
    )


STARTS = pytest.mark.parametrize(
    "start",
    [CheckpointGate(keep=0), CheckpointGate(persist_every=2), CheckpointGate(recipes=1, keep=0)],
    ids=lambda gate: f"K={gate.recipes},every={gate.persist_every},keep={gate.keep}",
)
WORKS = [(True, True), (True, False), (False, True), (False, False)]
"""Whether memory's ledger can be written, and the disk's."""


@pytest.mark.slow_cases("K=1,every=1,keep=0", "K=None,every=2,keep=1")
@STARTS
def test_in_long_histories_what_the_ledgers_name_is_there(start: CheckpointGate):
    chance, refused, promoted = random.Random(0), 0, 0
    for _ in range(WALKS):
        rank, works = Rank(start), (True, True)
        for _ in range(EVENTS):
            works = chance.choice(WORKS) if chance.random() < 0.3 else works
            before = rank.gate.verified
            rank = follow(rank, chance.choice([*events_for(rank)]), *works)
            refused += rank.gate.pending not in {None, *rank.captured}
            promoted += rank.gate.verified != before
    assert refused or start.recipes, "there was a capture without a slot"
    assert promoted


@pytest.mark.slow
@STARTS
def test_in_every_short_history_what_the_ledgers_name_is_there(start: CheckpointGate):
    edge, known = [Rank(start)], set()
    for _ in range(LENGTH):
        beyond = []
        for rank in edge:
            for event, works in product(events_for(rank), WORKS):
                following = follow(rank, event, *works)
                if (state := renumbered(following)) not in known:
                    known.add(state)
                    beyond.append(following)
        edge = beyond
    assert len(known) > 500


def test_a_memory_that_stays_full_does_not_end_captures():
    """The ledger in memory is never written again; the one on disk always is."""
    rank = Rank(CheckpointGate(keep=0))
    for step in range(1, 30):
        rank = follow(rank, Checked(step, Outcome.HEALTHY), step < 5, True)
        assert rank.gate.pending in rank.captured
        rank = follow(rank, Sealed(rank.gate.pending), step < 5, True)
        if rank.gate.writing:
            rank = follow(rank, Written(rank.gate.writing), step < 5, True)
    assert rank.gate.verified == Generation(29)


def test_nothing_goes_while_neither_ledger_can_be_written():
    rank = Rank(CheckpointGate(keep=0))
    for step in range(1, 4):
        rank = follow(rank, Checked(step, Outcome.HEALTHY), True, True)
        rank = follow(rank, Sealed(Generation(step)), True, True)
        rank = follow(rank, Written(Generation(1)), True, True) if step == 1 else rank
    before = rank.files | rank.captured
    for step in range(4, 9):
        rank = follow(rank, Checked(step, Outcome.HEALTHY), False, False)
        (event,) = events_for(rank)
        rank = follow(rank, event, False, False)
    named = ledger.newest([each for each in (rank.memory, rank.disk) if each is not None])
    assert {*named.trusted} <= rank.files | rank.captured
    assert before & {*named.held} <= rank.files | rank.captured


def test_a_shard_that_was_fetched_or_repaired_is_deleted_from_memory_in_its_turn(tmp_path: Path):
    """The snapshots do not know of it: it came into memory when the job resumed."""
    memory, generation = tmp_path / "memory", Generation(4)
    memory.mkdir()
    snapshots, member = Snapshots(memory, 0), Member(job="job", mesh="replica=2", world_size=2, rank=0)
    fetched, other = seal(memory, 0, 4), seal(memory, 1, 4)
    keeper = LedgerKeeper(member, memory, tmp_path / "disk", LedgerTiers(), snapshots, None)
    before = CheckpointGate(captured=(generation,), trusted=(generation,), step=4)
    gate, effects = transition(before, Lost(generation))
    keeper.give_up(before, gate, effects)
    assert keeper.write(gate, None, lambda work: work() and None) is None
    assert not fetched.exists()
    assert other.exists(), "another rank of this machine deletes its own"
    snapshots.close()
