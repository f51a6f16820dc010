"""The comparisons that prove a hang, as records (paper, sections 5 and 7). Nothing is decided here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torchscout.decision.columns import NOTHING, Bools, Ints
from torchscout.decision.consensus import Status, Verdict, exact
from torchscout.decision.protocol import Divergence
from torchscout.decision.record import EvidenceRecord, Manifestation, Surface
from torchscout.decision.roll_call import RollCall

__all__ = ["MOST", "of_coordinates", "of_cycle", "of_devices", "of_divergence", "of_lines"]

MOST = 8
"""Records of one kind that go with an incident: the hang of a large job touches thousands of lines."""


def of_lines(call: RollCall, lines: Iterable[str], suspects: Collection[int]) -> list[EvidenceRecord]:
    """How many operations of each line its members have issued or, where devices enter them, their devices
    have entered; -1 for a suspect that did not answer."""
    records = []
    for key in list(dict.fromkeys(lines))[:MOST]:
        members, reached = call.reached_by(key)
        heard = _heard(call, members, suspects)
        peers = tuple(members[heard].tolist())
        surface = f"{'entered' if call.on_device(key) else 'issued'}/{call.lines[key].name}"
        records.append(_record(call, surface, peers, exact(reached[heard].tolist()), suspects))
    return records


def of_divergence(call: RollCall, found: Sequence[Divergence]) -> list[EvidenceRecord]:
    """What members issued as the same number."""
    return [
        _record(call, f"{each.compared}/{each.line.name}", tuple(each.issued), each.verdict, each.ranks)
        for each in found[:MOST]
    ]


def of_cycle(call: RollCall, ranks: tuple[int, ...], verdict: Verdict) -> EvidenceRecord:
    """Which operation, numbered as they come, each rank of a cycle is in."""
    return _record(call, "deadlock", ranks, verdict, ranks)


def of_devices(call: RollCall, suspects: Sequence[int]) -> EvidenceRecord:
    """Which devices have work left, 1 or 0; nothing else is known of what runs inside CUDA graphs."""
    ranks = np.flatnonzero(call.columns.published & (call.columns.device_busy != NOTHING))
    named = np.isin(ranks, list(suspects))
    busy = tuple(call.columns.device_busy[ranks].tolist())
    is_decided = not all(busy[position] for position in np.flatnonzero(named))
    status = Status.ATTRIBUTED if is_decided else Status.INCONCLUSIVE
    outliers = tuple(np.flatnonzero(named).tolist()) if is_decided else ()
    return _record(call, "device", tuple(ranks.tolist()), Verdict(status, outliers, busy), suspects)


def of_coordinates(call: RollCall, ranks: Sequence[int]) -> list[EvidenceRecord]:
    """Where the equivalent peers of ``ranks`` stand: step * 2**32 + operation."""
    # Bounded before peers are looked up: a whole job may be named.
    groups = dict.fromkeys(call.mesh.peers_of(rank) for rank in ranks[: MOST * MOST])
    records = []
    for group in list(groups)[:MOST]:
        members = np.array(group.ranks)
        peers = tuple(members[_heard(call, members, ranks)].tolist())
        if len(peers) > 1:
            verdict = exact([_coordinate(call, rank) for rank in peers])
            records.append(_record(call, "coordinate", peers, verdict, ranks))
        else:
            reason = f"rank {group.ranks[0]} has no equivalent peer that answered"
            records.append(_record(call, "coordinate", peers, None, ranks, reason))
    return records


def _record(
    call: RollCall,
    surface: Surface,
    peers: tuple[int, ...],
    verdict: Verdict | None,
    suspects: Collection[int],
    reason: str | None = None,
) -> EvidenceRecord:
    """The context is that of the first suspect among the peers, or of the first peer."""
    named = set(suspects)
    subject = next((rank for rank in peers if rank in named), peers[0])
    return EvidenceRecord(
        step=int(call.columns.step[list(peers)].max()),
        surface=surface,
        manifestation=Manifestation.HANG,
        peers=peers,
        verdict=verdict,
        reason=reason,
        progress=_standing(call, subject),
        fingerprints=tuple(each.text for each in call.recent(subject)),
        stall_seconds=call.silence(peers),
    )


def _few(entered: Mapping[str, int], call: RollCall) -> list[tuple[str, int]]:
    return [(key, count) for key, count in entered.items() if key in call.lines][:MOST]


def _heard(call: RollCall, ranks: Ints, suspects: Collection[int]) -> Bools:
    # Who did not answer has no evidence to compare; a suspect is shown all the same.
    return call.columns.answered[ranks] | np.isin(ranks, list(suspects))


def _coordinate(call: RollCall, rank: int) -> int:
    progress = call.progress(rank)
    return -1 if progress is None else (progress.step << 32) + progress.operation


def _standing(call: RollCall, rank: int) -> dict[str, Any]:
    """Where ``rank`` stood, as plain JSON."""
    standing, progress = call.standings.get(rank), call.progress(rank)
    known: dict[str, Any] = {
        "rank": rank,
        "process": "absent" if standing is None else standing.process.value,
    }
    if standing is not None:
        known |= {"waiting": standing.waiting, "stack": standing.stack}
    if progress is not None:
        known |= {
            "step": progress.step,
            "operation": progress.operation,
            "phase": progress.phase.value,
            "at_communication": progress.at_communication,
            "silent_seconds": progress.silent_seconds,
            "device_step": progress.device_step,
            "device_busy": progress.device_busy,
            "entered": {call.lines[key].name: count for key, count in _few(progress.entered, call)},
        }
    return known
