"""Turns the reports of one round into an incident, or into none (paper, section 7). Pure.

It knows what a diagnosis of progress alone cannot: who is moving, who is excused, and who was gone first.
``hang.diagnosis`` decides which rank holds the job up. Only hubs import this, and only when they need it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torchscout.decision.consensus import Status, Verdict
from torchscout.decision.hang.diagnosis import diagnose, explain
from torchscout.decision.hang.evidence import HangEvidence
from torchscout.decision.hang.table import NOTHING
from torchscout.decision.progress import Phase, Process, RankStatus
from torchscout.decision.straggler.diagnosis import PhaseDiagnosis
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import Mesh
from torchscout.observer.rounds.columns import table_of
from torchscout.observer.rounds.post import FLAGS
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reported_incidents import after_timeout
from torchscout.observer.rounds.reports import Reports
from torchscout.utils.text import listed, named, sentences

__all__ = ["compare_phases", "conclude"]

_TOGETHER_SECONDS = 0.02
"""Trainers that ended within this time of the first one ended together. Later ones are a consequence: a lost
connection, or a launcher that cleans up, soon ends the others."""
_SUSPECTS, _VICTIMS = 8, 3
"""How many stacks an incident contains at most."""
_PROTOCOL = ("fingerprint", "digest", "splits")
"""First parts of the surfaces that show members issuing different operations; see ``hang.divergence``."""


def conclude(reports: Mapping[int, RankReport], mesh: Mesh, *, insistent: bool = False) -> Incident | None:
    """Return the incident that the round shows; ``insistent`` if it is not the first round of a silence.

    A rank that moves may be about to end everyone's wait. So the first round does not blame anybody while a
    rank moves, nor does it call a group undecided whose members issued different operations: the moving rank
    may yet join the majority.
    """
    posted = Reports.of(reports)
    if posted.flags & FLAGS["is_restarting"]:
        return None  # the cause is known, and ranks that do not know it yet fail as they lose their peers
    if (cause := _cause_of_timeout(posted, mesh)) is not None:
        return replace(cause, records=(*cause.records, *_shown(posted, cause)))
    gone, moving = _first_gone(posted), bool(posted.flags & FLAGS["moving"])
    lost = _lost_machines(posted, mesh) if gone else ()
    if moving and not insistent and not gone:
        return None
    evidence = HangEvidence(table_of(posted), mesh)
    incident = explain(evidence)
    if moving and not insistent and incident is not None and _is_undecided(incident):
        return None
    is_protocol = incident is not None and _is_about_protocol(incident)
    if not (lost or is_protocol) and (group := _left_by_absent(posted, gone, evidence)):
        incident = _undecided_departure(_departure(posted, gone, mesh), group, evidence)
    elif gone and not _explains(incident, lost or gone, moving=moving):
        incident = _departure(posted, lost or gone, mesh)
    if incident is None or _is_excused(incident, posted):
        return None
    if incident.action is Action.REPLACE and 2 * len(posted) < len(mesh):
        incident = _cut_off(incident, posted, mesh)
    return replace(incident, records=(*incident.records, *_shown(posted, incident)))


def compare_phases(reports: Mapping[int, RankReport], diagnosis: PhaseDiagnosis) -> list[Incident]:
    """Return the incidents that this survey shows, together with the ones before it."""
    posted = Reports.of(reports)
    milliseconds: dict[Phase, dict[int, float]] = defaultdict(dict)
    for rank, post in posted.posts.items():
        for phase, seconds in post.rest.get("phase_seconds", {}).items():
            milliseconds[Phase(phase)][rank] = 1000 * seconds
    return diagnosis.observe(posted.last_step, milliseconds)


def _is_excused(incident: Incident, reports: Reports) -> bool:
    """Return whether all ranks that it names are within their allowance, and nobody is about to be ended."""
    is_allowed = all(rank in reports and reports.says(rank, "excused") for rank in incident.ranks)
    return is_allowed and not reports.flags & FLAGS["is_pressed"]


def _cause_of_timeout(reports: Reports, mesh: Mesh) -> Incident | None:
    """Return who was waited for, if trainers ended because they had waited too long.

    NCCL's watchdog and Gloo's timeout end the ranks that wait, not the rank that they wait for.
    """
    gone = _first_gone(reports)
    if not gone or any(reports.stalled(rank) is None for rank in gone):
        return None
    statuses = [
        reports.status(rank)
        if (stalled := reports.stalled(rank)) is None
        else replace(reports.status(rank), process=Process.RUNNING, progress=stalled, waiting=None)
        for rank in reports
    ]
    lines = table_of(reports).lines
    incident = diagnose(statuses, lines, mesh)
    if incident is None or not set(gone).isdisjoint(incident.ranks):
        return None
    return after_timeout(incident, gone)


def _explains(incident: Incident | None, gone: Sequence[int], *, moving: bool) -> bool:
    """Return whether a diagnosis says more than that a trainer is gone."""
    if incident is None:
        return False
    if _is_about_protocol(incident):
        return True  # the library may end a process over what another one did
    # While a rank moves, who waits for whom is only a snapshot.
    return not moving and not set(gone).isdisjoint(incident.ranks)


def _is_undecided(incident: Incident) -> bool:
    """Return whether members issued different operations, and nobody can be named for it."""
    return _is_about_protocol(incident) and incident.scope is Scope.PROCESS_GROUP


def _is_about_protocol(incident: Incident) -> bool:
    return incident.records[0].surface.partition("/")[0] in _PROTOCOL


def _first_gone(reports: Reports) -> list[int]:
    longest = max(reports.gone.values(), default=0.0)
    first = sorted(rank for rank, seconds in reports.gone.items() if seconds >= longest - _TOGETHER_SECONDS)
    # A peer that loses its connection to a killed trainer may fail within that time.
    return [rank for rank in first if reports.says(rank, "was_killed")] or first


def _lost_machines(reports: Reports, mesh: Mesh) -> list[int]:
    """Return the ranks of machines from which nobody reported: trainers elsewhere ended because of that."""
    hosts = mesh.hosts_of(sorted(set(range(len(mesh))) - reports.posts.keys()))
    silent = [host for host in hosts if reports.posts.keys().isdisjoint(mesh.ranks_on(host))]
    return sorted(rank for host in silent for rank in mesh.ranks_on(host))


def _left_by_absent(reports: Reports, gone: Sequence[int], evidence: HangEvidence) -> set[int]:
    """Return the members of the operations in which these trainers ended, if absent ranks may have caused
    that: a trainer that is lost together with its observer breaks the connections of its peers."""
    operations = evidence.columns.last_event[list(gone)]
    if NOTHING in operations or any(reports.says(rank, "was_killed") for rank in gone):
        return set()
    members = set[int]()
    for line in set(evidence.line_of(operations).tolist()):
        joined = evidence.members.rank[evidence.members.of_line(line)].tolist()
        if evidence.unheard.isdisjoint(joined):
            return set()
        members.update(joined)
    return members


def _undecided_departure(incident: Incident, members: set[int], evidence: HangEvidence) -> Incident:
    """Return the departure without a name, as a group with absent members that stalls; see [Note: Absence]
    in ``hang.evidence``."""
    absent = sorted(evidence.unheard & members)
    theirs = "its trainer" if len(absent) == 1 else "one of their trainers"
    doubt = f"{named(absent)} did not answer: {theirs} may have ended first"
    return _undecided(
        incident,
        Scope.PROCESS_GROUP,
        tuple(sorted(members)),
        Action.RESTART,
        f"{incident.sentence} {sentences(doubt)}",
        evidence.mesh,
    )


def _cut_off(incident: Incident, reports: Reports, mesh: Mesh) -> Incident:
    """Return the incident without a name: a minority cannot tell whether the others are gone, or whether it
    is itself cut off from them."""
    answered = f"only {len(reports)} of {len(mesh)} ranks answered"
    sentence = sentences(answered, "the others are gone, or these are cut off from them")
    return _undecided(incident, Scope.JOB, tuple(range(len(mesh))), Action.INSPECT, sentence, mesh)


def _undecided(
    incident: Incident, scope: Scope, ranks: tuple[int, ...], action: Action, sentence: str, mesh: Mesh
) -> Incident:
    deciding = incident.records[0]
    if deciding.verdict is not None:
        verdict = Verdict(Status.INCONCLUSIVE, (), deciding.verdict.evidence)
        deciding = replace(deciding, verdict=verdict)
    return replace(
        incident,
        scope=scope,
        ranks=ranks,
        hosts=mesh.hosts_of(ranks),
        records=(deciding, *incident.records[1:]),
        action=action,
        sentence=sentence,
    )


def _departure(reports: Reports, gone: Sequence[int], mesh: Mesh) -> Incident:
    """Return the incident that these trainers, or their machines, ended early. It needs no vote."""
    ranks = sorted({*reports, *gone})
    # Causal evidence, as in the wait graph: it names a rank in a job of any size.
    ended = tuple(int(rank not in reports or reports.process(rank) is Process.GONE) for rank in ranks)
    positions = {rank: position for position, rank in enumerate(ranks)}
    record = EvidenceRecord(
        step=reports.last_step,
        surface="process",
        manifestation=Manifestation.HANG,
        peers=tuple(ranks),
        verdict=Verdict(Status.ATTRIBUTED, tuple(positions[rank] for rank in gone), ended),
        stall_seconds=reports.silent_seconds,
    )
    hosts = Counter(mesh.host_of(rank) for rank in gone)
    is_whole_job = 1 < len(gone) == len(mesh)
    is_lost = gone[0] not in reports
    together = is_lost or (len(gone) > 1 and len(hosts) == 1 and None not in hosts)
    scope = Scope.JOB if is_whole_job else Scope.MACHINE if together else Scope.RANK
    action = Action.REPLACE if is_lost else Action.INSPECT if scope is Scope.MACHINE else Action.RESTART
    return Incident(
        manifestation=Manifestation.HANG,
        scope=scope,
        step=record.step,
        ranks=tuple(gone),
        hosts=mesh.hosts_of(gone),
        records=(record,),
        action=action,
        sentence=_sentence(reports, gone, mesh),
    )


def _sentence(reports: Reports, gone: Sequence[int], mesh: Mesh) -> str:
    if gone[0] not in reports:
        hosts = mesh.hosts_of(gone)
        machines = f"machine {hosts[0]} is" if len(hosts) == 1 else f"machines {listed(hosts)} are"
        return sentences(f"{machines} gone: {named(gone)} did not answer", "trainers elsewhere ended with it")
    if len(gone) > 1:
        shown = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
        return f"The trainers of ranks {shown} ended before they had finished."
    (rank,) = gone
    host, progress = mesh.host_of(rank), reports.status(rank).progress
    who = f"rank {rank}" if host is None else f"rank {rank} on {host}"
    where = "" if progress is None else f", in {progress.phase.in_words} of step {progress.step}"
    return f"The trainer of {who} ended before it had finished{where}."


def _shown(reports: Reports, incident: Incident) -> list[EvidenceRecord]:
    """Return stacks and open operations of suspects and of a few other ranks, unless the records of the
    incident show them already."""
    proved = {record.progress["rank"] for record in incident.records if record.progress is not None}
    suspects = set(incident.ranks)
    with_stack = sorted(rank for rank, each in reports.stacks.items() if each.text and rank not in proved)
    shown = [rank for rank in with_stack if rank in suspects][:_SUSPECTS]
    shown += [rank for rank in with_stack if rank not in suspects][:_VICTIMS]
    others = (rank for post in reports.in_order if (rank := post.header.rank) not in suspects)
    ordered = [*sorted(suspects), *islice(others, _SUSPECTS + _VICTIMS)][: _SUSPECTS + _VICTIMS]
    return [_stack(reports.status(rank), incident) for rank in shown] + [
        _record(
            incident,
            "flight_recorder",
            f"operations of rank {rank} that are not over, by the Flight Recorder: shown, not compared",
            {"rank": rank, **operations},
        )
        for rank in ordered
        if rank in reports and (operations := reports.posts[rank].rest.get("operations")) is not None
    ]


def _stack(status: RankStatus, incident: Incident) -> EvidenceRecord:
    role = "named" if status.rank in incident.ranks else "not named"
    reason = f"the stacks of rank {status.rank}, which is {role}: shown, not compared"
    progress = {"rank": status.rank, "waiting": status.waiting, "stack": status.stack}
    return _record(incident, "stack", reason, progress)


def _record(incident: Incident, surface: str, reason: str, progress: dict[str, Any]) -> EvidenceRecord:
    return EvidenceRecord(
        step=incident.step,
        surface=surface,
        manifestation=Manifestation.HANG,
        peers=(progress["rank"],),
        reason=reason,
        progress=progress,
    )
