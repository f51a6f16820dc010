"""Decides about incidents while the job runs, and ends this worker if the job must restart (paper, section
8).

A launcher such as torchrun restarts all workers when one of them fails. Every worker nevertheless exits by
itself, from a thread: its main thread may be blocked in a collective or on the device. A worker whose threads
cannot run either is ended by its observer.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchscout.communicators import Communicators, Job
from torchscout.config import RecoveryConfig
from torchscout.decision.policy import decide, is_allowed
from torchscout.decision.types import Action, Decision, Incident
from torchscout.errors import RestartPlanError, ScoutError
from torchscout.log import log
from torchscout.run.folder import End, RankEntry
from torchscout.run.restart import FOLDER_VARIABLE, RestartPlan, start_command, write_plans
from torchscout.run.writer import record_one
from torchscout.utils.text import listed

if TYPE_CHECKING:
    from torchscout.session.checkpoints.manager import CheckpointManager

__all__ = ["EXIT_STATUS", "Recovery"]

EXIT_STATUS = 128 + signal.SIGTERM
"""Of a worker that leaves so that the job restarts. Observers count it as asked to end, not as failed."""
_SECONDS_TO_REPORT = 1.0
"""Before the other ranks leave: the launcher ends all ranks as soon as one has left. The rank that reports
leaves after half of it, when all ranks know that they leave: a lost connection is then no failure."""
_MOST_CHARACTERS = 800
"""Of a reason in a decision; a restart plan has limits."""


@dataclass(slots=True)
class Recovery:
    """The decisions of one session."""

    job: Job
    config: RecoveryConfig
    plan: RestartPlan
    folder: Path | str | None
    """Where the restart plan is written; without one, nothing is carried out."""
    checkpoints: CheckpointManager | None
    was_restarted: bool = False
    """Whether a restart plan or torchrun says so, on any rank."""
    began: float = field(default_factory=time.monotonic)
    exit: Callable[[int], object] = os._exit
    leaving: Decision | None = None
    """The decision because of which this process is about to leave."""
    is_ending: bool = False
    """Whether an exception ends this process: its observer decides in its place."""
    entry: RankEntry | None = None
    """This rank's entry in the run directory."""
    tell_observer: Callable[[], object] = lambda: None
    """Called right before this process leaves."""

    @classmethod
    def agree(
        cls,
        communicators: Communicators,
        job: Job,
        config: RecoveryConfig,
        folder: Path | str | None,
        checkpoints: CheckpointManager | None,
    ) -> Recovery:
        """Begin with the newest restart plan that any rank finds in its folder.

        Raises ``ScoutError`` on every rank if an earlier run decided to stop the job.
        """
        folder = folder or os.environ.get(FOLDER_VARIABLE)
        plan = RestartPlan()
        try:
            plan = plan if folder is None else RestartPlan.read(Path(folder))
        except RestartPlanError as error:
            log.warning("%s; it is ignored", error)
        # A machine may have joined since: its agent has restarted nothing yet.
        was_restarted = bool(plan.restarts) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        # Equal documents are one object, so that most plans are read once.
        exchanged = communicators.exchange({"plan": plan.to_json(), "was_restarted": was_restarted})
        found = {id(each): each for each in exchanged}.values()
        plans = [RestartPlan.from_json(each["plan"]) for each in found]
        plan = max(plans, key=lambda each: (each.is_stopped, len(each.restarts)))
        if plan.is_stopped:
            raise ScoutError(
                f"An earlier run decided: {plan.sentence} To start the job again, correct the cause and "
                f"remove the restart plan on every machine: {RestartPlan.path(Path(folder or ''))}."
            )
        if job.rank == 0 and plan.sentence:
            log.info("this job was restarted: %s", plan.sentence)
        if job.rank == 0 and (used := [each for each in plan.excluded if each in job.hosts]):
            log.warning("the job runs on excluded machines: %s", listed(used))
        was_restarted = any(each["was_restarted"] for each in found)
        return cls(job, config, plan, folder, checkpoints, was_restarted)

    @property
    def can_act(self) -> bool:
        """Whether any decision is carried out."""
        return bool(self.config.act) and self.folder is not None

    @property
    def plan_folders(self) -> tuple[Path, ...]:
        """Where this rank writes the restart plan; nowhere if nothing is carried out."""
        if self.folder is None or not self.config.act:
            return ()
        agents = os.environ.get(FOLDER_VARIABLE)
        folders = (Path(self.folder).absolute(), Path(agents or self.folder).absolute())
        return tuple(dict.fromkeys(folders))

    def handle(self, incident: Incident) -> None:
        """Decide about an incident, and end this process if the job is to restart."""
        # A job without SCOUT's checkpoints restarts from its own, which are not SCOUT's to judge.
        has_verified = self.checkpoints is None or self.checkpoints.has_verified()
        seconds = time.monotonic() - self.began
        decision = decide(
            incident, self.plan.restarts, self.config, has_verified=has_verified, seconds=seconds
        )
        is_carried_out = self.can_act and is_allowed(decision, self.config)
        named = [(rank, self.job.devices[rank]) for rank in decision.ranks if rank < len(self.job.devices)]
        devices = tuple(f"rank {rank}: {device}" for rank, device in named if device)
        decision = replace(decision, devices=devices, is_carried_out=is_carried_out)
        is_reporter, is_leaving = self.job.rank == incident.logged_by, is_carried_out and not self.is_ending
        self.leaving = decision if is_leaving else self.leaving
        if is_reporter:
            self._report(decision)
        elif self.job.copies_from(incident.logged_by) and not self.is_ending:
            self._record(decision)
        if is_leaving:
            time.sleep(_SECONDS_TO_REPORT / 2 if is_reporter else _SECONDS_TO_REPORT)
            self._leave(decision)

    def fails(self) -> None:
        """Called when an exception ends this process. If it is about to leave, the exception is a consequence
        of that, and it leaves now; otherwise its observer decides in its place."""
        if self.leaving is not None:
            self._leave(self.leaving)
        self.is_ending = True

    def nothing_to_resume(self, reason: str) -> None:
        """Stop a job that was restarted and has no checkpoint left: its launcher would restart it in vain."""
        if not (self.plan_folders and self.was_restarted):
            return
        # Without a plan, torchrun has restarted the job by itself, after an incident that named no rank.
        last = self.plan.restarts[-1] if self.plan.restarts else None
        decision = Decision(
            step=0 if last is None else last.step,
            action=Action.STOP,
            failure=self.plan.failure,
            ranks=() if last is None else last.ranks,
            hosts=() if last is None else last.hosts,
            sentence=f"Stop the job: {reason[:_MOST_CHARACTERS]}",
            is_carried_out=True,
        )
        if self.job.rank == 0:
            self._report(decision)
        for problem in write_plans(self.plan.after(decision), self.plan_folders):
            log.warning("%s", problem)
        self._record_end(decision)
        self.tell_observer()

    def plan_was_used(self) -> None:
        """Note that this run has loaded the checkpoint that the plan asks for; the history stays."""
        if self.folder is not None and self.plan.restarts:
            self.plan = self.plan.used()
            for problem in write_plans(self.plan, [Path(self.folder)]):
                log.warning("%s", problem)

    def _report(self, decision: Decision) -> None:
        kept = "" if decision.is_carried_out else " (not carried out)" if self.config.act else " (dry run)"
        log.warning("decision%s: %s (%s)", kept, decision.sentence, self.job.run.reference)
        if decision.devices:
            log.warning("named devices: %s", listed(decision.devices))
        if self.is_ending:
            return
        if self.config.on_decision:
            start_command(self.config, decision, self.job.run)
        self._record(decision)

    def _record(self, decision: Decision) -> None:
        try:
            record_one(self.job.run_dir, self.job.rank, decision)
        except OSError as error:  # a full disk must not keep this rank from leaving
            log.warning("the decision could not be recorded: %s", error)

    def _leave(self, decision: Decision) -> None:
        problems = write_plans(self.plan.after(decision), self.plan_folders)
        for problem in problems:
            log.warning("%s", problem)
        if decision.action is Action.STOP and problems:
            return  # without the plan, the launcher would restart the job
        self._record_end(decision)
        self.tell_observer()
        if self.checkpoints is not None:  # a hang may have kept the update from coming that would seal it
            self.checkpoints.settle()
        sys.stdout.flush()
        sys.stderr.flush()
        self.exit(EXIT_STATUS)

    def _record_end(self, decision: Decision) -> None:
        """Say that this rank ends on purpose: its launcher may have taken its exit status before its observer
        sees it, which would then report a failure."""
        if self.entry is None:
            return
        rank, record = self.entry.rank, self.entry.record
        try:
            End(rank, "interrupted", decision.step, record, decision.sentence).write(self.job.run_dir)
        except OSError as error:
            log.warning("the end of rank %d could not be recorded: %s", rank, error)
