"""Every sequence of events of the gate, against what the paper promises of it.

The gate and an independent witness of the history walk together. Only the order of steps matters to either,
so that states which differ by a renumbering are one. There are finitely many of those: the walk ends by
itself, and covers sequences of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import (
    Checked,
    Effects,
    Event,
    Lost,
    Outcome,
    Recovered,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.checkpoint.trust.generation import Generation

DEPTH = 12  # at least

GOING_BACK = (Recovered, Lost, WriteFailed)
"""A failed write loses what newer captures have displaced from memory; the others say so themselves."""


@dataclass(frozen=True)
class Seen:
    """What the history says about one captured generation."""

    full: bool
    """The K recipes up to its capture were accepted, without a check that was not between them."""
    since: int = 0
    """Accepted recipes in a row since its capture; K is as good as more."""
    doubted: bool = False
    """A rejected check or a recovery came after it."""
    poisoned: bool = False
    """Corruption was found after it."""
    sealed: bool = False
    """In memory, on every rank."""
    written: bool = False
    promoted: bool = False


@dataclass(frozen=True)
class Witness:
    """The history as far as the promises depend on it; it knows nothing of the gate's rules."""

    cycle: int
    row: int = 0
    """Accepted recipes in a row."""
    corrupt: bool = False
    """Corruption was found and no recovery recorded since."""
    seen: dict[Generation, Seen] = field(default_factory=dict)

    def after_event(self, event: Event, effects: Effects) -> Witness:
        row, corrupt, seen = self.row, self.corrupt, dict(self.seen)
        if isinstance(event, Checked):
            row = min(row + event.recipes, self.cycle) if event.outcome.accepted else 0
            corrupt |= event.outcome is Outcome.SDC
            seen = {generation: self._checked(each, event) for generation, each in seen.items()}
        if isinstance(event, Recovered):
            row, corrupt = 0, False
            seen = {generation: replace(each, doubted=True, since=0) for generation, each in seen.items()}
        if isinstance(event, Sealed):
            seen[event.generation] = replace(seen[event.generation], sealed=True)
        if isinstance(event, Written) and event.generation in seen:
            seen[event.generation] = replace(seen[event.generation], written=True)
        if effects.capture:
            assert effects.capture not in seen, "no name is used twice"
            seen[effects.capture] = Seen(full=row >= self.cycle)
        if effects.promote:
            seen[effects.promote] = replace(seen[effects.promote], promoted=True)
        return replace(self, row=row, corrupt=corrupt, seen=seen)

    def _checked(self, each: Seen, event: Checked) -> Seen:
        return replace(
            each,
            since=min(each.since + event.recipes, self.cycle) if event.outcome.accepted else 0,
            doubted=each.doubted or event.outcome is Outcome.REJECTED,
            poisoned=each.poisoned or event.outcome is Outcome.SDC,
        )


def events_for(gate: CheckpointGate) -> Iterator[Event]:
    if gate.pending:
        yield Sealed(gate.pending)
        yield Lost(gate.pending)
    else:
        outcomes = (each for each in Outcome if each is not Outcome.STRAGGLER)
        yield from (Checked(gate.step + 1, outcome) for outcome in outcomes)
        if (gate.recipes or 1) > 1:
            yield Checked(gate.step + 1, Outcome.HEALTHY, recipes=2)
    if gate.writing and gate.writing != gate.pending:
        yield Written(gate.writing)
        yield WriteFailed(gate.writing)
    yield from (Lost(each) for each in {gate.latest, gate.candidate, gate.interim, gate.verified} if each)
    loadable = gate.trusted if gate.poisoned else {*gate.trusted, *gate.captured}
    yield from (Recovered(each, in_files) for each in loadable for in_files in (False, True))
    if not gate.trusted:
        yield Recovered(None)


def captures_and_seals(
    old: CheckpointGate, event: Event, new: CheckpointGate, effects: Effects, witness: Witness
) -> None:
    for pointer in (new.latest, new.candidate, new.verified):
        assert pointer is None or witness.seen[pointer].sealed, "pointers move for what is sealed everywhere"
    if isinstance(event, Checked) and event.outcome.accepted and not new.poisoned:
        assert new.pending == effects.capture == Generation(event.step, new.lineage)
        if not old.durable and new.recipes is None and not old.unwritten and not old.writing:
            assert effects.persist == effects.capture, "the first certified one goes to files"
        if old.unwritten + 1 >= old.persist_every and not old.writing:
            assert effects.persist == effects.capture, "files are written in between"
    if isinstance(event, Sealed) and new.recipes is None:
        assert new.verified == new.latest == event.generation == effects.promote


def in_between(old: CheckpointGate, event: Event, new: CheckpointGate, witness: Witness) -> None:
    if new.interim:
        evidence = witness.seen[new.interim]
        assert (evidence.sealed, evidence.written, evidence.poisoned) == (True, True, False)
        assert new.interim == max(new.durable), "the newest files"
    if isinstance(event, Lost) and event.generation == old.latest and not old.poisoned:
        left = {old.interim, old.candidate} & set(old.durable) - {old.latest}
        if len(old.captured) == 1:
            assert new.latest == max(left, default=None), "candidates in files replace a lost latest"


