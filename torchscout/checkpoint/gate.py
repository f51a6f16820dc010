"""Which checkpoints may be trusted: algorithm 3's saving half as a state machine (paper, section 8).

Pure: ``transition`` takes a frozen state and an event and gives the next state, and what is to be done about
it. Every rank feeds it the same job-wide events in the same order and so arrives at the same state. Agreeing
on those events, copying, writing and deleting are for others; which checkpoint a failed job loads is for
``checkpoint.selection``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchscout.checkpoint.gate_state import (
    Checked,
    CheckpointGate,
    Effects,
    Event,
    Hung,
    Lost,
    Outcome,
    Recovered,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.checkpoint.generation import Generation
from torchscout.decision.record import Manifestation

__all__ = ["CheckpointGate", "transition"]

# [Note: what each event does to trust]
#
# accepted     Healthy, or slow: a straggler's numbers are right. Captures, and counts as one of K recipes.
# not checked  Skips the capture, as the paper has it for incomplete evidence. The K checks of a cycle must
#              follow each other, because only then does a rotation through K recipes visit all of them: so
#              the count starts again at 0. The candidate stays: its own cycle was complete, nothing speaks
#              against it, and the next K accepted checks in a row visit every recipe after its capture.
# rejected     Peers disagreed and it is not known yet whether a rank or a kernel is at fault. Skips
#              the capture and voids the cycle; the candidate goes too, as its second cycle is not accepted.
# sdc          Latched: the candidate and every capture that is not certified are gone, and whatever later
#              checks say, nothing is captured, counted or certified until a recovery is recorded.
# hang         Changes nothing: no evidence is added or lost, and a hang that resolves itself was none.
# recovered    What was loaded is the latest, and a new lineage begins. What is newer than it belongs to an
#              abandoned lineage and goes. So does the candidate, and the count starts again at 0: rotations
#              start anew with new workers, and on a replaced machine no replay exposes what the old one did.
# sealed       What was captured after the last accepted check gets its role.
# write failed A candidate without files is none; the cycle under way goes on. Certified state is in memory.
# lost         It is forgotten, in whichever role; the next older verified one, if any, takes its place.
#
# [Note: dense is not a catalog of one]
#
# A dense model's shapes never change, so that an accepted check certifies what is captured right after it:
# verified is latest once it is sealed, and there is no candidate. A catalog with K = 1 still waits for a
# second cycle: what was captured at check n is promoted at check n + 1; it is gone if that finds corruption.
#
# [Note: pointers move when every rank has sealed]
#
# A capture is copied and sealed while training goes on, and may fail on any rank: it is pending, and no
# pointer names it. With the next check all ranks tell whether they have sealed it, and it becomes the latest,
# or is given up. The latest before it stays whole until then. A job that dies in between looks for the
# pending one when it starts again: if every rank's shard is there, it was sealed (``ledger.settled``).

_Next = tuple[CheckpointGate, Effects]


def transition(gate: CheckpointGate, event: Event) -> tuple[CheckpointGate, Effects]:
    """The next state, and what is to be done; a ``ValueError`` for an event that cannot follow."""
    following, effects = _TRANSITIONS[type(event)](gate, event)
    following = _pruned(following)
    retired = gate.held.union(effects.retire) - following.held
    return following, replace(effects, retire=tuple(sorted(retired)))


def _checked(gate: CheckpointGate, event: Checked) -> _Next:
    if event.step <= gate.step:
        raise ValueError(f"a check at step {event.step} cannot follow step {gate.step}")
    if gate.pending is not None:
        raise ValueError(f"whether {gate.pending} is sealed must be known before the next check")
    gate = replace(gate, step=event.step)
    if gate.poisoned is not None:
        reason = f"corruption was found at step {gate.poisoned} and no recovery is recorded since"
        return gate, Effects(reason=reason, retrieve=Manifestation.SDC)
    if event.outcome.accepted:
        return _accepted(gate, Generation(event.step, gate.lineage))
    return _REFUSALS[event.outcome](gate)


def _accepted(gate: CheckpointGate, fresh: Generation) -> _Next:
    gate = replace(gate, pending=fresh)  # [Note: pointers move when every rank has sealed]
    return _certified(gate, fresh) if gate.recipes is None else _counted(gate, fresh, gate.recipes)


def _certified(gate: CheckpointGate, fresh: Generation) -> _Next:
    """Dense: [Note: dense is not a catalog of one]."""
    is_first = not gate.durable and not gate.unwritten  # nothing is in files, and no write has failed
    gate = replace(gate, unwritten=gate.unwritten + 1)
    reason = f"the check at step {fresh.step} certifies what is captured after it"
    is_due = is_first or gate.unwritten >= gate.persist_every
    if not is_due or gate.writing is not None:
        return gate, Effects(reason=reason, capture=fresh)
    gate = replace(gate, unwritten=0, writing=fresh)
    return gate, Effects(reason=reason, capture=fresh, persist=fresh)


def _sealed(gate: CheckpointGate, event: Sealed) -> _Next:
    fresh = event.generation
    if fresh != gate.pending:
        raise ValueError(f"{fresh} is not being captured; pending is {gate.pending}")
    reason, is_dense, captured = f"{fresh} is sealed on every rank", gate.recipes is None, (fresh,)
    if is_dense:
        gate = replace(gate, pending=None, captured=captured, trusted=(*gate.trusted, fresh))
        return gate, Effects(reason=f"{reason}, and verified", promote=fresh)
    # What a catalog writes was captured at the end of a cycle.
    candidate = fresh if gate.writing == fresh else gate.candidate
    return replace(gate, pending=None, captured=captured, candidate=candidate), Effects(reason=reason)


def _counted(gate: CheckpointGate, fresh: Generation, recipes: int) -> _Next:
    """A catalog: at the end of a cycle the prior candidate is promoted and the latest takes its place."""
    accepted = gate.accepted + 1
    if accepted < recipes:
        reason = f"{accepted} of {recipes} recipes are accepted in this cycle"
        return replace(gate, accepted=accepted), Effects(reason=reason, capture=fresh)
    gate = replace(gate, accepted=0)
    if gate.writing is not None:
        # What is on no disk cannot be promised to a later recovery; another cycle costs it nothing but time.
        reason = f"{gate.writing} is still being written and waits for another cycle"
        return gate, Effects(reason=reason, capture=fresh)
    ripe = gate.candidate
    trusted = gate.trusted if ripe is None else (*gate.trusted, ripe)
    reason = f"a cycle of {recipes} accepted recipes makes {fresh} the next candidate"
    if ripe is not None:
        reason += f" and {ripe} verified"
    gate = replace(gate, trusted=trusted, candidate=None, writing=fresh)
    return gate, Effects(reason=reason, capture=fresh, promote=ripe, persist=fresh)


def _not_checked(gate: CheckpointGate) -> _Next:
    reason = f"the check at step {gate.step} is incomplete: nothing is captured, and the cycle starts again"
    return replace(gate, accepted=0), Effects(reason=reason)


def _rejected(gate: CheckpointGate) -> _Next:
    reason = f"the check at step {gate.step} was not accepted: its cycle and the candidate are void"
    return replace(_without_candidate(gate), accepted=0), Effects(reason=reason)


def _corrupted(gate: CheckpointGate) -> _Next:
    reason = f"the check at step {gate.step} found corruption: nothing of this lineage is certified any more"
    certified = tuple(each for each in gate.captured if each in gate.trusted)
    gate = replace(_without_candidate(gate), accepted=0, poisoned=gate.step, captured=certified)
    return gate, Effects(reason=reason, retrieve=Manifestation.SDC)


def _without_candidate(gate: CheckpointGate) -> CheckpointGate:
    writing = gate.writing if gate.writing in (*gate.trusted, gate.pending) else None
    return replace(gate, candidate=None, writing=writing, durable=_still(gate, gate.trusted))


def _hung(gate: CheckpointGate, event: Hung) -> _Next:
    return gate, Effects(reason=f"the job hangs at step {event.step}", retrieve=Manifestation.HANG)


def _written(gate: CheckpointGate, event: Written) -> _Next:
    written = event.generation
    if written != gate.writing:
        # Its lineage or its cycle was voided meanwhile; the files go unless memory still needs their name.
        return gate, Effects(reason=f"{written} is not wanted in files any more", retire=(written,))
    gate = replace(gate, writing=None, durable=(*gate.durable, written))
    return gate, Effects(reason=f"the files of {written} are sealed on every rank")


def _write_failed(gate: CheckpointGate, event: WriteFailed) -> _Next:
    reason = f"the files of {event.generation} could not be written on every rank"
    if event.generation != gate.writing:
        return gate, Effects(reason=reason, retire=(event.generation,))
    if event.generation == gate.candidate:
        gate = _without_candidate(gate)
        reason += "; it is the candidate no longer"
    # At least one: a disk that stays full is not tried again at every check.
    return replace(gate, writing=None, unwritten=max(gate.unwritten, 1)), Effects(reason=reason)


def _lost(gate: CheckpointGate, event: Lost) -> _Next:
    gone = event.generation
    if gone == gate.candidate:
        gate = _without_candidate(gate)
    gate = replace(
        gate,
        captured=tuple(each for each in gate.captured if each != gone),
        trusted=tuple(each for each in gate.trusted if each != gone),
        durable=tuple(each for each in gate.durable if each != gone),
        writing=None if gate.writing == gone else gate.writing,
        pending=None if gate.pending == gone else gate.pending,
    )
    return gate, Effects(reason=f"{gone} cannot be had any more", retire=(gone,))


def _recovered(gate: CheckpointGate, event: Recovered) -> _Next:
    loaded = event.generation
    known = gate.trusted if gate.poisoned is not None else (*gate.trusted, *gate.captured)
    if loaded is None and gate.trusted:
        raise ValueError(
            f"a job cannot start from nothing while {gate.verified} is verified; report it lost first"
        )
    if loaded is not None and loaded not in known:
        raise ValueError(f"{loaded} may not be loaded; there is {', '.join(map(str, known)) or 'none'}")
    trusted = tuple(each for each in gate.trusted if loaded is not None and each.step <= loaded.step)
    gate = replace(
        gate,
        accepted=0,
        captured=() if loaded is None else (loaded,),
        candidate=None,
        trusted=trusted,
        durable=tuple(
            each for each in trusted if each in gate.durable or (each == loaded and event.in_files)
        ),
        writing=None,
        pending=None,
        unwritten=0,
        poisoned=None,
        lineage=gate.lineage + 1,
        step=0 if loaded is None else loaded.step,
    )
    origin = "its beginning" if loaded is None else str(loaded)
    return gate, Effects(reason=f"the job runs on from {origin} as lineage {gate.lineage}")


_REFUSALS: dict[Outcome, Callable[[CheckpointGate], _Next]] = {
    Outcome.NOT_CHECKED: _not_checked,
    Outcome.REJECTED: _rejected,
    Outcome.SDC: _corrupted,
}
_TRANSITIONS: dict[type, Callable[[CheckpointGate, Any], _Next]] = {
    Checked: _checked,
    Hung: _hung,
    Sealed: _sealed,
    Written: _written,
    WriteFailed: _write_failed,
    Lost: _lost,
    Recovered: _recovered,
}


def _still(gate: CheckpointGate, wanted: tuple[Generation, ...]) -> tuple[Generation, ...]:
    return tuple(each for each in gate.durable if each in wanted)


def _pruned(gate: CheckpointGate) -> CheckpointGate:
    """Without the verified generations that lie in neither memory nor the newest files."""
    in_files = [each for each in gate.trusted if each in gate.durable]
    wanted = {*in_files[-1 - gate.keep :], *gate.captured, gate.writing}
    trusted = tuple(each for each in gate.trusted if each in wanted)
    lasting = trusted if gate.candidate is None else (*trusted, gate.candidate)
    return replace(gate, trusted=trusted, durable=_still(gate, lasting))
