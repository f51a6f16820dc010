"""Decides about a hang in place of a trainer that cannot: it has ended, or is stopped (paper, section 8).

[Note: the launcher is first] When a machine is lost, the connections of its peers break. Their trainers fail
at once, and the launcher restarts them before there is a verdict. Observers outlive their trainers until the
verdict is known, so they write the restart plan: agents read it while they wait for the next round, and new
workers when they attach.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchscout.decision.policy import decide, is_allowed
from torchscout.decision.types import Decision, Incident, Resolved
from torchscout.errors import RestartPlanError
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan, is_same, start_command, write_plans
from torchscout.run.writer import record_one

if TYPE_CHECKING:
    from torchscout.decision.types import Recordable
    from torchscout.observer.spec import ObserverSpec

__all__ = ["LateDecision"]


class LateDecision:
    """The decision about the last hang or crash that this observer knows of."""

    def __init__(self, spec: ObserverSpec) -> None:
        self.is_author = False
        """Whether the hub of this process has recorded an incident."""
        self._spec = spec
        self._incident: Incident | None = None
        self._decision: Decision | None = None
        """About that incident."""
        self._is_planned = self._is_recorded = True

    def must_end(self, item: Recordable) -> bool:
        """Take an item of news, and return whether the trainer has to end because of it."""
        config = self._spec.recovery
        if config is None or not isinstance(item, Incident) or not item.manifestation.stops_job:
            return False
        restarts, seconds = self._spec.plan.restarts, time.monotonic() - self._spec.began
        # Whether there is a verified checkpoint matters for wrong numbers only.
        decision = decide(item, restarts, config, has_verified=True, seconds=seconds)
        is_carried_out = bool(self._spec.plan_folders) and is_allowed(decision, config)
        self._incident, self._decision = item, replace(decision, is_carried_out=is_carried_out)
        self._is_planned, self._is_recorded = not is_carried_out, False
        return is_carried_out

    def is_over(self, item: Recordable) -> bool:
        """Take an item of news, and return whether the incident of the decision is resolved by it: the job
        goes on, and a trainer that ends later does so for another reason."""
        if not isinstance(item, Resolved) or self._incident is None or item.incident != self._incident.id:
            return False
        self._incident = self._decision = None
        return True

    def trainer_ended(self) -> None:
        """Do what the trainer would have done, unless it has. Call it once the trainer has ended."""
        if self._decision is not None and not self._is_planned:
            self._is_planned = True
            if any(_is_stopped(Path(each)) for each in self._spec.plan_folders):
                self._decision = None  # trainers that refuse to go on have ended, too
                return
            plan = self._plan_after(self._decision)
            for problem in write_plans(plan, map(Path, self._spec.plan_folders)):
                print(problem, file=sys.stderr)
        if self._incident is not None and self._spec.rank == self._incident.logged_by:
            self._record()

    def close(self) -> None:
        """Record the decision if nobody has: the rank whose task it is may be gone with its observer."""
        if self.is_author:
            self._record()

    def _plan_after(self, decision: Decision) -> RestartPlan:
        """Return the plan for a decision. The trainer may have written it already. If it has used the plan
        that the job began with, the failure of that plan no longer counts."""
        plan = self._spec.plan
        try:
            found = RestartPlan.read(Path(self._spec.plan_folders[0]))
        except RestartPlanError:
            return plan.after(decision)
        if len(found.restarts) > len(plan.restarts) and is_same(found.restarts[-1], decision):
            return found
        return (plan if found.sentence else plan.used()).after(decision)

    def _record(self) -> None:
        decision, config = self._decision, self._spec.recovery
        if self._is_recorded or decision is None or config is None:
            return
        self._is_recorded = True
        try:
            known = IncidentLog.read(self._spec.run_dir).decisions
            if any((each.step, each.sentence) == (decision.step, decision.sentence) for each in known):
                return
            record_one(self._spec.run_dir, self._spec.rank, decision, by="observer")
        except OSError as error:
            print(f"the decision could not be recorded: {error}", file=sys.stderr)
        if config.on_decision:
            start_command(config, decision, self._spec.run, self._spec.directory)


def _is_stopped(folder: Path) -> bool:
    try:
        return RestartPlan.read(folder).is_stopped
    except RestartPlanError:
        return False
