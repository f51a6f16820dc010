"""Every sequence of events of the gate, with a crash after each, against what the paper promises.

The gate and an independent witness of the history walk together. Only the order of steps matters to either,
so that states which differ by a renumbering are one. There are finitely many of those: the walk ends by
itself, and covers sequences of any length. After every event two ranks are killed, of which one has not
written its ledger or has lost it, and the next run concludes what it may trust. Or the check fails, and the
ranks go on with what they agree on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import (
    FLAGS,
    Changed,
    Checked,
    CheckpointGate,
    Effects,
    Event,
    Generation,
    Outcome,
    Recovered,
    SweepResult,
    TrustLevel,
    confirm,
    select_checkpoint,
    transition,
)
from torchscout.checkpoint.ledger import Ledgers
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.decision.types import Failure
from torchscout.session.checkpoints.resumption import PreviousRun, RankRemains

DEPTH = 8  # at least


@dataclass(frozen=True)
class Seen:
    """What the history says about one generation."""

    full: bool = False
    """The K recipes up to its capture were accepted, without a check that was not between them."""
    since: int = 0
    """Accepted recipes in a row since its capture; K is as good as more."""
    accepted: bool = False
    sealed: bool = False
    written: bool = False
    earned: bool = False
    """At some time it had all that a verified generation needs."""


@dataclass(frozen=True)
class Witness:
    """The history as far as the promises depend on it; it knows nothing of the gate's rules."""

    catalog: int | None
    row: int = 0
    """Accepted recipes in a row."""
    corrupt: bool = False
    """Corruption was found, and no recovery recorded since."""
    seen: dict[Generation, Seen] = field(default_factory=dict)

    def after(self, event: Event, effects: Effects) -> Witness:
        row, corrupt, seen = self.row, self.corrupt, dict(self.seen)
        if isinstance(event, Checked):
            corrupt |= event.outcome is Outcome.SDC
            row = min(row + event.recipes, self.catalog or 1) if event.outcome.accepted else 0
            seen = {generation: self._checked(each, event) for generation, each in seen.items()}
        elif isinstance(event, Recovered):
            row, corrupt = 0, False
            seen = {generation: replace(each, full=False, since=0) for generation, each in seen.items()}
            if event.in_files and event.generation is not None:
                seen[event.generation] = replace(seen[event.generation], written=True)
        elif event.kind in ("sealed", "written") and event.generation in seen:
            seen[event.generation] = replace(seen[event.generation], **{event.kind: True})
        if effects.capture is not None:
            is_checked = isinstance(event, Checked)
            full = is_checked and row >= (self.catalog or 1)
            seen[effects.capture.generation] = Seen(full=full, accepted=is_checked)
        earned = {generation: replace(each, earned=self._earns(each)) for generation, each in seen.items()}
        return replace(self, row=row, corrupt=corrupt, seen=seen if corrupt else earned)

    def _checked(self, each: Seen, event: Checked) -> Seen:
        since = min(each.since + event.recipes, self.catalog or 1) if event.outcome.accepted else 0
        is_void = event.outcome is Outcome.REJECTED
        return replace(each, since=since, full=each.full and not is_void)

    def _earns(self, each: Seen) -> bool:
        if self.catalog is None:
            return each.earned or (each.accepted and each.sealed)
        return each.earned or (each.full and each.since >= self.catalog and each.sealed and each.written)


def events_for(gate: CheckpointGate) -> Iterator[Event]:
    if gate.pending is not None:
        yield Changed("sealed", gate.pending)
    else:
        yield from checks(gate)
    if gate.writing is not None and gate.writing != gate.pending:
        yield Changed("written", gate.writing)
        yield Changed("write_failed", gate.writing)
    yield from (Changed("lost", each) for each in gate.held)
    loadable = gate.trusted if gate.poisoned is not None else gate.sealed
    yield from (Recovered(each, in_files=each not in gate.in_files) for each in loadable)
    if not gate.trusted:
        yield Recovered(None)


