"""Carries out what is due at the end of a step, in step with every other rank (paper, section 6.1).

[Note: no rank is stranded] All that may fail on one rank alone (clones, allocations) happens before one
job-wide vote; work that is not ready everywhere is done nowhere. After the vote a rank that fails still
takes part in every exchange, with a poison in place of its signatures.

[Note: a lost rank is met on our own groups] A rank may sleep or die while it computes. The others must then
wait for it on SCOUT's groups, where patience ends, and not on training's. So scratch data are sent over
training's groups first, right after all have met; and where replays communicate, which only those of pure
data-parallel jobs do not, all meet before each of them.

[Note: as many rounds everywhere] How often a target is replayed in a check is agreed by the whole job after
each round: layers may be sharded, and ranks of other peer groups compute together with this one. A round is
repeated without strict determinism where an operator refused it on any rank, and after a disagreement there
are further rounds until ``decision.repeatability`` has decided on every rank, or may not ask for more.

[Note: timed again] Before anybody is reported as slow, what was slow is run several times more, with pauses,
and the shortest time counts. A slow rank is slow each time. One that had to wait for a core, or for a device
that it shares, is not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch

from torchscout.decision.record import EvidenceRecord
from torchscout.decision.repeatability import REFUSED, Repeated, SurfaceHistory, Trial
from torchscout.decision.straggler.timings import Measured
from torchscout.mesh import Axis, LayerKind, PeerGroup
from torchscout.replay.capture.broadcast import receive_together
from torchscout.replay.capture.saved_calls import SavedCalls
from torchscout.replay.guard import Refusal, attempt
from torchscout.replay.recipe import (
    LearningReplay,
    Observation,
    Peers,
    Recipe,
    Replay,
    finish_signatures,
    measured,
)
from torchscout.replay.schedule import Due, Rotation
from torchscout.replay.verdicts import (
    Context,
    Run,
    broken_depth,
    gather,
    has_failed,
    is_left_out,
    judged,
    named_for_results,
    not_checked,
    withhold,
)
from torchscout.utils.reentrancy import in_backward

__all__ = ["Begun", "Findings", "PeersFor", "Replayer"]

_TIMES, _PAUSE_SECONDS = 4, 0.01
"""How often, and how far apart, what looks slow is run again."""
_HEIGHT = 8
"""More than the comparisons that build upon each other."""
_Value = TypeVar("_Value")

PeersFor = Callable[[LayerKind, bool], Peers]
"""Who compares what: of a role, what ranks hold, or what they compute on gathered parameters."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What one check produced, the same on every peer."""

    records: list[EvidenceRecord] = field(default_factory=list)
    """As they are to be kept: what does not repeat has no verdict."""
    repeats: list[Repeated] = field(default_factory=list)
    """What further replays said, where a disagreement called for them."""
    elsewhere: set[int] = field(default_factory=set)
    """Ranks of other peer groups that were named for wrong results in the same check."""
    targets: list[str] = field(default_factory=list)
    """What was due on this rank and is_required for its state, whether or not it could be replayed."""
    measured: list[Measured] = field(default_factory=list)
    """What the replays took, this rank's own; without those that were run for the first time."""


@dataclass(slots=True)
class Begun:
    """One replay on its way."""

    due: Due
    target: str
    recipe: Recipe
    peers: Peers
    source: int
    """The position of the peer whose values are used."""
    replay: Replay | None
    problem: str | None
    """Why it cannot go on, on this rank or, after the vote, on any."""
    is_refused: bool = False
    """Whether that is a rule, such as an optimizer that communicates, and not a failure."""


