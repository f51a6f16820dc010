"""Carries out what is due at the end of a step, in step with every other rank (paper, section 6.1).

[Note: no rank is stranded] All that may fail on one rank alone (clones, allocations) happens before one
job-wide vote; work that is not ready everywhere is done nowhere. After the vote a rank that fails still
takes part in every exchange, with a poison in place of its signatures.

[Note: as many rounds everywhere] How often a target is replayed in a check is agreed by the whole job after
each round: layers may be sharded, and ranks of other peer groups compute together with this one. A round is
repeated without strict determinism where an operator refused it on any rank, and after a disagreement there
are further rounds until ``decision.repeatability`` has decided on every rank, or may not ask for more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from torchscout.decision import c3
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.decision.repeatability import Repeated, SurfaceHistory, Trial
from torchscout.decision.timings import Measured
from torchscout.errors import ChannelError, told
from torchscout.evidence.hearing import in_backward, inert
from torchscout.evidence.replay.judgement import (
    Context,
    broken_depth,
    is_left_out,
    judge,
    named_for_results,
    not_checked,
    withhold,
)
from torchscout.evidence.replay.keepsakes import Keepsakes
from torchscout.evidence.replay.peers import Peers
from torchscout.evidence.replay.recipe import (
    POISON,
    UNREPEATABLE,
    Comparison,
    Observation,
    Recipe,
    Replay,
    measured,
)
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
    """As they are to be kept: what does not repeat has no verdict."""
    repeats: list[Repeated] = field(default_factory=list)
    """What further replays said, where a disagreement called for them."""
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
        self.history = SurfaceHistory()
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
        if begun.problem is None:
            while (vote := self._vote_on_first())[0]:
                pass
            if vote[1]:
                while self._goes_on(False):
                    pass
                self._job.exchange([])

    def _run(self, begun: Begun, replay: Replay, context: Context, findings: Findings) -> None:
        replay.align(lambda tensor: begun.peers.broadcast(tensor, source=begun.source))
        variants = self.variants if begun.recipe.varies else (1.0,)
        comparisons = replay.comparisons()
        left_out = {
            each.surface: reason
            for each in comparisons
            if (reason := self.history.reason(each.surface, context.target)) is not None
        }
        context = replace(context, left_out=left_out)
        seen, records, differs = self._first_round(begun, comparisons, variants, context)
        if differs:
            records = self._repeat(begun, comparisons, variants, records, findings)
            named = self._job.exchange(named_for_results(comparisons, records))
            findings.elsewhere.update({rank for ranks in named for rank in ranks} - set(context.peers))
        findings.records.extend(records)
        name, shape = replay.work
        key = (begun.due.kind, name, () if begun.recipe.is_dynamic else shape)
        if key in self._warm:
            findings.measured.append(measured(begun.target, shape, [*seen.values()]))
        self._warm.add(key)
        self._keep(begun, replay)

    def _first_round(
        self, begun: Begun, comparisons: Sequence[Comparison], variants: Sequence[float], context: Context
    ) -> tuple[dict[float, Observation], list[EvidenceRecord], bool]:
        """What was seen here and judged by all, and whether anybody in the job found a difference."""
        is_refused = True
        while is_refused:
            seen = {variant: Observation() for variant in variants}
            gathered, problems = self._observed(begun, comparisons, seen)
            records = _judged(context, comparisons, seen, gathered, problems)
            has_failed = any(problem is not None for problem in problems)
            depth = 0 if has_failed else broken_depth(comparisons, records)
            is_refused, differs, height = self._vote_on_first(
                any(each.refused for each in seen.values()),
                any(each.scope is not None for each in records),
                0 if depth is None else _HEIGHT - depth,
            )
        if height:
            records = withhold(comparisons, records, _HEIGHT - height)
        for each in records:
            if is_left_out(each) and each.surface not in context.left_out:
                self.history.leave_out(each.surface, each.layer, str(each.reason))
        return seen, records, differs

    def _repeat(
        self,
        begun: Begun,
        comparisons: Sequence[Comparison],
        variants: Sequence[float],
        records: Sequence[EvidenceRecord],
        findings: Findings,
    ) -> list[EvidenceRecord]:
        """Replay until it is known whose fault a disagreement is; the records as they are to be kept."""
        named = {each.surface: each for each in comparisons}
        among = len(comparisons) * len(variants) * len(self._begun)
        trials = {
            place: self.history.trial(
                record, among=among, is_held=named[record.surface].is_held, right=named[record.surface].right
            )
            for place, record in enumerate(records)
            if record.scope is not None
        }
        is_open = True
        while is_open:
            gathered, _ = self._observed(begun, comparisons, {each: Observation() for each in variants})
            for trial in trials.values():
                _show(trial, begun.peers.group.ranks, gathered, variants)
            is_open = self._goes_on(any(trial.is_open for trial in trials.values()))
        found = {place: self.history.conclude(trial) for place, trial in trials.items()}
        findings.repeats.extend(found.values())
        return [found[place].record if place in found else each for place, each in enumerate(records)]

    def _vote_on_first(
        self, is_refused: bool = False, differs: bool = False, height: int = 0
    ) -> tuple[bool, bool, int]:
        """See [Note: as many rounds everywhere]."""
        refused, differing, height = self._job.highest([is_refused, differs, height])
        return bool(refused), bool(differing), height

    def _goes_on(self, is_open: bool) -> bool:
        """Whether anybody needs another round."""
        self.still_here()
        return bool(self._job.highest([is_open])[0])

    def _keep(self, begun: Begun, replay: Replay) -> None:
        """Whoever's call was replayed keeps it for a sweep, in place of what another peer had kept."""
        assert begun.due.target is not None, "what was replayed has a target"
        key = (begun.due.kind, begun.recipe.kept_as(begun.due.target))
        if (call := replay.invocation()) is None:
            self.keepsakes.drop(key)
        else:
            attempt(_bound(self.keepsakes.keep, key, call))

    def _observed(
        self, begun: Begun, comparisons: Sequence[Comparison], seen: Mapping[float, Observation]
    ) -> tuple[dict[Surface, Sequence[int]], list[str | None]]:
        """Compute and exchange once: what every peer has, and this rank's problem with each variant."""
        assert begun.replay is not None, "what is compared was begun"
        evidence: dict[Surface, int] = {}
        problems: list[str | None] = []
        for variant, into in seen.items():
            _, problem = attempt(_bound(begun.replay.observe, variant, into))
            problems.append(problem)
            for each in comparisons:
                value = into.signatures.get(each.surface, POISON)
                is_marked = each.surface in into.unrepeatable
                evidence[_key(each.surface, variant)] = UNREPEATABLE if is_marked else value
        verdicts = c3.compare(begun.peers.evidence, exact=evidence)
        for into in seen.values():
            attempt(into.read)  # a device that cannot be asked is not timed
        return {surface: cast("Sequence[int]", each.evidence) for surface, each in verdicts.items()}, problems


