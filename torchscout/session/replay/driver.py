"""One rank's part in replay: which checks run, what they find, what they certify (paper, section 6.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from torchscout.checkpoint.gate import Outcome, SweepResult
from torchscout.communicators import Communicators, PeerCommunicator
from torchscout.config import ReplayConfig
from torchscout.decision.policy import step_slowdown
from torchscout.decision.sdc import OpenIncidents, SdcDiagnosis
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, from_json
from torchscout.log import log
from torchscout.mesh import LayerKind, Mesh
from torchscout.replay.finite import FINITE, FiniteState, not_finite
from torchscout.replay.recipe import Measured, Mode, Recipe
from torchscout.replay.recipes.owned_state import OWNED_STATE, OwnedStateRecipe
from torchscout.replay.replayer import Replayer
from torchscout.replay.schedule import Rotation
from torchscout.replay.sweep import sweep
from torchscout.replay.verdicts import Findings
from torchscout.run.writer import Recorder
from torchscout.session.boundary import Boundary
from torchscout.session.checkpoints.certifier import SEVERITY, Certifier, CheckCoverage, outcome_of, trust_in
from torchscout.session.checkpoints.resumption import SweepReport
from torchscout.session.replay.captures import CAPTURED, CaptureComparison
from torchscout.session.replay.check_history import CheckHistory
from torchscout.session.replay.coverage import Covered, RecipeCycle, covered_by, unwatched
from torchscout.session.replay.pace import EXPERTS, Pace, PaceVote
from torchscout.session.replay.summary import SummaryRecorder
from torchscout.session.replay.time_comparison import Compared, TimeComparison
from torchscout.state.table import StateTable

__all__ = ["ReplayDriver", "ReplayParts"]

STATE_RECIPES = ("replicated_state", "expert_state")
"""The recipes that compare replicated state."""
_SWEPT = {Outcome.HEALTHY: SweepResult.CLEAN, Outcome.SDC: SweepResult.SDC}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayParts:
    """What a replay driver is made of."""

    config: ReplayConfig
    recipes: Sequence[Recipe]
    cycle: RecipeCycle
    parameters: Collection[torch.Tensor]
    """Those of the model that this rank holds; coverage is measured over them."""
    table: StateTable
    """The state of this rank."""
    mesh: Mesh
    communicators: Communicators
    peers: Callable[[LayerKind, bool], PeerCommunicator]
    """See ``replay.replayer.PeersFor``."""
    recorder: Recorder
    certifier: Certifier
    boundary: Boundary
    finish_update: Callable[[], None]
    """See ``adapters.base.Adapter``."""
    on_incidents: Callable[..., None]
    """See ``session.incidents.Incidents.publish``."""
    keeps_history: bool  # whether this rank records which checkpoints can be trusted
    still_alive: Callable[[], None]
    """Called repeatedly in a check that takes long because results differ, which is no hang."""


class _Ballot(NamedTuple):
    """One rank's vote on a check; the highest value of each field counts."""

    severity: int
    state_differs: int = 0
    found: int = 0
    """How many incidents this rank reports."""
    held_up: int = 0
    """Highest on the first rank whose state has NaN or infinity, or was not watched: that rank logs it."""


