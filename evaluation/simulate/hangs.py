"""Random hangs and crashes: who stops, what observers report of it in one or two rounds, and what is true."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from evaluation.simulate.job import Job
from evaluation.simulate.reports import STEP, Reporter, diverging, without
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


class _End(NamedTuple):
    how: How
    ago: float


@dataclass(slots=True)
class _Setting:
    """Where and when a fault happens."""

    chance: np.random.Generator
    mesh: Mesh
    per_host: int
    steps: int
    """Since the trainers began."""
    first_step: int
    """The step from which the job was resumed."""


@dataclass(slots=True)
class _Draft:
    """A fault before anything is lost on the way to the hub."""

    standing: Standing
    ranks: set[int] = field(default_factory=set)
    group: frozenset[int] = frozenset()
    stopped: set[int] = field(default_factory=set)
    ends: dict[int, _End] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    diverging: tuple[int, int, int] | None = None
    """A rank, a line, and the tick at which it issued something else."""
    skipped_at: int = 0
    """The tick of the operation that a rank left out."""
    late_hosts: bool = True
    """Whether it is the host, and not the device, of a rank that stops."""
    moving: bool = False
    """Whether all go on that have not ended."""


class Hangs:
    """Makes the hangs of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.reporter = job, Reporter(job)
        self._lengths = np.array([len(program) for program in job.programs])[job.stage]
        worlds = [
            next((place for place, slot in enumerate(program) if slot.kind == "world"), len(program) - 1)
            for program in job.programs
        ]
        self._syncs = np.array(worlds)[job.stage] + 1
        """How many operations of a step a host issues before it needs a result."""
        self._at = np.stack(job.tick_lines)
        """The line of each rank at each tick."""
        self._alone = job.mesh.on(job.layout.hosts(1))

    def make(self, family: str, condition: str, chance: np.random.Generator) -> Hang:
        """Make one scenario of a family, over Gloo or, with devices that enter operations, over NCCL."""
        spread_out = bool(chance.random() < 0.2)
        steps = int(chance.choice([STEP, 0, 1], p=[0.8, 0.1, 0.1]))
        setting = _Setting(
            chance,
            self._alone if spread_out else self.job.mesh,
            1 if spread_out else self.job.layout.per_host,
            steps,
            0 if steps == STEP else int(chance.integers(1, 100_000)),
        )
        if family == "superseded":
            return self._superseded(condition, setting)
        draft = _MAKERS[family](self, setting)
        return self._sent(draft, self._reports(draft, setting), condition, setting)

    def _superseded(self, condition: str, setting: _Setting) -> Hang:
        """A rank is late, it comes, and a second later one is killed, the same or another."""
        late = self._stall(setting)
        waited = self._reports(late, setting)
        first = self._sent(late, {**waited}, "clean", setting)
        setting = replace(setting, steps=setting.steps + 2)
        killed = self._crash(setting, how="killed", who=late.ranks if setting.chance.random() < 0.3 else ())
        reports = self._reports(killed, setting)
        for rank, report in reports.items():
            if late.standing.inside[rank]:
                reports[rank] = replace(report, stalled=waited[rank].progress)
        return replace(first, then=self._sent(killed, reports, condition, setting))

    def _sent(self, draft: _Draft, reports: _Reports, condition: str, setting: _Setting) -> Hang:
        """Pass the reports to a hub."""
        chance, ranks = setting.chance, np.array(sorted(reports))

        def some(share: float) -> set[int]:
            found: set[int] = {*ranks[chance.random(len(ranks)) < share].tolist()}
            return found or {int(chance.choice(ranks))}

        few = float(chance.choice([0.001, 0.01, 0.05]))
        missing, closed = {*draft.absent}, set[int]()
        first, again = {**reports}, missing
        if condition == "late_answers":
            missing = missing | some(few)
            again = draft.absent | (some(few) if chance.random() < 0.5 else set())
        elif condition in ("dead_observers", "lost_messages"):
            missing = again = missing | (lost := some(few))
            closed = lost if condition == "dead_observers" else closed
        elif condition == "lost_path":
            host = setting.mesh.host_of(int(chance.choice(ranks)))
            missing = again = missing | {*setting.mesh.ranks_on(host or "")}
        elif condition in ("few_stacks", "no_stacks"):
            share = 1.0 if condition == "no_stacks" else float(chance.choice([0.1, 0.5, 0.9]))
            for rank in some(share):
                first[rank] = reports[rank] = replace(reports[rank], waiting=None)
        elif condition == "moving":
            first |= {rank: replace(reports[rank], moving=True) for rank in some(0.01)}
        elif condition == "skew":
            for rank in some(0.1):
                first[rank] = reports[rank] = _skewed(reports[rank], float(chance.lognormal(0.0, 1.0)))
            for rank in draft.ends.keys() & reports.keys():
                seconds = (reports[rank].gone_seconds or 0.0) + float(chance.uniform(0, 0.5))
                first[rank] = reports[rank] = replace(reports[rank], gone_seconds=seconds)
        confirmed = missing & again
        rounds = [
            _round(first, setting.mesh, missing),
            _round(reports, setting.mesh, again, is_repeat=True, confirmed=confirmed, closed=closed & again),
        ]
        return Hang(self._truth(draft, _unreachable(setting.mesh, confirmed)), rounds)

    def _truth(self, draft: _Draft, lost: frozenset[int]) -> Truth:
        shown = {
            rank
            for rank in draft.ranks
            if draft.standing.waited_for[rank]
            or rank in draft.ends
            or rank in draft.absent
            or draft.diverging is not None
            or draft.standing.lagging
        }
        return Truth(frozenset(shown), draft.group, also=frozenset(draft.ranks - shown), lost=lost)

    # Each of these draws a fault.

    def _stall(
        self, setting: _Setting, *, most: int = 1, late_hosts: bool = True, who: Iterable[int] = ()
    ) -> _Draft:
        count = min(self.job.size, int(setting.chance.integers(2, most + 1))) if most > 1 else 1
        ranks = [*who] or [int(each) for each in setting.chance.choice(self.job.size, count, replace=False)]
        standing = spread(self.job, Faults(stops={rank: self._slot(setting, rank)[0] for rank in ranks}))
        # Whoever is stopped by another rank does not come to where it would stop.
        return _Draft(standing, {rank for rank in ranks if not standing.inside[rank]}, late_hosts=late_hosts)

    def _stopped(self, setting: _Setting) -> _Draft:
        draft = self._stall(setting)
        draft.stopped = draft.ranks
        return draft

    def _crash(self, setting: _Setting, how: How | None = None, who: Iterable[int] = ()) -> _Draft:
        """A trainer ends, before or in an operation, while the others wait for it or still move; then some of
        them may fail because of it, and the launcher may end the rest."""
        chance, draft = setting.chance, self._stall(setting, who=who)
        (first,) = draft.ranks
        how = how or ("killed", "failed", "asked", "unknown")[int(chance.choice(4, p=[0.4, 0.3, 0.1, 0.2]))]
        standing = draft.standing
        if chance.random() < 0.3:
            tick = np.full(self.job.size, standing.tick[first] % len(self.job.ticks))
            nobody = np.zeros(self.job.size, dtype=bool)
            draft.standing, draft.moving = Standing(tick, nobody, nobody, {}), True
        elif how == "killed" and chance.random() < 0.3:
            standing.inside[first] = True
        ago = float(chance.uniform(0.2, 6))
        draft.ends[first] = _End(how, ago)
        if chance.random() < 0.5:
            self._fail_with(
                draft, setting, "unknown" if how == "unknown" and chance.random() < 0.5 else "failed"
            )
        # Nothing but their clocks would tell trainers apart that were all asked to end.
        if chance.random() < 0.3 and not (draft.moving and how in ("asked", "unknown")):
            last = min(each.ago for each in draft.ends.values())
            for rank in range(self.job.size):
                draft.ends.setdefault(rank, _End("asked", last * float(chance.uniform(0.1, 0.9))))
        return draft

    def _fail_with(self, draft: _Draft, setting: _Setting, how: How) -> None:
        """End trainers that wait in operations with others that are gone, in two waves."""
        ranks = np.arange(self.job.size)
        at = self._at[draft.standing.tick % len(self.job.ticks), ranks]
        for _ in range(2):
            gone = [*(draft.ends.keys() | draft.absent)]
            lines = np.unique(np.concatenate([lines[gone] for lines in self.job.line_of.values()]))
            free = draft.standing.inside & np.isin(at, lines[lines >= 0])
            free[gone] = False
            found = ranks[free]
            last = min(
                (each.ago for each in draft.ends.values()), default=float(setting.chance.uniform(1, 6))
            )
            for rank in setting.chance.permutation(found)[
                : int(setting.chance.integers(1, _AT_ONCE))
            ].tolist():
                draft.ends[rank] = _End(how, last * float(setting.chance.uniform(0.3, 0.999)))

    def _lost(self, setting: _Setting, hosts: int) -> _Draft:
        chance, ranks = setting.chance, np.arange(self.job.size)
        of_host = ranks // setting.per_host
        hosts = min(hosts, max(1, int(of_host[-1])))  # somebody is left
        first = int(chance.integers(of_host[-1] + 2 - hosts))
        lost = ranks[(of_host >= first) & (of_host < first + hosts)].tolist()
        begin = self._slot(setting, lost[0])[0]
        # The machines are lost at one time, which lies in other operations for other stages.
        draft = _Draft(spread(self.job, Faults(stops=dict.fromkeys(lost, begin))), set(lost))
        if chance.random() < 0.7 and len(lost) < self.job.size:
            draft.absent = set(lost)
            if chance.random() < 0.3:
                self._fail_with(draft, setting, "failed")
        else:
            ago = float(chance.uniform(2, 6))
            draft.ends = {rank: _End("killed", ago + float(chance.uniform(0, 0.01))) for rank in lost}
        return draft

    def _divergence(self, setting: _Setting) -> _Draft:
        rank = int(setting.chance.integers(self.job.size))
        tick, line = self._slot(setting, rank)
        standing, members = spread(self.job, Faults(stuck={line: tick})), self.job.members(line)
        named = {rank} if len(members) > 2 else set[int]()
        return _Draft(standing, named, frozenset(() if named else members), diverging=(rank, line, tick))

    def _skipped(self, setting: _Setting) -> _Draft:
        rank = int(setting.chance.integers(self.job.size))
        tick, _ = self._slot(setting, rank, {"tensor", "expert", "replica", "world"})
        return _Draft(spread(self.job, Faults(skips={rank: tick})), {rank}, skipped_at=tick)

    def _transport(self, setting: _Setting) -> _Draft:
        tick, line = self._slot(setting, int(setting.chance.integers(self.job.size)))
        return _Draft(spread(self.job, Faults(stuck={line: tick})), group=frozenset(self.job.members(line)))

    def _pause(self, setting: _Setting) -> _Draft:
        """Nobody is at fault: all ranks evaluate for long, or move, here and there in the step."""
        moving, nobody = bool(setting.chance.random() < 0.5), np.zeros(self.job.size, dtype=bool)
        ticks = setting.chance.integers(len(self.job.ticks), size=self.job.size) * moving
        return _Draft(Standing(ticks, nobody, nobody, {}), moving=moving)

    def _slot(self, setting: _Setting, rank: int, kinds: Collection[str] = ()) -> tuple[int, int]:
        """Return a random tick at which ``rank`` has an operation, and its line."""
        slots = [
            slot
            for slot in self.job.programs[int(self.job.stage[rank])]
            if (not kinds or slot.kind in kinds) and not self.job.ticks[slot.tick].posted
        ]
        slot = slots[int(setting.chance.integers(len(slots)))]
        return slot.tick, int(self.job.line_of[slot.kind][rank])

    # What observers report.

    def _reports(self, draft: _Draft, setting: _Setting) -> _Reports:
        standing, chance = draft.standing, setting.chance
        on_devices = not draft.late_hosts or bool(chance.random() < 0.5)
        steps, ticks = np.divmod(standing.tick, len(self.job.ticks))
        begun = (setting.steps + steps) * self._lengths
        entered = begun + self.job.entered_before[self.job.stage, ticks] + standing.inside
        # A host runs ahead of its device until it needs a result.
        ahead = begun + self._syncs + np.where(entered - begun > self._syncs, self._lengths, 0)
        stays = ~standing.inside & draft.late_hosts
        issued = np.where(stays | (not on_devices), entered, ahead).tolist()
        shown = [None, False][int(chance.integers(2))] if on_devices else True
        # Whether whoever stopped has published anything since its last operation.
        is_last = bool(chance.random() < 0.5)
        reports: _Reports = {}
        for rank, (count, device, inside) in enumerate(
            zip(issued, entered.tolist(), standing.inside.tolist(), strict=True)
        ):
            if rank in draft.absent:
                continue
            busy = inside or not draft.late_hosts
            report = self.reporter.report(
                rank,
                count,
                device if on_devices else None,
                waiting=shown if busy else False,
                at_communication=(inside or (is_last and bool(draft.ranks))) and not on_devices,
                busy=busy,
                moving=draft.moving,
                first_step=setting.first_step,
            )
            if draft.ends or draft.stopped:
                report = self._ended(report, draft)
            reports[rank] = report
        for rank, line in standing.lagging.items():
            key, number = self._issued_at(setting, rank, draft.skipped_at, line)
            reports[rank] = without(reports[rank], key, number)
        if draft.diverging is not None:
            rank, line, tick = draft.diverging
            reports[rank] = diverging(reports[rank], *self._issued_at(setting, rank, tick, line))
        return reports

    def _ended(self, report: RankReport, draft: _Draft) -> RankReport:
        if report.rank in draft.stopped:
            return replace(report, process=Process.STOPPED, waiting=None)
        if (end := draft.ends.get(report.rank)) is None:
            return report
        return replace(
            report,
            process=Process.GONE,
            waiting=None,
            moving=False,
            gone_seconds=end.ago,
            how=end.how,
            wait_status=_STATUS[end.how],
        )

    def _issued_at(self, setting: _Setting, rank: int, tick: int, line: int) -> tuple[str, int]:
        """Return group and number of the operation that ``rank`` has at a tick of the step with the fault."""
        stage = int(self.job.stage[rank])
        slot = next(each for each in self.job.programs[stage] if each.tick == tick)
        number = setting.steps * self.job.counts[stage][-1][slot.kind] + slot.ordinal + 1
        return self.job.lines[line].key, number


