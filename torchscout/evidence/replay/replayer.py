"""Carries out what is due at the end of a step, in step with every other rank (paper, section 6.1).

[Note: no rank is stranded] All that may fail on one rank alone (clones, allocations) happens before one
job-wide vote; work that is not ready everywhere is done nowhere. After the vote a rank that fails still
takes part in every exchange, with a poison in place of its signatures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchscout.decision import c3
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.decision.timings import Measured
from torchscout.errors import ChannelError, told
from torchscout.evidence.hearing import in_backward, inert
from torchscout.evidence.replay.judgement import (
    Context,
    broken_depth,
    judge,
    named_for_results,
    not_checked,
    withhold,
)
from torchscout.evidence.replay.keepsakes import Keepsakes
from torchscout.evidence.replay.peers import Peers
from torchscout.evidence.replay.recipe import POISON, Comparison, Observation, Recipe, Replay, measured
from torchscout.evidence.replay.rotation import Due, Rotation
from torchscout.mesh import Role

__all__ = ["Begun", "Findings", "PeersFor", "Replayer", "attempt"]

_HEIGHT = 8
"""More than the comparisons that build upon each other."""
_Value = TypeVar("_Value")

PeersFor = Callable[[Role, bool], Peers]
"""Who compares what: of a role, what ranks hold, or what they compute on gathered parameters."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What one check produced, the same on every peer."""

    records: list[EvidenceRecord] = field(default_factory=list)
    repeats: list[EvidenceRecord] = field(default_factory=list)
    """Of the second replay, where a disagreement called for one."""
    elsewhere: set[int] = field(default_factory=set)
    """Ranks of other peer groups that were named for wrong results in the same check."""
    targets: list[str] = field(default_factory=list)
    """What was due on this rank and vouches for its state, whether or not it could be replayed."""
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


