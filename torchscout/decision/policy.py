"""Decides what to do about an incident: continue, restart, check or replace machines, inspect, or stop.

A pure function of the incident, the decisions that restarted the job so far, and the settings. Every rank
computes it from the same incident and comes to the same decision:

1. The incident says what it calls for; about a slow rank, what it costs the job decides.
2. If restarts do not bring the job further, it is stopped.
3. A named machine that failed before is replaced.
4. What is not permitted falls back to the strongest action that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchscout.decision.progress import Phase
from torchscout.decision.types import Action, Decision, Failure, Incident, Manifestation, Scope
from torchscout.utils.text import listed, named

if TYPE_CHECKING:
    from torchscout.config import RecoveryConfig

__all__ = ["RESTARTS", "decide", "is_allowed", "step_slowdown"]

RESTARTS = (Action.RESTART, Action.PREFLIGHT, Action.REPLACE)
"""The actions after which the job runs again."""
_PERMISSION = {
    Action.RESTART: "restart",
    Action.PREFLIGHT: "replace",
    Action.REPLACE: "replace",
    Action.STOP: "restart",
}
"""A stop ends the job as a restart does, and a machine that fails its preflight is replaced."""
_RECENT_STEPS, _RECENT_SECONDS = 50_000, 86_400.0
"""Failures may have to do with each other if no more steps and no more training time lie between them."""
_MOST_AT_ONE_STEP = 2
"""Restarts after failures at one step."""
_ENOUGH = 3
"""Intervals between checks that show how long steps usually take."""
_WAITS = {f"time/{each.value}" for each in (Phase.INPUT, Phase.CHECKPOINT_READ, Phase.CHECKPOINT_WRITE)}
"""What a rank is slow in without being at fault: data and storage are elsewhere."""


class _Choice(NamedTuple):
    action: Action
    why: str
    hosts: tuple[str, ...]


def is_allowed(decision: Decision | _Choice, config: RecoveryConfig) -> bool:
    """Whether SCOUT may carry out the decision; otherwise it is only logged."""
    return _PERMISSION.get(decision.action) in config.act


def decide(
    incident: Incident,
    restarts: Sequence[Decision],
    config: RecoveryConfig,
    *,
    has_verified: bool,
    seconds: float = 0.0,
) -> Decision:
    """Decide about an incident, given the job's restarts so far, oldest first.

    ``has_verified`` tells whether there is a checkpoint to restart from that is known to be correct. Without
    SCOUT's checkpoints it is True: the job's own are not SCOUT's to judge. ``seconds`` is for how long the
    job has run since its last start.
    """
    failure = _failure(incident)
    is_slow_rank = failure is Failure.STRAGGLER and incident.scope.is_named and bool(incident.ranks)
    action, why = _cost(incident, config) if is_slow_rank else _called_for(incident)
    choice = _Choice(action, f"{why} (step {incident.step})", incident.hosts)
    if action in RESTARTS:
        recent = _recent(incident.step, seconds, restarts)
        if failure is Failure.SDC and not has_verified:
            choice = choice._replace(action=Action.STOP, why="no verified checkpoint is left to restart from")
        elif (hopeless := _hopeless(incident, restarts, recent, config)) is not None:
            choice = choice._replace(action=Action.STOP, why=hopeless)
        else:
            choice = _permitted(_escalated(choice, incident, recent), failure, config)
    return Decision(
        action=choice.action,
        failure=failure,
        step=incident.step,
        ranks=incident.ranks,
        hosts=choice.hosts,
        sentence=f"{_in_words(choice)}: {choice.why}.",
        scope=incident.scope,
        seconds=seconds,
        incident=incident.id,
    )


def step_slowdown(incident: Incident, steps: Sequence[tuple[int, float]]) -> float | None:
    """Return how many times as long a step of the job takes since a rank is slow; None if nothing shows it.

    ``steps`` has the milliseconds of a step between each two checks since the job was started, with the step
    of the second one. What they vary by anyway is no slowdown. If the rank was slow from the start, a step
    counts as longer by as much as the work that was compared.
    """
    since = min(each.step for each in incident.records)
    before = sorted(milliseconds for step, milliseconds in steps if step < since)
    now = sorted(milliseconds for step, milliseconds in steps if step > since)
    if now and len(before) >= _ENOUGH:
        return max(1.0, now[len(now) // 4] / before[3 * len(before) // 4])
    if not steps:
        return None
    lost = dict[object, float]()
    for each in incident.records:
        if each.verdict is not None and each.verdict.outliers:
            times = [value for value in each.verdict.evidence if isinstance(value, int | float)]
            slow = max(times[position] for position in each.verdict.outliers)
            lost[each.surface, each.layer, each.mode] = max(0.0, slow - median(times))
    usual = median(milliseconds for _, milliseconds in steps)
    return usual / max(usual - sum(lost.values()), 0.1 * usual)


def _failure(incident: Incident) -> Failure:
    if incident.manifestation is Manifestation.HANG:
        return Failure.MACHINES_GONE if incident.action is Action.REPLACE else Failure.HANG
    known = {Manifestation.SDC: Failure.SDC, Manifestation.STRAGGLER: Failure.STRAGGLER}
    return known.get(incident.manifestation, Failure.OTHER)


def _cost(incident: Incident, config: RecoveryConfig) -> tuple[Action, str]:
    """A slow rank is replaced if the job loses more by waiting for it than by a restart."""
    if {each.surface for each in incident.records} <= _WAITS:
        return Action.INSPECT, "slow input or storage need not be the fault of a machine"
    if incident.slowdown is None:
        return Action.INSPECT, f"{named(incident.ranks)} slow the job down, it is not known how much"
    lost = (1 - 1 / incident.slowdown) * config.horizon_seconds
    why = f"{named(incident.ranks)} would cost about {lost:.0f} s in the next {config.horizon_seconds:.0f} s"
    if lost > config.restart_seconds:
        return Action.REPLACE, f"{why}, and a restart costs {config.restart_seconds:.0f} s"
    return Action.CONTINUE, f"{why}, less than a restart"


def _called_for(incident: Incident) -> tuple[Action, str]:
    """What the incident calls for. Without a name no machine is replaced before a preflight."""
    kind, scope, action, who = incident.manifestation, incident.scope, incident.action, named(incident.ranks)
    # A vote may have named ranks that compute together, of which one may have misled the others.
    is_named = scope.is_named or (kind is Manifestation.SDC and bool(incident.records[0].ranks))
    if action is Action.REPLACE and not is_named:
        action = Action.PREFLIGHT
    if kind is Manifestation.NOT_CHECKED:
        return action, "training is not affected"
    if action is Action.STOP:
        return action, "ranks communicate different things, and would do so again after a restart"
    if kind is Manifestation.HANG and action is Action.REPLACE:
        return action, f"{who} cannot be reached"
    if kind is Manifestation.CRASH and scope is Scope.JOB:
        return action, "all trainers ended at the same time"
    if kind is Manifestation.SDC and not is_named:
        return action, f"{who} differ, and it is not known which of them is wrong"
    return action, f"{who if is_named else 'it is not known which rank'} {_DID[kind]}"


_DID = {
    Manifestation.HANG: "stopped the job",
    Manifestation.CRASH: "ended and stopped the job",
    Manifestation.SDC: "computed or held wrong numbers",
    Manifestation.STRAGGLER: "is slow",
}


def _recent(step: int, seconds: float, restarts: Sequence[Decision]) -> list[Decision]:
    """Return the restarts that may have to do with a failure at this step, the newest first."""
    found = []
    for each in reversed(restarts):
        if seconds > _RECENT_SECONDS:
            break
        if step - each.step <= _RECENT_STEPS:
            found.append(each)
        seconds += each.seconds
    return found


def _hopeless(
    incident: Incident, restarts: Sequence[Decision], recent: Sequence[Decision], config: RecoveryConfig
) -> str | None:
    """Why another restart would not help; None if it may."""
    reached = list[int]()
    for step in (*(each.step for each in restarts), incident.step):
        # Inside ``resume()`` a job has no step yet: it has come as far as before.
        reached.append(step or (reached[-1] if reached else 0))
    here = reached.pop()
    # Once the job has passed the step of a failure, the restart after it has helped.
    vain = [*takewhile(lambda each: each[1] >= here, zip(reversed(restarts), reversed(reached), strict=True))]
    same = [restart for restart, step in vain if step == here]
    if len(same) >= _MOST_AT_ONE_STEP:
        hosts = {host for each in same if each.scope.is_named for host in each.hosts}
        if incident.scope.is_named and not hosts <= {*incident.hosts}:
            return (
                f"step {here} failed on {listed(hosts | {*incident.hosts})}: the program or its data is wrong"
            )
        return f"{len(same)} restarts did not help at step {here}"
    if len(vain) >= config.max_restarts:
        return f"{len(vain)} restarts in a row have not brought the job past step {here}"
    undecided = sum(not each.scope.is_named for each in recent)
    if not incident.scope.is_named and undecided >= config.max_restarts:
        return f"after {undecided} restarts it is still not known which rank is at fault"
    return None


def _escalated(choice: _Choice, incident: Incident, recent: Sequence[Decision]) -> _Choice:
    """What comes back with a machine is the machine: replace the named ones that failed before."""
    failed = {host for each in recent if each.scope.is_named for host in each.hosts}
    again = tuple(host for host in incident.hosts if host in failed)
    if choice.action is Action.REPLACE or not incident.scope.is_named or not again:
        return choice
    return _Choice(Action.REPLACE, f"{choice.why}, after an earlier failure there", again)


def _permitted(choice: _Choice, failure: Failure, config: RecoveryConfig) -> _Choice:
    """Fall back to a restart if no more is permitted, which does not help a slow machine. In a dry run the
    decision stays what it would be."""
    if is_allowed(choice, config) or failure is Failure.STRAGGLER or "restart" not in config.act:
        return choice
    return choice._replace(action=Action.RESTART, why=f'{choice.why}; act does not contain "replace"')


def _in_words(choice: _Choice) -> str:
    hosts = choice.hosts
    machines = f"machine{'s' * (len(hosts) > 1)} {listed(hosts)}" if hosts else "the named machines"
    return {
        Action.CONTINUE: "Continue",
        Action.RESTART: "Restart the job in place",
        Action.INSPECT: "Inspect the job",
        Action.PREFLIGHT: f"Restart the job after a preflight of {machines}",
        Action.REPLACE: f"Replace {machines}",
        Action.STOP: "Stop the job",
    }[choice.action]