def _judged(
    context: Context,
    comparisons: Sequence[Comparison],
    seen: Mapping[float, Observation],
    gathered: Mapping[Surface, Sequence[int]],
    problems: Sequence[str | None],
) -> list[EvidenceRecord]:
    """The records of all variants."""
    records = []
    for (variant, into), problem in zip(seen.items(), problems, strict=True):
        values = {each.surface: gathered[_key(each.surface, variant)] for each in comparisons}
        here = replace(context, variant=variant, problem=problem, unrepeatable=into.unrepeatable)
        records += judge(here, comparisons, values)
    return records


def _show(
    trial: Trial, peers: Sequence[int], gathered: Mapping[Surface, Sequence[int]], variants: Sequence[float]
) -> None:
    """One further round to a trial, without the ranks that failed in it."""
    surface = trial.record.surface
    values = next(gathered[_key(surface, variant)] for variant in variants if _is_of(trial.record, variant))
    having = [(rank, value) for rank, value in zip(peers, values, strict=True) if value != POISON]
    trial.observe([rank for rank, _ in having], [value for _, value in having])


def _is_of(record: EvidenceRecord, variant: float) -> bool:
    """Whether a record is about this variant of the input, as ``Context.mode`` spells it."""
    return (record.mode or "").partition(" ")[2] == ("" if variant == 1 else f"x{variant:g}")


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