class Replayer:
    """The recipes of one rank."""

    def __init__(self, recipes: Sequence[Recipe], rotation: Rotation, peers: PeersFor) -> None:
        self._recipes = {recipe.kind: recipe for recipe in recipes}
        self._rotation, self._peers_for = rotation, peers
        self._job: Peers = peers(LayerKind.DENSE, False)
        """Any of them: for what concerns the whole job."""
        everybody = PeerGroup(tuple(range(self._job.size)), Axis.REPLICA)
        self._meets = any(peers.group != everybody for peers in self._everybody())
        """Whether replays may communicate: see [Note: a lost rank is met on our own groups]."""
        self._begun: list[Begun] = []
        self._warm: set[Hashable] = set()
        """What has been run before."""
        self.variants: tuple[float, ...] = (1.0,)
        self.saved_calls = SavedCalls()
        self.history = SurfaceHistory()
        self.doubted: Callable[[int, Sequence[Measured]], Collection[str | None]] = lambda *_: ()
        """Given a step and what this rank measured in it: targets for which a rank would be reported as slow.

        Every rank calls this in every check, and all get the same answer. See [Note: timed again].
        """
        self.still_here: Callable[[], None] = lambda: None
        """Called in each further round of a disagreement: those may take longer than a step."""

    @property
    def is_due(self) -> bool:
        return bool(self._begun)

    def begin(self, step: int) -> None:
        """Before the step: start to capture what is due at its end; mostly nothing."""
        for due in self._rotation.due(step):
            recipe = self._recipes[due.kind]
            peers = self.peers_for(recipe)
            source = self._source(peers)
            if due.target is None:  # a pipeline stage without embedding, say
                self._begun.append(Begun(due, "", recipe, peers, source, None, None))
                continue
            replay, problem = attempt(_bound(recipe.begin, due.target, is_source=peers.position == source))
            name, is_refused = recipe.targets[due.target], isinstance(problem, Refusal)
            self._begun.append(Begun(due, name, recipe, peers, source, replay, problem, is_refused))

    def check(self, step: int) -> Findings:
        """At the end of the step: replay, compare, and let go of everything."""
        findings = Findings()
        if not self._begun:
            return findings
        try:
            self._carry_out(step, findings)
        finally:
            self._rotation.finished(step)
        return findings

    def check_besides(self, begun: Begun, step: int, findings: Findings) -> None:
        """One replay that no rotation has asked for, on every rank of the job."""
        assert not self._begun, "no step is under way"
        self._begun = [begun]
        self._carry_out(step, findings, is_timed=False)

    def peers_for(self, recipe: Recipe) -> Peers:
        return self._peers_for(recipe.role, recipe.is_gathered)

    def _carry_out(self, step: int, findings: Findings, *, is_timed: bool = True) -> None:
        try:
            self._describe()
            self._vote()
            ready = [place for place, begun in enumerate(self._begun) if begun.problem is None]
            runs = {place: self._run(place, step) for place in ready if self._is_here(place)}
            self._align(runs)
            if differing := self._first_round(ready, runs):
                self._repeat(differing, runs, findings)
            for place, begun in enumerate(self._begun):
                if begun.recipe.is_required and begun.due.target is not None:
                    findings.targets.append(begun.target)
                if (run := runs.get(place)) is not None:
                    self._conclude(begun, run, findings)
                elif begun.due.target is not None:
                    context = Context(step, begun.peers.group.ranks, begun.target)
                    surface = "/".join(filter(None, (begun.target, begun.due.kind)))
                    reason = f"{REFUSED}: {begun.problem}" if begun.is_refused else str(begun.problem)
                    findings.records.append(not_checked(context, surface, reason))
            if is_timed:
                findings.measured.extend(self._measure(step, ready, runs))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of what was begun, whatever became of it."""
        while self._begun:
            if (replay := self._begun.pop().replay) is not None:
                replay.release()

    def _source(self, peers: Peers) -> int:
        """One position for all peer groups of the job, so that no tensor-parallel group mixes replicas."""
        return self._rotation.rounds % len(peers.group)

    def _describe(self) -> None:
        """Tell the peers what was captured; make room for what the source has."""
        inside = "the optimizer steps inside the backward pass" if in_backward() else None
        for peers in self._everybody():
            begun = [each for each in self._begun if each.peers is peers]
            own = [_description(each, inside) for each in begun]
            gathered = [json.loads(each) for each in peers.metadata.gather(json.dumps(own).encode())]
            for place, each in enumerate(begun):
                self._prepare(each, [told[place] for told in gathered])

    def _everybody(self) -> Iterable[Peers]:
        """All that this rank has, in the same order on every rank, whatever is due on it."""
        return dict.fromkeys(
            self._peers_for(role, gathered) for role in LayerKind for gathered in (False, True)
        )

    def _prepare(self, begun: Begun, told_by: Sequence[Any]) -> None:
        is_sound = begun.problem is None and not any(each["problem"] for each in told_by)
        if is_sound and begun.replay is not None:
            documents = [json.loads(each["document"]) for each in told_by]
            prepare = _bound(begun.replay.prepare, documents, begun.source)
            _, begun.problem = attempt(prepare)

    def _vote(self) -> None:
        """Work that is not ready everywhere is done nowhere."""
        agreed = self._job.first_problems([begun.problem for begun in self._begun])
        if not any(agreed):
            return
        is_failed = [begun.problem is not None and not begun.is_refused for begun in self._begun]
        anywhere = self._job.highest(is_failed)
        for begun, problem, failed in zip(self._begun, agreed, anywhere, strict=True):
            begun.problem, begun.is_refused = problem, not failed

    def _is_here(self, place: int) -> bool:
        """Otherwise others replay what this rank has not."""
        return self._begun[place].due.target is not None

    def _run(self, place: int, step: int) -> Run:
        begun = self._begun[place]
        assert begun.replay is not None, "what all are ready for was begun"
        variants = self.variants if begun.recipe.varies else (1.0,)
        context = Context(step, begun.peers.group.ranks, begun.target)
        return Run(begun.due.kind, begun.replay, context, variants)

    def _align(self, runs: Mapping[int, Run]) -> None:
        """Give every rank the source's values, those of all replays together."""
        wanted: dict[int, list[torch.Tensor]] = {}
        for place, run in runs.items():
            run.replay.align(wanted.setdefault(place, []).append)
        for peers in self._everybody():
            sources: dict[int, list[torch.Tensor]] = {}
            for place, tensors in wanted.items():
                if self._begun[place].peers is peers:
                    sources.setdefault(self._begun[place].source, []).extend(tensors)
            for source, tensors in sources.items():
                receive_together(tensors, partial(peers.broadcast, source=source))
        for run in runs.values():
            run.comparisons = run.replay.comparisons()
            left_out = {
                each.surface: reason
                for each in run.comparisons
                if (reason := self.history.reason(each.surface, run.context.target)) is not None
            }
            run.context = replace(run.context, left_out=left_out)

    def _first_round(self, places: Sequence[int], runs: Mapping[int, Run]) -> list[int]:
        """Replay everything once, compare and judge it; where anybody in the job found a difference.

        Of ``places``, which are the same on all ranks, this one has ``runs``.
        """
        differing: list[int] = []
        while places:
            now = {place: run for place, run in runs.items() if place in places}
            for run in now.values():
                run.start()
            self._observe(places, now)
            self._gather(now)
            for run in now.values():
                run.records = judged(run)
            highest = iter(self._job.highest([vote for place in places for vote in _ballot(now.get(place))]))
            ballots = {place: _Ballot(*islice(highest, len(_Ballot._fields))) for place in places}
            for place, ballot in ballots.items():
                if ballot.height and place in now:
                    run = now[place]
                    run.records = withhold(run.comparisons, run.records, _HEIGHT - ballot.height)
            differing += [place for place, each in ballots.items() if each.differs and not each.is_refused]
            places = [place for place, each in ballots.items() if each.is_refused]
        for run in runs.values():
            if isinstance(run.replay, LearningReplay) and not has_failed(run.records):
                run.replay.learn(run.records)
            for each in run.records:
                if is_left_out(each) and each.surface not in run.context.left_out:
                    self.history.leave_out(each.surface, each.layer, str(each.reason))
        return sorted(differing)

    def _repeat(self, differing: Sequence[int], runs: Mapping[int, Run], findings: Findings) -> None:
        """Replay until it is known whose fault disagreements are; the records are then as they are kept."""
        trials = {place: self._trials(runs[place]) for place in differing if place in runs}
        places = differing
        while places:
            now = {place: runs[place].again() for place in places if place in runs}
            self._observe(places, now)
            self._gather(now, in_full=True)
            for place, run in now.items():
                for trial in trials[place].values():
                    trial.observe(*run.values_of(trial.record))
            self.still_here()
            wanted = [any(each.is_open for each in trials.get(place, {}).values()) for place in places]
            places = [place for place, more in zip(places, self._job.highest(wanted), strict=True) if more]
        for place, tried in trials.items():
            found = {number: self.history.conclude(trial) for number, trial in tried.items()}
            findings.repeats.extend(found.values())
            records = runs[place].records
            runs[place].records = [
                found[number].record if number in found else each for number, each in enumerate(records)
            ]
        named = [
            named_for_results(runs[place].comparisons, runs[place].records) if place in runs else []
            for place in differing
        ]
        told = self._job.exchange(named)
        for column, place in enumerate(differing):
            if place in runs:
                elsewhere = {rank for ranks in told for rank in ranks[column]}
                findings.elsewhere.update(elsewhere - set(runs[place].context.peers))

    def _trials(self, run: Run) -> dict[int, Trial]:
        """Of the run's disagreements, by the place of the record."""
        named = {each.surface: each for each in run.comparisons}
        among = len(run.comparisons) * len(run.variants) * len(self._begun)
        return {
            number: self.history.trial(
                record, among=among, is_held=named[record.surface].is_held, right=named[record.surface].right
            )
            for number, record in enumerate(run.records)
            if record.scope is not None
        }

    def _conclude(self, begun: Begun, run: Run, findings: Findings) -> None:
        findings.records.extend(run.records)
        self._keep(begun, run.replay)

    def _measure(self, step: int, ready: Sequence[int], runs: Mapping[int, Run]) -> list[Measured]:
        """What replays took. See [Note: timed again]."""
        seen = {place: [*run.seen.values()] for place, run in runs.items() if self._is_warm(place, run)}
        found = {place: self._measured(place, runs[place], each) for place, each in seen.items()}
        if not (doubted := self.doubted(step, [*found.values()])):
            return [*found.values()]
        wanted = [place in found and (found[place].layer or None) in doubted for place in ready]
        places = [place for place, yes in zip(ready, self._job.highest(wanted), strict=True) if yes]
        for _ in range(_TIMES):
            time.sleep(_PAUSE_SECONDS)
            now = {place: runs[place].again() for place in places if place in runs}
            self._observe(places, now)
            for place, run in now.items():
                seen.get(place, []).extend(run.seen.values())
            self.still_here()
        return [self._measured(place, runs[place], each) for place, each in seen.items()]

    def _is_warm(self, place: int, run: Run) -> bool:
        """Whether this work was run before. The first time, kernels are compiled and memory is allocated."""
        begun, (name, shape) = self._begun[place], run.replay.work
        key = (begun.due.kind, name, () if begun.recipe.is_dynamic else shape)
        is_warm = key in self._warm
        self._warm.add(key)
        return is_warm

    def _measured(self, place: int, run: Run, seen: Sequence[Observation]) -> Measured:
        return measured(self._begun[place].target, run.replay.work[1], seen)

    def _keep(self, begun: Begun, replay: Replay) -> None:
        """Whoever's call was replayed keeps it for a sweep, in place of what another peer had kept."""
        assert begun.due.target is not None, "what was replayed has a target"
        key = (begun.due.kind, begun.recipe.kept_as(begun.due.target))
        if (call := replay.invocation()) is None:
            self.saved_calls.drop(key)
        else:
            attempt(_bound(self.saved_calls.keep, key, call))

    def _gather(self, runs: Mapping[int, Run], *, in_full: bool = False) -> None:
        """Exchange what was seen, once among each group of peers."""
        for peers in self._everybody():
            mine = [run for place, run in runs.items() if self._begun[place].peers is peers]
            gather(peers.evidence, mine, in_full=in_full)

    def _observe(self, places: Sequence[int], runs: Mapping[int, Run]) -> None:
        """See [Note: a lost rank is met on our own groups]. Devices are waited for once, at the end."""
        ordered = sorted(places, key=lambda place: self._begun[place].recipe.is_required)
        for place in ordered:
            if self._meets and place != ordered[0]:
                self._job.highest([0])
            if (run := runs.get(place)) is None:
                continue
            for variant, seen in run.seen.items():
                _, run.problems[variant] = attempt(_bound(run.replay.observe, variant, seen))
        every = [seen for run in runs.values() for seen in run.seen.values()]
        _, problem = attempt(_bound(finish_signatures, every))
        for run in runs.values() if problem is not None else ():
            for variant, seen in run.seen.items():
                run.problems[variant] = problem
                seen.signatures.clear()
        for seen in every:
            attempt(seen.read)  # a device that cannot be asked is not timed