def checks(gate: CheckpointGate) -> Iterator[Checked]:
    step = gate.step + 1
    yield from (Checked(step, each) for each in Outcome if each is not Outcome.STRAGGLER)
    yield Checked(step, Outcome.HEALTHY, can_capture=False)
    yield Checked(step, Outcome.HEALTHY, recipes=0)
    if (gate.recipes or 1) > 1:
        yield Checked(step, Outcome.HEALTHY, recipes=2)


def holds(old: CheckpointGate, event: Event, new: CheckpointGate, effects: Effects, witness: Witness) -> None:
    """The promises about a job that runs."""
    for row in new.rows:
        seen = witness.seen[row.generation]
        assert seen.accepted or not row.accepted
        assert seen.sealed or not row.sealed
        assert seen.written or not row.in_files
        assert seen.earned or not row.verified
        assert row.in_memory or row.due or row.in_files or not row.sealed, "it is somewhere"
    if witness.corrupt:
        assert effects.capture is effects.promoted is None, "after corruption nothing is certified"
        assert new.held == {*new.trusted}, "and only what was verified before is left"
    if isinstance(event, Checked) and not event.outcome.accepted:
        assert effects.capture is None
    if isinstance(event, Checked) and event.outcome.accepted and not new.poisoned:
        is_captured = new.pending == Generation(event.step, new.lineage)
        assert is_captured == (event.can_capture and event.recipes > 0) == (effects.capture is not None)
        if is_captured and new.unwritten >= new.persist_every:
            assert old.writing, "files are written in between"
    if isinstance(event, Recovered):
        assert new.latest == event.generation
        assert new.candidate is None
        assert all(each.step <= new.step for each in new.held)
    elif not isinstance(event, Changed) or event.kind not in ("lost", "write_failed"):
        assert old.verified is None or new.verified is not None, "what is verified survives corruption"
        if {*old.trusted} & {*old.in_files}:
            assert {*new.trusted} & {*new.in_files}, "files with verified state never run out"


def killed(
    old: CheckpointGate, new: CheckpointGate, witness: Witness, *, captured: bool
) -> tuple[CheckpointGate, CheckpointGate]:
    """Two ranks are killed after an event. One has written its ledger; of the other the one before is there,
    or none. ``captured``: what was being captured is there. Returns what a new job concludes in either case.
    """
    shards = ((0, 1),) if captured else ()
    whole = RankRemains(new, pending=shards, before=old if old.lineage == new.lineage else None)
    found = []
    for other in (RankRemains(old, pending=shards), RankRemains(None)):
        previous = PreviousRun.of([whole, other])
        assert previous is not None
        gates = [each.gate for each in (whole, other) if each.gate and each.gate.lineage == new.lineage]
        may_be_loaded(previous.gate, gates, witness, captured)
        found.append(previous.gate)
    return found[0], found[1]


def is_killed_after(old: CheckpointGate, new: CheckpointGate, witness: Witness) -> None:
    for captured in {True, None not in (old.pending, new.pending)}:
        found = killed(old, new, witness, captured=captured)
        for each in found[1].held:
            assert level(found[1], each) <= level(found[0], each), (
                "to lose both ledgers is no better than one"
            )


def may_be_loaded(
    gate: CheckpointGate, ranks: Sequence[CheckpointGate], witness: Witness, captured: bool
) -> None:
    """The promises about a job that starts again."""
    assert (gate.poisoned is None) == all(each.poisoned is None for each in ranks)
    for row in gate.rows:
        seen = witness.seen[row.generation]
        assert seen.accepted, "without a verdict nothing is trusted"
        assert seen.sealed or captured
        assert seen.earned or not row.verified or (gate.recipes is None and captured)
        assert row.verified or gate.poisoned is None
        assert row.sealed
        assert row.in_memory or row.due or row.in_files, "it is somewhere"
    for each in ranks:
        most = ledger.settled(each, lambda _: True)
        assert all(level(gate, name) <= level(most, name) for name in gate.held)