class ReplayDriver:
    """Runs the checks that are due at the end of a step, until ``close``."""

    def __init__(self, parts: ReplayParts) -> None:
        """Compare state before the first update, and prepare the first step. Every rank makes this call."""
        self._parts = parts
        self._config = config = parts.config
        self._guard, self._communicators = parts.boundary.guarded, parts.communicators
        self._recipes, self._certifier = parts.recipes, parts.certifier
        self._rotation = Rotation({each.kind: each.order for each in parts.recipes}, config.intervals)
        self._replayer = Replayer(parts.recipes, self._rotation, parts.peers)
        self._replayer.variants = config.variants
        self._replayer.saved_calls = parts.certifier.saved_calls
        self._replayer.still_here = parts.still_alive
        paths = [each.order.cycle for each in parts.recipes if each.kind == EXPERTS]
        self._pace = Pace(config, parts.peers(LayerKind.DENSE, False).device, max(paths, default=0))
        self._replayer.now = self._pace.now
        self._ownership = parts.table.ownership
        self._owned_state = [each for each in parts.recipes if isinstance(each, OwnedStateRecipe)]
        self._peers = parts.peers(LayerKind.DENSE, False)
        self._rank, self._device = self._peers.group.ranks[self._peers.position], self._peers.device
        self._captures = CaptureComparison(parts.peers, parts.certifier, self._guard)
        self._diagnosis, self._open_incidents = SdcDiagnosis(parts.mesh), OpenIncidents()
        slow, shared = config.straggler, config.baseline
        if self._device.type != "cuda":
            slow, shared = slow.on_host(), shared.on_host()
        by_all = config.records == "all"
        self._times = TimeComparison(
            parts.mesh, self._rank, parts.communicators, slow, shared, by_all=by_all, guard=self._guard
        )
        self._replayer.doubted = self._doubted
        self._recorder = parts.recorder if by_all else SummaryRecorder(parts.recorder, slow)
        self._last_check = 0
        """The step of the previous check, after which state may have been captured."""
        self._compared: Compared | None = None
        """What ranks have agreed on in the current check, if they have."""
        self._finite = FiniteState(parts.recipes)
        self._concluded: Findings | None = None
        self._found: list[Incident] = []
        """Incidents that this rank reports to all ranks at the end of a check."""
        self._unsettled = Outcome.HEALTHY
        """The worst outcome of checks that this rank has concluded and that failed before the vote."""
        self._history = CheckHistory()
        self._has_reported_coverage = False
        self._certifier.set_coverage(
            parts.cycle,
            {"rotation": self._rotation, "ownership": self._ownership},
            lambda: self.covered().sentence(),
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            for each in self._recipes:
                each.start()
            self._learn_ownership()
            self._begin(1)
            undo.pop_all()

    @property
    def certified_step(self) -> int | None:
        return self._certifier.certified_step

    @property
    def checks(self) -> int:
        """How many checks there were so far."""
        return self._rotation.rounds

    @property
    def interval(self) -> int:
        """The number of steps from one check to the next."""
        return min(self._config.intervals.values()) * self._rotation.stretch

    @property
    def lacking(self) -> str | None:
        """What checks cannot cover, and why; None if nothing."""
        return self._parts.cycle.lacking

    def start_after(self, step: int) -> None:
        """Continue from a checkpoint of this step; captures that began before it was loaded are dropped."""
        self._replayer.abandon()
        self._pace.start_over()
        self._rotation.start_after(step)
        self._begin(step + 1)

    def update_begins(self) -> None:
        """Called right before an update: what the update overwrites must not have changed until now."""
        for each in self._owned_state:
            each.update_begins()

    def step_finished(self, step: int) -> None:
        """Called right after the update: run the check that is due, if any, and prepare the next step."""
        update_ended = self._pace.now()
        self._pace.step_took(update_ended - self._step_began)
        for each in self._owned_state:
            each.update_ended()
        self._guard(self._conclude_times)
        if self._replayer.is_due:
            self._check(step, update_ended)
        self._begin(step + 1)

    def _begin(self, step: int) -> None:
        """Start to capture what is replayed after this step, and watch what must not change before then."""
        self._replayer.begin(step)
        for each in self._owned_state:
            each.watch_after(step - 1)
        self._step_began = time.monotonic()

    def _check(self, step: int, began: float) -> None:
        self._parts.finish_update()
        check, findings = self._covered_at(step), Findings()
        try:
            self._replayer.check(step, findings)
        finally:
            # What peers have compared counts, even if the ranks lose each other before the vote.
            if self._concluded is not findings and findings.records:
                self._conclude_here(step, findings)
        compared, self._compared = self._compared, None
        assert compared is not None, "every check calls _doubted"
        if compared.doubted:
            compared = self._exchange(step, findings, findings.measured, is_final=True)
        self._pace.has_replayed(step)
        self._certify(step, compared, check)
        self._pace.check_took(self._pace.now() - began, check.paths, findings.on_shapes)
        self._guard(self._report_coverage)

    def _doubted(self, step: int, findings: Findings, measured: Sequence[Measured]) -> Collection[str]:
        """See ``Replayer.doubted``. Votes on the check are sent with the times; they count if no time is
        doubted."""
        findings.records.extend(self._captures.records(step))
        self._conclude_here(step, findings)
        self._compared = self._exchange(step, findings, measured, is_final=False)
        return self._compared.doubted

    @property
    def _held_up(self) -> list[str]:
        """What the user has to change before anything is certified, in this check."""
        held_up = self._history.held_up
        return [held_up[each] for each in (FINITE, OWNED_STATE) if each in held_up]

    def _exchange(
        self, step: int, findings: Findings, measured: Sequence[Measured], *, is_final: bool
    ) -> Compared:
        self._guard(lambda: self._conclude_times(wait=True))
        first = self._communicators.size - self._rank if self._held_up else 0
        own = _Ballot(SEVERITY.index(self._unsettled), 0, len(self._found), first)
        counted = self._certifier.votes(self._unsettled, differs=self._capture_is_doubtful(findings))
        votes = [*own, *self._pace.vote(), *counted]
        return self._times.exchange(step, measured, votes, is_final=is_final)

    def _covered_at(self, step: int) -> CheckCoverage:
        """What the check at the end of this step covers if it is accepted."""
        state = [each.kind for each in self._recipes if each.kind in STATE_RECIPES]
        has_state = bool(state) and all(self._rotation.is_due(kind, step) for kind in state)
        return CheckCoverage(self._rotation.turns_at(EXPERTS, step), has_state)

    def _conclude_here(self, step: int, findings: Findings) -> None:
        """Conclude what a check found. A failure in here stays local: a full disk must not separate this rank
        from the others."""
        self._concluded = findings
        wrong = not_finite(self._guard(self._finite.wrong), step, self._rank)
        outcome = self._guard(lambda: self._conclude(findings, wrong)) or Outcome.NOT_CHECKED
        self._unsettled = max(self._unsettled, outcome, key=SEVERITY.index)

    def _conclude(self, findings: Findings, wrong: Sequence[EvidenceRecord] = ()) -> Outcome:
        """Diagnose and record what a check found, and what is ``wrong`` with state that peers agree on;
        return this rank's outcome."""
        records = findings.records
        incidents = self._diagnosis.diagnose(records, repeats=findings.repeats, elsewhere=findings.elsewhere)
        self._history.add(records, self._config.require)
        new = self._open_incidents.new_ones(incidents, records)
        self._report([each for each in new if each.reporter == self._rank])
        self._write([*records, *(each for repeated in findings.repeats for each in repeated.again)])
        # A corrupted copy of correct state is dropped; training itself is fine.
        live = [each for each in records if each.surface != CAPTURED]
        outcome = outcome_of(live, (), findings.targets, self._config.require)
        share = min((each.share for each in self._owned_state), default=1.0)
        self._write(wrong)
        unmet = {each.surface: each.reason for each in wrong}
        unmet[OWNED_STATE] = unwatched(share, self._config.watched)
        if outcome.accepted and self._history.hold_up(unmet):
            return Outcome.NOT_CHECKED
        return outcome

    def _conclude_times(self, *, wait: bool = False) -> None:
        slow = self._times.observed(wait=wait)
        own = [each for each in slow.incidents if self._times.reports_all or each.reporter == self._rank]
        self._report(own)
        self._write(slow.records)

    def _certify(self, step: int, compared: Compared, check: CheckCoverage) -> None:
        """Act on the votes of all ranks: report incidents, move the gate, and agree on what the next check
        may cost."""
        highest = iter(compared.highest)
        agreed = _Ballot(*islice(highest, len(_Ballot._fields)))
        agreed_pace = PaceVote(*islice(highest, len(PaceVote._fields)))
        self._guard(self._conclude_times)
        self._share_incidents(bool(agreed.found) or compared.is_slow)
        if self._history.is_new(agreed.held_up, self._communicators.size - self._rank):
            log.warning("step %d: %s", step, "; ".join(self._held_up))
        if not SEVERITY[agreed.severity].accepted:
            self._rotation.take_back(EXPERTS, step)
        self._guard(lambda: self._certifier.decide(step, [*highest], check))
        if self._parts.keeps_history:
            kept = self._certifier.captures
            self._guard(lambda: self._recorder.record(trust_in(self._certifier.state(), step, is_kept=kept)))
        self._unsettled, self._last_check = Outcome.HEALTHY, step
        self._pace.adopt(agreed_pace, self._rotation, step)

    def disconnect(self, step: int) -> None:
        """Called when a check has failed on this rank: close SCOUT's groups, which ends the check on all
        ranks, and go on watching state that no other rank has."""
        self._communicators.disconnect()
        self._replayer.abandon()
        self.watch(step)

    def watch(self, step: int) -> None:
        """Called after an update while there are no checks. State that only one rank has is still watched,
        since the next check could not find what has changed until then."""
        for each in self._owned_state:
            each.update_ended()
            each.watch_after(step)

    def reconnect(self, step: int) -> None:
        """Connect all ranks again, and continue with the checks after this step. Every rank makes this call.

        Raises ``ChannelError`` if that fails. In the check that failed, some ranks may have come further than
        others. So everything on which exchanges depend is made equal again: the schedule is rank 0's, and
        times are compared from the beginning.
        """
        self._parts.still_alive()
        self._communicators.connect()
        self._rotation.move_to(self._communicators.from_rank_0(self._rotation.position()), step)
        self._times.start_over()
        self._pace.start_over()
        self._replayer.warm_up_again()
        gates = self._communicators.exchange(self._certifier.state())
        self._guard(lambda: self._certifier.agree(gates))
        self._begin(step + 1)

    def sweep(self, step: int, everything: bool) -> SweepReport:
        """Compare the state that was just loaded for this step, and replay ``everything`` on it if asked to.

        Incidents are reported as in any check. Every rank makes this call.
        """
        self._replayer.abandon()
        recipes = [each for each in self._recipes if everything or each.kind in STATE_RECIPES]
        findings = sweep(self._replayer, recipes, self._peers, step)
        outcome = self._guard(lambda: self._conclude(findings)) or Outcome.NOT_CHECKED
        differing = [each.mode for each in findings.records if each.scope is not None and not each.layer]
        own = _Ballot(SEVERITY.index(outcome), state_differs=Mode.STATE in differing, found=len(self._found))
        agreed = _Ballot(*self._communicators.highest(own))
        self._share_incidents(bool(agreed.found))
        compared = {each.layer for each in findings.records if each.verdict is not None}
        left = (each for each in findings.records if each.layer not in compared)
        unswept = next((f"{each.surface}: {each.reason}" for each in left), None)
        result = _SWEPT.get(SEVERITY[agreed.severity], SweepResult.COULD_NOT_RUN)
        return SweepReport(result, bool(agreed.state_differs), unswept)

    def status(self) -> Mapping[str, Any]:
        """What has been checked and when, how far the rotation is, and what could not be checked."""
        return {
            **self.metrics(),
            "peers": list(self._peers.group.ranks),
            "coverage": self._rotation.coverage(),
            "last": dict(self._history.latest),
            "not_checked": dict(self._history.not_checked),
            "not_repeating": self._replayer.history.not_repeating(),
            "held_up": dict(self._history.held_up),
            "lacking": self.lacking,
            "covered": self.covered().to_json(),
            "watched": min((each.share for each in self._owned_state), default=None),
        }

    def metrics(self) -> dict[str, Any]:
        """See ``Session.metrics``."""
        return {
            "checks": self.checks,
            "certified": self.certified_step,
            "turns": self._rotation.turns(),
            "share": self._pace.share(self._rotation.stretch),
            "max_overhead": self._config.max_overhead,
            **self._history.metrics(),
        }

    def covered(self) -> Covered:
        """What checks cover on this rank and what they leave out, as far as is known by now."""
        return covered_by(self._recipes, self._parts.parameters, self._history.not_checked)

    def close(self) -> None:
        # If a rank has failed in a check, this rank's device may wait for it, and training would wait too.
        self._communicators.abort_device_groups()
        self._replayer.abandon()
        for each in self._recipes:
            each.close()
        self._guard(lambda: self._conclude_times(wait=True))
        if self._found:  # no further check shares it
            self._guard(lambda: self._parts.on_incidents(self._rank, self._found, is_shared=False))
        self._recorder.close()

    def _learn_ownership(self) -> None:
        """Compare state before the first update: what differs already is owned by its rank."""
        recipes = [each for each in self._recipes if each.kind in STATE_RECIPES]
        self._ownership.is_before_training = True
        try:
            sweep(self._replayer, recipes, self._peers, 0)
        finally:
            self._ownership.is_before_training = False

    def _capture_is_doubtful(self, findings: Findings) -> bool:
        """Whether what was captured after the previous check differs, or may have changed before it was."""
        changed_after = {step for each in self._owned_state for step, _ in each.changed}
        return self._last_check in changed_after or any(
            each.scope is not None and each.surface == CAPTURED for each in findings.records
        )

    def _report(self, own: Sequence[Incident]) -> None:
        """Keep the incidents that this rank reports; its peers have concluded the same."""
        for each in own:
            is_slow = each.manifestation is Manifestation.STRAGGLER
            slowdown = step_slowdown(each, self._pace.steps) if is_slow else None
            self._found.append(replace(each, slowdown=slowdown))

    def _share_incidents(self, were_found: bool) -> None:
        """Pass the incidents of all ranks to ``on_incidents``, if any rank has found one."""
        if were_found:
            own, self._found = self._found, []
            for rank, found_by in enumerate(self._communicators.exchange([each.to_json() for each in own])):
                every = map(from_json, found_by)
                self._parts.on_incidents(rank, [each for each in every if isinstance(each, Incident)])

    def _write(self, records: Sequence[EvidenceRecord]) -> None:
        def write() -> None:
            with ExitStack() as writes:  # one record that cannot be written does not prevent the rest
                for record in reversed(records):
                    writes.callback(self._recorder.record, record)

        self._history.count(records)
        self._guard(write)

    def _report_coverage(self) -> None:
        """Log the coverage once every target has been checked."""
        cycles = [each["cycles"] for each in self._rotation.coverage().values()]
        if not self._has_reported_coverage and all(cycles):
            self._has_reported_coverage = True
            if self._rank == 0:
                log.info("after the first cycle of checks: %s", self.covered().sentence())
