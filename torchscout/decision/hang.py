"""Explains one round of the observers: who holds the job up, who has ended, which machine is lost (paper,
section 7).

A vote on coordinates alone would blame victims, which lag too. So evidence is considered in the order of
``diagnose``. The vote of equivalent peers is only recorded: it corroborates and does not overrule, so that a
minority that is ahead is not blamed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchscout.decision import hang_records as proof
from torchscout.decision import sentences
from torchscout.decision.divergence import culprits, divergences
from torchscout.decision.hang_graph import Evidence, WaitGraph
from torchscout.decision.progress import Process, RankReport
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import Mesh
from torchscout.utils.text import named
from torchscout.utils.text import sentences as in_sentences

__all__ = ["Diagnosis", "Round", "diagnose"]

_DYING_SECONDS = 1.0
"""Before that, what broke the connection of a trainer that failed may not be known."""
_TOGETHER_SECONDS = 0.02
"""Trainers that ended within this time of the first one ended together, if nothing shows which one caused it.
Later ones are a consequence: a lost connection, or a launcher that cleans up, soon ends the others."""
_ASKING_SECONDS = 4.0
"""Within that time of the last one, a launcher that ends a job may ask another trainer to end. Less than the
silence after which other ranks count as waiting for those."""
_KILLED_SECONDS, _UNKNOWN_SECONDS = 1.0, 0.1
"""A lost connection kills nobody, and a launcher that cleans up asks first. So trainers that were killed
within the first time of each other were killed together if they are a whole job or machine. So were those
that ended within the second time of one of them, though nobody knows how."""


@dataclass(frozen=True)
class Round:
    """What the observers of a job answered in one round."""

    reports: Mapping[int, RankReport]
    """By rank; a rank without a report did not answer."""
    mesh: Mesh
    is_repeat: bool = False
    """Whether there was an earlier round of the same silence."""
    confirmed: Collection[int] = ()
    """Ranks that did not answer in a round that began at least 3 s earlier either."""
    closed: Collection[int] = ()
    """Ranks whose observers have closed their connections, so that their host is up."""
    not_expected: Collection[int] = ()
    """Ranks that need not answer: they are known to have finished, to have been asked to end, or to have lost
    their observer."""
    absent: str = "did not answer"
    """What sentences say about a rank without a report."""

    @cached_property
    def missing(self) -> frozenset[int]:
        """Ranks that should have answered and did not."""
        return frozenset(range(len(self.mesh))) - self.reports.keys() - {*self.not_expected}

    @cached_property
    def lost(self) -> frozenset[int]:
        """Ranks of machines that are confirmed to be lost: nobody answers there, and if the host is up,
        several observers and trainers of it have ended."""
        found = set[int]()
        for host in self.mesh.hosts_of(sorted(self.missing & {*self.confirmed})):
            ranks = frozenset(self.mesh.ranks_on(host))
            is_up = not ranks.isdisjoint(self.closed)
            is_one_observer = is_up and len(ranks) == 1 and ranks.isdisjoint(self._left)
            if ranks <= self.missing and ranks <= {*self.confirmed} and not is_one_observer:
                found |= ranks
        return frozenset(found)

    @cached_property
    def _left(self) -> frozenset[int]:
        """Members of operations in which a trainer failed, and not because of the time: their connections
        broke."""
        found = set[int]()
        for each in self.reports.values():
            place = None if each.progress is None else each.progress.inside
            if place is not None and each.how in {"failed", "unknown"} and not _waited_too_long(each):
                found.update(*(group.members for group in each.groups if group.key == place[0]))
        return frozenset(found)


@dataclass(frozen=True)
class Diagnosis:
    """What one round shows."""

    incidents: tuple[Incident, ...] = ()
    """Lost machines and late ranks are two of them; else there is one at most."""
    needs_another_round: bool = False
    """Whether it depends on ranks that may only have answered late."""
    is_early: bool = False
    """Whether it depends on trainers that may just be dying, so that another round may follow soon."""


def diagnose(observed: Round) -> Diagnosis:
    """Explain why the job does not move, or who has ended.

    1. Restarting: the cause is known, and ranks that do not know it yet fail as they lose their peers.
    2. Asked: a launcher ends the whole job, and nobody is missing.
    3. Timed out: NCCL's watchdog and Gloo's timeout end the ranks that wait, not the one they wait for.
    4. Diverged: the library may end or block a rank because of what another one issued.
    5. Gone: a trainer that ended is named unless it did so because of another.
    6. Lost machines and late ranks: those that others wait for and that wait for nobody.
    7. Cycles: ranks that wait for each other.
    8. Stalls: no rank is behind, and an operation does not return.
    9. Devices that do not finish, though no observed operation explains it.

    Silence without a wait is a pause: an evaluation, a long computation, a debugger on a rank that no other
    rank needs yet.
    """
    if any(each.is_restarting for each in observed.reports.values()):
        return Diagnosis()
    case = _Case(observed)
    if not observed.missing and case.is_being_ended():
        return Diagnosis()
    found = case.timed_out() or case.explained()
    may_be_dying = case.peers_may_be_dying() or case.rest_may_be_dying()
    if may_be_dying and any(each.manifestation is Manifestation.CRASH for each in found):
        return Diagnosis(needs_another_round=True, is_early=True)
    unconfirmed = observed.missing - {*observed.confirmed}
    if unconfirmed and (not found or any(not _is_certain(each, observed) for each in found)):
        # Without a wait there is nothing to explain, and nothing to ask again for.
        is_explained = bool(found) or bool(case.graph.blocked) or bool(case.gone)
        return Diagnosis(needs_another_round=is_explained)
    return Diagnosis(tuple(case.completed(each) for each in found))


def _is_certain(incident: Incident, observed: Round) -> bool:
    """Whether it holds whatever those that did not answer have done."""
    return incident.scope is Scope.RANK and observed.reports.keys() >= {*incident.ranks}


class _Case:
    """One round, and the conclusions from it."""

    def __init__(self, observed: Round) -> None:
        self._round, self._mesh, self._reports = observed, observed.mesh, observed.reports
        self.evidence = Evidence(observed.reports, observed.lost, observed.missing - observed.lost)
        self.graph = WaitGraph(self.evidence)
        self.gone = {rank for rank, each in observed.reports.items() if each.gone_seconds is not None}
        """Ranks whose trainers ended early."""
        self._moves = any(each.moving for each in observed.reports.values())
        self._ends_soon = any(each.near_timeout for each in observed.reports.values())

    def is_being_ended(self) -> bool:
        """Whether all trainers were asked to end, or some have just been: others may be asked next."""
        ends = [self._reports[rank] for rank in self.gone]
        seconds = [each.gone_seconds or 0.0 for each in ends if each.how == "asked"]
        is_asking = len(ends) == len(self._reports) or min(seconds, default=0.0) < _ASKING_SECONDS
        return bool(ends) and len(seconds) == len(ends) and is_asking

    def peers_may_be_dying(self) -> bool:
        """Whether trainers have just failed inside operations, and nothing shows why.

        A trainer that is killed loses its connections first, and lives on until its memory is freed.
        """
        if self._round.is_repeat or not self.gone:
            return False
        reports, last = self._reports, self.evidence.last
        alive = {rank for rank, each in reports.items() if each.process is not Process.GONE}
        left = self._left_by(alive)
        return all(
            reports[rank].how in ("failed", "unknown")
            and (reports[rank].gone_seconds or 0.0) < _DYING_SECONDS
            and (
                rank in left
                or (
                    (place := last[rank]) is not None
                    and not alive.isdisjoint(self.evidence.groups[place[0]].members)
                )
            )
            for rank in self.gone
        )

    def rest_may_be_dying(self) -> bool:
        """Whether most trainers of the job or a machine have just been killed, and the others seem alive."""
        if self._round.is_repeat:
            return False
        alive = {rank for rank, each in self._reports.items() if each.process is not Process.GONE}
        killed = {
            rank
            for rank in self.gone
            if self._reports[rank].how == "killed"
            and (self._reports[rank].gone_seconds or 0.0) < _DYING_SECONDS
        }
        machines = [{*self._mesh.ranks_on(host)} for host in self._mesh.hosts_of(sorted(killed))]
        return any(
            2 * len(killed & each) > len(each) and not alive.isdisjoint(each)
            for each in ({*range(len(self._mesh))}, *machines)
        )

    def _left_by(self, ranks: Collection[int]) -> set[int]:
        """Return the ended trainers that had issued an operation which one of ``ranks`` never came to: they
        may have gone on for a moment, as a backward pass does, and failed for lack of that rank."""
        come: dict[str, int] = {}
        for rank in ranks:
            for group in self._reports[rank].groups:
                came = self.evidence.came_to(rank, group.key)
                come[group.key] = min(came, come.get(group.key, came))
        return {
            rank
            for rank in self.gone
            if any(
                self.evidence.issued(rank, each.key) > come[each.key]
                for each in self._reports[rank].groups
                if each.key in come
            )
        }

    def timed_out(self) -> list[Incident]:
        """Return who was waited for, if trainers ended because they had waited too long."""
        waited = {rank for rank in self.gone if _waited_too_long(self._reports[rank])}
        if not waited or self._killed_elsewhere():
            return []
        case = _Case(
            replace(self._round, reports={rank: self._before(rank, waited) for rank in self._reports})
        )
        found = case._diverged() or case._late() or case._deadlock() or case._stall()
        if not found or any(not self.gone.isdisjoint(each.ranks) for each in found):
            return []
        trainers = f"the trainer{'s' if len(self.gone) > 1 else ''} of {named(sorted(self.gone))}"
        consequence = in_sentences(f"{trainers} ended after waiting for too long")
        return [replace(each, sentence=f"{each.sentence} {consequence}") for each in found]

    def _killed_elsewhere(self) -> bool:
        """Whether a trainer was killed that waited for nobody: others may have failed because of that."""
        return any(self._reports[rank].how == "killed" and not self._waited(rank) for rank in self.gone)

    def _waited(self, rank: int) -> bool:
        """Whether a trainer ended in an operation that other members had not entered."""
        if (place := self.evidence.last[rank]) is None:
            return False
        members = self.evidence.groups[place[0]].members
        return any(self.evidence.came_to(each, place[0]) < place[1] for each in members)

    def _before(self, rank: int, waited: Collection[int]) -> RankReport:
        """Return the report of ``rank`` as it would have been before those that had ``waited`` were ended."""
        report = replace(self._reports[rank], moving=False, excused=False)
        if rank in self.gone:
            in_operation = rank in waited or self.evidence.last[rank] is not None
            if report.how == "killed" or not in_operation:
                return report
            report = replace(report, process=Process.RUNNING, gone_seconds=None, waiting=None)
        return report if report.stalled is None else replace(report, progress=report.stalled, waiting=None)

    def explained(self) -> list[Incident]:
        """Return the conclusions from what ranks show now."""
        waits_for_more = self._moves and not self._round.is_repeat
        if waits_for_more and not self.gone:
            return []  # a rank that moves may be about to end everyone's wait
        if diverged := self._diverged():
            is_undecided = diverged[0].scope is Scope.PROCESS_GROUP
            return [] if is_undecided and waits_for_more else diverged
        if self.gone:
            return self._ended()
        found = self._late() or self._deadlock() or self._stall() or self._unobserved()
        return [] if all(self._is_excused(each.ranks) for each in found) else found

    def completed(self, incident: Incident) -> Incident:
        """Return the incident without a name if too few answered, with what was seen beside."""
        is_of_absent = incident.action is Action.REPLACE or not self.evidence.unheard.isdisjoint(
            incident.ranks
        )
        if is_of_absent and 2 * len(self._reports) < len(self._mesh):
            sentence = sentences.cut_off(len(self._reports), len(self._mesh))
            incident = self._undecided(
                incident, Scope.JOB, tuple(range(len(self._mesh))), Action.INSPECT, sentence
            )
        beside = proof.shown(self.evidence, incident.step, incident.ranks, incident.records)
        return replace(incident, records=(*incident.records, *beside))

    # Members that issued different operations.

    def _diverged(self) -> list[Incident]:
        found = divergences(self.evidence, self._looked_at())
        if self.graph.sources:
            # What all have passed long ago did no harm, and others wait for a rank now.
            found = [each for each in found if not each.is_old]
        if not found:
            return []
        guilty = culprits(found)
        shown = [each for each in found if not guilty or not set(guilty).isdisjoint(each.group.members)]
        # The deciding record first: one that names somebody, then one that shows the operation.
        shown.sort(key=lambda each: (not each.ranks, each.compared == "digest"))
        ranks = guilty or tuple(sorted({rank for each in shown for rank in each.group.members}))
        scope = Scope.RANK if guilty else Scope.PROCESS_GROUP
        records = proof.of_divergence(self.evidence, shown)
        return [
            self._incident(scope, ranks, records, Action.STOP, sentences.different(shown, guilty, self._mesh))
        ]

    def _looked_at(self) -> set[int]:
        """Ranks whose operations may be the reason why a rank waits, died or is late."""
        evidence, reports = self.evidence, self._reports
        # The library may end a process because of what another one did, even if that one has moved on.
        found = set(evidence.halted).union(rank for rank in self.graph.sources if rank in reports)
        found.update(
            rank
            for rank, each in reports.items()
            if each.progress is not None and each.progress.entered and each.progress.device_busy is not False
        )
        if any(
            each.waiting or (each.waiting is None and evidence.last[rank]) for rank, each in reports.items()
        ):
            found.update(rank for rank, each in reports.items() if each.waiting is not False)
        return found

    # Trainers that ended.

    def _ended(self) -> list[Incident]:
        first = self._killed_together(self._first_gone())
        # A launcher may ask trainers to end because of others that are not heard of.
        are_asked = all(self._reports[rank].how == "asked" for rank in first)
        lost = self.evidence.lost if are_asked else self.evidence.lost.intersection(self.graph.sources)
        if lost:  # trainers elsewhere ended inside operations of theirs, or were asked to
            return [self._lost(sorted(lost))]
        absent = self.evidence.unheard
        if group := (self.gone | absent) if are_asked and absent else self._left_by_absent(first):
            doubt = sentences.absent(sorted(absent & group), self._round.absent, may_be_first=True)
            incident = self._crash(first)
            sentence = f"{incident.sentence} {doubt}"
            return [
                self._undecided(incident, Scope.PROCESS_GROUP, tuple(sorted(group)), Action.RESTART, sentence)
            ]
        return [self._crash(first)]

    def _first_gone(self) -> list[int]:
        """Return the trainers that ended first: causes decide, and clocks only where causes do not."""
        reports, last = self._reports, self.evidence.last
        seconds = {rank: reports[rank].gone_seconds or 0.0 for rank in self.gone}
        failed = {rank for rank in self.gone if reports[rank].how != "asked"}
        # A launcher asks the rest of a job to end once a trainer has failed.
        since = max((seconds[rank] for rank in failed), default=0.0)
        gone = failed | {rank for rank in self.gone if seconds[rank] >= since}
        found = {rank for rank in gone if not self.graph.waits(rank)} or gone
        killed = {rank for rank in found if reports[rank].how == "killed"}
        left = {self.evidence.groups[place[0]] for rank in killed if (place := last[rank]) is not None}
        # Who ended in the middle of an operation, and had lost a killed peer there or missed somebody, failed
        # because of it.
        found -= self._left_by(killed) - killed
        found -= {
            rank
            for rank in found - killed
            if killed
            and (place := last[rank]) is not None
            and (
                self._waited(rank)
                or self.evidence.groups[place[0]] in left
                or not killed.isdisjoint(self.evidence.groups[place[0]].members)
            )
        }
        found = {rank for rank in found if rank in killed or (rank in failed and last[rank] is None)} or found
        earliest = max(seconds[rank] for rank in found)
        together = {rank for rank in found if seconds[rank] >= earliest - _TOGETHER_SECONDS}
        return sorted(together & killed or together & failed or together)

    def _killed_together(self, first: Sequence[int]) -> Sequence[int]:
        """Return all ranks of the job, or of machines, if they were killed together and the ``first``
        are among them."""
        reports = self._reports
        ended = {rank: -(reports[rank].gone_seconds or 0.0) for rank in self.gone}
        killed = {rank for rank in self.gone if reports[rank].how == "killed"}
        begin = min((ended[rank] for rank in killed), default=0.0)
        together = {rank for rank in killed if ended[rank] <= begin + _KILLED_SECONDS}
        moments = sorted(ended[rank] for rank in together)
        together |= {
            rank
            for rank in self.gone
            if reports[rank].how == "unknown"
            and bisect_left(moments, ended[rank] - _UNKNOWN_SECONDS)
            < bisect_right(moments, ended[rank] + _UNKNOWN_SECONDS)
        }
        machines = [frozenset(self._mesh.ranks_on(host)) for host in self._mesh.hosts_of(sorted(together))]
        whole = {rank for each in machines if len(each) > 1 and each <= together for rank in each}
        found = together if len(together) == len(self._mesh) else whole
        return sorted(found) if found.issuperset(first) else first

    def _left_by_absent(self, gone: Sequence[int]) -> set[int]:
        """Return the members of the operations in which these trainers ended, if absent ranks may have caused
        that: a trainer that is lost together with its observer breaks the connections of its peers."""
        places = [self.evidence.last[rank] for rank in gone]
        if any(self._reports[rank].how == "killed" for rank in gone):
            return set()
        members = set[int]()
        for place in places:
            joined = set() if place is None else {*self.evidence.groups[place[0]].members}
            if self.evidence.unheard.isdisjoint(joined):
                return set()
            members |= joined
        return members

    def _crash(self, ranks: Sequence[int]) -> Incident:
        hosts = Counter(self._mesh.host_of(rank) for rank in ranks)
        is_whole_job = 1 < len(ranks) == len(self._mesh)
        together = len(ranks) > 1 and len(hosts) == 1 and None not in hosts
        scope = Scope.JOB if is_whole_job else Scope.MACHINE if together else Scope.RANK
        others = sorted(self.gone.difference(ranks))
        return self._incident(
            scope,
            tuple(ranks),
            [proof.of_ends(self.evidence, ranks)],
            Action.PREFLIGHT if scope is Scope.MACHINE else Action.RESTART,
            sentences.crashed(self.evidence, self._mesh, ranks, others),
            manifestation=Manifestation.CRASH,
        )

    # Ranks that others wait for, and that wait for nobody.

    def _late(self) -> list[Incident]:
        lost = [rank for rank in self.graph.sources if rank in self.evidence.lost]
        found = [self._lost(lost)] if lost else []
        ended = [rank for rank in self.graph.sources if rank in self.gone]
        if ended:
            return [*found, self._crash(ended)]
        sources = [rank for rank in self.graph.sources if rank not in lost and not self._is_excused([rank])]
        late = [rank for rank in sources if not self._may_wait(rank)]
        if late:
            return [*found, self._of_sources(late)]
        return found or self._not_known(sources)

    def _may_wait(self, rank: int) -> bool:
        """Whether a wait of this rank may be missing in its record."""
        report = self._reports[rank]
        in_graph = (
            report.progress is not None
            and report.progress.captured > 0
            and report.progress.device_busy is True
        )
        return report.is_incomplete or in_graph

    def _of_sources(self, ranks: Sequence[int]) -> Incident:
        missed = {rank: self.graph.missing(rank) for rank in ranks}
        waiters = len(self.graph.waiters(ranks))
        first = {rank: each[0] for rank, each in missed.items()}
        sentence = sentences.late(self.evidence, self._mesh, first, waiters)
        groups = [each.group for operations in missed.values() for each in operations]
        records = proof.of_groups(self.evidence, groups, ranks)
        if self._device_unknown(ranks):
            members = tuple(sorted({*ranks, *self.evidence.groups[groups[0]].members}))
            sentence += " Its device was not observed and may itself be waiting."
            return self._incident(Scope.PROCESS_GROUP, members, records, Action.RESTART, sentence)
        return self._incident(self._scope(ranks), tuple(ranks), records, Action.RESTART, sentence)

    def _not_known(self, ranks: Sequence[int]) -> list[Incident]:
        """Report the groups of ranks that seem to be late, but whose waits may not all be recorded."""
        if not ranks:
            return []
        operations = [each for rank in ranks for each in self.graph.missing(rank)]
        members = tuple(
            sorted({rank for each in operations for rank in self.evidence.groups[each.group].members})
        )
        first = {rank: self.graph.missing(rank)[0] for rank in ranks}
        sentence = sentences.late(self.evidence, self._mesh, first, len(self.graph.waiters(ranks)))
        theirs = "its record" if len(ranks) == 1 else "their records"
        doubt = in_sentences(f"{theirs} may lack operations, so that {named(ranks)} may wait as well")
        records = proof.of_groups(self.evidence, [each.group for each in operations], ())
        return [self._incident(Scope.PROCESS_GROUP, members, records, Action.INSPECT, f"{sentence} {doubt}")]

    def _lost(self, ranks: Sequence[int]) -> Incident:
        """Report the machines of ``ranks``: all of their ranks, even if nobody waits for them yet."""
        hosts = self._mesh.hosts_of(ranks)
        everybody = tuple(sorted(rank for host in hosts for rank in self._mesh.ranks_on(host)))
        groups = [each.group for rank in ranks for each in self.graph.missing(rank)]
        records = proof.of_groups(self.evidence, groups, everybody)
        records = records or [proof.of_ends(self.evidence, everybody)]
        waiters = len(self.graph.waiters(ranks) - self.gone)
        sentence = sentences.lost_machines(self._mesh, everybody, waiters, len(self.gone))
        return self._incident(Scope.MACHINE, everybody, records, Action.REPLACE, sentence)

    def _scope(self, ranks: Sequence[int]) -> Scope:
        """Several suspects on each of their machines point to the machines."""
        hosts = Counter(self._mesh.host_of(rank) for rank in ranks)
        return Scope.MACHINE if None not in hosts and min(hosts.values()) > 1 else Scope.RANK

    def _device_unknown(self, ranks: Sequence[int]) -> bool:
        """Whether the host of a suspect may only seem late because it waits for its own device."""
        if all(each.progress is None or each.progress.device_step is None for each in self._reports.values()):
            return False
        return any(
            (progress := self._reports[rank].progress) is not None
            and self._reports[rank].process is Process.RUNNING
            and progress.device_step is None
            for rank in ranks
        )

    def _is_excused(self, ranks: Iterable[int]) -> bool:
        """Whether all of ``ranks`` move or are within their allowance, and nobody is about to be ended."""
        reports = [self._reports.get(rank) for rank in ranks]
        if self._ends_soon:
            return all(each is not None and each.moving for each in reports)
        return all(each is not None and (each.excused or each.moving) for each in reports)

    # Nobody is late.

    def _deadlock(self) -> list[Incident]:
        """Report cycles of waiting ranks. Waits alone do not single out a rank of a cycle; a majority may."""
        if self.graph.sources or not self.graph.cycles:
            return []
        cycles, votes, guilty = [], [], list[tuple[int, ...]]()
        for cycle in self.graph.cycles:
            inside, knot = self.graph.inside(cycle), self.graph.knot(cycle)
            vote = proof.of_cycle(self.evidence, inside, None)
            if len(vote.ranks) != 1:  # of several that differ from the rest, some wait for the others
                vote = proof.undecided(vote) if knot is None else proof.of_cycle(self.evidence, inside, knot)
            cycles.append(inside)
            votes.append(vote)
            guilty.append(vote.ranks)
        decided = all(guilty)
        ranks = tuple(sorted(rank for vote in votes for rank in (vote.ranks if decided else vote.peers)))
        groups = [issued.group for inside in cycles for issued in inside.values()]
        return [
            self._incident(
                Scope.RANK if decided else Scope.PROCESS_GROUP,
                ranks,
                [*votes[: proof.MOST], *proof.of_groups(self.evidence, groups, ranks)],
                Action.RESTART,
                sentences.deadlock(self.evidence, self._mesh, cycles, ranks if decided else ()),
            )
        ]

    def _stall(self) -> list[Incident]:
        """Report operations that all ranks entered. Suspects are dead, or their devices are behind."""
        if self.graph.sources or not self.graph.stalled:
            return []
        places = sorted(self.graph.stalled.values())
        stalled = [self.evidence.operation(place, self.evidence.answered(place[0])) for place in places]
        members = {rank for each in stalled for rank in self.evidence.groups[each.group].members}
        # A rank that is merely absent may be the cause, or only its report is missing.
        unheard = sorted(members & self.evidence.unheard)
        suspects = members & self.evidence.dead or (set() if unheard else self._devices_behind(members))
        if suspects:
            theirs = {
                rank: next(each for each in stalled if rank in self.evidence.groups[each.group].members)
                for rank in sorted(suspects)
            }
            waiters = len(members | self.graph.waiters(members)) - len(suspects)
            sentence = sentences.late(self.evidence, self._mesh, theirs, waiters)
            records = proof.of_groups(self.evidence, [each.group for each in stalled], suspects)
            ranks = tuple(sorted(suspects))
            return [self._incident(self._scope(ranks), ranks, records, Action.RESTART, sentence)]
        unclear = sorted(self.graph.unclear & members)
        everybody = len(stalled) > 1 and len(members) == len(self._mesh)
        seconds = proof.silence(self.evidence, members)
        return [
            self._incident(
                Scope.JOB if everybody else Scope.PROCESS_GROUP,
                tuple(sorted(members)),
                proof.of_groups(self.evidence, [each.group for each in stalled], ()),
                Action.RESTART if unclear else Action.INSPECT,
                sentences.stall(self.evidence, stalled, seconds, unheard, unclear, self._round.absent),
            )
        ]

    def _devices_behind(self, members: Iterable[int]) -> set[int]:
        """Members whose device has finished fewer steps than the rest, if they are not the majority."""
        progresses = {rank: self._reports[rank].progress for rank in members if rank in self._reports}
        steps = {
            rank: each.device_step
            for rank, each in progresses.items()
            if each is not None and each.device_step is not None
        }
        behind = {rank for rank, step in steps.items() if step < max(steps.values())}
        return behind if 2 * len(behind) <= len(steps) else set()

    def _unobserved(self) -> list[Incident]:
        """Report devices that do not finish although no observed operation explains it.

        They may wait inside a CUDA graph, whose replays are not observed. A rank that is missing there has an
        idle device and a host that is behind all the stuck ones. If there is no such rank, but there are CUDA
        graphs, the incident only says that the job does not move.
        """
        if self.graph.sources:
            return []
        known = {rank: each.progress for rank, each in self._reports.items() if each.progress is not None}
        running = {
            rank: each for rank, each in known.items() if self._reports[rank].process is Process.RUNNING
        }
        stuck = sorted(rank for rank, each in running.items() if each.device_busy is True)
        if not stuck:
            return []
        least = min(known[rank].coordinate for rank in stuck)
        idle = [rank for rank, each in running.items() if each.device_busy is False]
        late = sorted(rank for rank in idle if known[rank].coordinate < least)
        if len(idle) + len(stuck) < len(known):
            late = []  # nothing is known about some devices
        if not late and not any(each.captured for each in known.values()):
            return []
        ranks = tuple(late or stuck)
        scope, action = (self._scope(late), Action.RESTART) if late else (Scope.JOB, Action.INSPECT)
        seconds = proof.silence(self.evidence, stuck)
        sentence = sentences.unobserved(self.evidence, self._mesh, stuck, late, seconds)
        return [self._incident(scope, ranks, [proof.of_devices(self.evidence, ranks)], action, sentence)]

    def _undecided(
        self, incident: Incident, scope: Scope, ranks: tuple[int, ...], action: Action, sentence: str
    ) -> Incident:
        """Return the incident without a name."""
        deciding = proof.undecided(incident.records[0])
        return replace(
            incident,
            manifestation=incident.manifestation if scope is not Scope.JOB else Manifestation.HANG,
            scope=scope,
            ranks=ranks,
            hosts=self._mesh.hosts_of(ranks),
            records=(deciding, *incident.records[1:]),
            action=action,
            sentence=sentence,
        )

    def _incident(
        self,
        scope: Scope,
        ranks: tuple[int, ...],
        records: Sequence[EvidenceRecord],
        action: Action,
        sentence: str,
        *,
        manifestation: Manifestation = Manifestation.HANG,
    ) -> Incident:
        if manifestation is Manifestation.HANG and (
            unheard := sorted(self.evidence.unheard.difference(ranks))
        ):
            sentence += f" {sentences.absent(unheard, self._round.absent)}"
        beside = (
            []
            if manifestation is Manifestation.CRASH
            else proof.of_coordinates(self.evidence, self._mesh, ranks)
        )
        return Incident(
            manifestation=manifestation,
            scope=scope,
            step=records[0].step,
            ranks=ranks,
            hosts=self._mesh.hosts_of(ranks),
            records=(*records, *beside),
            action=action,
            sentence=sentence,
        )


def _waited_too_long(report: RankReport) -> bool:
    """Whether this trainer may have ended because of the time for which it had waited."""
    if report.how == "killed":  # no watchdog does that
        return False
    has_timeout = any(group.timeout is not None for group in report.groups)
    return report.has_timed_out or (report.stalled is not None and not has_timeout)
