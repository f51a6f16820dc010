"""Diagnoses a hang from the progress of all ranks: which ranks hold up the job, and why (paper, section 7).

A vote on coordinates alone would blame victims, which lag too. So evidence is considered in this order:
members of a group that issued different operations (``divergence``), ranks that others wait for and that
wait for nobody (``wait_graph``), ranks that wait in a cycle, and, if no rank is behind, the process group
that is stuck. The vote of equivalent peers is only recorded: it corroborates and does not overrule, so that
a minority that is ahead is not blamed.

A diagnosis covers one round. Ranks in a collective that is about to finish look the same as ranks that hang,
so observers ask for one only when no rank has moved for some time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from torchscout.decision.consensus import exact
from torchscout.decision.hang import explanation
from torchscout.decision.hang.divergence import Divergence, culprits, divergences
from torchscout.decision.hang.evidence import HangEvidence
from torchscout.decision.hang.table import NOTHING, Bools
from torchscout.decision.hang.wait_graph import WaitGraph
from torchscout.decision.progress import CommGroup, IssuedOp, Process, RankStatus
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import Mesh
from torchscout.utils.text import named, sentences

__all__ = ["diagnose", "explain"]

_Missed = Mapping[int, Sequence[IssuedOp]]
"""Suspect -> the operations that do not finish without it."""


def diagnose(
    statuses: Iterable[RankStatus],
    lines: Mapping[str, CommGroup],
    mesh: Mesh,
    *,
    absent: str = "did not answer",
) -> Incident | None:
    """Explain why no rank moves; return None if no rank waits for a communication.

    ``statuses`` are those of the ranks that answered, and ``absent`` is what sentences say about other ranks.
    Silence without a wait is a pause: an evaluation, a long computation, a debugger on a rank that no other
    rank needs yet.
    """
    return explain(HangEvidence.of(statuses, lines, mesh, absent=absent))


def explain(evidence: HangEvidence) -> Incident | None:
    """As ``diagnose``, from evidence."""
    graph = WaitGraph(evidence)
    if found := divergences(evidence, _lines_in_use(evidence, graph.sources)):
        return _diverged(evidence, found)
    if graph.sources:
        missed = {rank: graph.missing(rank) for rank in graph.sources}
        return _late(evidence, missed, len(graph.waiters(missed)))
    if graph.cycles:
        return _deadlock(evidence, [graph.inside(cycle) for cycle in graph.cycles])
    if graph.stalled.lines:
        return _stall(evidence, graph)
    return _unobserved(evidence)


def _lines_in_use(evidence: HangEvidence, sources: Sequence[int]) -> Bools:
    """Lines on which different operations may be the reason why a rank waits, died or is late."""
    columns, table = evidence.columns, evidence.table
    in_use = np.zeros(len(evidence.lines), dtype=bool)
    # The library may end a process because of what another one did, even if that one has moved on.
    looked_at = evidence.is_dead & columns.answered
    looked_at[sources] = True
    looked_at |= columns.has_device
    if evidence.in_communication.any():
        looked_at |= columns.waiting != 0
    shows = looked_at[table.row_rank] & (np.diff(table.starts) > 0) & (table.row_line != NOTHING)
    in_use[table.row_line[shows]] = True
    return in_use


def _diverged(evidence: HangEvidence, found: Sequence[Divergence]) -> Incident:
    guilty = culprits(found)
    proof = [each for each in found if not guilty or not set(guilty).isdisjoint(each.line.members)]
    # The deciding record first: one that names somebody, then one that shows the operation.
    proof.sort(key=lambda each: (not each.ranks, each.compared == "digest"))
    return _incident(
        evidence,
        Scope.RANK if guilty else Scope.PROCESS_GROUP,
        guilty or tuple(sorted({rank for each in proof for rank in each.line.members})),
        explanation.of_divergence(evidence, proof),
        Action.RESTART,
        explanation.different(proof, guilty, evidence.mesh),
    )


def _late(evidence: HangEvidence, missed: _Missed, waiters: int) -> Incident:
    """Report ranks that others wait for and that wait for nobody."""
    # All ranks of a lost machine are lost, even if no rank waits for them yet.
    machines = set(evidence.mesh.hosts_of([rank for rank in missed if rank in evidence.lost]))
    lost = {rank for rank in evidence.lost if evidence.mesh.host_of(rank) in machines}
    ranks = tuple(sorted(lost | missed.keys()))
    if lost == set(ranks):
        sentence = explanation.lost_machines(evidence.mesh, ranks, waiters)
    else:
        sentence = explanation.late(evidence, {rank: each[0] for rank, each in missed.items()}, waiters)
    scope, action = _scope_and_action(evidence, ranks)
    lines = [each.line for operations in missed.values() for each in operations]
    records = explanation.of_lines(evidence, lines, ranks)
    if _device_unknown(evidence, ranks):
        scope, ranks = Scope.PROCESS_GROUP, tuple(sorted({*ranks, *evidence.lines[lines[0]].members}))
        sentence += " Its device was not observed and may itself be waiting."
    return _incident(evidence, scope, ranks, records, action, sentence)


def _deadlock(evidence: HangEvidence, cycles: Sequence[Mapping[int, IssuedOp]]) -> Incident:
    """Report cycles of waiting ranks. Waits alone do not single out a rank of a cycle; a majority may."""
    votes = []
    for cycle in cycles:
        entered = [_key(issued) for issued in cycle.values()]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(entered))}
        votes.append(explanation.of_cycle(evidence, tuple(cycle), exact([numbers[key] for key in entered])))
    decided = all(vote.ranks for vote in votes)
    ranks = tuple(sorted(rank for vote in votes for rank in (vote.ranks if decided else vote.peers)))
    lines = [issued.line for cycle in cycles for issued in cycle.values()]
    return _incident(
        evidence,
        Scope.RANK if decided else Scope.PROCESS_GROUP,
        ranks,
        [*votes[: explanation.MOST], *explanation.of_lines(evidence, lines, ranks)],
        Action.RESTART,
        explanation.deadlock(evidence, cycles),
    )


def _stall(evidence: HangEvidence, graph: WaitGraph) -> Incident:
    """Report operations that all ranks entered. Suspects are dead, or their devices are behind."""
    stalled = sorted(map(evidence.table.issued_op, graph.stalled.lines.values()), key=_key)
    members = {rank for each in stalled for rank in evidence.lines[each.line].members}
    # A rank that is merely absent may be the cause, or only its report is missing: see [Note: Absence].
    absent = members & evidence.unheard
    suspects = members & evidence.dead or (set() if absent else _devices_behind(evidence, members))
    if suspects:
        missed: dict[int, list[IssuedOp]] = {rank: [] for rank in sorted(suspects)}
        for each in stalled:
            for rank in suspects.intersection(evidence.lines[each.line].members):
                missed[rank].append(each)
        return _late(evidence, missed, len(members | graph.waiters(members)) - len(suspects))
    everybody = len(stalled) > 1 and len(members) == len(evidence.mesh)
    return _incident(
        evidence,
        Scope.JOB if everybody else Scope.PROCESS_GROUP,
        tuple(sorted(members)),
        explanation.of_lines(evidence, [each.line for each in stalled], ()),
        Action.INSPECT,
        explanation.stall(evidence, stalled, evidence.silence(members), sorted(absent)),
    )


def _unobserved(evidence: HangEvidence) -> Incident | None:
    """Report devices that do not finish although no observed operation explains it.

    They may wait inside a CUDA graph, whose replays are not observed. A rank that is missing there has an
    idle device and a host that is behind all the stuck ones. If there is no such rank, but there are CUDA
    graphs, the incident only says that the job does not move.
    """
    columns = evidence.columns
    stuck = columns.running & (columns.device_busy == 1)
    if not stuck.any():
        return None
    idle = columns.published & columns.running & (columns.device_busy == 0)
    coordinates = (columns.step << 32) + columns.operation
    late: list[int] = np.flatnonzero(idle & (coordinates < coordinates[stuck].min())).tolist()
    if not (idle | stuck)[columns.published].all():
        late = []  # nothing is known about some devices
    if not late and not columns.captured.any():
        return None
    inside: list[int] = np.flatnonzero(stuck).tolist()
    scope, action = _scope_and_action(evidence, late) if late else (Scope.JOB, Action.INSPECT)
    ranks = tuple(late or inside)
    sentence = explanation.unobserved(evidence, inside, late)
    return _incident(evidence, scope, ranks, [explanation.of_devices(evidence, ranks)], action, sentence)


def _scope_and_action(evidence: HangEvidence, ranks: Sequence[int]) -> tuple[Scope, Action]:
    mesh, lost = evidence.mesh, [rank for rank in ranks if rank in evidence.lost]
    suspects, lost_hosts = Counter(mesh.host_of(rank) for rank in ranks), mesh.hosts_of(lost)
    together = None not in suspects and all(
        count > 1 or host in lost_hosts for host, count in suspects.items()
    )
    scope = Scope.MACHINE if together else Scope.RANK
    # One crashed trainer does not mean a lost machine, even if it was alone there: its observer answered.
    emptied = together and all(
        host is not None and len(mesh.ranks_on(host)) == count for host, count in suspects.items()
    )
    answered = (evidence.statuses.get(rank) for rank in ranks)
    processes = {None if status is None else status.process for status in answered}
    if lost or (emptied and processes == {Process.GONE}):
        return scope, Action.REPLACE
    understood = processes <= {Process.RUNNING, Process.GONE}
    return scope, Action.RESTART if understood and not together else Action.INSPECT


def _device_unknown(evidence: HangEvidence, ranks: Sequence[int]) -> bool:
    """Whether the host of a suspect may only seem late because it waits for its own device."""
    columns = evidence.columns
    not_known = columns.published & columns.running & (columns.device_step == NOTHING)
    return bool((columns.device_step != NOTHING).any() and not_known[list(ranks)].any())


def _devices_behind(evidence: HangEvidence, members: Iterable[int]) -> set[int]:
    """Members whose device has finished fewer steps than the rest, if they are not the majority."""
    ranks = np.array(sorted(members))
    steps = evidence.columns.device_step[ranks]
    is_known = steps != NOTHING
    is_behind = is_known & (steps < steps.max())
    return set(ranks[is_behind].tolist()) if 2 * is_behind.sum() <= is_known.sum() else set()


def _key(issued: IssuedOp) -> tuple[str, int]:
    return issued.line, issued.number


def _incident(
    evidence: HangEvidence,
    scope: Scope,
    ranks: tuple[int, ...],
    records: Sequence[EvidenceRecord],
    action: Action,
    sentence: str,
) -> Incident:
    if unheard := sorted(evidence.unheard.difference(ranks)):
        sentence += f" {sentences(f'{named(unheard)} {evidence.absent}')}"
    return Incident(
        manifestation=Manifestation.HANG,
        scope=scope,
        step=records[0].step,
        ranks=ranks,
        hosts=evidence.mesh.hosts_of(ranks),
        records=(*records, *explanation.of_coordinates(evidence, ranks)),
        action=action,
        sentence=sentence,
    )