def may_be_selected(gate: CheckpointGate) -> None:
    decisions = [select_checkpoint(failure, gate) for failure in Failure]
    decisions += [confirm(gate, sweep) for sweep in SweepResult]
    for decision in decisions:
        if decision.generation is None:
            assert not gate.trusted
        elif decision.role is TrustLevel.VERIFIED:
            assert decision.generation in gate.trusted
        else:
            assert decision.generation in gate.sealed
            assert gate.poisoned is None


def level(gate: CheckpointGate, generation: Generation) -> int:
    row = gate.row(generation)
    if row is None:
        return 0
    return 3 if row.verified else 2 if row.ends_cycle and row.in_files else 1


def verdict_may_be_late(gate: CheckpointGate, witness: Witness) -> None:
    """A capture that has begun before its check's verdict is not trusted until then."""
    fresh = Generation(gate.step + 1, gate.lineage)
    begun, effects = transition(gate, Changed("begun", fresh))
    if gate.poisoned is None:
        assert effects.capture is not None
        assert effects.capture.generation == fresh
        found = killed(gate, begun, witness, captured=True)
        assert all(fresh not in each.held for each in found)
    if gate.pending is None:
        for event in checks(gate):
            assert transition(begun, event) == transition(gate, event)


def after_failed_check(
    old: CheckpointGate, new: CheckpointGate, witness: Witness
) -> Iterator[tuple[CheckpointGate, Witness]]:
    """Ranks continue after a check that failed before all of them had acted on it."""
    if new.lineage != old.lineage:
        return  # a recovery is not part of a check
    for gates in ([new, new], [old, new]):
        agreed = ledger.realigned(gates)
        assert agreed.accepted_recipes == 0
        for row in agreed.rows:
            assert witness.seen[row.generation].earned or not row.verified
            assert row.in_memory or row.due or row.in_files or not row.sealed
        yield agreed, replace(witness, row=0, corrupt=agreed.poisoned is not None)


def renumbered(gate: CheckpointGate, witness: Witness) -> object:
    """The same for all states that differ by a monotone renumbering of steps and lineages."""
    rows = []
    for row in gate.rows:
        seen = witness.seen[row.generation]
        flags = tuple(getattr(row, name) for name in FLAGS)
        rows.append((flags, not seen.earned and seen.full and seen.since, seen.sealed, seen.written))
    numbers = (gate.accepted_recipes, min(gate.unwritten, gate.persist_every))
    return (*numbers, witness.row, witness.corrupt, *rows)


@pytest.mark.long_cases("K=1*", "K=2,every=1*", "*every=1,keep=1")
@pytest.mark.parametrize(
    "start",
    [
        CheckpointGate(keep=0),
        CheckpointGate(keep=1),
        CheckpointGate(persist_every=2, keep=0),
        CheckpointGate(recipes=1, keep=0),
        CheckpointGate(recipes=2, keep=0),
        pytest.param(CheckpointGate(recipes=2, persist_every=2, keep=1), marks=pytest.mark.slow),
        pytest.param(CheckpointGate(recipes=3, persist_every=2, keep=0), marks=pytest.mark.slow),
    ],
    ids=lambda gate: f"K={gate.recipes},every={gate.persist_every},keep={gate.keep}",
)
def test_every_sequence_keeps_every_promise(start: CheckpointGate):
    edge, known = [(start, Witness(start.recipes))], set()
    length = promotions = 0
    while edge:
        length += 1
        beyond = []
        for gate, witness in edge:
            verdict_may_be_late(gate, witness)
            may_be_selected(gate)
            for event in events_for(gate):
                following, effects = transition(gate, event)
                wiser = witness.after(event, effects)
                holds(gate, event, following, effects, wiser)
                promotions += effects.promoted is not None
                is_killed_after(gate, following, wiser)
                reached = [(following, wiser), *after_failed_check(gate, following, wiser)]
                for each, knowing in reached:
                    if (state := renumbered(each, knowing)) not in known:
                        known.add(state)
                        seen = {name: knowing.seen[name] for name in each.held}
                        beyond.append((each, replace(knowing, seen=seen)))
        edge = beyond
    assert length >= DEPTH
    assert promotions


