"""Translates the histories of ``test_policy`` for today's ``decide``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchscout.config import RecoveryConfig
from torchscout.decision.consensus.rules import Status, Verdict
from torchscout.decision.records.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.decision.recovery.policy import decide, is_allowed

if TYPE_CHECKING:
    from tests.scenarios.test_policy import Event, History

ACTIONS = {
    "continue": Action.CONTINUE,
    "restart": Action.RESTART,
    "inspect": Action.INSPECT,
    "preflight": Action.INSPECT,  # which today knows no preflight as an action
    "replace": Action.REPLACE,
    "stop": Action.STOP,
}
KINDS = {"straggler": Manifestation.STRAGGLER, "sdc": Manifestation.SDC}


def done(history: History) -> tuple[str | None, tuple[str, ...]]:
    """Handle the incidents one after the other; return the action that follows the last, and the machines
    that it takes out of the job."""
    config = RecoveryConfig(act=tuple(history.act))
    restarts = []
    for event in history.events:
        decision = decide(incident_of(event), restarts, config, has_verified=history.has_verified)
        is_done = is_allowed(decision, config)
        restarts += [decision] if is_done and decision.action in (Action.RESTART, Action.REPLACE) else []
    if not is_done:
        return None, ()
    words = {action: word for word, action in ACTIONS.items()}
    return words[decision.action], decision.hosts if decision.action is Action.REPLACE else ()


def incident_of(event: Event) -> Incident:
    finding = event.finding
    status = Status.INCONCLUSIVE if event.undecided else Status.ATTRIBUTED
    outliers = () if event.undecided else finding.ranks
    times = [event.step_slowdown or 1.0 if rank in outliers else 1.0 for rank in range(len(event.machines))]
    record = EvidenceRecord(
        step=event.step,
        surface="time/input" if event.input_or_storage else "coordinate",
        manifestation=KINDS.get(finding.kind, Manifestation.HANG),
        peers=tuple(range(len(event.machines))),
        verdict=Verdict(status, outliers, tuple(times)),
    )
    hosts = tuple(dict.fromkeys(event.machines[rank] for rank in finding.ranks))
    return Incident(
        manifestation=record.manifestation,
        scope=Scope(finding.scope.replace(" ", "_")),
        step=event.step,
        ranks=finding.ranks,
        hosts=hosts,
        records=(record,),
        action=ACTIONS[finding.action],
        sentence="Something happened.",
    )
