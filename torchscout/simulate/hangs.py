"""Random hangs: who stops, what observers report of it, and what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from torchscout.decision.hang.table import Ints
from torchscout.decision.progress import Process
from torchscout.decision.types import Incident
from torchscout.observer.rounds.diagnosis import conclude
from torchscout.observer.rounds.hub import Round
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reports import Reports
from torchscout.simulate.job import Job
from torchscout.simulate.reports import STEP, Reporter, Stand
from torchscout.simulate.scoring import Truth
from torchscout.simulate.spread import Faults, Standing, spread

__all__ = ["CONDITIONS", "FAMILIES", "Hang", "Hangs"]

FAMILIES = (
    *("stall", "stalls", "stuck_device", "crash", "stopped", "lost_host", "lost_rack"),
    *("divergence", "skipped", "transport", "pause"),
)
CONDITIONS = ("clean", "lost_messages", "few_stacks", "no_stacks", "late_messages", "duplicates", "skew")
"""What happens to the reports of a round. About half of all rounds are clean."""


@dataclass(frozen=True, slots=True)
class Hang:
    """One round of the observers."""

    truth: Truth
    posts: Mapping[int, Post]
    early: Mapping[int, Post] = field(default_factory=dict)
    """Posts to an earlier round, whose senders still moved."""
    repeated: frozenset[int] = frozenset()
    """Ranks whose posts arrive twice, as after a reconnection."""
    insistent: bool = False

    @property
    def reports(self) -> Reports:
        return Reports(self.posts)

    def decide(self, job: Job) -> list[Incident]:
        """Conclude the rounds as a hub does it."""
        found = conclude(self._gathered({**self.posts, **self.early}), job.mesh) if self.early else None
        if found is None:
            insistent = self.insistent or bool(self.early)
            found = conclude(self._gathered(self.posts), job.mesh, insistent=insistent)
        return [] if found is None else [found]

    def _gathered(self, posts: Mapping[int, Post]) -> Reports:
        gathering = Round(1, deadline=0.0, awaited=set(posts))
        for rank, post in posts.items():
            gathering.add(rank, post)
            if rank in self.repeated:
                gathering.add(rank, post)
        return Reports(gathering.posts, gathering.stacks)


@dataclass(slots=True)
class _Round:
    """What observers report before anything is sent."""

    truth: Truth
    reports: dict[int, Stand | RankReport]
    early: dict[int, Stand | RankReport] = field(default_factory=dict)
    repeated: frozenset[int] = frozenset()
    insistent: bool = False


@dataclass(slots=True)
class _Draft:
    """A hang before anything is lost on the way to the hub."""

    standing: Standing
    ranks: set[int] = field(default_factory=set)
    group: frozenset[int] = frozenset()
    dead: dict[int, Process] = field(default_factory=dict)
    killed: bool = True
    absent: set[int] = field(default_factory=set)
    diverging: tuple[int, int, int] | None = None
    """A rank, a line, and the tick at which it issued something else."""
    skipped_at: int = 0
    """The tick of the operation that a rank left out."""
    late_hosts: bool = True
    """Whether it is the host, and not the device, of a rank that stops."""


class Hangs:
    """Makes the hangs of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.reporter = job, Reporter(job)
        self._length: Ints = np.array([len(program) for program in job.programs])[job.stage]
        worlds = [
            next((place for place, slot in enumerate(program) if slot.kind == "world"), len(program) - 1)
            for program in job.programs
        ]
        self._syncs: Ints = np.array(worlds)[job.stage] + 1
        """How many operations of a step a host issues before it needs a result."""

    def make(self, family: str, condition: str, chance: np.random.Generator) -> Hang:
        """Make one scenario of a family, over Gloo or, with devices that enter operations, over NCCL."""
        if family == "pause":
            return self._sent(self._pause(chance))
        draft: _Draft = _MAKERS[family](self, chance)
        on_devices = not draft.late_hosts or bool(chance.random() < 0.5)
        reports = self._reports(draft, chance, on_devices=on_devices)
        drawn = _Round(self._truth(draft), {r: each for r, each in reports.items() if r not in draft.absent})
        self._disturb(drawn, condition, chance)
        return self._sent(drawn)

    def _sent(self, drawn: _Round) -> Hang:
        posts, early = (
            {rank: self.reporter.post(rank, report) for rank, report in each.items()}
            for each in (drawn.reports, drawn.early)
        )
        return Hang(drawn.truth, posts, early, drawn.repeated, drawn.insistent)

    def _truth(self, draft: _Draft) -> Truth:
        waited = draft.standing.waited_for
        shown = {rank for rank in draft.ranks if waited[rank] or rank in draft.dead or rank in draft.absent}
        if draft.diverging is not None or draft.standing.lagging:
            shown = draft.ranks
        return Truth(frozenset(shown), draft.group, also=frozenset(draft.ranks - shown))

    def _slot(self, chance: np.random.Generator, rank: int, kinds: Iterable[str] = ()) -> tuple[int, int]:
        """Return a random tick at which ``rank`` has an operation, and its line."""
        wanted = set(kinds)
        slots = [
            slot
            for slot in self.job.programs[int(self.job.stage[rank])]
            if (not wanted or slot.kind in wanted) and not self.job.ticks[slot.tick].posted
        ]
        slot = slots[int(chance.integers(len(slots)))]
        return slot.tick, int(self.job.line_of[slot.kind][rank])

    def _rank(self, chance: np.random.Generator) -> int:
        return int(chance.integers(self.job.size))

    def _stall(self, chance: np.random.Generator, *, most: int = 1, late_hosts: bool = True) -> _Draft:
        count = int(chance.integers(2, most + 1)) if most > 1 else 1
        ranks = [int(each) for each in chance.choice(self.job.size, count, replace=False)]
        standing = spread(self.job, Faults(stops={rank: self._slot(chance, rank)[0] for rank in ranks}))
        # Whoever is stopped by another rank does not come to where it would stop.
        return _Draft(standing, {rank for rank in ranks if not standing.inside[rank]}, late_hosts=late_hosts)

    def _crash(self, chance: np.random.Generator, process: Process = Process.GONE) -> _Draft:
        draft = self._stall(chance)
        draft.dead = dict.fromkeys(draft.ranks, process)
        draft.killed = bool(chance.random() < 0.5)
        return draft

    def _lost(self, chance: np.random.Generator, hosts: int) -> _Draft:
        ranks = np.arange(self.job.size)
        of_host = ranks // 8
        first = int(chance.integers(max(1, of_host[-1] + 2 - hosts)))
        lost = ranks[(of_host >= first) & (of_host < first + hosts)].tolist()
        begin = self._slot(chance, lost[0])[0]
        # The machines are lost at one time, which lies in other operations for other stages.
        last = len(self.job.ticks) - 1
        standing = spread(self.job, Faults(stops={rank: min(begin, last) for rank in lost}))
        draft = _Draft(standing, set(lost))
        if chance.random() < 0.7:
            draft.absent = set(lost)
        else:
            draft.dead = dict.fromkeys(lost, Process.GONE)
        return draft

    def _divergence(self, chance: np.random.Generator) -> _Draft:
        rank = self._rank(chance)
        tick, line = self._slot(chance, rank)
        standing, members = spread(self.job, Faults(stuck={line: tick})), self.job.members(line)
        is_decidable = len(members) > 2
        return _Draft(
            standing,
            {rank} if is_decidable else set(),
            frozenset() if is_decidable else frozenset(members),
            diverging=(rank, line, tick),
        )

    def _skipped(self, chance: np.random.Generator) -> _Draft:
        rank = self._rank(chance)
        tick, _ = self._slot(chance, rank, self.job.line_of.keys() & {"tensor", "expert", "replica", "world"})
        return _Draft(spread(self.job, Faults(skips={rank: tick})), {rank}, skipped_at=tick)

    def _transport(self, chance: np.random.Generator) -> _Draft:
        tick, line = self._slot(chance, self._rank(chance))
        return _Draft(spread(self.job, Faults(stuck={line: tick})), group=frozenset(self.job.members(line)))

    def _pause(self, chance: np.random.Generator) -> _Round:
        """Nobody is at fault: all ranks evaluate for long, or ranks move and a round was asked for early."""
        moving = bool(chance.random() < 0.5)
        where = (
            STEP * self._length + chance.integers(self._length.max(), size=self.job.size) * moving
        ).tolist()
        plain = [Stand(issued, waiting=False, at_communication=False) for issued in where]
        reports: dict[int, Stand | RankReport] = dict(enumerate(plain))
        if moving:
            few = chance.choice(self.job.size, max(1, self.job.size // 100), replace=False)
            reports |= {rank: plain[rank]._replace(moving=True) for rank in few.tolist()}
        return _Round(Truth(), reports, insistent=not moving)

    def _reports(
        self, draft: _Draft, chance: np.random.Generator, *, on_devices: bool
    ) -> dict[int, Stand | RankReport]:
        standing, job = draft.standing, self.job
        steps, ticks = np.divmod(standing.tick, len(job.ticks))
        begun = (STEP + steps) * self._length
        entered = begun + job.entered_before[job.stage, ticks] + standing.inside
        # A host runs ahead of its device until it needs a result.
        ahead = begun + self._syncs + np.where(entered - begun > self._syncs, self._length, 0)
        stays = ~standing.inside & draft.late_hosts
        issued = np.where(stays | (not on_devices), entered, ahead).tolist()
        shown = [None, False][int(chance.integers(2))] if on_devices else True
        # Whether whoever stopped has published anything since its last operation.
        is_last = bool(chance.random() < 0.5)
        reports: dict[int, Stand | RankReport] = {}
        for rank, (count, device, inside) in enumerate(
            zip(issued, entered.tolist(), standing.inside.tolist(), strict=True)
        ):
            busy = inside or not draft.late_hosts
            reports[rank] = Stand(
                count,
                device if on_devices else None,
                shown if busy else False,
                (inside or is_last) and not on_devices,
                busy,
            )
        self._alter(draft, reports, chance)
        return reports

    def _alter(
        self, draft: _Draft, reports: dict[int, Stand | RankReport], chance: np.random.Generator
    ) -> None:
        """Change the reports of ranks that do not stand like others: these are few."""
        for rank, line in draft.standing.lagging.items():
            reports[rank] = self.reporter.without(
                self._full(rank, reports), line, self._number_at(rank, draft.skipped_at)
            )
        if draft.diverging is not None:
            rank, line, tick = draft.diverging
            number = self._number_at(rank, tick)
            reports[rank] = self.reporter.diverging(self._full(rank, reports), line, number)
        seconds = float(chance.uniform(2, 6))
        for rank, process in draft.dead.items():
            since = seconds + float(chance.uniform(0, 0.01))
            reports[rank] = _ended(self._full(rank, reports), process, since, draft.killed)

    def _full(self, rank: int, reports: Mapping[int, Stand | RankReport]) -> RankReport:
        report = reports[rank]
        return self.reporter.report(rank, report) if isinstance(report, Stand) else report

    def _disturb(self, drawn: _Round, condition: str, chance: np.random.Generator) -> None:
        """Change the round into what arrives at the hub."""
        reports = drawn.reports
        ranks = np.array(sorted(reports))

        def some(share: float) -> list[int]:
            found: list[int] = ranks[chance.random(len(ranks)) < share].tolist()
            return found

        if condition == "lost_messages":
            lost = frozenset(some(float(chance.choice([0.001, 0.01, 0.05]))))
            drawn.reports = {rank: each for rank, each in reports.items() if rank not in lost}
            drawn.truth = replace(drawn.truth, unseen=lost)
        elif condition in ("few_stacks", "no_stacks"):
            share = 1.0 if condition == "no_stacks" else float(chance.choice([0.1, 0.5, 0.9]))
            reports |= {rank: _without_stack(reports[rank]) for rank in some(share)}
        elif condition == "late_messages":
            drawn.early = {rank: _moving(reports[rank]) for rank in some(0.01)}
        elif condition == "duplicates":
            drawn.repeated = frozenset(some(float(chance.choice([0.01, 0.5, 1.0]))))
        elif condition == "skew":
            for rank in some(0.1):
                reports[rank] = _skewed(reports[rank], float(chance.lognormal(0.0, 1.0)))

    def _number_at(self, rank: int, tick: int) -> int:
        """Return the number of the operation that ``rank`` has at ``tick`` of the step with the fault."""
        stage = int(self.job.stage[rank])
        slot = next(each for each in self.job.programs[stage] if each.tick == tick)
        return STEP * self.job.counts[stage][-1][slot.kind] + slot.ordinal + 1


def _without_stack(report: Stand | RankReport) -> Stand | RankReport:
    if isinstance(report, Stand):
        return report._replace(waiting=None)
    return replace(report, status=replace(report.status, waiting=None))


def _moving(report: Stand | RankReport) -> Stand | RankReport:
    return report._replace(moving=True) if isinstance(report, Stand) else replace(report, moving=True)


def _skewed(report: Stand | RankReport, factor: float) -> Stand | RankReport:
    if isinstance(report, Stand):
        return report._replace(silent_seconds=report.silent_seconds * factor)
    progress = report.status.progress
    assert progress is not None
    slower = replace(progress, silent_seconds=progress.silent_seconds * factor)
    return replace(report, status=replace(report.status, progress=slower))


def _ended(report: RankReport, process: Process, seconds: float, killed: bool) -> RankReport:
    status = replace(report.status, process=process, waiting=None)
    if process is Process.STOPPED:
        return replace(report, status=status)
    return replace(report, status=status, gone_seconds=seconds, was_killed=killed)


_MAKERS: Mapping[str, Callable[[Hangs, np.random.Generator], _Draft]] = {
    "stall": Hangs._stall,
    "stalls": lambda hangs, chance: hangs._stall(chance, most=4),
    "stuck_device": lambda hangs, chance: hangs._stall(chance, late_hosts=False),
    "crash": Hangs._crash,
    "stopped": lambda hangs, chance: hangs._crash(chance, Process.STOPPED),
    "lost_host": lambda hangs, chance: hangs._lost(chance, 1),
    "lost_rack": lambda hangs, chance: hangs._lost(chance, int(chance.integers(2, 9))),
    "divergence": Hangs._divergence,
    "skipped": Hangs._skipped,
    "transport": Hangs._transport,
}
