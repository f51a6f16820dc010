"""One rank's share in replay: its recipes, its cadence, what came of them (paper, section 6.1)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch

from torchscout.checkpoint.certification import SEVERITY, CertifiedSteps, outcome_of
from torchscout.checkpoint.gate_state import Outcome
from torchscout.checkpoint.selection import SweepResult
from torchscout.checkpoint.state.training_state import Stateful
from torchscout.communicators import Communicators, PeerCommunicator
from torchscout.config import ReplayConfig
from torchscout.decision import c3
from torchscout.decision.ownership import Ownership
from torchscout.decision.record import EvidenceRecord, Incident, from_json
from torchscout.decision.recorder import Recorder
from torchscout.decision.repeatability import UNDECIDED, unmet
from torchscout.decision.sdc import OpenIncidents, SdcDiagnosis
from torchscout.decision.straggler.diagnosis import Slowness, Stragglers
from torchscout.decision.straggler.timings import Measured, Timings
from torchscout.decision.summary import SummaryRecorder
from torchscout.log import log
from torchscout.mesh import Axis, LayerKind, Mesh
from torchscout.replay.capture.saved_calls import SavedCalls
from torchscout.replay.recipe import ABSENT, Comparison, Mode, Recipe
from torchscout.replay.recipes.experts import ExpertsRecipe
from torchscout.replay.recipes.layer import LayerRecipe
from torchscout.replay.recipes.optimizer import OptimizerRecipe
from torchscout.replay.recipes.owned_state import AT_REST, OwnedStateRecipe
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.replay.replayer import Findings, Replayer
from torchscout.replay.schedule import OverheadBudget, Rotation
from torchscout.replay.sweep import sweep
from torchscout.replay.verdicts import Context, judge
from torchscout.session.coverage import Covered, RecipeCycle, covered_by
from torchscout.session.resumption import SweepReport

__all__ = ["ReplayDriver"]

CENSUS = ("census", "expert_census")
"""The recipes that compare what peers hold."""
EXPERTS = "experts"
"""The recipe that goes through a catalog of shapes: only an accepted check takes it further."""
KEPT = "state/checkpoint"
"""What peers have captured of the state that they hold copies of."""
_SWEPT = {Outcome.HEALTHY: SweepResult.CLEAN, Outcome.SDC: SweepResult.SDC}


class Certifier(Protocol):
    """What checkpoints have to do with a check."""

    saved_calls: SavedCalls

    def signature(self) -> int | None:
        """Of what the last check let it capture, as far as peers should have the same; None if nothing."""
        ...

    def votes(self, outcome: Outcome, *, differs: bool) -> list[int]:
        """Return this rank's votes on the check, equally many on every rank."""
        ...

    def decide(self, step: int, counted: Sequence[int], *, counts: bool) -> None:
        """Decide by the highest vote of all ranks; a check certifies state only if it ``counts``."""
        ...

    def go_by(
        self, coverage: RecipeCycle, progress: Mapping[str, Stateful], covered: Callable[[], str]
    ) -> None:
        """Keep the progress of checks with checkpoints; ``covered`` describes what they cover by now."""
        ...


class _Ballot(NamedTuple):
    """One rank's vote on a check; the highest value of each field counts."""

    severity: int
    differs: int
    found: int
    stretch: int = 1
    revision: int = 0


