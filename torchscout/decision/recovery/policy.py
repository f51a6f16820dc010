"""Decides what to do about an incident: continue, restart, replace machines, inspect, or stop.

A pure function of the incident, the decisions that restarted the job so far, and the settings. Every rank
computes it from the same incident and comes to the same decision.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchscout.decision.consensus import Status
from torchscout.decision.progress import Phase
from torchscout.decision.types import Action, Decision, Failure, Incident, Manifestation, Scope
from torchscout.utils.text import listed, named

if TYPE_CHECKING:
    from torchscout.config import RecoveryConfig

__all__ = ["decide", "is_allowed"]


def is_allowed(decision: Decision, config: RecoveryConfig) -> bool:
    """Whether SCOUT may carry out the decision; otherwise it is only logged.

    A stop ends the job as a restart would, so it needs the same permission.
    """
    needed = {Action.RESTART: "restart", Action.REPLACE: "replace", Action.STOP: "restart"}
    return needed.get(decision.action) in config.act


def decide(
    incident: Incident, restarts: Sequence[Decision], config: RecoveryConfig, *, has_verified: bool
) -> Decision:
    """Decide about an incident, given the job's restarts so far, oldest first.

    ``has_verified`` tells whether there is a checkpoint to restart from that is known to be correct. Without
    SCOUT's checkpoints it is True: the job's own are not SCOUT's to judge.
    """
    proposed = _PROPOSED[incident.manifestation](incident, config)
    if proposed.action not in (Action.RESTART, Action.REPLACE):
        return proposed
    if proposed.failure is Failure.SDC and not has_verified:
        return _changed(proposed, Action.STOP, "no verified checkpoint is left to restart from")
    if (why := _is_stuck(proposed, restarts, config)) is not None:
        return _changed(proposed, Action.STOP, why)
    return _escalated(proposed, restarts)


def _hang(incident: Incident, _: RecoveryConfig) -> Decision:
    if incident.action is Action.REPLACE:
        return _decision(incident, Action.REPLACE, Failure.MACHINES_GONE, "cannot be reached")
    if incident.scope is Scope.JOB and incident.records[0].surface == "process":
        return _decision(incident, Action.INSPECT, Failure.OTHER, "all trainers ended at the same time")
    # A named rank is late, whatever the reason. If ranks communicate different things, it is not always clear
    # which one is wrong, but a restart helps in any case.
    if incident.scope in (Scope.RANK, Scope.MACHINE) or incident.action is Action.RESTART:
        return _decision(incident, Action.RESTART, Failure.HANG, "stopped the job")
    verdict = incident.records[0].verdict
    is_undecided = verdict is not None and verdict.status is Status.INCONCLUSIVE
    why = "it is not known who stopped the job" if is_undecided else "no rank is behind the others"
    return _decision(incident, Action.INSPECT, Failure.HANG, why)


def _sdc(incident: Incident, _: RecoveryConfig) -> Decision:
    if incident.scope is Scope.RANK:
        return _decision(incident, Action.REPLACE, Failure.SDC, "computed or held wrong numbers")
    if incident.scope is Scope.PEER_GROUP and len(incident.ranks) == 2:
        return _decision(incident, Action.REPLACE, Failure.SDC, "disagree, and either may be wrong")
    return _decision(incident, Action.INSPECT, Failure.SDC, "it is not known which rank is wrong")


def _straggler(incident: Incident, config: RecoveryConfig) -> Decision:
    if incident.scope not in (Scope.RANK, Scope.MACHINE) or not incident.ranks:
        return _decision(incident, Action.INSPECT, Failure.STRAGGLER, "it is not known which rank is slow")
    if incident.records[0].surface in _PHASES:
        why = "slow input or storage need not be the fault of a machine"
        return _decision(incident, Action.INSPECT, Failure.STRAGGLER, why)
    lost = _slowdown(incident) * config.horizon_seconds
    costs = f"would cost about {lost:.0f} s in the next {config.horizon_seconds:.0f} s"
    if lost > config.restart_seconds:
        why = f"{costs}, and a restart costs {config.restart_seconds:.0f} s"
        return _decision(incident, Action.REPLACE, Failure.STRAGGLER, why)
    return _decision(incident, Action.CONTINUE, Failure.STRAGGLER, f"{costs}, less than a restart")


def _not_checked(incident: Incident, _: RecoveryConfig) -> Decision:
    return _decision(incident, Action.CONTINUE, Failure.OTHER, "training is not affected")


_PROPOSED = {
    Manifestation.HANG: _hang,
    Manifestation.SDC: _sdc,
    Manifestation.STRAGGLER: _straggler,
    Manifestation.NOT_CHECKED: _not_checked,
}


_PHASES = {f"time/{phase.value}" for phase in Phase}


def _slowdown(incident: Incident) -> float:
    """The share of the job's time that waiting for the slow rank costs, from the times that prove it.

    An upper bound: it assumes that all work of that rank is as slow as what was compared.
    """
    record = incident.records[0]
    if record.verdict is None or not record.verdict.outliers:
        return 0.0
    times = [float(each) for each in record.verdict.evidence if isinstance(each, int | float)]
    slow = [times[position] for position in record.verdict.outliers]
    usual = [each for position, each in enumerate(times) if position not in record.verdict.outliers]
    if not usual or max(slow) <= 0:
        return 0.0
    return max(0.0, 1 - statistics.median(usual) / max(slow))


def _is_stuck(proposed: Decision, restarts: Sequence[Decision], config: RecoveryConfig) -> str | None:
    """Why restarting again makes no sense; None if it does."""
    last = restarts[-config.max_restarts :]
    # A job that has passed the step of an earlier incident has made progress since.
    if len(last) == config.max_restarts and all(each.step >= proposed.step for each in last):
        return f"{len(last)} restarts in a row have not brought the job past step {proposed.step}"
    return None


def _escalated(proposed: Decision, restarts: Sequence[Decision]) -> Decision:
    """A stronger action, if the same failure came back after the job was restarted."""
    same = [each for each in restarts if each.failure is proposed.failure and each.step == proposed.step]
    if proposed.action is Action.RESTART:
        repeated = {*proposed.ranks} & {rank for each in restarts for rank in each.ranks}
        if repeated and proposed.hosts:
            why = f"{named(sorted(repeated))} failed again after a restart"
            proposed = _changed(proposed, Action.REPLACE, why)
        elif sum(each.action is Action.RESTART for each in same) >= 2:
            return _changed(proposed, Action.STOP, f"two restarts did not help at step {proposed.step}")
    if proposed.action is Action.REPLACE and sum(each.action is Action.REPLACE for each in same) >= 2:
        return _changed(proposed, Action.STOP, f"two replacements did not help at step {proposed.step}")
    return proposed


def _decision(incident: Incident, action: Action, failure: Failure, why: str) -> Decision:
    subject = "" if action is Action.INSPECT or not incident.ranks else f"{named(incident.ranks)} "
    return Decision(
        action=action,
        failure=failure,
        step=incident.step,
        ranks=incident.ranks,
        hosts=incident.hosts,
        sentence=_sentence(action, incident.hosts, f"{subject}{why} (step {incident.step})"),
    )


def _changed(decision: Decision, action: Action, why: str) -> Decision:
    return replace(decision, action=action, sentence=_sentence(action, decision.hosts, why))


_WORDS = {
    Action.CONTINUE: "Continue",
    Action.RESTART: "Restart the job in place",
    Action.INSPECT: "Inspect the job",
    Action.STOP: "Stop the job",
}


def _sentence(action: Action, hosts: Sequence[str], why: str) -> str:
    machines = f"machine{'s' * (len(hosts) > 1)} {listed(hosts)}" if hosts else "the named machines"
    return f"{_WORDS.get(action, f'Replace {machines}')}: {why}."