def _round(reports: _Reports, mesh: Mesh, missing: Collection[int], **known: object) -> Round:
    answered = {rank: each for rank, each in reports.items() if rank not in missing} if missing else reports
    return Round(answered, mesh, **known)  # type: ignore[arg-type]


def _unreachable(mesh: Mesh, confirmed: Collection[int]) -> frozenset[int]:
    """Ranks of machines of which nobody has answered twice: these machines are lost, whatever else is wrong."""
    hosts = (mesh.ranks_on(host) for host in mesh.hosts_of(sorted(confirmed)))
    return frozenset(rank for ranks in hosts if {*ranks} <= {*confirmed} for rank in ranks)


def _skewed(report: RankReport, factor: float) -> RankReport:
    progress = report.progress
    assert progress is not None
    return replace(report, progress=replace(progress, silent_seconds=progress.silent_seconds * factor))


_MAKERS: Mapping[str, Callable[[Hangs, _Setting], _Draft]] = {
    "stall": Hangs._stall,
    "stalls": lambda hangs, setting: hangs._stall(setting, most=4),
    "stuck_device": lambda hangs, setting: hangs._stall(setting, late_hosts=False),
    "crash": Hangs._crash,
    "stopped": Hangs._stopped,
    "lost_host": lambda hangs, setting: hangs._lost(setting, 1),
    "lost_rack": lambda hangs, setting: hangs._lost(setting, int(setting.chance.integers(2, 9))),
    "divergence": Hangs._divergence,
    "skipped": Hangs._skipped,
    "transport": Hangs._transport,
    "pause": Hangs._pause,
}
FAMILIES = (*_MAKERS, "superseded")