class ReplayDriver:
    """Checks at the end of the steps at which they are due, until ``close``."""

    def __init__(
        self,
        config: ReplayConfig,
        recipes: Sequence[Recipe],
        mesh: Mesh,
        communicators: Communicators,
        links: Callable[[LayerKind, bool], PeerCommunicator],
        recorder: Recorder,
        guard: Callable[[Callable[[], Any]], Any],
        finish_update: Callable[[], None],
    ) -> None:
        """``links`` to this rank's peers: see ``replay.replayer.PeersFor``."""
        self._guard, self._settle = guard, finish_update
        self._config, self._wanted = config, config
        _keep_common(recipes, links)
        self._recipes, self._kinds = recipes, {each.kind for each in recipes}
        self._rotation = Rotation({each.kind: len(each.targets) for each in recipes}, config.intervals)
        self._replayer = Replayer(recipes, self._rotation, links)
        self._replayer.variants = config.variants
        censuses = [each for each in recipes if isinstance(each, ReplicatedStateRecipe)]
        self._ownership = censuses[0].ownership if censuses else Ownership()
        self._at_rest = [each for each in recipes if isinstance(each, OwnedStateRecipe)]
        for each in recipes:
            each.start()
        self._mesh, self._communicators = mesh, communicators
        self._links = links(LayerKind.DENSE, False)
        copies = links(LayerKind.EXPERT, False)
        self._copies = copies if {*copies.group.ranks} <= {*self._links.group.ranks} else None
        """Those who hold the same of everything, experts included; None where their dense parts differ."""
        self._coverage = RecipeCycle()
        self._parameters: Collection[torch.Tensor] = ()
        self._has_reported = False
        self._rank = self._links.group.ranks[self._links.position]
        self._device = self._links.device
        self._diagnosis, self._open = SdcDiagnosis(mesh), OpenIncidents()
        slow, shared = config.straggler, config.baseline
        if self._device.type != "cuda":
            slow, shared = slow.on_host(), shared.on_host()
        self._stragglers = Stragglers(mesh, self._rank, slow, shared)
        self._recorder = recorder if config.records == "all" else SummaryRecorder(recorder, slow)
        self._cadence = OverheadBudget()
        self._since = time.monotonic()
        self._replayer.doubted = self._doubted
        self._timings: Timings | None = None
        """Of the check that is under way, unless something is timed again in it."""
        self._checked = 0
        """The step of the last check, after which something may have been captured."""
        self._revision, self._revisions = 0, 0
        self._certifier: Certifier | None = None
        self.trust = CertifiedSteps()
        self._last: dict[str, dict[str, Any]] = {}
        self._unchecked: dict[str, str] = {}
        self._found: list[Incident] = []
        """What this rank has to tell the others, of the check that is under way."""
        self._on_incidents: Callable[[list[Incident]], None] = _ignore
        self._held_up: dict[str, str] = {}
        """What kept the last check from certifying though nobody was found wrong, with the reasons."""

    def begin(self, step: int) -> None:
        """Before a step: capture what is due at its end, and watch what must not change until its update."""
        self._replayer.begin(step)
        for each in self._at_rest:
            each.watch_after(step - 1)

    def look_before_training(self) -> None:
        """Compare state before the first update: what differs then, ranks keep for themselves."""
        recipes = [each for each in self._recipes if each.kind in CENSUS]
        self._ownership.is_before_training = True
        try:
            sweep(self._replayer, recipes, self._links, 0)
        finally:
            self._ownership.is_before_training = False

    def start_after(self, step: int) -> None:
        """Go on from a checkpoint of this step; what was begun before it was loaded is let go."""
        self._replayer.abandon()
        self._rotation.start_after(step)
        self.begin(step + 1)

    def update_begins(self) -> None:
        """Right before an update: nothing may have changed that it overwrites."""
        for each in self._at_rest:
            each.update_begins()

    def step_finished(self, step: int) -> None:
        """Right after the optimizer's update: check what is due, conclude, and look ahead."""
        begin = self._now()
        self._cadence.step_took(begin - self._since)
        for each in self._at_rest:
            each.update_ended()
        if self._replayer.is_due:
            self._settle()
            counts = self._coverage.recipes is None or self._rotation.is_due(EXPERTS, step)
            findings = self._replayer.check(step)
            findings.records.extend(self._compare_kept(step))
            timings = self._timings or self._shared(step, findings.measured)
            # What fails from here on is this rank's own affair: a full disk must not part it from the others.
            outcome = self._guard(lambda: self._conclude(findings, timings))
            self._cadence.check_took(self._now() - begin)
            differs = any(each.scope is not None and each.surface == KEPT for each in findings.records)
            # What has changed right after the last check may have done so before it was captured.
            changed = {after for each in self._at_rest for after, _ in each.changed}
            differs |= self._checked in changed
            self._agree(step, outcome or Outcome.NOT_CHECKED, differs=differs, counts=counts)
            self._checked = step
            self._guard(self._report_coverage)
        self.begin(step + 1)
        self._since = time.monotonic()

    def cover(
        self, lacking: str | None, *, has_catalog: bool, parameters: Collection[torch.Tensor] = ()
    ) -> None:
        """Find out what checks go over; called on every rank, with its own ``parameters``."""
        self._parameters = parameters
        turns = [len(each.targets) for each in self._recipes if each.kind == EXPERTS]
        (most,) = self._communicators.highest([max(turns, default=0)])
        self._coverage = RecipeCycle(most if has_catalog and most else None, lacking)
        self.trust.go_by(self._coverage.recipes)

    @property
    def lacking(self) -> str | None:
        """What checks cannot go over, and why; see ``cover``."""
        return self._coverage.lacking

    def tell(self, still_here: Callable[[], None]) -> None:
        """Have this called in a check that takes longer because numbers differ: it is no hang."""
        self._replayer.still_here = still_here

    def report_to(self, on_incidents: Callable[[list[Incident]], None]) -> None:
        """Have this called, on every rank, with what a check has found on any of them."""
        self._on_incidents = on_incidents

    def serve(self, certifier: Certifier) -> None:
        """Let checkpoints depend on what is found, and keep what a sweep replays."""
        self._certifier = certifier
        progress: dict[str, Stateful] = {"rotation": self._rotation, "ownership": self._ownership}
        certifier.go_by(self._coverage, progress, lambda: self.covered().sentence())
        self._replayer.saved_calls = certifier.saved_calls

    def sweep(self, step: int, everything: bool) -> SweepReport:
        """Compare the state of this step, which was just loaded, and replay ``everything`` on it if asked to.

        Reported as in any check.
        """
        self._replayer.abandon()
        recipes = self._recipes if everything else [each for each in self._recipes if each.kind in CENSUS]
        findings = sweep(self._replayer, recipes, self._links, step)
        outcome = self._guard(lambda: self._conclude(findings, None)) or Outcome.NOT_CHECKED
        differing = [each.mode for each in findings.records if each.scope is not None and not each.layer]
        own = _Ballot(SEVERITY.index(outcome), Mode.STATE in differing, len(self._found))
        worst = _Ballot(*self._communicators.highest(own))
        self._spread(worst.found)
        compared = {each.layer for each in findings.records if each.verdict is not None}
        left = (each for each in findings.records if each.layer not in compared)
        unswept = next((f"{each.surface}: {each.reason}" for each in left), None)
        result = _SWEPT.get(SEVERITY[worst.severity], SweepResult.COULD_NOT_RUN)
        return SweepReport(result, bool(worst.differs), unswept)

    def change(self, **settings: Any) -> None:
        """Other settings from the next check on; what rank 0 wants is done by all."""
        allowed = {"interval", "recipes", "variants", "budget"}
        if unknown := sorted(settings.keys() - allowed):
            raise ValueError(f"replay can change {sorted(allowed)} while it runs, not {unknown}")
        wanted = replace(self._wanted, **settings)
        if "interval" in settings and isinstance(wanted.recipes, Mapping):
            raise ValueError(f"recipes have intervals of their own, {dict(wanted.recipes)}; change recipes=")
        if missing := settings.get("recipes", {}) and wanted.intervals.keys() - self._kinds:
            raise ValueError(f"recipes {sorted(missing)} were not there when replay was attached")
        self._wanted = wanted
        self._revision += 1

    def status(self) -> Mapping[str, Any]:
        """What was checked when, how far the rotation is, and what could not be checked."""
        intervals = self._config.intervals
        share = self._cadence.share(min(intervals.values()) * self._rotation.stretch)
        return {
            "peers": list(self._links.group.ranks),
            "checks": self._rotation.rounds,
            "certified": self.trust.step,
            "coverage": self._rotation.coverage(),
            "last": dict(self._last),
            "not_checked": dict(self._unchecked),
            "not_repeating": self._replayer.history.not_repeating(),
            "held_up": dict(self._held_up),
            "lacking": self._coverage.lacking,
            "covered": self.covered().to_json(),
            "watched": min((each.share for each in self._at_rest), default=None),
            "share": share,
            "budget": self._config.budget,
        }

    def covered(self) -> Covered:
        """What checks go over on this rank, and what they leave out, as far as they have found out."""
        return covered_by(self._recipes, self._parameters, self._unchecked)

    def close(self) -> None:
        self._replayer.abandon()
        for each in self._recipes:
            each.close()
        self._recorder.close()

    def _conclude(self, findings: Findings, timings: Timings | None) -> Outcome:
        records = findings.records
        incidents = self._diagnosis.diagnose(records, repeats=findings.repeats, elsewhere=findings.elsewhere)
        slow = Slowness([], []) if timings is None else self._stragglers.observe(timings)
        self._remember(records)
        # Apart: who cannot write down its comparisons may still be the one to report the conclusion.
        self._guard(lambda: self._report([*self._open.new_ones(incidents, records), *slow.incidents]))
        again = [each for repeated in findings.repeats for each in repeated.again]
        self._guard(lambda: self._write([*records, *again, *slow.records]))
        # A wrong copy of right numbers is nothing to stop training for; it is given up.
        live = [each for each in records if each.surface != KEPT]
        outcome = outcome_of(live, slow.incidents, findings.targets, self._config.require)
        if outcome.accepted and (unwatched := self._unwatched()) is not None:
            self._held_up[AT_REST] = unwatched
            return Outcome.NOT_CHECKED
        return outcome

    def _unwatched(self) -> str | None:
        """Why state with one owner keeps a check from certifying: it may have changed unseen."""
        share, needed = min((each.share for each in self._at_rest), default=1.0), self._config.watched
        if share >= needed:
            return None
        return (
            f"{share:.0%} of the state with one owner was watched since the last check, and certifying takes "
            f"{needed:.0%}; see ReplayConfig.watched and watch_budget"
        )

    def _report_coverage(self) -> None:
        """Once every target has had its turn."""
        cycles = [each["cycles"] for each in self._rotation.coverage().values()]
        if not self._has_reported and all(cycles):
            self._has_reported = True
            if self._is_first:
                log.info("after the first cycle of checks: %s", self.covered().sentence())

    def _shared(self, step: int, measured: Sequence[Measured]) -> Timings:
        told = self._communicators.exchange([each.to_json(self._mesh) for each in measured])
        return Timings(step, self._mesh, told, self._config.straggler)

    def _doubted(self, step: int, measured: Sequence[Measured]) -> set[str | None]:
        """What looks slow to the whole job, in a check that is under way; see ``Replayer.doubted``."""
        timings = self._shared(step, measured)
        doubted = self._stragglers.layers_to_time_again(timings)
        self._timings = None if doubted else timings
        return doubted

    def _compare_kept(self, step: int) -> list[EvidenceRecord]:
        """What peers have captured since the last check must be the same: it may go wrong on its way."""
        peers = self._copies
        if (
            self._certifier is None
            or peers is None
            or peers.group.axis is Axis.SHARD
            or not peers.group.can_compare
        ):
            return []
        own = self._guard(self._certifier.signature)
        found = c3.compare(peers.evidence, {KEPT: ABSENT if own is None else own})[KEPT]
        if ABSENT in found.evidence:
            return []
        context, gathered = Context(step, peers.group.ranks, ""), cast("Sequence[int]", found.evidence)
        return judge(context, [Comparison(KEPT, Mode.STATE)], {KEPT: gathered})

    def _report(self, incidents: Sequence[Incident]) -> None:
        """Peers conclude alike; one of them writes it down, and tells all other ranks."""
        self._found = [each for each in incidents if each.reporter == self._rank]
        for incident in self._found:
            self._recorder.record(incident)

    def _spread(self, found: int) -> None:
        """Tell all ranks of what was found, if any of them has ``found`` something."""
        own, self._found = self._found, []
        if found:
            told = self._communicators.exchange([each.to_json() for each in own])
            incidents = [from_json(each) for of_rank in told for each in of_rank]
            self._on_incidents([each for each in incidents if isinstance(each, Incident)])

    def _write(self, records: Sequence[EvidenceRecord]) -> None:
        with ExitStack() as all_of_them:  # one that cannot be written does not keep the others back
            for record in reversed(records):
                all_of_them.callback(self._recorder.record, record)

    def _remember(self, records: Sequence[EvidenceRecord]) -> None:
        self._held_up = unmet(records, self._config.require) | {
            each.surface: each.reason
            for each in records
            if each.reason is not None and each.reason.startswith(UNDECIDED)
        }
        for record in records:
            name = record.layer or record.surface
            if record.verdict is None:
                self._unchecked[record.surface] = str(record.reason)
                continue
            self._unchecked.pop(record.surface, None)
            known = self._last.get(name, {})
            clean = record.verdict.agrees and (known.get("step") != record.step or known["clean"])
            self._last[name] = {"step": record.step, "clean": clean}

    def _agree(self, step: int, outcome: Outcome, *, differs: bool, counts: bool) -> None:
        """On what the check is worth to checkpoints, and when the next one is."""
        stretch = self._cadence.stretch(min(self._config.intervals.values()), self._config.budget)
        revision = self._revision if self._is_first else 0
        votes = [] if self._certifier is None else self._certifier.votes(outcome, differs=differs)
        own = _Ballot(SEVERITY.index(outcome), differs, len(self._found), stretch, revision)
        highest = self._communicators.highest([*own, *votes])
        agreed, counted = _Ballot(*highest[: len(own)]), highest[len(own) :]
        self._spread(agreed.found)
        worst = SEVERITY[agreed.severity]
        if not worst.accepted:
            self._rotation.take_back(EXPERTS, step)
        self._guard(lambda: self.trust.checked(step, worst, counts=counts, doubted=bool(agreed.differs)))
        if (certifier := self._certifier) is not None:
            self._guard(lambda: certifier.decide(step, counted, counts=counts))
        if agreed.revision > self._revisions:
            self._revisions = agreed.revision
            self._adopt(self._communicators.said_by_first(_changeable(self._wanted)))
        self._rotation.change(self._config.intervals, agreed.stretch if self._config.budget else 1, step)

    def _adopt(self, said: Mapping[str, Any]) -> None:
        variants = tuple(said["variants"])
        self._config = replace(
            self._config, recipes=said["intervals"], variants=variants, budget=said["budget"]
        )
        self._replayer.variants = variants

    @property
    def _is_first(self) -> bool:
        return torch.distributed.get_rank() == 0

    def _now(self) -> float:
        """With a budget to keep, without the work that training still has on the device."""
        if self._config.budget is not None and self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()


def _keep_common(recipes: Sequence[Recipe], links: Callable[[LayerKind, bool], PeerCommunicator]) -> None:
    """Peers replay the same at the same time: what only some of them have is left out."""
    for recipe in recipes:
        if not isinstance(recipe, LayerRecipe | OptimizerRecipe) or isinstance(recipe, ExpertsRecipe):
            continue  # shapes of experts come from a catalog that is the same everywhere
        channel = links(recipe.role, recipe.is_gathered).metadata
        names = [json.loads(each) for each in channel.gather(json.dumps(recipe.targets).encode())]
        if any(each != names[0] for each in names):
            common = set.intersection(*map(set, names))
            recipe.keep([each for each in names[0] if each in common])


def _ignore(_: list[Incident]) -> None:
    """Nobody has asked."""


def _changeable(config: ReplayConfig) -> dict[str, Any]:
    return {"intervals": config.intervals, "variants": list(config.variants), "budget": config.budget}