class Replayer:
    """The recipes of one rank."""

    def __init__(self, recipes: Sequence[Recipe], rotation: Rotation, peers: PeersFor) -> None:
        self._recipes = {recipe.kind: recipe for recipe in recipes}
        self._rotation, self._peers_for = rotation, peers
        self._job: Peers = peers(Role.DENSE, False)
        """Any of them: for what concerns the whole job."""
        self._begun: list[Begun] = []
        self._warm: set[Hashable] = set()
        """What has been run before."""
        self.variants: tuple[float, ...] = (1.0,)
        self.keepsakes = Keepsakes()

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
            name = recipe.targets[due.target]
            self._begun.append(Begun(due, name, recipe, peers, source, replay, problem))

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
        self._carry_out(step, findings)

    def peers_for(self, recipe: Recipe) -> Peers:
        return self._peers_for(recipe.role, recipe.is_gathered)

    def _carry_out(self, step: int, findings: Findings) -> None:
        try:
            self._describe()
            self._vote()
            for begun in self._begun:
                context = Context(step, begun.peers.group.ranks, begun.target)
                if begun.due.target is None:
                    self._attend(begun)
                    continue
                if begun.recipe.vouches:
                    findings.targets.append(begun.target)
                if begun.problem is None and begun.replay is not None:
                    self._run(begun, begun.replay, context, findings)
                else:
                    surface = "/".join(filter(None, (begun.target, begun.due.kind)))
                    findings.records.append(not_checked(context, surface, str(begun.problem)))
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
        return dict.fromkeys(self._peers_for(role, gathered) for role in Role for gathered in (False, True))

    def _prepare(self, begun: Begun, told_by: Sequence[Any]) -> None:
        is_sound = begun.problem is None and not any(each["problem"] for each in told_by)
        if is_sound and begun.replay is not None:
            documents = [json.loads(each["document"]) for each in told_by]
            prepare = _bound(begun.replay.prepare, documents, begun.source)
            _, begun.problem = attempt(prepare)

    def _vote(self) -> None:
        """Work that is not ready everywhere is done nowhere."""
        agreed = self._job.first_problems([begun.problem for begun in self._begun])
        for begun, problem in zip(self._begun, agreed, strict=True):
            begun.problem = problem

    def _attend(self, begun: Begun) -> None:
        """Others replay what this rank has not; it is asked as often as they are."""
        if begun.problem is None and self._job.highest([0, 0])[0]:
            self._job.highest([0, 0])
            self._job.exchange([])

    def _run(self, begun: Begun, replay: Replay, context: Context, findings: Findings) -> None:
        replay.align(lambda tensor: begun.peers.broadcast(tensor, source=begun.source))
        variants = self.variants if begun.recipe.varies else (1.0,)
        comparisons = replay.comparisons()
        seen = {variant: Observation() for variant in variants}
        records: list[EvidenceRecord] = []
        if self._compare(begun, comparisons, seen, context, records):
            again = {variant: Observation() for variant in variants}
            self._compare(begun, comparisons, again, context, findings.repeats)
            named = self._job.exchange(named_for_results(comparisons, records))
            findings.elsewhere.update({rank for ranks in named for rank in ranks} - set(context.peers))
        findings.records.extend(records)
        name, shape = replay.work
        key = (begun.due.kind, name, () if begun.recipe.is_dynamic else shape)
        if key in self._warm:
            findings.measured.append(measured(begun.target, shape, [*seen.values()]))
        self._warm.add(key)
        self._keep(begun, replay)

    def _keep(self, begun: Begun, replay: Replay) -> None:
        """Whoever's call was replayed keeps it for a sweep, in place of what another peer had kept."""
        assert begun.due.target is not None, "what was replayed has a target"
        key = (begun.due.kind, begun.recipe.kept_as(begun.due.target))
        if (call := replay.invocation()) is None:
            self.keepsakes.drop(key)
        else:
            attempt(_bound(self.keepsakes.keep, key, call))

    def _compare(
        self,
        begun: Begun,
        comparisons: Sequence[Comparison],
        seen: Mapping[float, Observation],
        context: Context,
        into: list[EvidenceRecord],
    ) -> bool:
        """Compute, exchange once, judge; whether anybody in the job found a difference."""
        records, has_failed = self._judged(begun, comparisons, seen, context)
        depth = 0 if has_failed else broken_depth(comparisons, records)
        height = 0 if depth is None else _HEIGHT - depth
        # Job-wide: layers may be sharded, and ranks of other peer groups compute together with this one.
        differs, height = self._job.highest([any(each.scope is not None for each in records), height])
        into.extend(withhold(comparisons, records, _HEIGHT - height) if height else records)
        return bool(differs)

    def _judged(
        self,
        begun: Begun,
        comparisons: Sequence[Comparison],
        seen: Mapping[float, Observation],
        context: Context,
    ) -> tuple[list[EvidenceRecord], bool]:
        """The records of all variants, and whether this rank failed in any."""
        assert begun.replay is not None, "what is compared was begun"
        evidence: dict[Surface, int] = {}
        problems: list[str | None] = []
        for variant, into in seen.items():
            _, problem = attempt(_bound(begun.replay.observe, variant, into))
            problems.append(problem)
            for each in comparisons:
                evidence[_key(each.surface, variant)] = into.signatures.get(each.surface, POISON)
        verdicts = c3.compare(begun.peers.evidence, exact=evidence)
        for into in seen.values():
            attempt(into.read)  # a device that cannot be asked is not timed
        records = []
        for variant, problem in zip(seen, problems, strict=True):
            gathered: dict[Surface, Any] = {
                each.surface: verdicts[_key(each.surface, variant)].evidence for each in comparisons
            }
            here = Context(context.step, context.peers, context.target, variant, problem)
            records += judge(here, comparisons, gathered)
        return records, any(problem is not None for problem in problems)


def _description(begun: Begun, inside: str | None) -> dict[str, Any]:
    document = None
    if begun.replay is not None and begun.problem is None:
        document, begun.problem = attempt(_bound(_spelled, begun.replay))
    begun.problem = begun.problem or inside
    return {"problem": begun.problem, "document": document}


def _key(surface: Surface, variant: float) -> Surface:
    return f"{surface} x{variant!r}"


def _spelled(replay: Replay) -> str:
    return json.dumps(replay.describe())


def _bound(function: Callable[..., _Value], *args: Any, **kwargs: Any) -> Callable[[], _Value]:
    return lambda: function(*args, **kwargs)


def attempt(work: Callable[[], _Value]) -> tuple[_Value | None, str | None]:
    """The result, or in words why there is none."""
    try:
        with inert():
            return work(), None
    except ChannelError:
        raise  # the exchange itself is broken: there is nobody left to be in step with
    except Exception as error:  # noqa: BLE001  see [Note: no rank is stranded]; the user's modules run in here
        return None, told(error)
