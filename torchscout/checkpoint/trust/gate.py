"""Decides which checkpoints are trusted: the saving half of algorithm 3, a state machine (paper, section 8).

``transition`` is a pure function from a state and an event to the next state and its effects. Every rank
passes the same job-wide events in the same order and so reaches the same state. ``selection`` decides which
checkpoint a failed job loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchscout.checkpoint.trust.gate_state import (
    Checked,
    CheckpointGate,
    Effects,
    Event,
    Lost,
    Outcome,
    Realigned,
    Recovered,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.checkpoint.trust.generation import Generation

__all__ = ["CheckpointGate", "transition"]

# [Note: what each event does to trust]
#
# accepted     Healthy, or slow: a straggler's numbers are right. Captures, and counts the recipes that were
#              replayed: a check may have several of the K.
# not checked  Captures nothing, as in the paper for incomplete evidence. A rotation visits all K recipes only
#              if those of a cycle follow each other, so the count restarts at 0. The candidate stays: its own
#              cycle was complete, and the next K accepted recipes in a row are all recipes again.
# rejected     Peers disagreed, and it is not known yet whether a rank or a kernel is at fault. Captures
#              nothing, restarts the count and drops the candidate, whose second cycle is not accepted.
# sdc          Drops the candidate and every capture that is not certified. Whatever later checks say, nothing
#              is captured, counted or certified until a recovery.
# recovered    The loaded generation is the latest, and a new lineage begins. Newer generations belong to an
#              abandoned lineage and are dropped. So is the candidate, and the count restarts at 0, because
#              rotations restart and a replaced machine may hide what the old one did wrong.
# sealed       The pending generation gets its role.
# write failed A candidate without files is dropped; the current cycle goes on. Certified state is in memory.
# realigned    After a check that failed on some ranks: the state that all ranks can rely on replaces each
#              rank's own.
# lost         The generation is dropped. The next older verified one takes the place of a verified one, and
#              the newest candidate in files that of the latest: [Note: candidates in between].
#
# [Note: dense is not a catalog of one]
#
# A dense model's shapes never change, so an accepted check certifies the generation captured right after it:
# once sealed it is both latest and verified, and there is no candidate. A catalog with K = 1 still waits for
# a second cycle: what was captured at check n is promoted at check n + 1, or dropped if that finds an SDC.
#
# [Note: candidates in between]
#
# A cycle may be long, and without files a job that loses its memory would go back to the last cycle's end.
# So every ``persist_every``-th capture within a cycle is written, too. The newest of them is kept as
# ``interim`` until newer files are sealed. No complete cycle ends with its capture, so it is never promoted.
# It is trusted like the latest, which it replaces if that is lost: after a crash the next workers must replay
# the catalog on it before they train. A file that is still being written when a cycle ends delays the end of
# the cycle to the next accepted check: the recipes accepted until then include all of them, too.
#
# [Note: pointers move when every rank has sealed]
#
# A capture is copied and sealed while training goes on, and may fail on any rank. Until the next check it is
# pending and has no role. At that check all ranks report whether they have sealed it: it becomes the latest,
# or is dropped. The previous latest is kept until then. A job that dies in between looks for the pending
# generation when it restarts: if every rank's shard is there, it was sealed (``ledger.settled``).

_Next = tuple[CheckpointGate, Effects]


def transition(gate: CheckpointGate, event: Event) -> tuple[CheckpointGate, Effects]:
    """Return the next state and what to do; raises ``ValueError`` for an event that cannot follow."""
    following, effects = _TRANSITIONS[type(event)](gate, event)
    following = _pruned(following)
    retired = gate.held.union(effects.retire) - following.held
    return following, replace(effects, retire=tuple(sorted(retired)))


def _checked(gate: CheckpointGate, event: Checked) -> _Next:
    if event.step <= gate.step:
        raise ValueError(f"a check at step {event.step} cannot follow step {gate.step}")
    if gate.pending is not None:
        raise ValueError(f"report {gate.pending} as sealed or lost before the next check")
    gate = replace(gate, step=event.step)
    if gate.poisoned is not None:
        reason = f"corruption was found at step {gate.poisoned}, and the job has not recovered since"
        return gate, Effects(reason=reason)
    if event.outcome.accepted:
        return _accepted(gate, Generation(event.step, gate.lineage), event.recipes)
    return _REFUSALS[event.outcome](gate)


def _accepted(gate: CheckpointGate, fresh: Generation, recipes: int) -> _Next:
    if recipes < 1:
        raise ValueError(f"an accepted check replays at least 1 recipe, not {recipes}")
    gate = replace(gate, pending=fresh, unwritten=gate.unwritten + 1)
    # [Note: pointers move when every rank has sealed]
    if gate.recipes is None:
        return _certified(gate, fresh)
    accepted = gate.accepted + recipes
    if accepted < gate.recipes:
        return _within_cycle(replace(gate, accepted=accepted), fresh)
    return _cycle_ended(gate, fresh, gate.recipes)


def _certified(gate: CheckpointGate, fresh: Generation) -> _Next:
    """Dense: [Note: dense is not a catalog of one]."""
    is_first = not gate.durable and gate.unwritten == 1  # no file exists, and no write has failed
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
    # What is captured at the end of a cycle is written, and the count has restarted.
    candidate = fresh if gate.writing == fresh and not gate.accepted else gate.candidate
    return replace(gate, pending=None, captured=captured, candidate=candidate), Effects(reason=reason)


def _within_cycle(gate: CheckpointGate, fresh: Generation) -> _Next:
    """A catalog: [Note: candidates in between]."""
    reason = f"{gate.accepted} of {gate.recipes} recipes are accepted in this cycle"
    if gate.unwritten < gate.persist_every or gate.writing is not None:
        return gate, Effects(reason=reason, capture=fresh)
    gate = replace(gate, unwritten=0, writing=fresh)
    return gate, Effects(reason=reason, capture=fresh, persist=fresh)


def _cycle_ended(gate: CheckpointGate, fresh: Generation, recipes: int) -> _Next:
    """A catalog: promotes the candidate and makes ``fresh`` the next one."""
    if gate.writing is not None:
        reason = f"{gate.writing} is still being written; the cycle ends with the next accepted check"
        return replace(gate, accepted=recipes - 1), Effects(reason=reason, capture=fresh)
    ripe = gate.candidate
    trusted = gate.trusted if ripe is None else (*gate.trusted, ripe)
    reason = f"a cycle of {recipes} accepted recipes makes {fresh} the next candidate"
    if ripe is not None:
        reason += f" and {ripe} verified"
    gate = replace(gate, accepted=0, trusted=trusted, candidate=None, writing=fresh, unwritten=0)
    return gate, Effects(reason=reason, capture=fresh, promote=ripe, persist=fresh)


def _not_checked(gate: CheckpointGate) -> _Next:
    reason = f"the check at step {gate.step} is incomplete: nothing is captured, and the cycle starts again"
    return replace(gate, accepted=0), Effects(reason=reason)


def _rejected(gate: CheckpointGate) -> _Next:
    reason = f"the check at step {gate.step} was not accepted: its cycle and the candidate are void"
    return replace(_without_candidate(gate), accepted=0), Effects(reason=reason)


def _corrupted(gate: CheckpointGate) -> _Next:
    reason = f"the check at step {gate.step} found corruption: nothing of this lineage is certified any more"
    gate = replace(
        gate,
        accepted=0,
        poisoned=gate.step,
        captured=tuple(each for each in gate.captured if each in gate.trusted),
        candidate=None,
        interim=None,
        writing=gate.writing if gate.writing in gate.trusted else None,
        durable=_still(gate, gate.trusted),
    )
    return gate, Effects(reason=reason)


def _without_candidate(gate: CheckpointGate) -> CheckpointGate:
    writing = None if gate.writing == gate.candidate else gate.writing
    durable = tuple(each for each in gate.durable if each != gate.candidate)
    return replace(gate, candidate=None, writing=writing, durable=durable)


def _written(gate: CheckpointGate, event: Written) -> _Next:
    written = event.generation
    if written != gate.writing:
        # Its lineage or cycle was dropped meanwhile; its files are deleted unless it has another role.
        return gate, Effects(reason=f"{written} is no longer needed in files", retire=(written,))
    is_interim = written not in (*gate.trusted, gate.candidate)
    durable = (*(each for each in gate.durable if each != gate.interim), written)
    gate = replace(gate, writing=None, durable=durable, interim=written if is_interim else None)
    return gate, Effects(reason=f"the files of {written} are sealed on every rank")


def _write_failed(gate: CheckpointGate, event: WriteFailed) -> _Next:
    reason = f"the files of {event.generation} could not be written on every rank"
    if event.generation != gate.writing:
        return gate, Effects(reason=reason, retire=(event.generation,))
    if event.generation == gate.candidate:
        gate = _without_candidate(gate)
        reason += "; it is no longer the candidate"
    # At least one, so that a full disk is not tried again at every check.
    return replace(gate, writing=None, unwritten=max(gate.unwritten, 1)), Effects(reason=reason)


def _lost(gate: CheckpointGate, event: Lost) -> _Next:
    gone = event.generation
    if gone == gate.candidate:
        gate = _without_candidate(gate)
    gate = replace(
        gate,
        interim=None if gate.interim == gone else gate.interim,
        durable=tuple(each for each in gate.durable if each != gone),
    )
    captured = tuple(each for each in gate.captured if each != gone)
    if gone in gate.captured and not captured and gate.newest_candidate is not None:
        captured = (gate.newest_candidate,)
    gate = replace(
        gate,
        captured=captured,
        trusted=tuple(each for each in gate.trusted if each != gone),
        writing=None if gate.writing == gone else gate.writing,
        pending=None if gate.pending == gone else gate.pending,
    )
    return gate, Effects(reason=f"{gone} is no longer available", retire=(gone,))


def _recovered(gate: CheckpointGate, event: Recovered) -> _Next:
    loaded = event.generation
    known = gate.trusted if gate.poisoned is not None else (*gate.trusted, *gate.captured)
    if loaded is None and gate.trusted:
        raise ValueError(
            f"a job cannot start from step 0 while {gate.verified} is verified; report it lost first"
        )
    if loaded is not None and loaded not in known:
        raise ValueError(f"{loaded} may not be loaded; available: {', '.join(map(str, known)) or 'none'}")
    trusted = tuple(each for each in gate.trusted if loaded is not None and each.step <= loaded.step)
    gate = replace(
        gate,
        accepted=0,
        captured=() if loaded is None else (loaded,),
        candidate=None,
        interim=None,
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
    origin = "step 0" if loaded is None else str(loaded)
    return gate, Effects(reason=f"the job continues from {origin} as lineage {gate.lineage}")


def _realigned(_: CheckpointGate, event: Realigned) -> _Next:
    return event.gate, Effects(reason="checks continue after a failure: the cycle starts again")


_REFUSALS: dict[Outcome, Callable[[CheckpointGate], _Next]] = {
    Outcome.NOT_CHECKED: _not_checked,
    Outcome.REJECTED: _rejected,
    Outcome.SDC: _corrupted,
}
_TRANSITIONS: dict[type, Callable[[CheckpointGate, Any], _Next]] = {
    Checked: _checked,
    Sealed: _sealed,
    Written: _written,
    WriteFailed: _write_failed,
    Lost: _lost,
    Realigned: _realigned,
    Recovered: _recovered,
}


def _still(gate: CheckpointGate, wanted: tuple[Generation, ...]) -> tuple[Generation, ...]:
    return tuple(each for each in gate.durable if each in wanted)


def _pruned(gate: CheckpointGate) -> CheckpointGate:
    """Drop verified generations that are neither in memory nor among the newest files."""
    in_files = [each for each in gate.trusted if each in gate.durable]
    wanted = {*in_files[-1 - gate.keep :], *gate.captured, gate.writing}
    trusted = tuple(each for each in gate.trusted if each in wanted)
    lasting = (*trusted, *(each for each in (gate.candidate, gate.interim) if each is not None))
    return replace(gate, trusted=trusted, durable=_still(gate, lasting))