class _Ballot(NamedTuple):
    """One rank's vote on a replay; the highest value of each field counts."""

    is_refused: int
    """Whether to replay without strict determinism."""
    differs: int
    """Whether peers differ."""
    height: int
    """How high above the lowest comparison one failed that others depend on; 0 if none did."""


def _ballot(run: Run | None) -> _Ballot:
    if run is None:
        return _Ballot(0, 0, 0)
    depth = 0 if run.has_failed else broken_depth(run.comparisons, run.records)
    differs = any(each.scope is not None for each in run.records)
    is_refused = any(each.refused for each in run.seen.values())
    return _Ballot(is_refused, differs, 0 if depth is None else _HEIGHT - depth)


def _description(begun: Begun, inside: str | None) -> dict[str, Any]:
    document = None
    if begun.replay is not None and begun.problem is None:
        document, begun.problem = attempt(_bound(_spelled, begun.replay))
        begun.is_refused = isinstance(begun.problem, Refusal)
    begun.problem = begun.problem or inside
    return {"problem": begun.problem, "document": document}


def _spelled(replay: Replay) -> str:
    return json.dumps(replay.describe())


def _bound(function: Callable[..., _Value], *args: Any, **kwargs: Any) -> Callable[[], _Value]:
    return lambda: function(*args, **kwargs)
