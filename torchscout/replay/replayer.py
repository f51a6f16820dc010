"""Runs the replays that are due at the end of a step, in lockstep with all other ranks (paper, section 6.1).

[Note: no rank is stranded] Everything that can fail on one rank alone (clones, allocations) happens before
one job-wide vote; work that is not ready on every rank is done on none. After the vote, a rank that fails
still takes part in every exchange, with a poison in place of its signatures.

[Note: waiting on SCOUT's groups] A rank may sleep or die while it computes. All other ranks must then wait
for it on SCOUT's groups of hosts, which have a timeout, and neither on training's groups nor for a device. So
scratch data are sent over training's groups right after the vote; there is a job-wide exchange after
broadcasts on devices; and if replays communicate, which only those of pure data-parallel jobs do not, there
is one before each of them.

[Note: equally many rounds on all ranks] The whole job agrees after each round on how often a target is
replayed, because layers may be sharded, so that ranks of other peer groups compute together with this one. A
round is repeated without strict determinism if an operator refused it on any rank. After a disagreement there
are further rounds until ``decision.repeatability`` has decided on every rank, or has used up its rounds.

[Note: timed again] Before a rank is reported as slow, the slow work is run several more times, with pauses,
and the shortest time counts. A slow rank is slow every time. One that had to wait for a core, or for a device
that it shares, is not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from torchscout.c3.channel import decoded
from torchscout.decision.repeatability import SurfaceHistory, Trial
from torchscout.mesh import Axis, LayerKind, PeerGroup
from torchscout.replay.active import ActiveReplay, description_of, unreplayed
from torchscout.replay.capture.broadcast import receive_together
from torchscout.replay.capture.saved_calls import SavedCalls
from torchscout.replay.guard import Refusal, attempt
from torchscout.replay.recipe import Measured, Observation, Peers, Recipe, Replay, finish_signatures, measured
from torchscout.replay.schedule import Rotation
from torchscout.replay.timing import host_ahead
from torchscout.replay.verdicts import (
    Ballot,
    Context,
    Findings,
    Run,
    ballot_of,
    gather,
    has_failed,
    is_left_out,
    judged,
    named_for_results,
    withhold,
)
from torchscout.utils.reentrancy import in_backward

__all__ = ["PeersFor", "Replayer"]

_TIMES, _PAUSE_SECONDS = 4, 0.01
"""How often slow work is run again, and the pause before each run."""


PeersFor = Callable[[LayerKind, bool], Peers]
"""Returns the peers for a role, and for stored state or for computation on gathered parameters."""


class Replayer:
    """Runs the recipes of one rank."""

    def __init__(self, recipes: Sequence[Recipe], rotation: Rotation, peers: PeersFor) -> None:
        self._recipes = {recipe.kind: recipe for recipe in recipes}
        self._rotation, self._peers_for = rotation, peers
        self._job: Peers = peers(LayerKind.DENSE, False)
        """Used for exchanges among the whole job."""
        all_ranks = PeerGroup(tuple(range(self._job.size)), Axis.REPLICA)
        self._may_communicate = any(peers.group != all_ranks for peers in self._all_peers())
        """Whether replays may communicate: see [Note: waiting on SCOUT's groups]."""
        self._active: list[ActiveReplay] = []
        self._warm: set[Hashable] = set()
        """Work that has been run before."""
        self.variants: tuple[float, ...] = (1.0,)
        self.saved_calls = SavedCalls()
        self.history = SurfaceHistory()
        self.doubted: Callable[[int, Findings, Sequence[Measured]], Collection[str]] = lambda *_: ()
        """Returns the targets for which a rank would be reported as slow, given a step, what its check has
        found and this rank's times.

        Called on every rank in every check, with the same result. See [Note: timed again].
        """
        self.still_here: Callable[[], None] = lambda: None
        """Called in each repetition, since these may take longer than a step."""
        self.now: Callable[[], float] = time.monotonic
        """The time by which expert shapes are measured, for the overhead budget."""
        self._on_shapes = 0.0

    @property
    def is_due(self) -> bool:
        return bool(self._active)

    def begin(self, step: int) -> None:
        """Before the step: start to capture what is due at its end, usually nothing."""
        for due in self._rotation.due(step):
            recipe = self._recipes[due.kind]
            peers = self.peers_for(recipe)
            # One position for all peer groups, so that no tensor-parallel group mixes replicas.
            source = self._rotation.rounds % len(peers.group)
            if due.target is None:  # such as a pipeline stage without embedding
                self._active.append(ActiveReplay(due, "", recipe, peers, source, None, None))
                continue
            replay, problem = attempt(partial(recipe.begin, due.target, is_source=peers.position == source))
            name, is_refused = recipe.targets[due.target], isinstance(problem, Refusal)
            self._active.append(ActiveReplay(due, name, recipe, peers, source, replay, problem, is_refused))

    def check(self, step: int, findings: Findings | None = None) -> Findings:
        """At the end of the step: replay, compare, and release everything. Adds to ``findings``, where a
        check that fails leaves what it has found."""
        findings = Findings() if findings is None else findings
        if not self._active:
            return findings
        try:
            self._run_all(step, findings)
        finally:
            self._rotation.finished(step)
        return findings

    def check_now(self, active: Iterable[ActiveReplay], step: int, findings: Findings) -> None:
        """Run replays outside of the rotation, on every rank of the job."""
        assert not self._active, "no step is in progress"
        self._active = [*active]
        self._run_all(step, findings, is_timed=False)

    def peers_for(self, recipe: Recipe) -> Peers:
        return self._peers_for(recipe.role, recipe.is_gathered)

    def _run_all(self, step: int, findings: Findings, *, is_timed: bool = True) -> None:
        try:
            self._describe()
            has_news = self._vote()
            ready = [place for place, active in enumerate(self._active) if active.problem is None]
            runs = {
                place: self._run(self._active[place], step)
                for place in ready
                if self._active[place].due.target is not None
            }
            self._on_shapes = 0.0
            sent = self._send_scratch(ready, runs, has_news)
            self._align({place: run for place, run in runs.items() if place not in sent})
            differing = self._first_round(ready, runs, sent)
            findings.on_shapes = self._on_shapes
            if differing:
                self._repeat(differing, runs, findings)
            kept: set[Hashable] = set()
            for place, active in enumerate(self._active):
                if active.due.target is None:
                    continue
                if active.recipe.is_required:
                    findings.targets.append(active.target)
                if (run := runs.get(place)) is not None:
                    findings.records.extend(run.records)
                    self._keep(active, run.replay, kept)
                else:
                    findings.records.append(unreplayed(active, step))
            if is_timed:
                findings.measured.extend(self._measure(findings, step, ready, runs))
            for active in self._active:
                if active.replay is not None:
                    active.replay.settle()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release all active replays."""
        while self._active:
            if (replay := self._active.pop().replay) is not None:
                replay.release()

    def warm_up_again(self) -> None:
        """Do not compare the times of the next run of any work, which ranks may have run unequally often."""
        self._warm.clear()

    def _describe(self) -> None:
        """Exchange descriptions of what was captured; allocate memory for the source's values."""
        inside = "the optimizer steps inside the backward pass" if in_backward() else None
        for peers in self._all_peers():
            active = [each for each in self._active if each.peers is peers]
            own = [description_of(each, inside) for each in active]
            gathered = decoded(peers.metadata.gather(json.dumps(own).encode()))
            for place, each in enumerate(active):
                self._prepare(each, [descriptions[place] for descriptions in gathered])

    def _all_peers(self) -> Iterable[Peers]:
        """Return all peers of this rank, in the same order on every rank, regardless of what is due."""
        return dict.fromkeys(
            self._peers_for(role, gathered) for role in LayerKind for gathered in (False, True)
        )

    def _prepare(self, active: ActiveReplay, descriptions: Sequence[Any]) -> None:
        is_ready = active.problem is None and not any(each["problem"] for each in descriptions)
        if is_ready and active.replay is not None:
            documents = decoded([each["document"] for each in descriptions])
            _, active.problem = attempt(partial(active.replay.prepare, documents, active.source))

    def _vote(self) -> bool:
        """Agree on problems: work that is not ready on every rank is done on none.

        Return whether a rank has news for ``Replay.agree``.
        """
        ready = [each.replay for each in self._active if each.problem is None]
        news = any(each is not None and each.has_news for each in ready)
        problems = [active.problem for active in self._active]
        *obstacles, has_news = self._job.highest([*(each is not None for each in problems), news])
        if not any(obstacles):
            return bool(has_news)
        agreed = self._job.first_problems(problems)
        is_failed = [active.problem is not None and not active.is_refused for active in self._active]
        anywhere = self._job.highest(is_failed)
        for active, problem, failed in zip(self._active, agreed, anywhere, strict=True):
            active.problem, active.is_refused = problem, not failed
        return bool(has_news)

    def _run(self, active: ActiveReplay, step: int) -> Run:
        assert active.replay is not None, "begun, since all ranks are ready for it"
        variants = self.variants if active.recipe.varies else (1.0,)
        shape = active.replay.work[1] or None
        context = Context(step, active.peers.group.ranks, active.target, shape=shape)
        return Run(active.due.kind, active.replay, context, variants)

    def _align(self, runs: Mapping[int, Run]) -> None:
        """Broadcast the source's values, those of all replays together."""
        wanted: dict[int, list[torch.Tensor]] = {}
        for place, run in runs.items():
            run.replay.align(wanted.setdefault(place, []).append)
        for peers in self._all_peers():
            sources: dict[int, list[torch.Tensor]] = {}
            for place, tensors in wanted.items():
                if self._active[place].peers is peers:
                    sources.setdefault(self._active[place].source, []).extend(tensors)
            for source, tensors in sources.items():
                receive_together(tensors, partial(peers.broadcast, source=source))
        if self._may_communicate or any(each.evidence is not each.metadata for each in self._all_peers()):
            # A broadcast may fail on one rank and succeed elsewhere. Without this exchange, some ranks would
            # then replay over training's groups while others already train; and where a broadcast runs on
            # devices, nothing would end it, so that hosts would wait for their devices for ever.
            self._job.highest([0])
        for run in runs.values():
            self._expect(run)

    def _expect(self, run: Run) -> None:
        run.comparisons = run.replay.comparisons()
        left_out = {
            each.surface: reason
            for each in run.comparisons
            if (reason := self.history.reason(each.surface, run.context.target)) is not None
        }
        run.context = replace(run.context, left_out=left_out)

    def _send_scratch(self, ready: Sequence[int], runs: Mapping[int, Run], has_news: bool) -> list[int]:
        """Send scratch data over training's groups; see [Note: waiting on SCOUT's groups]. Return the places
        of these replays."""
        places = [place for place in ready if not self._active[place].recipe.is_required]
        for place, run in runs.items():
            run.replay.agree(has_news)
            if place in places:
                self._expect(run)
        self._start(places, runs)
        return places

    def _start(self, places: Sequence[int], runs: Mapping[int, Run]) -> None:
        """Run each replay for the first time."""
        for place in places:
            if place in runs:
                runs[place].start()
        self._compute(places, runs)

    def _first_round(
        self, places: Sequence[int], runs: Mapping[int, Run], done: Collection[int]
    ) -> list[int]:
        """Replay and compare everything once; return the places at which any rank found a difference.

        ``places`` are identical on all ranks; ``runs`` are those that this rank has; those in ``done`` have
        been replayed.
        """
        differing: list[int] = []
        while places:
            now = {place: run for place, run in runs.items() if place in places}
            self._start([place for place in places if place not in done], now)
            self._finish(now)
            done = ()
            self._gather(now)
            for run in now.values():
                run.records = judged(run)
            ballots = self._count(places, now)
            for place, ballot in ballots.items():
                if ballot.height and place in now:
                    run = now[place]
                    run.records = withhold(run.comparisons, run.records, ballot.depth)
            differing += [place for place, each in ballots.items() if each.differs and not each.is_refused]
            places = [place for place, each in ballots.items() if each.is_refused]
        for run in runs.values():
            if not has_failed(run.records):
                run.replay.learn(run.records)
            for each in run.records:
                if is_left_out(each) and each.surface not in run.context.left_out:
                    self.history.leave_out(each.surface, each.layer, str(each.reason))
        return sorted(differing)

    def _count(self, places: Sequence[int], runs: Mapping[int, Run]) -> dict[int, Ballot]:
        """Return the ballots of the whole job. If it is one peer group, all ranks know them already."""
        own = {place: ballot_of(runs.get(place)) for place in places}
        if not self._may_communicate:
            return own
        highest = iter(self._job.highest([vote for ballot in own.values() for vote in ballot]))
        return {place: Ballot(*islice(highest, len(Ballot._fields))) for place in places}

    def _repeat(self, differing: Sequence[int], runs: Mapping[int, Run], findings: Findings) -> None:
        """Replay until it is known which rank is at fault, and update the records."""
        trials = {place: self._trials(runs[place]) for place in differing if place in runs}
        places = differing
        while places:
            now = {place: runs[place].restarted() for place in places if place in runs}
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
        named_by_rank = self._job.exchange(named)
        for column, place in enumerate(differing):
            if place in runs:
                elsewhere = {rank for ranks in named_by_rank for rank in ranks[column]}
                findings.elsewhere.update(elsewhere - set(runs[place].context.peers))

    def _trials(self, run: Run) -> dict[int, Trial]:
        """Return a trial for each disagreement of the run, by the number of its record."""
        named = {each.surface: each for each in run.comparisons}
        among = len(run.comparisons) * len(run.variants) * len(self._active)
        return {
            number: self.history.trial(
                record,
                among=among,
                is_held=named[record.surface].is_stored,
                right=named[record.surface].expected,
            )
            for number, record in enumerate(run.records)
            if record.scope is not None
        }

    def _measure(
        self, findings: Findings, step: int, ready: Sequence[int], runs: Mapping[int, Run]
    ) -> list[Measured]:
        """Return the times of replays. See [Note: timed again]."""
        seen = {place: [*run.seen.values()] for place, run in runs.items() if self._is_warm(place, run)}
        found = {place: self._measured(place, runs[place], each) for place, each in seen.items()}
        if not (doubted := self.doubted(step, findings, [*found.values()])):
            return [*found.values()]
        wanted = [place in found and found[place].layer in doubted for place in ready]
        places = [place for place, yes in zip(ready, self._job.highest(wanted), strict=True) if yes]
        for _ in range(_TIMES):
            time.sleep(_PAUSE_SECONDS)
            now = {place: runs[place].restarted() for place in places if place in runs}
            with host_ahead():
                self._observe(places, now)
            for place, run in now.items():
                seen.get(place, []).extend(run.seen.values())
            self.still_here()
        return [self._measured(place, runs[place], each) for place, each in seen.items()]

    def _is_warm(self, place: int, run: Run) -> bool:
        """Whether this work was run before. The first run compiles kernels and allocates memory."""
        active, (name, shape) = self._active[place], run.replay.work
        key = (active.due.kind, name, () if active.recipe.is_dynamic else shape)
        is_warm = key in self._warm
        self._warm.add(key)
        return is_warm

    def _measured(self, place: int, run: Run, seen: Sequence[Observation]) -> Measured:
        return measured(self._active[place].target, run.replay.work[1], seen)

    def _keep(self, active: ActiveReplay, replay: Replay, kept: set[Hashable]) -> None:
        """Save the source's call for a sweep, unless another shape's has been ``kept`` in this check; other
        peers drop the call that they had saved."""
        assert active.due.target is not None, "what was replayed has a target"
        key = (active.due.kind, active.recipe.saved_name(active.due.target))
        if key in kept:
            return
        kept.add(key)
        if (call := replay.invocation()) is None:
            self.saved_calls.drop(key)
        else:
            attempt(partial(self.saved_calls.keep, key, call))

    def _gather(self, runs: Mapping[int, Run], *, in_full: bool = False) -> None:
        """Exchange results, once in each peer group."""
        for peers in self._all_peers():
            mine = [run for place, run in runs.items() if self._active[place].peers is peers]
            gather(peers.evidence, mine, in_full=in_full)

    def _observe(self, places: Sequence[int], runs: Mapping[int, Run]) -> None:
        """Run each replay once. Waits for devices once, at the end."""
        self._compute(places, runs)
        self._finish(runs)

    def _compute(self, places: Sequence[int], runs: Mapping[int, Run]) -> None:
        """Run each replay once, without waiting; see [Note: waiting on SCOUT's groups]."""
        ordered = sorted(places, key=lambda place: self._active[place].recipe.is_required)
        for place in ordered:
            began = self.now() if self._active[place].recipe.is_dynamic else None
            if self._may_communicate and place != ordered[0]:
                self._job.highest([0])
            if (run := runs.get(place)) is None:
                continue
            for variant, seen in run.seen.items():
                _, run.problems[variant] = attempt(partial(run.replay.observe, seen))
            if began is not None:
                self._on_shapes += self.now() - began

    def _finish(self, runs: Mapping[int, Run]) -> None:
        """Wait for signatures and times."""
        every = [seen for run in runs.values() for seen in run.seen.values()]
        _, problem = attempt(partial(finish_signatures, every))
        for run in runs.values() if problem is not None else ():
            for variant, seen in run.seen.items():
                run.problems[variant] = problem
                seen.signatures.clear()
        for seen in every:
            attempt(seen.read)  # if reading fails, there are no times
