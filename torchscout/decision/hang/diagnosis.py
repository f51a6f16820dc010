"""Progress of all ranks -> who holds the job up, and why (paper, section 7; docs/design.md).

A vote on coordinates alone blames victims, who lag too. So the order of evidence is: who broke the
protocol (``protocol``), who is waited for and does not wait (``wait_graph``), who waits in a circle,
and, if nobody is behind, which process group is stuck. The vote of equivalent peers goes along as a
record: it corroborates and does not overrule, so that a minority that is ahead is not blamed.

It looks at one round. That nobody moves is for the observers to know before they ask: ranks inside
collectives that are just about to finish look the same. What to do about a hang is for the recovery
policy; the action here only says which kind of failure it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from torchscout.decision.consensus import exact
from torchscout.decision.hang import explanation
from torchscout.decision.hang.divergence import Divergence, culprits, divergences
from torchscout.decision.hang.evidence import NOTHING, Bools, HangEvidence
from torchscout.decision.hang.wait_graph import WaitGraph
from torchscout.decision.progress import CommGroup, IssuedOp, Process, RankStatus
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import Mesh

__all__ = ["diagnose"]

_Missed = Mapping[int, Sequence[IssuedOp]]
"""Per suspect, the operations that do not finish without it."""


def diagnose(
    standings: Mapping[int, RankStatus] | Iterable[RankStatus],
    lines: Mapping[str, CommGroup],
    mesh: Mesh,
    *,
    absent: str = "did not answer",
) -> Incident | None:
    """Explain why nobody moves; None when no communication holds anybody up.

    ``standings`` are those of the ranks that answered. Silence without a wait is a pause: evaluation, a
    long computation, a debugger on a rank that nobody needs yet. ``absent`` says of the others what they
    did not do.
    """
    given = standings.values() if isinstance(standings, Mapping) else standings
    call = HangEvidence(given, lines, mesh, absent=absent)
    graph = WaitGraph(call)
    if found := divergences(call, _lines_in_use(call, graph.sources)):
        return _broken_protocol(call, found)
    if graph.sources:
        missed = {rank: graph.missing(rank) for rank in graph.sources}
        return _late(call, missed, len(graph.waiters(missed)))
    if graph.cycles:
        return _deadlock(call, [graph.inside(cycle) for cycle in graph.cycles])
    if graph.held.lines:
        return _stall(call, graph)
    return _unobserved(call)


def _lines_in_use(call: HangEvidence, sources: Sequence[int]) -> Bools:
    """Lines on which a difference may be what somebody waits for, has died of, or is late for."""
    columns, in_use = call.columns, np.zeros(len(call.lines), dtype=bool)
    # The library may end a process over what another one did, also while that is on to something else.
    looked_at = call.is_dead & columns.answered
    looked_at[sources] = True
    looked_at |= columns.has_device
    if call.in_communication.any():
        looked_at |= columns.waiting != 0
    in_use[columns.line[columns.recent[looked_at[columns.recent_rank]]]] = True
    return in_use


def _broken_protocol(call: HangEvidence, found: Sequence[Divergence]) -> Incident:
    named = culprits(found)
    proof = [each for each in found if not named or not set(named).isdisjoint(each.line.members)]
    # The deciding record first: one that names somebody, then one that shows the operation.
    proof.sort(key=lambda each: (not each.ranks, each.compared == "digest"))
    return _incident(
        call,
        Scope.RANK if named else Scope.PROCESS_GROUP,
        named or tuple(sorted({rank for each in proof for rank in each.line.members})),
        explanation.of_divergence(call, proof),
        Action.RESTART,
        explanation.different(proof, named, call.mesh),
    )


def _late(call: HangEvidence, missed: _Missed, waiters: int) -> Incident:
    """Ranks that others wait for and that wait for nobody."""
    # Of a lost machine all ranks are lost, also those that nobody has come to wait for.
    machines = set(call.mesh.hosts_of([rank for rank in missed if rank in call.lost]))
    lost = {rank for rank in call.lost if call.mesh.host_of(rank) in machines}
    ranks = tuple(sorted(lost | missed.keys()))
    if lost == set(ranks):
        sentence = explanation.lost_machines(call.mesh, ranks, waiters)
    else:
        sentence = explanation.late(call, {rank: each[0] for rank, each in missed.items()}, waiters)
    scope, action = _scope_and_action(call, ranks)
    lines = [each.line for operations in missed.values() for each in operations]
    records = explanation.of_lines(call, lines, ranks)
    if _device_unknown(call, ranks):
        scope, ranks = Scope.PROCESS_GROUP, tuple(sorted({*ranks, *call.lines[lines[0]].members}))
        sentence += "; its device was not observed and may itself be held up"
    return _incident(call, scope, ranks, records, action, sentence)


def _deadlock(call: HangEvidence, cycles: Sequence[Mapping[int, IssuedOp]]) -> Incident:
    """Who waits for whom tells nobody in a cycle from the others: here, if anything, a majority does."""
    votes = []
    for cycle in cycles:
        entered = [_key(issued) for issued in cycle.values()]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(entered))}
        votes.append(explanation.of_cycle(call, tuple(cycle), exact([numbers[key] for key in entered])))
    decided = all(vote.ranks for vote in votes)
    ranks = tuple(sorted(rank for vote in votes for rank in (vote.ranks if decided else vote.peers)))
    lines = [issued.line for cycle in cycles for issued in cycle.values()]
    return _incident(
        call,
        Scope.RANK if decided else Scope.PROCESS_GROUP,
        ranks,
        [*votes[: explanation.MOST], *explanation.of_lines(call, lines, ranks)],
        Action.RESTART,
        explanation.deadlock(call, cycles),
    )


def _stall(call: HangEvidence, graph: WaitGraph) -> Incident:
    """All that answered have entered. Suspects are the absent and the dead, then whose device is behind."""
    held = sorted(graph.held.lines.values(), key=_key)
    members = {rank for each in held for rank in call.lines[each.line].members}
    if suspects := members & (call.unheard | call.dead) or _devices_behind(call, members):
        missed: dict[int, list[IssuedOp]] = {rank: [] for rank in sorted(suspects)}
        for each in held:
            for rank in suspects.intersection(call.lines[each.line].members):
                missed[rank].append(each)
        return _late(call, missed, len(members | graph.waiters(members)) - len(suspects))
    everybody = len(held) > 1 and len(members) == len(call.mesh)
    return _incident(
        call,
        Scope.JOB if everybody else Scope.PROCESS_GROUP,
        tuple(sorted(members)),
        explanation.of_lines(call, [each.line for each in held], ()),
        Action.INSPECT,
        explanation.stall(call, held, call.silence(members)),
    )


def _unobserved(call: HangEvidence) -> Incident | None:
    """Some devices do not finish, and no operation that was observed explains it: what they wait for may be
    inside a CUDA graph, whose replays nobody sees.

    Whoever is missing there has an idle device and a host that is behind all the others. Short of that it is
    said that the job stands still, if there are such graphs, and no more.
    """
    columns = call.columns
    stuck = columns.running & (columns.device_busy == 1)
    if not stuck.any():
        return None
    idle = columns.published & columns.running & (columns.device_busy == 0)
    coordinates = (columns.step << 32) + columns.operation
    late: list[int] = np.flatnonzero(idle & (coordinates < coordinates[stuck].min())).tolist()
    if not (idle | stuck)[columns.published].all():
        late = []  # there are devices of which nothing is known
    if not late and not columns.captured.any():
        return None
    inside: list[int] = np.flatnonzero(stuck).tolist()
    scope, action = _scope_and_action(call, late) if late else (Scope.JOB, Action.INSPECT)
    ranks = tuple(late or inside)
    sentence = explanation.unobserved(call, inside, late)
    return _incident(call, scope, ranks, [explanation.of_devices(call, ranks)], action, sentence)


def _scope_and_action(call: HangEvidence, ranks: Sequence[int]) -> tuple[Scope, Action]:
    mesh, lost = call.mesh, [rank for rank in ranks if rank in call.lost]
    suspects, lost_hosts = Counter(mesh.host_of(rank) for rank in ranks), mesh.hosts_of(lost)
    together = None not in suspects and all(
        count > 1 or host in lost_hosts for host, count in suspects.items()
    )
    scope = Scope.MACHINE if together else Scope.RANK
    # One crashed trainer does not make a lost machine, even if it was alone there: its observer answered.
    sizes = Counter(mesh.host_of(rank) for rank in range(len(mesh)) if together)
    emptied = together and all(sizes[host] == count for host, count in suspects.items())
    processes = {_process(call, rank) for rank in ranks}
    if lost or (emptied and processes == {Process.GONE}):
        return scope, Action.REPLACE
    understood = processes <= {Process.RUNNING, Process.GONE}
    return scope, Action.RESTART if understood and not together else Action.INSPECT


def _process(call: HangEvidence, rank: int) -> Process | None:
    """None where nobody answered."""
    standing = call.standings.get(rank)
    return None if standing is None else standing.process


def _device_unknown(call: HangEvidence, ranks: Sequence[int]) -> bool:
    """Whether a suspect's host may only seem late: where devices run ahead, a host waits for its own."""
    columns = call.columns
    not_known = columns.published & columns.running & (columns.device_step == NOTHING)
    return bool((columns.device_step != NOTHING).any() and not_known[list(ranks)].any())


def _devices_behind(call: HangEvidence, members: Iterable[int]) -> set[int]:
    """Members whose device has finished fewer steps than the others', if they are not the majority."""
    ranks = np.array(sorted(members))
    steps = call.columns.device_step[ranks]
    is_known = steps != NOTHING
    is_behind = is_known & (steps < steps.max())
    return set(ranks[is_behind].tolist()) if 2 * is_behind.sum() <= is_known.sum() else set()


def _key(issued: IssuedOp) -> tuple[str, int]:
    return issued.line, issued.number


def _incident(
    call: HangEvidence,
    scope: Scope,
    ranks: tuple[int, ...],
    records: Sequence[EvidenceRecord],
    action: Action,
    sentence: str,
) -> Incident:
    if others := sorted(call.unheard.difference(ranks)):
        sentence += explanation.unheard(call, others)
    return Incident(
        manifestation=Manifestation.HANG,
        scope=scope,
        step=records[0].step,
        ranks=ranks,
        hosts=call.mesh.hosts_of(ranks),
        records=(*records, *explanation.of_coordinates(call, ranks)),
        action=action,
        sentence=sentence,
    )
