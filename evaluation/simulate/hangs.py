"""Random hangs and crashes: who stops, what observers report of it in one or two rounds, and what is true."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from evaluation.simulate.job import Job
from evaluation.simulate.reports import STEP, Reporter, differing
from evaluation.simulate.scoring import Truth
from evaluation.simulate.spread import Faults, Standing, spread
from torchscout.decision.hang import Round, diagnose
from torchscout.decision.progress import How, Process, RankReport
from torchscout.decision.types import Incident
from torchscout.mesh import Mesh

__all__ = ["CONDITIONS", "FAMILIES", "Hang", "Hangs"]

CONDITIONS = (
    *("clean", "late_answers", "dead_observers", "lost_messages", "lost_path"),
    *("few_stacks", "no_stacks", "moving", "skew"),
)
"""What happens to the reports of a round. About half of all rounds are clean."""
_STATUS: Mapping[How, int | None] = {"killed": 9, "failed": 1 << 8, "asked": 15, "unknown": None}
_AT_ONCE = 30
"""How many trainers fail at once because of another, at most."""
_Reports = dict[int, RankReport]


@dataclass(frozen=True, slots=True)
class Hang:
    """A fault, and what is answered in the rounds that a hub holds because of it."""

    truth: Truth
    rounds: Sequence[Round]
    """The second one is held if the first one does not explain the fault."""
    then: Hang | None = None
    """What goes wrong after this is over."""

    def decide(self) -> tuple[list[Incident], float]:
        """Return what is concluded, and the processor time of the longest diagnosis."""
        seconds = 0.0
        for each in self.rounds:
            begin = time.process_time()
            found = diagnose(each)
            seconds = max(seconds, time.process_time() - begin)
            if found.incidents:
                return [*found.incidents], seconds
        return [], seconds


class _Setting(NamedTuple):
    """Where and when a fault happens."""

    chance: np.random.Generator
    mesh: Mesh
    steps: int
    """Since the trainers began."""
    first_step: int
    """The step from which the job was resumed."""


class _End(NamedTuple):
    how: How
    ago: float


@dataclass(slots=True)
class _Draft:
    """A fault before anything is lost on the way to the hub."""

    standing: Standing
    ranks: set[int] = field(default_factory=set)
    group: frozenset[int] = frozenset()
    stopped: set[int] = field(default_factory=set)
    ends: dict[int, _End] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    differs: tuple[int, int, int] | None = None
    """A rank, a line, and the tick at which it issued something else or left an operation out."""
    late_hosts: bool = True
    """Whether it is the host, and not the device, of a rank that stops."""
    moving: bool = False
    """Whether all go on that have not ended."""

    def truth(self, lost: frozenset[int]) -> Truth:
        """Return what is wrong; ``lost`` are ranks of machines that do not answer."""
        shown = {rank for rank in self.ranks if self.standing.waited_for[rank] or rank in self.ends}
        shown |= self.ranks if self.differs is not None else self.absent
        return Truth(frozenset(shown), self.group, also=frozenset(self.ranks - shown), lost=lost)


class Hangs:
    """Makes the hangs of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.reporter = job, Reporter(job)
        self._one_each = job.mesh.on(job.layout.hosts(1))

    def make(self, family: str, condition: str, chance: np.random.Generator) -> Hang:
        """Make one scenario of a family, over Gloo or, with devices that enter operations, over NCCL."""
        mesh = self._one_each if chance.random() < 0.2 else self.job.mesh
        steps = int(chance.choice([STEP, 0, 1], p=[0.8, 0.1, 0.1]))
        setting = _Setting(chance, mesh, steps, 0 if steps == STEP else int(chance.integers(1, 100_000)))
        if family == "superseded":
            return self._superseded(condition, setting)
        draft = _MAKERS[family](self, setting)
        return _sent(draft, self._reports(draft, setting), condition, setting)

    def _superseded(self, condition: str, setting: _Setting) -> Hang:
        """A rank is late, it comes, and two steps later one is killed, the same or another."""
        late = self._stall(setting)
        waited = self._reports(late, setting)
        first = _sent(late, {**waited}, "clean", setting)
        setting = setting._replace(steps=setting.steps + 2)
        killed = self._crash(setting, how="killed", who=late.ranks if setting.chance.random() < 0.3 else ())
        reports = self._reports(killed, setting)
        for rank in np.flatnonzero(late.standing.inside).tolist():
            reports[rank] = replace(reports[rank], stalled=waited[rank].progress)
        return replace(first, then=_sent(killed, reports, condition, setting))

    # Each of these draws a fault.

    def _stall(self, setting: _Setting, *, most: int = 1, who: Iterable[int] = (), **how: bool) -> _Draft:
        count = min(self.job.size, int(setting.chance.integers(2, most + 1))) if most > 1 else 1
        ranks = [*who] or setting.chance.choice(self.job.size, count, replace=False).tolist()
        standing = spread(self.job, Faults(stops={rank: self._slot(setting, rank)[0] for rank in ranks}))
        # Whoever is stopped by another rank does not come to where it would stop.
        draft = _Draft(standing, {rank for rank in ranks if not standing.inside[rank]})
        draft.stopped = draft.ranks if how.get("stopped") else set()
        draft.late_hosts = not how.get("on_device")
        return draft

    def _crash(self, setting: _Setting, how: How | None = None, who: Iterable[int] = ()) -> _Draft:
        """A trainer ends, before or in an operation, while the others wait for it or still move; then some of
        them may fail because of it, and the launcher may end the rest."""
        chance, draft = setting.chance, self._stall(setting, who=who)
        (first,) = draft.ranks
        how = how or ("killed", "failed", "asked", "unknown")[int(chance.choice(4, p=[0.4, 0.3, 0.1, 0.2]))]
        if chance.random() < 0.3:
            draft.standing, draft.moving = self._nobody_waits(int(draft.standing.tick[first])), True
        elif how == "killed" and chance.random() < 0.3:
            draft.standing.inside[first] = True
        draft.ends[first] = _End(how, float(chance.uniform(0.2, 6)))
        if chance.random() < 0.5:
            self._fail_with(
                draft, chance, "unknown" if how == "unknown" and chance.random() < 0.5 else "failed"
            )
        # Nothing but their clocks would tell trainers apart that were all asked to end.
        if chance.random() < 0.3 and not (draft.moving and how in ("asked", "unknown")):
            last = min(each.ago for each in draft.ends.values())
            for rank in range(self.job.size):
                draft.ends.setdefault(rank, _End("asked", last * float(chance.uniform(0.1, 0.9))))
        return draft

    def _nobody_waits(self, ticks: int | np.ndarray) -> Standing:
        nobody = np.zeros(self.job.size, dtype=bool)
        return Standing(np.broadcast_to(ticks, self.job.size) % len(self.job.ticks), nobody, nobody)

    def _fail_with(self, draft: _Draft, chance: np.random.Generator, how: How) -> None:
        """End trainers that wait in operations with others that are gone, in two waves."""
        ranks = np.arange(self.job.size)
        at = self.job.tick_lines[draft.standing.tick % len(self.job.ticks), ranks]
        for _ in range(2):
            gone = [*(draft.ends.keys() | draft.absent)]
            lines = np.unique([lines[gone] for lines in self.job.line_of.values()])
            waiting = draft.standing.inside & np.isin(at, lines[lines >= 0])
            waiting[gone] = False
            last = min((each.ago for each in draft.ends.values()), default=float(chance.uniform(1, 6)))
            for rank in chance.permutation(ranks[waiting])[: int(chance.integers(1, _AT_ONCE))].tolist():
                draft.ends[rank] = _End(how, last * float(chance.uniform(0.3, 0.999)))

    def _lost(self, setting: _Setting, most: int) -> _Draft:
        chance, mesh = setting.chance, setting.mesh
        hosts = mesh.hosts_of(range(self.job.size))
        count = min(int(chance.integers(most // 4, most) if most > 1 else 1), max(1, len(hosts) - 1))
        first = int(chance.integers(len(hosts) - count + 1))
        lost = {rank for host in hosts[first : first + count] for rank in mesh.ranks_on(host)}
        # The machines are lost at one time, which lies in other operations for other stages.
        stops = dict.fromkeys(sorted(lost), self._slot(setting, min(lost))[0])
        draft = _Draft(spread(self.job, Faults(stops=stops)), lost)
        if chance.random() < 0.7 and len(hosts) > 1:
            draft.absent = lost
            if chance.random() < 0.3:
                self._fail_with(draft, chance, "failed")
        else:
            ago = float(chance.uniform(2, 6))
            draft.ends = {rank: _End("killed", ago + float(chance.uniform(0, 0.01))) for rank in lost}
        return draft

    def _divergence(self, setting: _Setting) -> _Draft:
        rank = int(setting.chance.integers(self.job.size))
        tick, line = self._slot(setting, rank)
        standing, members = spread(self.job, Faults(stuck={line: tick})), self.job.members(line)
        named = {rank} if len(members) > 2 else set[int]()
        return _Draft(standing, named, frozenset(() if named else members), differs=(rank, line, tick))

    def _skipped(self, setting: _Setting) -> _Draft:
        rank = int(setting.chance.integers(self.job.size))
        tick, line = self._slot(setting, rank, {"tensor", "expert", "replica", "world"})
        return _Draft(spread(self.job, Faults(skips={rank: tick})), {rank}, differs=(rank, line, tick))

    def _transport(self, setting: _Setting) -> _Draft:
        tick, line = self._slot(setting, int(setting.chance.integers(self.job.size)))
        return _Draft(spread(self.job, Faults(stuck={line: tick})), group=frozenset(self.job.members(line)))

    def _pause(self, setting: _Setting) -> _Draft:
        """Nobody is at fault: all ranks evaluate for long, or move, here and there in the step."""
        moving = bool(setting.chance.random() < 0.5)
        ticks = setting.chance.integers(len(self.job.ticks), size=self.job.size) * moving
        return _Draft(self._nobody_waits(ticks), moving=moving)

    def _slot(self, setting: _Setting, rank: int, kinds: Collection[str] = ()) -> tuple[int, int]:
        """Return a random tick at which ``rank`` has an operation, and its line."""
        found = [
            (tick, kind)
            for tick, kind in enumerate(self.job.programs[int(self.job.stage[rank])])
            if kind is not None and (not kinds or kind in kinds) and not self.job.ticks[tick].posted
        ]
        tick, kind = found[int(setting.chance.integers(len(found)))]
        return tick, int(self.job.line_of[kind][rank])

    # What observers report.

    def _reports(self, draft: _Draft, setting: _Setting) -> _Reports:
        standing, chance = draft.standing, setting.chance
        on_devices = not draft.late_hosts or bool(chance.random() < 0.5)
        # A host runs ahead of its device until it needs a result, that of the whole job.
        ticks = len(self.job.ticks)
        sync = 1 + next(place for place, each in enumerate(self.job.ticks) if each.kind == "world")
        entered = setting.steps * ticks + standing.tick + standing.inside
        ahead = entered // ticks * ticks + sync + np.where(entered % ticks > sync, ticks, 0)
        stays = ~standing.inside & draft.late_hosts
        issued = np.where(stays | (not on_devices), entered, ahead).tolist()
        shown = [None, False][int(chance.integers(2))] if on_devices else True
        # Whether whoever stopped has published nothing since its last operation.
        is_last = bool(chance.random() < 0.5) and bool(draft.ranks)
        reports: _Reports = {}
        for rank in sorted({*range(self.job.size)} - draft.absent):
            busy = bool(standing.inside[rank]) or not draft.late_hosts
            report = self.reporter.report(
                rank,
                issued[rank],
                int(entered[rank]) if on_devices else None,
                first_step=setting.first_step,
                waiting=shown if busy else False,
                at_communication=(bool(standing.inside[rank]) or is_last) and not on_devices,
                busy=busy,
                moving=draft.moving,
            )
            if rank in draft.stopped:
                report = replace(report, process=Process.STOPPED, waiting=None)
            if (end := draft.ends.get(rank)) is not None:
                how, ago = end
                report = replace(report, process=Process.GONE, waiting=None, moving=False)
                report = replace(report, gone_seconds=ago, how=how, wait_status=_STATUS[how])
            reports[rank] = report
        if draft.differs is not None:
            rank, line, tick = draft.differs
            counts, kind = self.job.counts[stage := int(self.job.stage[rank])], self.job.programs[stage][tick]
            assert kind is not None
            number = setting.steps * counts[-1][kind] + counts[tick].get(kind, 0) + 1
            key, skips = self.job.lines[line].key, bool(standing.lagging)
            reports[rank] = differing(reports[rank], key, number, skips=skips)
        return reports


def _sent(draft: _Draft, reports: _Reports, condition: str, setting: _Setting) -> Hang:
    """Pass the reports to a hub, in two rounds."""
    chance, mesh, ranks = setting.chance, setting.mesh, np.array([*reports])

    def some(share: float) -> set[int]:
        return {*ranks[chance.random(len(ranks)) < share].tolist()} or {int(chance.choice(ranks))}

    few = float(chance.choice([0.001, 0.01, 0.05]))
    first, absent, again = reports, set[int](), set[int]()
    if condition == "late_answers":
        absent, again = some(few), some(few) if chance.random() < 0.5 else set()
    elif condition in ("dead_observers", "lost_messages"):
        absent = again = some(few)
    elif condition == "lost_path":
        absent = again = {*mesh.ranks_on(mesh.host_of(int(chance.choice(ranks))) or "")}
    elif condition == "moving":
        first = reports | {rank: replace(reports[rank], moving=True) for rank in some(0.01)}
    elif condition in ("few_stacks", "no_stacks"):
        share = 1.0 if condition == "no_stacks" else float(chance.choice([0.1, 0.5, 0.9]))
        reports |= {rank: replace(reports[rank], waiting=None) for rank in some(share)}
    elif condition == "skew":
        reports |= {
            rank: _skewed(reports[rank], chance) for rank in some(0.1) | draft.ends.keys() & reports.keys()
        }
    confirmed = draft.absent | (absent & again)
    hosts = (mesh.ranks_on(host) for host in mesh.hosts_of(sorted(confirmed)))
    lost = frozenset(rank for ranks in hosts if confirmed.issuperset(ranks) for rank in ranks)
    before, after = (
        {rank: each for rank, each in answered.items() if rank not in missing}
        for answered, missing in ((first, absent), (reports, again))
    )
    closed = again if condition == "dead_observers" else ()
    return Hang(draft.truth(lost), [Round(before, mesh), Round(after, mesh, True, confirmed, closed)])


def _skewed(report: RankReport, chance: np.random.Generator) -> RankReport:
    """See its silence longer or shorter, and its end earlier, than by the clocks of other machines."""
    assert report.progress is not None
    silent = report.progress.silent_seconds * float(chance.lognormal())
    gone = None if report.gone_seconds is None else report.gone_seconds + float(chance.uniform(0, 0.5))
    return replace(report, progress=replace(report.progress, silent_seconds=silent), gone_seconds=gone)


_MAKERS: Mapping[str, Callable[[Hangs, _Setting], _Draft]] = {
    "stall": Hangs._stall,
    "stalls": lambda hangs, setting: hangs._stall(setting, most=4),
    "stuck_device": lambda hangs, setting: hangs._stall(setting, on_device=True),
    "crash": Hangs._crash,
    "stopped": lambda hangs, setting: hangs._stall(setting, stopped=True),
    "lost_host": lambda hangs, setting: hangs._lost(setting, 1),
    "lost_rack": lambda hangs, setting: hangs._lost(setting, 9),
    "divergence": Hangs._divergence,
    "skipped": Hangs._skipped,
    "transport": Hangs._transport,
    "pause": Hangs._pause,
}
FAMILIES = (*_MAKERS, "superseded")