@dataclass
class Rank:
    """One rank with its ledgers and shards, of which each tier may fail for a while."""

    gate: CheckpointGate
    memory: CheckpointGate | None = None
    """The ledger there."""
    disk: CheckpointGate | None = None
    captured: set[Generation] = field(default_factory=set)
    """The shards in memory."""
    files: set[Generation] = field(default_factory=set)

    def follow(self, event: Event, memory_works: bool, disk_works: bool) -> Effects:
        """As ``session.checkpoints.manager`` does it, with a look after every change."""
        self.gate, effects = transition(self.gate, event)
        if isinstance(event, Recovered) and event.generation is not None:
            self.captured.add(event.generation)
            self.files |= {event.generation} if event.in_files else set()
        if effects.capture is not None:
            self.captured.add(effects.capture.generation)
            self.files |= {effects.capture.generation} if effects.capture.due else set()
        self.look()
        self.memory = self.gate if memory_works else self.memory
        self.look()
        self.captured &= self.needed(Tier.MEMORY)
        self.look()
        self.disk = self.gate if disk_works else self.disk
        self.captured &= self.needed(Tier.MEMORY)
        self.files &= self.needed(Tier.DISK)
        self.look()
        return effects

    def needed(self, tier: Tier) -> frozenset[Generation]:
        member = Member(job="job", mesh="replica=1", world_size=1, rank=0)
        return Ledgers(member, Path(), Path(), (self.memory, self.disk)).needed(tier, self.gate)

    def look(self) -> None:
        """What a restart would find now, with this machine's memory or without it."""
        found = ledger.newest([each for each in (self.memory, self.disk) if each is not None])
        for row in () if found is None else found.rows:
            assert row.generation in self.files or not row.in_files, "the job is killed"
            is_in_memory = row.sealed and (row.in_memory or row.due)
            assert row.generation in self.captured or not is_in_memory, "the job is killed"
        assert self.disk is None or {*self.disk.in_files} <= self.files, "the machine is lost"


@pytest.mark.parametrize("recipes", [None, 1, 2, 3])
def test_in_long_histories_what_a_new_job_may_load_is_there(recipes: int | None):
    chance, promoted, stale = random.Random(recipes), 0, 0
    for walk in range(6):
        start = CheckpointGate(recipes=recipes, persist_every=1 + walk % 3, keep=walk % 2)
        rank, witness, works = Rank(start), Witness(recipes), (True, True)
        for _ in range(60):
            healthy = Checked(rank.gate.step + 1, Outcome.HEALTHY)
            usual = healthy if rank.gate.pending is None else Changed("sealed", rank.gate.pending)
            event = usual if chance.random() < 0.6 else chance.choice([*events_for(rank.gate)])
            works = (chance.random() < 0.7, chance.random() < 0.7) if chance.random() < 0.3 else works
            before = rank.gate
            effects = rank.follow(event, *works)
            witness = witness.after(event, effects)
            holds(before, event, rank.gate, effects, witness)
            is_killed_after(before, rank.gate, witness)
            promoted += effects.promoted is not None
            stale += rank.memory != rank.disk
    assert promoted
    assert stale


def test_stragglers_and_healthy_checks_have_the_same_effect_on_trust():
    gate = transition(CheckpointGate(recipes=2), Checked(1, Outcome.HEALTHY))
    assert gate == transition(CheckpointGate(recipes=2), Checked(1, Outcome.STRAGGLER))