def hold(
    old: CheckpointGate,
    event: Event,
    new: CheckpointGate,
    effects: Effects,
    before: Witness,
    witness: Witness,
) -> None:
    """The promises."""
    captures_and_seals(old, event, new, effects, witness)
    in_between(old, event, new, witness)
    promoted = effects.promote
    if before.corrupt or witness.corrupt:
        assert (effects.capture, effects.persist, promoted) == (None, None, None), "trust is latched"
        assert all(witness.seen[each].promoted for each in new.held), "only what was verified before is left"
    if promoted:
        evidence = witness.seen[promoted]
        assert not evidence.poisoned
        if new.recipes is not None:
            assert evidence.full, "a cycle up to its capture"
            assert evidence.since >= new.recipes, "and a cycle after it"
            assert not evidence.doubted, "with nothing rejected between"
            assert evidence.written
    assert {each for each in new.trusted if not witness.seen[each].promoted} == set()
    if new.verified != old.verified:
        backwards = new.verified is None or (
            old.verified is not None and new.verified.step < old.verified.step
        )
        assert isinstance(event, GOING_BACK) if backwards else new.verified == promoted
    assert set(effects.retire).isdisjoint(new.held)
    assert old.held - new.held <= set(effects.retire), "nothing is forgotten without being deleted"
    if not isinstance(event, Lost | Recovered) and set(old.trusted) & set(old.durable):
        assert set(new.trusted) & set(new.durable), "files with verified state never run out"
    if isinstance(event, Recovered):
        assert new.latest == event.generation
        assert all(each.step <= new.step for each in new.held)
        assert new.candidate is None
    if not isinstance(event, GOING_BACK):
        assert old.verified is None or new.verified is not None, "what is verified survives corruption"


def renumbered(gate: CheckpointGate, witness: Witness) -> object:
    """The same for all states that differ by a monotone renumbering of steps and lineages."""
    held = gate.held
    steps = {step: index for index, step in enumerate(sorted({each.step for each in held} | {gate.step}))}
    lineages = {line: i for i, line in enumerate(sorted({each.lineage for each in held} | {gate.lineage}))}

    def short(each: Generation | None) -> object:
        return each and (steps[each.step], lineages[each.lineage])

    return (
        gate.accepted,
        *(tuple(map(short, getattr(gate, name))) for name in ("captured", "trusted", "durable")),
        *(short(getattr(gate, name)) for name in ("candidate", "interim", "writing", "pending")),
        min(gate.unwritten, gate.persist_every),
        gate.poisoned is None,
        steps[gate.step],
        lineages[gate.lineage],
        witness.row,
        witness.corrupt,
        frozenset((short(each), witness.seen[each]) for each in held),
    )


@pytest.mark.long_cases("K=2,every=1,keep=0")
@pytest.mark.parametrize(
    "start",
    [
        CheckpointGate(keep=1),
        CheckpointGate(persist_every=2, keep=0),
        CheckpointGate(recipes=1, keep=1),
        CheckpointGate(recipes=2, keep=0),
        pytest.param(CheckpointGate(persist_every=2, keep=1), marks=pytest.mark.slow),
        pytest.param(CheckpointGate(recipes=2, persist_every=2, keep=0), marks=pytest.mark.slow),
        pytest.param(CheckpointGate(recipes=2, keep=1), marks=pytest.mark.slow),
        pytest.param(CheckpointGate(recipes=3, keep=0), marks=pytest.mark.slow),
        pytest.param(CheckpointGate(recipes=3, persist_every=2, keep=0), marks=pytest.mark.slow),
    ],
    ids=lambda gate: f"K={gate.recipes},every={gate.persist_every},keep={gate.keep}",
)
def test_every_sequence_keeps_every_promise(start: CheckpointGate):
    edge, known = [(start, Witness(start.recipes or 1))], set()
    length = promotions = 0
    while edge:
        length += 1
        beyond = []
        for gate, witness in edge:
            for event in events_for(gate):
                following, effects = transition(gate, event)
                wiser = witness.after_event(event, effects)
                hold(gate, event, following, effects, witness, wiser)
                promotions += effects.promote is not None
                wiser = replace(wiser, seen={each: wiser.seen[each] for each in following.held})
                if (state := renumbered(following, wiser)) not in known:
                    known.add(state)
                    beyond.append((following, wiser))
        edge = beyond
    assert length >= DEPTH
    assert promotions


def test_stragglers_and_healthy_checks_have_the_same_effect_on_trust():
    gate = transition(CheckpointGate(recipes=2), Checked(1, Outcome.HEALTHY))
    assert gate == transition(CheckpointGate(recipes=2), Checked(1, Outcome.STRAGGLER))
